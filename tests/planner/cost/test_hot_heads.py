"""Hot ids as heads: their price, the bytes that the runtime sends with them, and the options with them."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from tests.planner.cost.test_price import MANY, check
from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.head_bytes import bytes_saved, head_bytes, read_curve
from tilerec.planner.cost.hot_reads import HotReads
from tilerec.planner.cost.model import HOST, HOT_PIECE, Model
from tilerec.planner.cost.options import Problem, build
from tilerec.planner.cost.price import price
from tilerec.planner.cost.ways import HEADS, Limits, Option, Way
from tilerec.planner.cost.workload import Reads, Skew, TableWork, Workload
from tilerec.planner.search.instance import evaluate
from tilerec.planner.search.solve import lower_bound, solve
from tilerec.sharding.strategies import column_wise, row_wise, table_wise
from tilerec.spec import optimizer as specs
from tilerec.spec.hot_rows import MOST_HOT_ROWS, HotRows
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology, gigabytes_per_second

ROWS = 20_000
HOSTS = Topology(16, local_world_size=8)


def order(rows: int, name: str = "t") -> np.ndarray[Any, np.dtype[np.int64]]:
    """The ids by frequency, as `ids_of` of test_price draws them."""
    found: np.ndarray[Any, np.dtype[np.int64]] = torch.randperm(
        rows, generator=torch.Generator().manual_seed(len(name))
    ).numpy()
    return found


def table(name: str = "t", *reads: Reads, rows: int = ROWS, named: int = 4_000, **more: Any) -> TableWork:
    skew = Skew(rows, 1.05, hot=order(rows, name)[:named])
    given: dict[str, Any] = {"optimizer": specs.SGD(0.1), "skew": skew, **more}
    return TableWork(name, rows, 64, reads=reads or [Reads(2048, 20)], **given)


def sequence(**more: Any) -> TableWork:
    return table(each_id=True, **more)


def hot(tiling: Tiling, ids: Any, world: int) -> Tiling:
    return tiling.with_hot("t", HotRows(np.asarray(ids, np.int64)), world)


# -------------------------------------------------------------------------------------------------------------- price


def test_copies_of_a_table_behind_a_cache_are_in_device_memory_and_no_step_writes_them_to_the_host() -> None:
    world, ids = Topology(4, "cuda", hbm_cap=1 << 40, ddr_cap=1 << 40), order(ROWS)[:200]
    model = Model(Workload([table(cached=True, load_factor=0.1)]), world)
    bare = row_wise("t", ROWS, 64, None, world)
    without, beside = price([bare], model), price([hot(bare, ids, 4)], model)
    assert np.array_equal(beside.memory[:, HOST], without.memory[:, HOST])  # host memory has each row once
    assert (beside.memory[:, model.tier] >= without.memory[:, model.tier] + 200 * 64 * 4).all()
    direct = Model(Workload([table()]), world)
    written = price([hot(bare, ids, 4)], direct).parts["update"] - price([bare], direct).parts["update"]
    saved = beside.parts["update"] - without.parts["update"]
    assert (saved + HOT_PIECE <= written + 1e-12).all()


@pytest.mark.parametrize("distinct", [None, True, False], ids=["counted", "once", "each"])
def test_bytes_with_hot_ids_are_those_the_runtime_sends(distinct: bool | None) -> None:
    """Heads beside every tiling, with the most frequent ids, with others, and with ids of which nothing is known."""
    world, rows = Topology(4, "cpu"), 5000
    works = []
    for name, reads in (
        ("rows", [Reads(MANY, 1)]), ("cold", [Reads(MANY, 1)]), ("columns", [Reads(MANY, 1)]),
        ("bags of many", [Reads(MANY, 3)]), ("two readers", [Reads(MANY, 1), Reads(MANY, 1)]),
        ("whole table", [Reads(MANY, 1)]),
    ):  # fmt: skip
        works.append(
            TableWork(name, rows, 8, optimizer=specs.SGD(0.1), reads=reads, wire=Wire(distinct=distinct),
                      skew=Skew(rows, 1.05, hot=order(rows, name)[:500]))
        )  # fmt: skip
    orders = [order(rows, work.name) for work in works]
    evenly = row_wise("t", rows, 8, None, world)
    tilings = [
        hot(evenly, orders[0][:50], 4),
        hot(evenly, [*orders[1][300:400], *orders[1][2000:2300]], 4),
        hot(column_wise("t", rows, 8, [0, 2], world), orders[2][:200], 4),
        hot(evenly, orders[3][:20], 4),
        hot(evenly, orders[4][:100], 4),
        hot(table_wise("t", rows, 8, [1], world), orders[5][:100], 4),
    ]
    check(works, list(tilings), world, rough=0.08)  # the most frequent ids that are not hot are in some ranges


@pytest.mark.parametrize("skew", [None, Skew(5000, 1.05, ordered=True)], ids=["named", "in order"])
def test_bytes_with_hot_ids_behind_a_cache_are_those_the_runtime_sends(skew: Skew | None) -> None:
    """The planner's own tilings: the ranges of a table in frequency order are cut by what travels behind its head."""
    world, rows = Topology(4, "cpu"), 5000
    work = TableWork("t", rows, 8, optimizer=specs.SGD(0.1), reads=[Reads(MANY, 1)], files=True,
                     skew=skew or Skew(rows, 1.05, hot=order(rows)[:500]))  # fmt: skip
    problem = build([work], world, {"t": Limits(on_device=False, cached=True)})
    head = problem.sharding(0, problem.options.index(Option(Way.ROWS, 1, 4, True, 0.01)), ())
    assert head.tiling is not None
    assert head.hot == HotRows(np.arange(50) if skew else order(rows)[:50])
    if skew:
        cuts = head.tiling.blocks[0].cuts
        assert cuts[0] == 0
        assert np.all(np.diff(cuts[1:]) > cuts[1])  # the first range has the rows that are read most
    check([dataclasses.replace(work, cached=True, files=False)], [head.tiling], world, rough=0.08)


