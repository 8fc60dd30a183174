"""Hot rows come and go in a running model: its bits stay, and only rows that become hot travel."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parallel.resharding.test_reshard import TABLES, assert_same, check_move, sharded, tilings, train
from tests.parity.harness import OPTIMIZERS, WORLDS, Case, batches, build
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, ReshardError
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.measured_load import load_of
from tilerec.parallel.resharding.rebalance import rebalance
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.table_move import TableMove
from tilerec.parallel.shard import shard
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.sharding import logical
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks


def case_of(optimizer: str, world: str = "4", **more: Any) -> Case:
    sizes = (3, 2, 0, 4)[: sum(map(len, WORLDS[world]))]
    return Case(TABLES, {}, WORLDS[world], OPTIMIZERS[optimizer], sizes, steps=4, **more)


def with_hot(cuts: dict[str, Tiling], world: int, *ids: list[int]) -> dict[str, Tiling]:
    return {
        name: tiling.with_hot(name, HotRows(np.array(own, dtype=np.int64)), world)
        for (name, tiling), own in zip(cuts.items(), ids, strict=True)
    }


ONE = ("row_wise", "table_wise", "grid")
OTHER = ("column_wise", "row_wise", "table_wise")
HOT = ([0, 3, 9], [6], [1, 5, 16])
OTHER_HOT = ([3, 4], [], [5, 6, 7, 16])


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "sgd", "lamb"])
@pytest.mark.parametrize("way", ["heads appear", "heads go", "heads change", "all at once"])
def test_training_goes_on_as_if_the_new_plan_had_been_used_from_that_state(optimizer: str, way: str) -> None:
    case = case_of(optimizer)
    one, other = tilings(ONE, case), tilings(OTHER, case)
    before, after = {
        "heads appear": (one, with_hot(one, 4, *HOT)),
        "heads go": (with_hot(one, 4, *HOT), one),
        "heads change": (with_hot(one, 4, *HOT), with_hot(one, 4, *OTHER_HOT)),
        "all at once": (with_hot(one, 4, *HOT), with_hot(other, 4, *OTHER_HOT)),
    }[way]
    check_move(case, before, _as_plan(after))


def _as_plan(cuts: dict[str, Tiling]) -> dict[str, Any]:
    """Without hot= a move keeps a table's hot rows, so tables without any say so."""
    return {
        name: ParameterSharding("explicit", tiling=tiling, hot=tiling.head.hot if tiling.head else HotRows())
        for name, tiling in cuts.items()
    }


def test_a_move_without_hot_keeps_the_hot_rows_and_an_empty_one_removes_them() -> None:
    case = case_of("adam", "2")
    base, cuts = build(case), with_hot(tilings(ONE, case), 2, *HOT)

    def live(group: Group) -> None:
        module = sharded(case, base, cuts, group)
        reshard(module, {"": {"t0": ParameterSharding("table_wise", ranks=[1])}})
        held = plan_of(module).plan[""]["t0"]
        assert held.hot == HotRows(np.array(HOT[0]))
        assert [tile.owners for tile in module._tables["t0"].tiles][-1] == (0, 1)
        check_replicas(module)
        reshard(module, {"": {"t0": ParameterSharding("table_wise", ranks=[1], hot=HotRows())}})
        assert module._tables["t0"].tiling.head is None

    run_virtual_ranks(2, live)


def test_only_rows_that_become_hot_travel_and_the_others_keep_their_memory() -> None:
    case = case_of("rowwise_adagrad")
    cuts = tilings(("row_wise", "row_wise", "row_wise"), case)
    base = build(case)

    def live(group: Group) -> tuple[int, int]:
        module = sharded(case, base, with_hot(cuts, 4, *HOT), group)
        train(case, module, batches(case, group.rank)[:1])
        leaf = module._tables["t2"].leaves()[0]
        before = leaf.data_ptr()
        sent = module.exchange.group.traffic.total()
        report = reshard(module, {"": _as_plan(with_hot(cuts, 4, HOT[0], HOT[1], [1, 5, 16, 3]))}, progress=False)
        assert leaf.data_ptr() == before
        check_replicas(module)
        return report.bytes_sent, module.exchange.group.traffic.total() - sent

    found = run_virtual_ranks(4, live)
    # One row of 20 columns and its sum, from its owner to three ranks.
    assert {sent for sent, _ in found} == {3 * (20 + 1) * 4}
    assert sum(own for _, own in found) == 3 * (20 + 1) * 4


