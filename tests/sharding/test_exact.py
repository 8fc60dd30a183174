"""`exact=True`: the same bits under every tiling, however a step reads its tables and whoever takes the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.shard_collection import shard_collection
from tilerec.spec.optimizer import SGD, Adam, RowWiseAdagrad
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

ROWS, DIM, RANKS = 9, 8, 3

TILINGS: dict[str, Any] = {
    "one rank": [(0, ROWS, 0, DIM, 1)],
    "everywhere": [(0, ROWS, 0, DIM, (0, 1, 2))],
    "rows": [(0, 4, 0, DIM, 0), (4, 9, 0, DIM, 2)],
    "columns": [(0, ROWS, 0, 3, 2), (0, ROWS, 3, DIM, 0)],
    "rows, some twice": [(0, 4, 0, DIM, (0, 2)), (4, 9, 0, DIM, 1)],
}


def whole_of(tiles: Any, parts: list[list[Tensor]]) -> Tensor:
    """The table, from the leaves of all ranks; copies are equal."""
    out = torch.full((ROWS, DIM), float("nan"), dtype=parts[0][0].dtype)
    seen: dict[Any, Tensor] = {}
    taken = [0] * RANKS
    for r0, r1, c0, c1, owners in sorted(tiles, key=lambda tile: (tile[2], tile[0])):
        for rank in owners if isinstance(owners, tuple) else (owners,):
            part = parts[rank][taken[rank]]
            taken[rank] += 1
            assert torch.equal(seen.setdefault((r0, c0), part), part)
            out[r0:r1, c0:c1] = part
    return out


def trained(group: Group, tiles: Any, rule: Any, twice: bool, wide: bool) -> list[Tensor]:
    types = (DataType.FP32, DataType.FP64) if wide else (DataType.FP32, DataType.FP32)
    configs = [
        EmbeddingBagConfig(ROWS, DIM, name, kind, feature_names=[f"f_{name}"])
        for name, kind in zip("ab", types, strict=True)
    ]
    module = EmbeddingBagCollection(configs)
    for table in module.embedding_bags.values():
        table.weight.data = torch.sin(torch.arange(ROWS * DIM).view(ROWS, DIM).double()).to(table.weight.dtype)
    if rule is not None:
        apply_optimizer_in_backward(rule, module.parameters())
    tiling = Tiling.of("a", ROWS, DIM, tiles)
    shard_collection(
        module,
        {"a": tiling, "b": tiling},
        group,
        group.split("route"),
        Topology(group.size, "cpu"),
        exact=True,
    )
    dense = torch.optim.Adagrad(module.parameters(), 0.3) if rule is None else None
    for step in range(2):
        loss = torch.zeros(())
        for call in range(1 + twice):
            features = random_batch(["f_a", "f_b"], ROWS, 4 + group.rank, seed=10 * step + 3 * call + group.rank)
            loss = loss + (module(features).values() * 0.37).square().sum() * (0.7 + call)
        loss.backward()
        if dense is not None:
            dense.step()
            dense.zero_grad()
    return [leaf.detach() for leaf in module.embedding_bags["a"].leaves()]


@pytest.mark.parametrize("wide", [False, True], ids=["", "beside float64"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("rule", [None, SGD(lr=0.3), RowWiseAdagrad(lr=0.3), Adam(lr=0.3)],
                         ids=lambda rule: type(rule).__name__)  # fmt: skip
def test_every_tiling_trains_to_the_same_bits(rule: Any, twice: bool, wide: bool) -> None:
    tables = {
        name: whole_of(tiles, run_virtual_ranks(RANKS, trained, tiles, rule, twice, wide))
        for name, tiles in TILINGS.items()
    }
    for name, table in tables.items():
        assert torch.equal(table, tables["one rank"]), name