def test_hot_ids_of_a_table_in_frequency_order_leave_its_ranges() -> None:
    """Of two ranges, the first one has nearly all reads, and the hot ids, which are its first rows, most of these."""
    rows, world = 5000, Topology(2, "cpu")
    work = TableWork(
        "t", rows, 8, optimizer=specs.SGD(0.1), reads=[Reads(8 * MANY)], skew=Skew(rows, 1.05, ordered=True)
    )
    for ids in (np.arange(100), np.arange(2400, 2600)):
        tiling = Tiling.of("t", rows, 8, [(0, 2500, 0, 8, 1), (2500, rows, 0, 8, 0)])
        for distinct in (True, False):
            own = dataclasses.replace(work, wire=Wire(distinct=distinct))
            check([own], [hot(tiling, ids, 2)], world, rough=0.08)


def test_ids_of_hot_rows_count_by_their_rank_and_unknown_ones_as_the_mean_of_the_others() -> None:
    work = Workload([table(named=100), TableWork("even", 1000, 8)])
    most = order(ROWS)
    bare = row_wise("t", ROWS, 64, None, Topology(4))
    plain = row_wise("t", 1000, 8, None, Topology(4))
    law = work.laws

    def share(ids: Any, even: Any = ()) -> list[float]:
        own = work.with_hot(HotReads.of(work, [hot(bare, ids, 4), hot(plain, even, 4)]))
        heads = own.share([0, 1], own.rows, own.rows + own.hot.rows)  # type: ignore[union-attr]
        assert np.allclose(own.share([0, 1], 0, own.rows) + heads, 1.0)
        return [float(value) for value in heads]

    assert share(most[:100])[0] == pytest.approx(float(law.reads(np.array(0), 100)))
    assert share(most[:3])[0] == pytest.approx(float(law.reads(np.array(0), 3)))
    assert share(most[3:5])[0] == pytest.approx(float(law.reads(np.array(0), 5) - law.reads(np.array(0), 3)))
    others = float(1.0 - law.reads(np.array(0), 100))
    assert share(most[5000:5100])[0] == pytest.approx(100 * others / (ROWS - 100))
    assert share(most, np.arange(10)) == [pytest.approx(1.0), pytest.approx(0.01)]