@pytest.mark.parametrize("place", ["fill_head", "make_ready"])
def test_a_failure_midway_leaves_the_hot_rows_as_they_were(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("adam", "2")
    base, cuts = build(case), tilings(ONE, case)
    own = getattr(TableMove, place)

    def fails(move: TableMove) -> None:
        own(move)
        if move._group.rank == 1:
            raise RuntimeError("out of luck")

    def live(group: Group) -> None:
        module = sharded(case, base, with_hot(cuts, 2, *HOT), group)
        twin = copy.deepcopy(module)
        with pytest.raises(ReshardError, match=r"rank 1 failed .*out of luck"):
            reshard(module, {"": _as_plan(with_hot(tilings(OTHER, case), 2, *OTHER_HOT))}, progress=False)
        assert_same(module, twin)
        assert plan_of(module).plan[""]["t0"].hot == HotRows(np.array(HOT[0]))
        steps = batches(case, group.rank)[:2]
        for got, want in zip(train(case, module, steps), train(case, twin, steps), strict=True):
            assert torch.equal(got, want)

    monkeypatch.setattr(TableMove, place, fails)
    run_virtual_ranks(2, live)


def test_a_rank_that_cannot_read_its_rows_midway_still_sends_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("adam", "2")
    base, cuts = build(case), tilings(ONE, case)
    own, moving = logical.select_rows, threading.Event()

    def fails(tensor: Tensor, rows: Tensor) -> Tensor:
        if moving.is_set() and threading.current_thread().name == "rank 1":
            raise RuntimeError("broken disk")
        return own(tensor, rows)

    def live(group: Group) -> None:
        module = sharded(case, base, with_hot(cuts, 2, *HOT), group)
        twin = copy.deepcopy(module)
        moving.set()
        with pytest.raises(ReshardError, match=r"rank 1 failed in the move, .*broken disk.*works as before"):
            reshard(module, {"": _as_plan(with_hot(cuts, 2, *OTHER_HOT))}, progress=False)
        moving.clear()
        assert_same(module, twin)
        assert plan_of(module).plan[""]["t0"].hot == HotRows(np.array(HOT[0]))
        check_replicas(module)

    monkeypatch.setattr(logical, "select_rows", fails)
    run_virtual_ranks(2, live)


def test_a_move_of_hot_rows_waits_in_no_handshake_which_a_dead_rank_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of("adam", "2")
    base, cuts = build(case), tilings(ONE, case)
    begun: list[str] = []

    def live(group: Group) -> None:
        module = sharded(case, base, with_hot(cuts, 2, *HOT), group)
        own = module.exchange.group
        begin = own.begin
        if group.rank == 0:
            monkeypatch.setattr(own, "begin", lambda operation: (begun.append(operation), begin(operation)))
        reshard(module, {"": _as_plan(with_hot(cuts, 2, *OTHER_HOT))}, progress=False)

    run_virtual_ranks(2, live)
    assert begun == ["reshard"]


def test_a_batch_that_was_routed_before_a_head_moved_is_routed_again() -> None:
    case = case_of("sgd", "2", exact=True)
    base, cuts = build(case), tilings(ONE, case)

    def live(group: Group) -> None:
        module, still = (sharded(case, base, with_hot(cuts, 2, *HOT), group) for _ in range(2))
        batch = batches(case, group.rank)[0]
        ahead = module.route(batch)
        reshard(module, {"": _as_plan(with_hot(cuts, 2, *OTHER_HOT))})
        with torch.no_grad():
            got: Tensor = module(ahead).values()
            assert torch.equal(got, still(batch).values())

    run_virtual_ranks(2, live)


def test_a_table_without_an_attached_optimizer_gets_no_hot_rows_by_a_move() -> None:
    case = case_of("none", "2")
    base, cuts = build(case), tilings(ONE, case)

    def live(group: Group) -> None:
        module = shard(copy.deepcopy(base), {"": cuts}, group)
        with pytest.raises(ConfigError, match="got hot rows with a move of a table without an attached optimizer"):
            reshard(module, {"": {"t0": ParameterSharding("table_wise", ranks=[1], hot=HotRows(np.array([2])))}})

    run_virtual_ranks(2, live)


def test_rebalance_moves_tables_and_keeps_hot_rows_whose_reads_were_not_counted() -> None:
    case = case_of("adam", "2")
    base = build(case)
    # All tables on rank 1: there is something to move.
    cuts = {t.name: Tiling.of(t.name, t.rows, t.dim, [(0, t.rows, 0, t.dim, 1)]) for t in TABLES}

    def live(group: Group) -> tuple[str, ...]:
        module = sharded(case, base, with_hot(cuts, 2, *HOT), group)
        train(case, module, batches(case, group.rank))
        planner = EmbeddingShardingPlanner(topology=Topology(2, "cpu"))
        load = replace(load_of(module), hot={})
        done = rebalance(module, planner, least_gain=0.0, horizon=10**12, load=load)
        check_replicas(module)
        for name, table in module._tables.items():
            assert table.tiling.head == cuts[name].with_hot(name, HotRows(np.array(HOT[int(name[1])])), 2).head
        train(case, module, batches(case, group.rank)[:1])
        check_replicas(module)
        return done.moved.tables if done.moved is not None else ()

    assert run_virtual_ranks(2, live)[0]
