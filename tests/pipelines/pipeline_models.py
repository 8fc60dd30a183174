"""Small models, batches and plain loops for tests of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing import random_batch

KEYS = ["a", "b", "c"]
ROWS = 23


@dataclass
class ClickBatch:
    """Features, numbers and labels of B samples."""

    features: KeyedJaggedTensor
    dense: Tensor
    labels: Tensor


def batch_of(seed: int, size: int = 4) -> ClickBatch:
    """One batch, a function of its seed."""
    generator = torch.Generator().manual_seed(seed)
    return ClickBatch(
        random_batch(KEYS, ROWS, size, seed=seed),
        torch.randn(size, 3, generator=generator),
        torch.rand(size, generator=generator),
    )


class Clicks(nn.Module):
    """Two tables, one of them read by two features, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(ROWS, 8, "t", feature_names=["a", "b"]),
                EmbeddingBagConfig(ROWS, 16, "u", feature_names=["c"]),
            ]
        )
        self.over = nn.Linear(3 + 8 + 8 + 16, 1)

    def forward(self, batch: ClickBatch) -> tuple[Tensor, Tensor]:
        pooled = self.tables(batch.features).values()
        logits = self.over(torch.cat((batch.dense, pooled), dim=1)).squeeze(-1)
        return ((logits - batch.labels) ** 2).mean(), logits.detach()


def model_of(group: Group | None = None, kind: str = "row_wise", make: Callable[[], Any] = Clicks) -> Any:
    """The model with an optimizer on its tables, sharded over the group."""
    model = make()
    generator = torch.Generator().manual_seed(7)  # virtual ranks share torch's own
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    tables = [p for name, p in model.named_parameters() if "embedding" in name]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.1})
    if group is not None:
        last = group.size - 1
        ranks = {"table_wise": [last], "column_wise": [0, last], "table_column_wise": [0, last]}.get(kind)
        names = [config.name for config in model.tables.embedding_bag_configs()]
        shard(model, plan={"tables": {name: ParameterSharding(kind, ranks=ranks) for name in names}}, mesh=group)
    return model


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD for the parameters outside of tables."""
    return torch.optim.SGD([p for name, p in model.named_parameters() if "embedding" not in name], lr=0.1)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> list[Tensor]:
    """Outputs of an ordinary training loop."""
    outputs = []
    for batch in batches:
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs


def pipelined(pipeline: Any, batches: Iterator[Any]) -> list[Tensor]:
    """Outputs of a pipeline up to the end of an iterator."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            return outputs


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """All bits of two sets of parameters are the same."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