def test_hot_ids_are_looked_for_and_their_updated_rows_written_back() -> None:
    """Seconds of a table of one id per bag: 8 ns per id at its home, and a copy of each updated hot row."""
    work, world = table("t", Reads(1000)), Topology(2, "cpu")
    bare = row_wise("t", ROWS, 64, None, world)
    model = Model(Workload([work]), world)
    tiling = hot(bare, order(ROWS)[:1000], 2)
    own = model.of_tilings([tiling])
    assert model.of_tilings([bare]) is model
    found = price([tiling], model)
    assert found.sent["ids"][0] < price([bare], model).sent["ids"][0]
    each = np.array([0])
    head = own.seen(2).between(each, ROWS, ROWS + 1000)
    tail = own.seen(2).between(each, 0, ROWS)
    assert float((head + tail)[0]) == pytest.approx(float(model.seen(2).whole[0]))
    faster = dataclasses.replace(world, speeds=dataclasses.replace(model.speeds, hot_id=0.0))
    less = price([tiling], Model(Workload([work]), faster))
    assert found.parts["route"] - less.parts["route"] == pytest.approx(np.full(2, 1000 * 8e-9))
    assert float(own.write_back(each, head)[0]) == pytest.approx(
        HOT_PIECE + float(head[0] * (own.rates.at("pick", 64.0) + own.rates.at("place", 64.0)))
    )


# ------------------------------------------------------------------------------------------------------------ options


def places_of(option: Option, topology: Topology) -> tuple[int, ...]:
    if option.width == topology.world_size:
        return ()
    return (1,) if option.way is Way.WHOLE else tuple(range(option.pieces))


def cuts_beside(topology: Topology) -> list[Option]:
    """The cuts of a table of 64 columns that are tried beside hot ids, without their heads."""
    ranks, sizes = topology.world_size, {len(host) for host in topology.host_ranks}
    hosts = [Option(Way.ROWS, 1, n) for n in sizes if n < ranks] + [Option(Way.GRID, 2, n) for n in sizes if n < ranks]
    single = [Option(Way.ROWS, k, 1) for k in (2, 4) if k < ranks]
    return [Option(Way.ROWS, 1, ranks), Option(Way.WHOLE, 1, 1), Option(Way.COLUMNS, 2, 1), *single, *hosts]


def model_of(problem: Problem, option: Option) -> Model:
    """The model of a plan with an option: hosts do not add the rows of single ranges (realise.py)."""
    if option.way is not Way.ROWS or option.width > 1:
        return problem.model
    works = [dataclasses.replace(work, sums_in_hosts=False) for work in problem.tables]
    return Model(Workload(works), problem.model.topology)


def arranged(problem: Problem, option: Option) -> tuple[float, float, float]:
    """The searched cost, the lower one and the price of one table under an option, in seconds."""
    o = np.array([problem.options.index(option)])
    places = [places_of(option, problem.model.topology)]
    tiling = problem.sharding(0, int(o[0]), places[0]).tiling
    assert tiling is not None
    searched, lower = (evaluate(own, o, places).cost / 1e12 for own in (problem.instance, problem.lower))
    return searched, lower, price([tiling], model_of(problem, option)).seconds


