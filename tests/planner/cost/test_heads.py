"""Heads: the first rows of a table on every rank. What they cost, where the search takes them, and what they save."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from tilerec.errors import ConfigError
from tilerec.planner.cost.cuts import head_rows, row_cuts
from tilerec.planner.cost.head_bytes import head_bytes, read_curve
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.options import Problem, build
from tilerec.planner.cost.price import price
from tilerec.planner.cost.ways import HEADS, Limits, Option, Way
from tilerec.planner.cost.workload import Reads, Skew, TableWork, Workload
from tilerec.planner.search.instance import Status, evaluate
from tilerec.planner.search.solve import lower_bound, solve
from tilerec.spec import optimizer as specs
from tilerec.spec.plan import ShardingType, Wire
from tilerec.spec.topology import Topology

ROWS = 100_000
SKEW = Skew(ROWS, 1.05, ordered=True)
HOSTS = Topology(16, local_world_size=8)


def table(name: str = "t", *reads: Reads, **more: Any) -> TableWork:
    given: dict[str, Any] = {"optimizer": specs.SGD(0.1), "skew": SKEW, **more}
    return TableWork(name, ROWS, 64, reads=reads or [Reads(2048, 20)], **given)


def sequence(**more: Any) -> TableWork:
    return table(each_id=True, **more)


def arranged(problem: Problem, option: Option) -> tuple[float, float, float]:
    """The searched cost, the lower one and the price of one table under an option, in seconds."""
    o = np.array([problem.options.index(option)])
    tiling = problem.sharding(0, int(o[0]), ()).tiling
    assert tiling is not None
    searched, lower = (evaluate(own, o, [()]).cost / 1e12 for own in (problem.instance, problem.lower))
    return searched, lower, price([tiling], problem.model).seconds


def test_heads_are_options_of_tables_whose_first_rows_are_read_most() -> None:
    tables = [
        table("ordered"), table("anywhere", skew=Skew(ROWS, 1.05)), table("even", skew=None),
        dataclasses.replace(table("short"), rows=150, skew=Skew(150, 1.0, ordered=True)),
        table("limited"), table("typed"),
    ]  # fmt: skip
    limits = {
        "limited": Limits((ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)),
        "typed": Limits((ShardingType.EXPLICIT,)),
    }
    problem = build(tables, Topology(4), limits)
    heads = {
        work.name: [problem.options[o].head for o in there.nonzero()[0].tolist() if problem.options[o].head]
        for work, there in zip(tables, problem.instance.there, strict=True)
    }
    assert heads == {
        "ordered": list(HEADS), "anywhere": [], "even": [], "short": [0.01, 0.05], "limited": [], "typed": list(HEADS)
    }  # fmt: skip
    assert not any(option.head for option in build(tables[1:3], Topology(4)).options)
    assert not any(option.head for option in build(tables[:1], Topology(1)).options)


def test_a_head_is_on_every_rank_and_the_other_rows_are_cut_by_what_travels() -> None:
    problem = build([table()], Topology(4))
    o = problem.options.index(Option(Way.ROWS, 1, 4, head=0.01))
    sharding = problem.sharding(0, o, ())
    assert sharding.tiling is not None
    head, *others = sharding.tiling.tiles()
    assert (head.r0, head.r1, head.owners) == (0, 1000, (0, 1, 2, 3))
    assert [tile.owners for tile in others] == [(0,), (1,), (2,), (3,)]
    reads = [float(problem.model.workload.share(0, tile.r0, tile.r1)) for tile in others]
    assert max(reads) < 1.02 * min(reads)
    assert sharding.kind is ShardingType.EXPLICIT
    assert sharding.tiling.rows == ROWS
    cuts = row_cuts(problem.model, np.array([0]), 4, 0.01)[0]
    assert cuts.tolist() == [1000, *(tile.r1 for tile in others)]
    assert head_rows([99, 150, ROWS], 0.01).tolist() == [0, 1, 1000]


@pytest.mark.parametrize(
    "topology", [Topology(4), Topology(8, "cpu"), HOSTS, Topology(12, local_world_size=4, nic="host")], ids=str
)
@pytest.mark.parametrize(
    "work",
    [table(), table("t", Reads(2048)), table("t", Reads(512, 3, True), Reads(512, 1)), sequence(),
     table(optimizer=None), table(wire=Wire(distinct=True), each_id=True), table(optimizer=specs.RowWiseAdagrad(0.1))],
    ids=["bags", "one id", "weights", "sequence", "bare", "once", "row-wise"],
)  # fmt: skip
def test_an_arrangement_with_a_head_costs_nearly_its_price_and_no_less_than_its_bound(
    work: TableWork, topology: Topology
) -> None:
    problem = build([work], topology)
    for option in problem.options:
        if option.head:
            searched, lower, priced = arranged(problem, option)
            assert 0.85 * priced < searched < 1.35 * priced, option
            assert (0.5 if work.optimizer else 0.4) * priced < lower <= priced * (1 + 2e-5), option
            o = np.array([problem.options.index(option)])
            tiling: Any = problem.sharding(0, int(o[0]), ()).tiling
            held = price([tiling], problem.model).memory
            least = evaluate(problem.lower, o, [()]).memory  # each rank holds the mean of the ranges
            assert np.all(least.sum(0) <= held.sum(0) * (1 + 1e-5) + 2 * topology.world_size)
            assert np.all(evaluate(problem.instance, o, [()]).memory >= 0.98 * held.max(0)), option


def test_the_search_takes_heads_where_every_id_travels_and_none_where_repeated_ids_travel_once() -> None:
    """Unpooled ids on two hosts. A head saves more than half of the bytes, but once each they are even fewer."""
    works = [dataclasses.replace(sequence(), name=f"t{t}") for t in range(4)]
    sent = {}
    for distinct in (False, True):
        problem = build([dataclasses.replace(w, wire=Wire(distinct=distinct)) for w in works], HOSTS)
        found = solve(problem.instance)
        chosen = [problem.options[o] for o in found.option.tolist()]
        assert all(bool(option.head) != distinct for option in chosen)
        tilings: Any = [problem.sharding(t, int(o), found.places[t]).tiling for t, o in enumerate(found.option)]
        priced = price(tilings, problem.model)
        sent[distinct] = np.sum(list(priced.sent.values()), axis=0).mean()
        assert found.cost / 1e12 == pytest.approx(priced.seconds, rel=0.01)
        assert lower_bound(problem.lower, found.cost * 2) / 1e12 <= priced.seconds * (1 + 1e-5)
        if not distinct:
            rows = problem.sharding(0, problem.options.index(Option(Way.ROWS, 1, 16)), ()).tiling
            assert rows is not None
            plain = price([rows] * 4, problem.model)
            assert sent[False] < 0.5 * np.sum(list(plain.sent.values()), axis=0).mean()
            assert priced.seconds < plain.seconds
    assert sent[True] < sent[False]


def test_bags_of_many_ids_gain_from_a_head_only_where_their_table_is_cut_over_many_ranks() -> None:
    """Of ten ids, those of the head send no bags to its ranges: half of the bytes. A whole table sends a bag once."""
    work = table("t", Reads(2048, 10))
    plain, *heads = head_bytes(work, HOSTS)
    assert 0.4 * plain.sent < min(own.sent for own in heads) < 0.6 * plain.sent
    problem = build([work], HOSTS)
    whole = problem.sharding(0, problem.options.index(Option(Way.WHOLE, 1, 1)), (3,)).tiling
    assert whole is not None
    sent = np.sum(list(price([whole], problem.model).sent.values()), axis=0).mean()
    assert sent < 0.5 * min(own.sent for own in heads)


def test_a_head_that_does_not_fit_is_not_taken() -> None:
    """Copies of 5 % of 4 million rows take 154 MB on every rank, besides the ranges of the others."""
    rows = 4_000_000
    work = dataclasses.replace(
        sequence(optimizer=specs.Adam(0.1)), rows=rows, skew=Skew(rows, 1.05, ordered=True), reads=[Reads(16, 20)]
    )
    only = {"t": Limits((ShardingType.EXPLICIT,))}

    def planned(cap: int) -> tuple[list[int], int, Any]:
        problem = build([work], Topology(16, local_world_size=8, hbm_cap=cap), only)
        instance = problem.instance
        assert [option.head for option in problem.options] == list(HEADS)
        held = (instance.memory + instance.home_memory)[0, :, 0].tolist()
        return held, int(instance.base_memory.max()), solve(instance)

    cap = 800 << 20  # ranges of at most twice their part of the rows
    held, base, found = planned(cap)
    assert held == sorted(held)
    assert held[3] - held[0] == pytest.approx(0.0495 * rows * 64 * 12 - 2 * 0.0495 * rows * 64 * 12 / 16, rel=0.05)
    assert found.status is Status.FOUND
    tight = base + (held[2] + held[3]) // 2
    _, _, found = planned(tight)
    assert HEADS[int(found.option[0])] < HEADS[3]
    assert np.all(found.memory <= tight)
    assert planned(base + held[0] // 2)[2].status is Status.NONE_EXISTS


def test_the_bytes_and_the_curve_of_a_table_are_those_of_its_price() -> None:
    found = head_bytes(sequence(), HOSTS)
    assert [own.rows for own in found] == [0, 50, 200, 1000, 5000]
    model = Model(Workload([sequence()]), HOSTS)
    assert [own.reads for own in found] == [float(model.workload.share(0, 0, own.rows)) for own in found]
    problem = build([sequence()], HOSTS)
    tiling = problem.sharding(0, problem.options.index(Option(Way.ROWS, 1, 16, head=0.002)), ()).tiling
    assert tiling is not None
    sent = np.sum(list(price([tiling], model).sent.values()), axis=0).mean()
    assert found[2].sent == pytest.approx(float(sent))
    curve = read_curve(sequence())
    assert curve[-1] == (ROWS, 1.0)
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(curve))
    assert dict(curve)[1] == pytest.approx(float(model.workload.share(0, 0, 1)), abs=1e-4)


def test_limits_that_leave_heads_only_to_tables_without_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="Table 't': nothing that its constraints allow"):
        build([table(), table("even", skew=None)], Topology(4), {"t": Limits((ShardingType.EXPLICIT,), ranks=(0, 1))})
