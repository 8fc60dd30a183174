"""Predicted bytes are those that the runtime sends, name by name; seconds and memory follow the formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tilerec.comms.group import Group
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad
from tilerec.parallel.shard import shard
from tilerec.parallel.traffic import traffic
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price
from tilerec.planner.cost.workload import Reads, TableWork, Workload
from tilerec.sharding.strategies import complete
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec import optimizer as specs
from tilerec.spec.plan import ParameterSharding, Wire
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

BATCH = 400


def step_bytes(
    works: list[TableWork], tilings: list[Tiling], topology: Topology, rule: Any = torch.optim.SGD
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Bytes that each rank sent in one step of even ids and bags of one size, by name: in all, and between hosts."""

    def run(group: Group) -> tuple[dict[str, int], dict[str, int]]:
        torch.manual_seed(0)
        configs = [
            EmbeddingBagConfig(
                w.rows, w.dim, w.name, feature_names=[f"{w.name}.{i}" for i in range(len(w.reads))]
            )
            for w in works
        ]
        model: Any = EmbeddingBagCollection(configs)
        if rule is not None:
            apply_optimizer_in_backward(rule, model.parameters(), {"lr": 0.1})
        plan = {
            w.name: ParameterSharding("explicit", tiling=t, ids_per_bag=w.ids_per_bag, wire=w.wire)
            for w, t in zip(works, tilings, strict=True)
        }
        shard(model, plan=plan, mesh=group, topology=topology)
        generator = torch.Generator().manual_seed(group.rank)
        values, lengths, keys = [], [], []
        for work in works:
            for i, reads in enumerate(work.reads):
                keys.append(f"{work.name}.{i}")
                bags = torch.full((int(reads.bags),), int(reads.ids_per_bag), dtype=torch.int32)
                lengths.append(bags)
                values.append(torch.randint(work.rows, (int(bags.sum()),), generator=generator))
        batch = KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))
        counted = traffic(model)
        counted.reset()
        model(batch).values().sum().backward()
        return {line.name: line.total for line in counted}, counted.between(topology.host_ranks)

    results = run_virtual_ranks(topology.world_size, run)
    names = dict.fromkeys(name for result, _ in results for name in result)
    totals = {name: [result.get(name, 0) for result, _ in results] for name in names}
    return totals, {name: [far.get(name, 0) for _, far in results] for name in names}


def tilings_of(works: list[TableWork], kinds: list[Any], topology: Topology) -> list[Tiling]:
    made = []
    for work, kind in zip(works, kinds, strict=True):
        sharding = kind if isinstance(kind, Tiling) else ParameterSharding(kind[0], ranks=kind[1])
        tiling = complete(sharding, work.name, work.rows, work.dim, topology).tiling
        assert tiling is not None
        made.append(tiling)
    return made


def check(works: list[TableWork], kinds: list[Any], topology: Topology, rule: Any = torch.optim.SGD) -> None:
    tilings = tilings_of(works, kinds, topology)
    predicted = price(tilings, Model(Workload(works), topology))
    sent, far = step_bytes(works, tilings, topology, rule)
    assert {n for n, v in sent.items() if any(v)} == {n for n, v in predicted.sent.items() if np.any(v > 0)}
    for name, counted in sent.items():
        assert predicted.sent[name] == pytest.approx(counted, rel=0.05, abs=64), name
        assert predicted.between_hosts[name] == pytest.approx(far[name], rel=0.05, abs=64), name


SGD = specs.SGD(0.1)
WORKS = [
    TableWork("whole", 500, 16, optimizer=SGD, reads=[Reads(BATCH, 1)]),
    TableWork("columns", 300, 16, optimizer=SGD, reads=[Reads(BATCH, 3), Reads(BATCH, 1)]),
    TableWork("rows", 400, 8, optimizer=SGD, reads=[Reads(BATCH, 6)]),
    TableWork("single", 400, 8, optimizer=SGD, reads=[Reads(BATCH, 1)]),
]
KINDS = [("table_wise", [1]), ("column_wise", [0, 2]), ("row_wise", None), ("row_wise", [3, 0, 1])]


def test_bytes_of_one_host_are_those_the_runtime_sends() -> None:
    check(WORKS, KINDS, Topology(4, "cpu"))


def test_bytes_of_two_hosts_are_those_the_runtime_sends() -> None:
    works = [*WORKS, TableWork("host", 400, 8, optimizer=SGD, reads=[Reads(BATCH, 5)]),
             TableWork("grid", 400, 16, optimizer=SGD, reads=[Reads(BATCH, 2)])]  # fmt: skip
    kinds = [*KINDS, ("table_row_wise", [2, 3]), ("grid_shard", [0, 1, 2, 3])]
    check(works, kinds, Topology(4, "cpu", local_world_size=2))


@pytest.mark.parametrize(("rows", "length"), [(20_000, 1), (3_000, 6), (5, 3)], ids=["bags", "rows", "dense"])
def test_bytes_of_replicas_are_those_of_each_form(rows: int, length: int) -> None:
    works = [TableWork("copy", rows, 8, optimizer=SGD, reads=[Reads(BATCH, length)]), WORKS[0]]
    check(works, [("data_parallel", None), KINDS[0]], Topology(3, "cpu"))
    check(works[:1], [("data_parallel", None)], Topology(2, "cpu"))


def test_tables_without_optimizer_send_dense_gradients() -> None:
    works = [dataclasses.replace(work, optimizer=None) for work in WORKS]
    works.append(TableWork("copy", 100, 8, reads=[Reads(BATCH, 1)]))
    check(works, [*KINDS, ("data_parallel", None)], Topology(4, "cpu"), rule=None)


def test_column_blocks_tell_each_other_their_sums() -> None:
    works = [dataclasses.replace(work, optimizer=specs.RowWiseAdagrad(0.1)) for work in WORKS]
    check(works, KINDS, Topology(4, "cpu"), rule=RowWiseAdagrad)


def test_number_formats_of_the_wire_are_counted() -> None:
    wire = Wire("bf16", "int8")
    check([dataclasses.replace(work, wire=wire) for work in WORKS], KINDS, Topology(4, "cpu"))


def test_any_tiling_has_a_price() -> None:
    tiles = [(0, 100, 0, 8, (0, 1)), (100, 400, 0, 4, 2), (100, 400, 4, 8, (1, 3))]
    work = TableWork("free", 400, 8, optimizer=SGD, reads=[Reads(BATCH, 2)])
    topology = Topology(4, "cpu")
    tiling = Tiling.of("free", 400, 8, tiles)
    predicted = price([tiling], Model(Workload([work]), topology))
    sent, _ = step_bytes([work], [tiling], topology)
    for name in ("header", "ids", "rows", "gradients"):
        assert predicted.sent[name] == pytest.approx(sent[name], rel=0.05, abs=64), name
    assert predicted.memory[:, 0].tolist() == [0] * 4  # CPU ranks have host memory only
    assert np.all(predicted.memory[:, 1] > 0)