@pytest.mark.parametrize("topology", [Topology(4), Topology(8, "cpu"), HOSTS], ids=str)
@pytest.mark.parametrize(
    "work",
    [table(), table("t", Reads(2048)), table("t", Reads(512, 3, True), Reads(512, 1)), sequence(),
     table(wire=Wire(distinct=True), each_id=True), table(optimizer=specs.RowWiseAdagrad(0.1)),
     table("t", Reads(2048), wire=Wire(distinct=True), sums_in_hosts=True)],
    ids=["bags", "one id", "weights", "sequence", "once", "row-wise", "once in hosts"],
)  # fmt: skip
def test_an_arrangement_with_hot_ids_costs_its_price(work: TableWork, topology: Topology) -> None:
    problem = build([work], topology)
    with_head = [option for option in problem.options if option.head]
    once = problem.model.sent_once(np.arange(len(work.reads)), 1.0).any()
    cuts = [Option(Way.ROWS, 1, topology.world_size)] if once else cuts_beside(topology)
    assert with_head == [cut._replace(head=head) for cut in cuts for head in HEADS]
    for option in with_head:
        searched, lower, priced = arranged(problem, option)
        # Before the search, column blocks that exchange sums may be on any hosts.
        anywhere = option.way is Way.COLUMNS and work.optimizer == specs.RowWiseAdagrad(0.1) and topology is HOSTS
        assert searched == pytest.approx(priced, rel=0.01 if anywhere else 2e-5), option
        assert 0.8 * priced < lower <= priced * (1 + 2e-5), option
        o = np.array([problem.options.index(option)])
        places = places_of(option, topology)
        tiling: Any = problem.sharding(0, int(o[0]), places).tiling
        held = price([tiling], model_of(problem, option)).memory
        assert np.all(evaluate(problem.lower, o, [places]).memory <= held * (1 + 3e-5)), option
        most = held if places else held.max(0)
        assert np.all(evaluate(problem.instance, o, [places]).memory >= 0.98 * most), option


def drawn_places(draw: random.Random, option: Option, topology: Topology) -> tuple[int, ...]:
    if option.width == topology.world_size:
        return ()
    hosts = [h for h, ranks in enumerate(topology.host_ranks) if len(ranks) == option.width]
    return tuple(sorted(draw.sample(range(topology.world_size) if option.width == 1 else hosts, option.pieces)))


@pytest.mark.parametrize(
    "topology",
    [HOSTS, Topology(8, "cpu", local_world_size=4), Topology(9, hosts=[[0, 1, 2, 3], [4, 5, 6, 7], [8]]),
     Topology(8, "cpu", hosts=[[0, 1, 2], [3, 4, 5], [6, 7]]), Topology(8, local_world_size=4, nic="host")],
    ids=str,
)  # fmt: skip
def test_no_arrangement_of_tables_with_hot_ids_costs_less_than_its_lower_cost(topology: Topology) -> None:
    """Random cuts and places of four tables, each beside hot ids, half of them with sums over rows."""
    each = Wire(distinct=False)
    works = [
        table("bags", optimizer=specs.RowWiseAdagrad(0.1)), table("one", Reads(2048), wire=each),
        table("sequence", each_id=True, optimizer=specs.RowWiseAdagrad(0.1), wire=each),
        table("adam", Reads(512, 5), optimizer=specs.Adam(0.1)),
    ]  # fmt: skip
    problem, draw = build(works, topology), random.Random(0)
    heads = [o for o, option in enumerate(problem.options) if option.head]
    assert problem.lower.there[:, heads].all()
    for _ in range(60):
        option = np.array([draw.choice(heads) for _ in works])
        cuts = [problem.options[o] for o in option.tolist()]
        places = [drawn_places(draw, cut, topology) for cut in cuts]
        tilings: Any = [problem.sharding(t, int(o), places[t]).tiling for t, o in enumerate(option)]
        apart = [
            dataclasses.replace(work, sums_in_hosts=False) if cut.way is Way.ROWS and cut.width == 1 else work
            for work, cut in zip(works, cuts, strict=True)
        ]
        priced = price(tilings, Model(Workload(apart), topology))
        lower = evaluate(problem.lower, option, places)
        # Where proxies have unequal turns, the lower cost has their mean.
        assert lower.cost / 1e12 <= priced.seconds * (1 + 3e-5), cuts
        assert np.all(lower.memory.sum(0) <= priced.memory.sum(0) * (1 + 3e-5)), cuts


CACHED = {"t": Limits(on_device=False, cached=True)}
IN_ORDER = Skew(ROWS, 1.05, ordered=True)


