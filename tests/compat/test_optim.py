"""TorchRec's `apply_optimizer_in_backward` completes settings of tables with FBGEMM's defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilerec
from tilerec.compat.optim import apply_optimizer_in_backward
from tilerec.errors import ConfigError
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


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.Adadelta, {"lr": 0.7, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.05, "alpha": 0.9, "eps": 1e-6}),
    ],
)
def test_adadelta_and_rmsprop_of_tables_are_torchs(kind: Any, settings: dict[str, float]) -> None:
    ebc = tilerec.EmbeddingBagCollection([tilerec.EmbeddingBagConfig(3, 4, "t", feature_names=["f"])])
    weight = ebc.embedding_bags["t"].weight
    copy = torch.nn.Parameter(weight.detach().clone())
    apply_optimizer_in_backward(kind, [weight], settings)
    other = kind([copy], **settings)
    features = tilerec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1]))
    for step in range(4):
        factor = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        (ebc(features).values() * factor).sum().backward()
        other.zero_grad()
        (copy * factor).sum().backward()
        other.step()
    torch.testing.assert_close(weight.detach(), copy.detach())


def test_settings_that_a_table_cannot_have_are_refused() -> None:
    ebc = tilerec.EmbeddingBagCollection([tilerec.EmbeddingBagConfig(3, 4, "t", feature_names=["f"])])
    with pytest.raises(ConfigError, match=r"RMSprop: momentum: got 0\.9"):
        apply_optimizer_in_backward(torch.optim.RMSprop, ebc.parameters(), {"momentum": 0.9})
