"""TorchRec's `apply_optimizer_in_backward` completes settings of tables with FBGEMM's defaults."""

from __future__ import annotations

import torch

import tilerec
from tilerec.compat.optim import apply_optimizer_in_backward
from tilerec.storage.table_rows import rows_of


def test_missing_settings_of_tables_are_fbgemms() -> None:
    ebc = tilerec.EmbeddingBagCollection([tilerec.EmbeddingBagConfig(4, 2, "t", feature_names=["f"])])
    weight = ebc.embedding_bags["t"].weight
    dense = torch.nn.Linear(2, 1)
    apply_optimizer_in_backward(torch.optim.Adagrad, [weight, *dense.parameters()], {"lr": 0.5})
    rows = rows_of(weight)
    assert rows is not None
    assert rows.spec is not None
    assert (rows.spec.lr, rows.spec.eps) == (0.5, 1e-8)  # type: ignore[attr-defined]
    dense(torch.ones(1, 2)).sum().backward()
    assert dense.weight.grad is None  # stepped in the backward