@pytest.mark.parametrize("topology", [Topology(4, "cpu"), Topology(8, "cuda", local_world_size=4)], ids=str)
@pytest.mark.parametrize("skew", [None, IN_ORDER], ids=["named", "in order"])
@pytest.mark.parametrize("load_factor", [0.0, 0.1])
def test_an_arrangement_with_hot_ids_behind_a_cache_costs_its_price(
    topology: Topology, skew: Skew | None, load_factor: float
) -> None:
    """Host memory behind GPUs, files on CPUs. Ranges of a table in frequency order have estimates and means."""
    work = table(load_factor=load_factor, files=topology.compute_device == "cpu", **({"skew": skew} if skew else {}))
    problem = build([work], topology, CACHED)
    heads = [o for o, option in enumerate(problem.options) if option.head]
    cuts = [Option(Way.ROWS, 1, topology.world_size)] if skew else cuts_beside(topology)
    assert [problem.options[o] for o in heads] == [
        cut._replace(cached=True, head=head) for cut in cuts for head in HEADS
    ]
    for o in heads:
        option = problem.options[o]
        places = places_of(option, topology)
        sharding: Any = problem.sharding(0, o, places)
        most = np.arange(ROWS) if skew else order(ROWS)
        assert sharding.hot == HotRows(most[: int(ROWS * option.head)])
        kinds = {Way.ROWS: {"row_wise", "table_row_wise"}, Way.WHOLE: {"table_wise"}, Way.GRID: {"grid_shard"},
                 Way.COLUMNS: {"column_wise", "table_column_wise"}}  # fmt: skip
        assert sharding.kind.value in kinds[option.way]
        apart = None if sharding.ids_per_bag is None else sharding.ids_per_bag > 1.0
        own = Model(Workload([dataclasses.replace(work, cached=True, sums_in_hosts=apart)]), topology)
        priced = price([sharding.tiling], own)
        held = priced.memory
        searched, lower = (evaluate(own, np.array([o]), [places]) for own in (problem.instance, problem.lower))
        assert lower.cost / 1e12 <= priced.seconds * (1 + 2e-5)
        assert np.all(searched.memory >= 0.98 * (held if places else held.max(0)))
        if skew:
            assert searched.cost / 1e12 >= 0.9 * priced.seconds
            assert np.all(lower.memory.sum(0) <= held.sum(0) * (1 + 1e-5) + 2 * topology.world_size)
        else:
            assert searched.cost / 1e12 == pytest.approx(priced.seconds, rel=2e-5), option
            assert np.all(lower.memory <= held * (1 + 3e-5) + 1)


def test_hot_ids_leave_the_misses_of_a_cache() -> None:
    """A table of which each row that is read misses: hot rows are no misses, and those left are the others."""
    world = Topology(4, "cuda")
    model = Model(Workload([table(cached=True, load_factor=0.0)]), world)
    bare = row_wise("t", ROWS, 64, None, world)
    tiling = hot(bare, order(ROWS)[:200], 4)
    every = np.array([0])
    assert float(model.missed[0]) == pytest.approx(float(model.all_distinct[0]))  # before the heads are known
    own = model.of_tilings([tiling])
    cold = own.seen(4).between(every, 0, ROWS)
    assert float(own.missed[0]) == pytest.approx(float(cold[0]))
    assert float(own.missed[0]) < float(model.missed[0]) - 199


def test_a_head_in_frequency_order_of_more_rows_than_a_plan_holds_is_no_option_behind_a_cache() -> None:
    rows = 25 * MOST_HOT_ROWS
    problem = build([table(rows=rows, skew=Skew(rows, 1.05, ordered=True))], Topology(4, "cuda"), CACHED)
    assert [option.head for option in problem.options if option.head] == [0.0005, 0.002, 0.01]


