"""Bytes counted from one rank's batch alone equal those that all ranks send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not (Path(__file__).parents[2] / "benchmarks").exists():
    pytest.skip("benchmarks are part of the repository, not of the wheel", allow_module_level=True)

from benchmarks.home_bytes import count_home
from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tilerec.comms.group import Group
from tilerec.parallel.shard import shard
from tilerec.parallel.traffic import traffic
from tilerec.sharding.layout import TableLayout
from tilerec.sharding.strategies import row_wise, table_wise
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

RANKS, SAMPLES, ROWS = 4, 16, (200, 50, 80)
LENGTHS = (5, 1, 3)
"""Ids per bag of each table, each read by one feature."""


def _batch(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    dice = torch.Generator().manual_seed(rank)
    ids = [(torch.rand(SAMPLES * n, generator=dice) ** 3 * rows).long() for rows, n in zip(ROWS, LENGTHS, strict=True)]
    return ids, [torch.full((SAMPLES,), n) for n in LENGTHS]


@pytest.mark.parametrize("per_host", [4, 2], ids=["one host", "sums inside hosts"])
@pytest.mark.parametrize("once", [False, True])
def test_counts_of_one_home_equal_traffic_of_all_ranks(per_host: int, once: bool) -> None:
    topology = Topology(RANKS, "cpu", local_world_size=per_host)
    tilings = [
        row_wise("t0", ROWS[0], 8, None, topology),
        row_wise("t1", ROWS[1], 4, None, topology),
        table_wise("t2", ROWS[2], 8, [3], topology),
    ]

    def sent(group: Group) -> dict[str, int]:
        tables = [
            EmbeddingBagConfig(rows, tiling.dim, f"t{i}", feature_names=[f"f{i}"])
            for i, (rows, tiling) in enumerate(zip(ROWS, tilings, strict=True))
        ]
        plan: dict[str, Any] = {
            f"t{i}": ParameterSharding(
                ShardingType.EXPLICIT, tiling=tiling, ids_per_bag=n, wire=Wire(distinct=None if once else False)
            )
            for i, (tiling, n) in enumerate(zip(tilings, LENGTHS, strict=True))
        }
        module = shard(EmbeddingBagCollection(tables), plan={"": plan}, mesh=group, topology=topology)
        ids, lengths = _batch(group.rank)
        traffic(module).reset()
        module(
            KeyedJaggedTensor(["f0", "f1", "f2"], torch.cat(ids), lengths=torch.cat(lengths))
        ).values().sum().backward()
        return {line.name: line.total for line in traffic(module).table()}

    every = run_virtual_ranks(RANKS, sent)
    tables = [TableLayout(f"t{i}", tiling, n) for i, (tiling, n) in enumerate(zip(tilings, LENGTHS, strict=True))]
    counts = [count_home(tables, [0, 1, 2], topology, home, _batch(home), once) for home in range(RANKS)]
    others = [torch.arange(RANKS) != home for home in range(RANKS)]
    for name, found in {
        "header": [count.header[away] for count, away in zip(counts, others, strict=True)],
        "ids": [count.ids[away] for count, away in zip(counts, others, strict=True)],
        "rows": [count.rows[away] for count, away in zip(counts, others, strict=True)],
        "gradients": [count.rows[away] for count, away in zip(counts, others, strict=True)],
        "rows in host": [count.inside for count in counts],
        "gradients in host": [count.inside for count in counts],
    }.items():
        own = sum(line.get(name, 0) for line in every)
        assert sum(int(part.sum()) for part in found) == own, (name, every)
    assert sum(int(count.inside.sum()) for count in counts) > 0 or per_host == RANKS