def test_hot_ids_are_options_of_trained_tables_that_name_them() -> None:
    tables = [
        table("named"), table("few", named=150), table("frozen", optimizer=None),
        table("unnamed", skew=Skew(ROWS, 1.05)), table("columns"), table("rows"), table("cached"),
    ]  # fmt: skip
    limits = {
        "columns": Limits((ShardingType.COLUMN_WISE,)), "rows": Limits((ShardingType.ROW_WISE,)),
        "cached": Limits(on_device=False, cached=True),
    }  # fmt: skip
    problem = build(tables, Topology(4), limits)
    heads = {
        cut: {
            work.name: [option.head for option, own in zip(problem.options, there, strict=True)
                        if own and option.head and option[:3] == cut]
            for work, there in zip(tables, problem.instance.there.tolist(), strict=True)
        }
        for cut in ((Way.ROWS, 1, 4), (Way.ROWS, 2, 1), (Way.WHOLE, 1, 1), (Way.COLUMNS, 2, 1))
    }  # fmt: skip
    known = {
        "named": list(HEADS), "few": [0.0005, 0.002, 0.01], "frozen": [], "unnamed": [], "columns": [],
        "rows": list(HEADS), "cached": list(HEADS),
    }  # fmt: skip
    assert heads[Way.ROWS, 1, 4] == heads[Way.ROWS, 2, 1] == known
    assert heads[Way.WHOLE, 1, 1] == {**known, "rows": []}
    assert heads[Way.COLUMNS, 2, 1] == {**known, "rows": [], "columns": list(HEADS)}
    assert {problem.options[o].cached for o in problem.instance.there[6].nonzero()[0].tolist()} == {True}
    o = problem.options.index(Option(Way.ROWS, 1, 4, head=0.01))
    whole = problem.sharding(0, problem.options.index(Option(Way.WHOLE, 1, 1, head=0.01)), (2,))
    assert whole.kind is ShardingType.TABLE_WISE
    assert whole.hot == HotRows(order(ROWS, "named")[:200])
    assert whole.tiling is not None
    assert whole.tiling.bare == table_wise("t", ROWS, 64, [2], Topology(4))
    for t, count in ((0, 200), (1, 150)):
        sharding = problem.sharding(t, o, ())
        assert sharding.kind is ShardingType.ROW_WISE
        assert sharding.hot == HotRows(order(ROWS, tables[t].name)[:count])
        assert sharding.tiling is not None
        assert sharding.tiling.bare == row_wise("t", ROWS, 64, None, Topology(4))
        assert ParameterSharding.from_json("t", sharding.to_json()).hot == sharding.hot


def test_the_search_takes_hot_ids_where_every_id_travels_and_none_where_repeated_ids_travel_once() -> None:
    works = [dataclasses.replace(sequence(rows=100_000, named=5_000), name=f"t{t}") for t in range(4)]
    for distinct in (False, True):
        problem = build([dataclasses.replace(w, wire=Wire(distinct=distinct)) for w in works], HOSTS)
        found = solve(problem.instance)
        assert all(bool(problem.options[o].head) != distinct for o in found.option.tolist())
        tilings: Any = [problem.sharding(t, int(o), found.places[t]).tiling for t, o in enumerate(found.option)]
        priced = price(tilings, problem.model)
        assert found.cost / 1e12 == pytest.approx(priced.seconds, rel=1e-4)
        assert lower_bound(problem.lower, found.cost * 2) / 1e12 <= priced.seconds * (1 + 1e-5)
        saved = bytes_saved(works, tilings, HOSTS)
        bare = np.sum(list(price([t.bare for t in tilings], Model(Workload(works), HOSTS)).sent.values()), axis=0)
        assert (saved > 0.5 * bare.mean()) != distinct


def test_hot_ids_beside_column_blocks_are_taken_where_copies_of_a_table_are_dear() -> None:
    """Bags of 50 ids over slow links: all arrangements are tried, with those options and without them."""
    works = [
        table("t", Reads(2048, 50), skew=Skew(ROWS, 0.8, hot=order(ROWS)[:1000]), wire=Wire(distinct=False)),
        dataclasses.replace(
            table("u", Reads(2048, 50), rows=2000, skew=Skew(2000, 1.3, hot=order(2000, "u")[:100])),
            wire=Wire(distinct=False), dim=128, each_id=True,
        ),
    ]  # fmt: skip
    problem = build(works, Topology(2, "cuda", intra_host_bw=1e4))
    beside = [bool(option.head) and option.way is not Way.ROWS for option in problem.options]
    found = solve(problem.instance)
    assert [beside[o] for o in found.option.tolist()] == [True, False]
    without = solve(dataclasses.replace(problem.instance, width=np.where(beside, 0, problem.instance.width)))
    assert found.cost < 0.99 * without.cost
    tilings: Any = [problem.sharding(t, int(o), found.places[t]).tiling for t, o in enumerate(found.option)]
    assert price(tilings, problem.model).seconds == pytest.approx(found.cost / 1e12, rel=1e-4)


GPUS = Topology(16, local_world_size=8, inter_host_bw=gigabytes_per_second(12.5))
CPUS = Topology(
    64, "cpu", local_world_size=8, intra_host_bw=gigabytes_per_second(5), inter_host_bw=gigabytes_per_second(1.25 / 8)
)  # fmt: skip
ROW_WISE = specs.RowWiseAdagrad(0.1)


def long(rows: int, dim: int, exponent: float, *reads: Reads, count: int = 1, named: int = 50_000, **more: Any) -> Any:
    skew = Skew(rows, exponent, hot=np.arange(named))
    return [TableWork(f"t{t}", rows, dim, skew=skew, reads=reads, **more) for t in range(count)]


@pytest.mark.parametrize(
    ("works", "topology", "types", "cut"),
    [
        (long(21_290, 128, 1.05, Reads(8192), count=8, named=1000, each_id=True, optimizer=ROW_WISE), GPUS, (),
         Option(Way.ROWS, 2, 1)),
        (long(21_290, 128, 1.05, Reads(8192), count=8, named=1000, each_id=True, optimizer=ROW_WISE), GPUS,
         (ShardingType.COLUMN_WISE,), Option(Way.COLUMNS, 2, 1)),
        (long(3_172_238, 16, 1.05, Reads(2048, 50), count=2, optimizer=ROW_WISE), CPUS, (), Option(Way.ROWS, 1, 8)),
        (long(2_059_214, 64, 0.9, Reads(2048, 50), optimizer=specs.Adagrad(0.1)), CPUS, (), Option(Way.GRID, 2, 8)),
    ],
    ids=["single ranges", "columns with sums over rows", "ranges over a host", "grid"],
)  # fmt: skip
def test_hot_ids_are_taken_beside_every_cut_where_it_costs_least(
    works: list[TableWork], topology: Topology, types: tuple[ShardingType, ...], cut: Option
) -> None:
    problem = build(works, topology, {work.name: Limits(types) for work in works} if types else None)
    found = solve(problem.instance)
    assert {problem.options[o]._replace(head=0.0) for o in found.option.tolist()} == {cut}
    assert all(problem.options[o].head for o in found.option.tolist())
    beside = [bool(option.head) and (option.way, option.width) == (cut.way, cut.width) for option in problem.options]
    without = solve(dataclasses.replace(problem.instance, width=np.where(beside, 0, problem.instance.width)))
    assert found.cost < 0.97 * without.cost
    shardings = [problem.sharding(t, int(o), found.places[t]) for t, o in enumerate(found.option)]
    assert all(sharding.hot for sharding in shardings)
    apart = None if cut.width > 1 else False
    own = Model(Workload([dataclasses.replace(work, sums_in_hosts=apart) for work in works]), topology)
    tilings: Any = [sharding.tiling for sharding in shardings]
    priced = price(tilings, own).seconds
    assert priced == pytest.approx(found.cost / 1e12, rel=0.005)
    assert lower_bound(problem.lower, found.cost * 2) / 1e12 <= priced * (1 + 1e-5)


def test_hot_ids_that_do_not_fit_are_not_taken() -> None:
    """Copies of 5 % of 400,000 rows with Adam's state take 15 MB on every rank."""
    rows = 400_000
    work = table("t", Reads(16, 20), rows=rows, named=20_000, each_id=True, optimizer=specs.Adam(0.1))
    held = {}
    for cap in (100 << 20, 28 << 20):
        problem = build([work], Topology(16, local_world_size=8, hbm_cap=cap), {"t": Limits((ShardingType.ROW_WISE,))})
        heads = [o for o, option in enumerate(problem.options) if option.head]
        most = (problem.instance.memory + problem.instance.home_memory)[0, heads, 0]
        assert int(most[3] - most[0]) == pytest.approx(0.0495 * rows * 64 * 12, rel=0.05)
        found = solve(problem.instance)
        assert np.all(found.memory <= cap)
        held[cap] = problem.options[int(found.option[0])].head
    assert held[28 << 20] < 0.05


def test_the_bytes_and_the_curve_of_hot_ids_are_those_of_its_price() -> None:
    found = head_bytes(sequence(named=150), HOSTS)
    assert [own.rows for own in found] == [0, 10, 40, 150]
    assert found[3].reads == pytest.approx(float(Workload([sequence()]).laws.reads(np.array(0), 150)))
    assert found[3].sent < found[0].sent
    curve = read_curve(sequence())
    assert curve[-1] == (ROWS, 1.0)


# ---------------------------------------------------------------------------------------------------------- bad input


def test_a_skew_holds_eight_bytes_per_hot_id_and_compares_them() -> None:
    hot = np.random.default_rng(0).permutation(1_000)
    skew = Skew(1_000, 1.0, hot=hot)
    assert memoryview(skew.hot).nbytes == 8_000  # type: ignore[arg-type]
    assert list(skew.hot) == hot.tolist()
    assert skew == Skew(1_000, 1.0, hot=torch.from_numpy(hot))
    assert hash(skew) == hash(Skew(1_000, 1.0, hot=hot.tolist()))
    assert skew != Skew(1_000, 1.0, hot=hot[::-1])
    limits = ParameterConstraints(skew=skew)
    assert ParameterConstraints.from_json("t", json.loads(json.dumps(limits.to_json()))) == limits


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3, 5, 3], "the hot id 3 twice; expected each id once"),
        ([-1], "the hot id -1; expected row numbers from 0"),
        ([0.5], "hot ids of type float64"),
        (["a"], "hot ids of type"),
        ([True], "hot ids of type bool"),
        ([2**63], "hot ids of type uint64"),
        ([[1], [2, 3]], "hot ids that make no array"),
        (torch.tensor([1], device="meta"), "hot ids that make no array"),
        (range(11), "11 hot ids; expected at most 10, the different ids"),
    ],
)
def test_hot_ids_that_are_none_are_refused(ids: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"Skew: got .*{words}"):
        Skew(10, 1.0, hot=ids)


@pytest.mark.parametrize(
    "ids",
    [(3, 1), [np.int64(3), np.int32(1)], np.array([3, 1], np.uint32), torch.tensor([3, 1], dtype=torch.int32),
     array("i", [3, 1]), range(3, 0, -2), np.array([3, 1], ">i8")],
    ids=["tuple", "numbers of numpy", "uint32", "int32 tensor", "array", "range", "other byte order"],
)  # fmt: skip
def test_hot_ids_are_whole_numbers_of_any_type(ids: Any) -> None:
    skew = Skew(10, 1.0, hot=ids)
    same = [copy.deepcopy(skew), pickle.loads(pickle.dumps(skew)), dataclasses.replace(skew), Skew(10, 1.0, hot=[3, 1])]
    assert all(other == skew and hash(other) == hash(skew) for other in same)
    assert list(skew.hot) == [3, 1]
    assert skew != Skew(10, 1.0, hot=[1, 3])
    assert type(ParameterConstraints(skew=skew).to_json()["skew"]["hot"][0]) is int


def test_a_hot_id_beyond_its_table_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Table 'short': got the hot id 12; expected ids of its 12 rows"):
        TableWork("short", 12, 8, skew=Skew(12, 1.0, hot=[3, 12]))
