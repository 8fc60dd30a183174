"""An instance's numbers are those of the tilings that its options stand for."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tilerec.errors import ConfigError
from tilerec.planner.cost.cuts import RangesByFrequency, even_pieces, row_cuts, sizes_of_shares
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.option_amounts import OptionAmounts
from tilerec.planner.cost.options import Problem, build
from tilerec.planner.cost.price import price
from tilerec.planner.cost.ways import Limits, Way, enumerate_options
from tilerec.planner.cost.workload import Reads, Skew, TableWork, Workload
from tilerec.planner.search.instance import SHARE, Instance, Solution, evaluate
from tilerec.planner.search.solve import lower_bound, solve
from tilerec.spec import optimizer as specs
from tilerec.spec.plan import ShardingType
from tilerec.spec.tile import Tiling, ceil_chunks
from tilerec.spec.topology import Topology, gigabytes_per_second

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="seconds each: nightly")
PLAIN = specs.SGD(0.1)


def works(count: int = 24, seed: int = 0, optimizer: Any = PLAIN) -> list[TableWork]:
    draw = random.Random(seed)
    return [
        TableWork(
            f"t{i:02d}", int(10 ** draw.uniform(3, 6)), draw.choice([16, 32, 64, 128]), optimizer=optimizer,
            reads=[Reads(512, draw.choice([1, 2, 5, 20])) for _ in range(draw.choice([1, 1, 2]))],
        )
        for i in range(count)
    ]  # fmt: skip


def drawn(problem: Problem, topology: Topology, ways: tuple[Way, ...] | None, seed: int = 1) -> Any:
    """A random plan of some ways: options, places, tilings."""
    draw, instance = random.Random(seed), problem.instance
    option, places = [], []
    for t in range(instance.tables):
        o = draw.choice(
            [o for o in np.flatnonzero(instance.there[t]).tolist() if ways is None or problem.options[o].way in ways]
        )
        width, pieces = int(instance.width[t, o]), int(instance.pieces[t, o])
        hosts = [h for h in range(topology.host_count) if len(topology.ranks_of(h)) == width]
        among = range(topology.world_size) if width == 1 else hosts
        option.append(o)
        places.append(() if width == topology.world_size else tuple(draw.sample(among, pieces)))
    tilings = [problem.sharding(t, o, places[t]).tiling for t, o in enumerate(option)]
    return np.array(option), places, tilings


def apart(problem: Problem, option: Any) -> Model:
    """The model of a plan: ranges of rows on single ranks are not added up inside hosts."""
    single = [problem.options[o].way is Way.ROWS and problem.options[o].width == 1 for o in option]
    tables = [
        dataclasses.replace(work, sums_in_hosts=False) if alone else work
        for work, alone in zip(problem.tables, single, strict=True)
    ]
    return Model(Workload(tables), problem.model.topology)


WAYS: list[tuple[Way, ...] | None] = [
    (Way.WHOLE,),
    (Way.COLUMNS, Way.WHOLE),
    (Way.ROWS,),
    (Way.COPIES,),
    (Way.GRID, Way.WHOLE),
    None,
]
ALIKE = [
    Topology(2, "cpu"),
    Topology(4, "cpu"),
    Topology(8),
    Topology(8, local_world_size=4),
    Topology(6, local_world_size=2),
    Topology(8, local_world_size=4, nic="host"),
]
ROUGH = 1e-5  # ranges of whole rows are not all alike
ROW_WISE = specs.RowWiseAdagrad(0.1)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("topology", ALIKE, ids=lambda t: f"{t}, {t.nic}")
def test_an_arrangement_on_hosts_alike_costs_what_its_tilings_cost(
    topology: Topology, ways: tuple[Way, ...] | None
) -> None:
    # Sums over rows of column blocks depend on which blocks share a host: of those, on one host only.
    optimizer = ROW_WISE if topology.host_count == 1 else PLAIN
    for seed in range(3):
        problem = build(works(12, seed, optimizer), topology)
        option, places, tilings = drawn(problem, topology, ways, seed)
        solution = evaluate(problem.instance, option, places)
        priced = price(tilings, apart(problem, option))
        # Of a few features, owners of rows send every id, and other homes each distinct id once.
        alike = problem.lower is problem.instance
        assert solution.cost / 1e12 == pytest.approx(priced.seconds, rel=2e-4 if alike else 2e-3)
        for s, name in enumerate(problem.stages):
            # Ranks below the slowest may wait for what others send them.
            assert solution.load[:, s].max() / 1e12 <= priced.stages[name].max() * (1 + 1e-9) + problem.model.call * 12
        if priced.memory.any():
            assert np.all(solution.memory <= priced.memory * (1 + (ROUGH if alike else 5e-5)) + 1)
            tier = problem.model.tier
            assert solution.memory[:, tier] == pytest.approx(priced.memory[:, tier], rel=0.08)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize(
    "topology",
    [
        Topology(6, hosts=[[0, 1], [2, 3, 4, 5]]),
        Topology(8, hosts=[[0], [1, 2, 3, 4, 5, 6, 7]]),
        Topology(5, "cpu", hosts=[[0, 1, 2], [3, 4]]),
        Topology(8, local_world_size=2),
    ],
    ids=str,
)
def test_no_arrangement_is_cheaper_than_its_lower_instance_says(
    topology: Topology, ways: tuple[Way, ...] | None
) -> None:
    for seed in range(4):
        problem = build(works(8, seed, ROW_WISE), topology)
        option, places, tilings = drawn(problem, topology, ways, seed)
        priced = price(tilings, apart(problem, option))
        lower = evaluate(problem.lower, option, places)
        assert lower.cost / 1e12 <= priced.seconds * (1 + ROUGH)
        assert np.all(lower.memory <= priced.memory * (1 + ROUGH) + 1)


@pytest.mark.parametrize("seed", [26, 96, 312, 360])
def test_of_a_host_whose_ranks_are_proxies_of_unequally_many_homes_the_bound_takes_the_fewest(seed: int) -> None:
    """The four ranks of a host serve five homes on other hosts: one of them serves two."""
    topology, draw = Topology(9, hosts=[[0, 1, 2, 3], [4, 5, 6, 7], [8]]), random.Random(seed)
    tables = [
        TableWork(
            f"t{i}", draw.choice([2520, 20_160, 201_600]), draw.choice([16, 64, 256]), optimizer=PLAIN,
            reads=(Reads(draw.choice([16, 64, 256, 1024]), draw.choice([1.2, 1.5, 2, 4, 8, 16, 40])),),
        )
        for i in range(3)
    ]  # fmt: skip
    problem = build(tables, topology)
    option, places, tilings = drawn(problem, topology, None, seed)
    assert any(problem.options[o].width == 4 for o in option.tolist())
    assert evaluate(problem.lower, option, places).cost / 1e12 <= price(tilings, apart(problem, option)).seconds


def unlike(nic: Any, duplex: bool, hosts: list[list[int]], **times: float) -> Topology:
    """Hosts of several sizes, slow links between them; times: factors on some speeds."""
    topology = Topology(sum(map(len, hosts)), hosts=hosts, nic=nic, inter_host_bw=gigabytes_per_second(2))
    speeds = default_speeds(topology)
    changed = {name: factor * getattr(speeds, name) for name, factor in times.items()}
    return dataclasses.replace(topology, speeds=dataclasses.replace(speeds, duplex=duplex, **changed))


def every_arrangement(problem: Problem, topology: Topology) -> Iterator[tuple[Any, list[tuple[int, ...]], float]]:
    """Options and places of all tables, and the price."""
    ways = []
    for t in range(problem.instance.tables):
        own = []
        for o in np.flatnonzero(problem.instance.there[t]).tolist():
            width, pieces = int(problem.instance.width[t, o]), int(problem.instance.pieces[t, o])
            hosts = [h for h in range(topology.host_count) if len(topology.ranks_of(h)) == width]
            among = range(topology.world_size) if width == 1 else hosts
            if width == topology.world_size:
                own.append((o, ()))
            elif pieces <= len(among):
                own += [(o, where) for where in itertools.combinations(among, pieces)]
        ways.append(own)
    for picked in itertools.product(*ways):
        option, places = np.array([o for o, _ in picked]), [where for _, where in picked]
        tilings: Any = [problem.sharding(t, o, where).tiling for t, (o, where) in enumerate(picked)]
        yield option, places, price(tilings, apart(problem, option)).seconds


@pytest.mark.parametrize("hosts", [[[0], [1, 2, 3]], [[0], [1], [2, 3]], [[0, 1], [2, 3]]], ids=str)
@pytest.mark.parametrize("nic", ["host", "device"])
def test_of_few_tables_on_unlike_hosts_the_search_finds_nearly_the_best_and_no_arrangement_is_below_the_bound(
    hosts: list[list[int]], nic: str
) -> None:
    """Directions add up: what homes receive over the network counts, wherever owners are."""
    topology = unlike(nic, False, hosts)
    whole = Limits((ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL))
    for seed in range(2):
        tables = works(2, seed)
        problem = build(tables, topology, {table.name: whole for table in tables})
        prices = {
            (tuple(option.tolist()), tuple(places)): (
                seconds,
                evaluate(problem.instance, option, places).cost / 1e12,
            )
            for option, places, seconds in every_arrangement(problem, topology)
        }
        least = min(seconds for seconds, _ in prices.values())
        assert lower_bound(problem.lower, int(least * 2e12)) / 1e12 <= least * (1 + ROUGH)
        chosen = min(prices.values(), key=lambda pair: pair[1])[0]
        assert chosen <= (1.01 if nic == "host" else 1.06) * least


@pytest.mark.parametrize("dear", ["link_in", "link_out", "network_in", "network_out"])
@pytest.mark.parametrize("duplex", [False, True])
@pytest.mark.parametrize("nic", ["host", "device"])
def test_on_unlike_hosts_a_direction_that_is_dearer_raises_no_lower_instance_above_a_price(
    nic: str, duplex: bool, dear: str
) -> None:
    """Ids go the other way than rows, and hosts where one is least may not be those of the other."""
    for hosts in ([[0], [1, 2, 3]], [[0, 1], [2, 3, 4]]):
        topology = unlike(nic, duplex, hosts, **{dear: 3000.0 if dear.startswith("link") else 10.0})
        problem = build(works(4, 1), topology)
        for ways in WAYS:
            option, places, tilings = drawn(problem, topology, ways)
            priced = price(tilings, apart(problem, option)).seconds
            assert evaluate(problem.lower, option, places).cost / 1e12 <= priced * (1 + 2e-4), ways
        whole = np.full(4, [str(o) for o in problem.options].index("whole"))
        for rank in range(topology.world_size):
            tilings = [problem.sharding(t, int(o), (rank,)).tiling for t, o in enumerate(whole)]
            priced = price(tilings, problem.model).seconds
            assert evaluate(problem.lower, whole, [(rank,)] * 4).cost / 1e12 <= priced * (1 + 2e-4), rank


@pytest.mark.parametrize("nic", ["host", "device"])
def test_beside_pins_a_bound_does_not_take_pieces_to_lie_evenly(nic: str) -> None:
    """Receiving takes longest, so pieces are best where pins have homes wait."""
    topology = unlike(nic, False, [[0], [1]], network_in=20.0)
    pin, *free = works(4, 1)
    pin = dataclasses.replace(pin, reads=[Reads(40_000, 1, True)] * 4)
    heavy: Any = build([pin], topology).sharding(0, 0, (0,)).tiling
    for rank in range(2):
        problem = build([pin, *free], topology, pinned={pin.name: heavy})
        o = [str(option) for option in problem.options].index("whole")
        tilings: list[Any] = [problem.sharding(t, o, (rank,)).tiling for t in range(3)]
        priced = price([heavy, *tilings], Model(Workload([pin, *free]), topology))
        lower = evaluate(problem.lower, np.full(3, o), [(rank,)] * 3)
        assert lower.cost / 1e12 <= priced.seconds * (1 + ROUGH), rank


def test_ids_of_a_table_of_two_to_the_31_rows_take_eight_bytes() -> None:
    topology = Topology(8, local_world_size=4)
    found = []
    for rows in ((1 << 31) - 1, 1 << 31):
        problem = build([TableWork("t", rows, 16, optimizer=PLAIN, reads=[Reads(512, 3)])], topology)
        option, places, tilings = drawn(problem, topology, (Way.WHOLE,))
        ids = price(tilings, apart(problem, option)).stages["ids"].max()
        found.append((evaluate(problem.instance, option, places).stage[0] / 1e12, ids))
    (short, short_price), (tall, tall_price) = found
    assert tall - short == pytest.approx(tall_price - short_price, rel=1e-3)


@pytest.mark.parametrize("dear", ["link_in", "link_out", "network_in", "network_out"])
@pytest.mark.parametrize(
    "topology",
    [Topology(2, "cpu"), Topology(3, "cpu"), Topology(8, "cpu", local_world_size=4)],
    ids=str,
)
def test_a_direction_that_is_dearer_than_the_other_raises_no_bound_above_a_price(topology: Topology, dear: str) -> None:
    """Where both directions take the same processor's time, a home saves what its own rank holds."""
    speeds = default_speeds(topology)
    for times in (1.5, 5.0):
        topology = dataclasses.replace(
            topology, speeds=dataclasses.replace(speeds, **{dear: times * getattr(speeds, dear)})
        )
        for ways in WAYS:
            if ways == (Way.GRID, Way.WHOLE) and topology.host_count == 1:
                continue
            problem = build(works(12), topology)
            option, places, tilings = drawn(problem, topology, ways)
            priced = price(tilings, apart(problem, option)).seconds
            lower = evaluate(problem.lower, option, places).cost / 1e12
            assert 0.9 * priced <= lower <= priced * (1 + 2e-4)


def test_the_bound_goes_by_numbers_of_its_own_only_where_the_search_has_estimates() -> None:
    """Rules over whole rows on several hosts, hosts of processes or of different sizes, and ordered ids."""
    hosts, skew = Topology(4, local_world_size=2), Skew(1000, 1.0, ordered=True)

    def same(topology: Topology, optimizer: Any = PLAIN, skew: Skew | None = None, rows: int = 1000) -> bool:
        problem = build([TableWork("t", rows, 64, optimizer=optimizer, skew=skew)], topology)
        return problem.lower is problem.instance

    assert same(hosts)
    assert not same(hosts, ROW_WISE)
    assert not same(hosts, skew=skew)
    assert not same(Topology(4, "cpu", local_world_size=2))
    assert not same(Topology(5, hosts=[[0, 1], [2, 3, 4]]))
    for topology in (Topology(4), Topology(4, "cpu")):
        assert same(topology, ROW_WISE)
        assert same(topology, skew=Skew(1000, 1.0))
        assert not same(topology, skew=skew)


@pytest.mark.parametrize("nic", ["device", "host"])
def test_on_unlike_hosts_a_piece_costs_what_its_own_host_takes(nic: Any) -> None:
    topology = Topology(8, hosts=[[0, 1, 2], [3, 4, 5, 6, 7]], nic=nic)
    for seed in range(3):
        problem = build(works(24, seed), topology)
        option, places, tilings = drawn(problem, topology, (Way.WHOLE,), seed)
        found = evaluate(problem.instance, option, places).load / 1e12
        stages = price(tilings, apart(problem, option)).stages
        # Owners send what homes get. Of the larger host they send less per rank, and where ranks share cards, homes on
        # the smaller one take longer to receive it.
        for s, name in enumerate(problem.stages):
            if name in ("rows", "rows between hosts"):
                if nic == "host" and name == "rows":
                    assert np.all(found[:, s] <= stages[name] * 1.001 + 1e-9)
                assert found[:, s].max() == pytest.approx(stages[name].max(), rel=1e-3)


@pytest.mark.parametrize("ways", [(Way.WHOLE,), (Way.ROWS,), (Way.COLUMNS, Way.WHOLE)])
def test_a_cached_arrangement_costs_what_its_tilings_cost_and_lies_in_host_memory(
    ways: tuple[Way, ...],
) -> None:
    topology, adagrad = Topology(8), specs.Adagrad(0.1)
    tables = [dataclasses.replace(work, load_factor=0.1) for work in works(optimizer=adagrad)]
    limits = {work.name: Limits(on_device=False, cached=True) for work in tables}
    problem = build(tables, topology, limits)
    assert all(option.cached for option in problem.options)
    option, places, tilings = drawn(problem, topology, ways)
    solution = evaluate(problem.instance, option, places)
    cached = Model(Workload([dataclasses.replace(work, cached=True) for work in tables]), topology)
    priced = price(tilings, cached)
    assert solution.cost / 1e12 == pytest.approx(priced.seconds, rel=1e-3)
    assert solution.memory.mean(0) == pytest.approx(priced.memory.mean(0), rel=0.04)  # blocks that meet share lines
    plain = price(tilings, problem.model)
    assert priced.seconds > plain.seconds
    weights = sum(work.rows * work.dim * 8 for work in tables) / 8
    assert priced.memory[:, 1].mean() == pytest.approx(weights, rel=0.01)
    saved = plain.memory[:, 0].mean() - priced.memory[:, 0].mean()
    if ways == (Way.WHOLE,):  # a column block has lines of its own
        rows, row = np.array([w.rows for w in tables]), np.array([w.dim * 8 for w in tables])
        lines = np.maximum(32 * np.ceil(0.1 * rows / 32), problem.model.all_distinct)
        assert saved == pytest.approx(weights - (lines * (row + 17) + 4 * rows).sum() / 8, rel=0.01)


def test_a_table_without_an_attached_optimizer_is_not_cached() -> None:
    bare = dataclasses.replace(works(1)[0], optimizer=None)
    problem = build([bare, *works(3)[1:]], Topology(2), {w.name: Limits(cached=True) for w in works(3)})
    behind = np.array([option.cached for option in problem.options])
    assert not problem.instance.there[0, behind].any()
    assert problem.instance.there[1:, behind].any(1).all()


def test_rules_over_whole_rows_pay_for_columns() -> None:
    topology = Topology(4, "cpu")
    for optimizer in (specs.SGD(0.1), specs.RowWiseAdagrad(0.1)):
        problem = build(works(6, optimizer=optimizer), topology)
        option, places, tilings = drawn(problem, topology, (Way.COLUMNS, Way.WHOLE))
        cost = evaluate(problem.instance, option, places).cost / 1e12
        assert cost == pytest.approx(price(tilings, problem.model).seconds, rel=0.06)
        assert ("row sums" in problem.charges) == (optimizer.phases > 0)


def test_every_option_is_a_tiling_of_the_type_it_is_called() -> None:
    topology = Topology(8, local_world_size=4)
    problem = build([TableWork("t", 1000, 128, optimizer=specs.SGD(0.1))], topology)
    found = {}
    for o, option in enumerate(problem.options):
        k = int(problem.instance.pieces[0, o])
        places = () if option.width == 8 else tuple(range(k))
        sharding = problem.sharding(0, o, places)
        assert sharding.tiling is not None
        found[str(option)] = sharding.kind
        pieces = [t.rectangle.cells for t in sharding.tiling.tiles()]
        assert max(pieces) - min(pieces) <= 128 * k
        assert sum(pieces) == 128_000
    assert found == {
        "whole": ShardingType.TABLE_WISE,
        "copies over 8 ranks": ShardingType.DATA_PARALLEL,
        "columns x 2": ShardingType.TABLE_COLUMN_WISE,
        "columns x 4": ShardingType.TABLE_COLUMN_WISE,
        "rows x 2": ShardingType.TABLE_ROW_WISE,
        "rows x 3": ShardingType.TABLE_ROW_WISE,
        "rows x 4": ShardingType.TABLE_ROW_WISE,
        **{f"rows x {k}": ShardingType.ROW_WISE for k in (5, 6, 7)},
        "rows over 8 ranks": ShardingType.ROW_WISE,
        "rows over 4 ranks": ShardingType.TABLE_ROW_WISE,
        "grid x 2 over 4 ranks": ShardingType.GRID_SHARD,
    }
    assert problem.sharding(0, [str(o) for o in problem.options].index("columns x 2"), (5, 2)).kind is (
        ShardingType.COLUMN_WISE
    )


def test_one_range_of_rows_is_a_whole_table() -> None:
    """Also where a table is limited to one rank."""
    options = [str(option) for option in enumerate_options(Topology(20), [64], row_splits=[1, 5, 20])]
    assert "rows x 1" not in options
    assert "rows x 5" in options
    assert len(set(options)) == len(options)


def test_limits_leave_the_options_of_their_types() -> None:
    limits = {
        "t00": Limits((ShardingType.TABLE_WISE,)),
        "t01": Limits((ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)),
        "t02": Limits((ShardingType.COLUMN_WISE,), min_partition=8),
        "t03": Limits(ranks=(1, 2)),
        "t04": Limits((ShardingType.TABLE_COLUMN_WISE,), min_partition=4),
    }
    topology = Topology(4, local_world_size=2)
    problem = build(works(6), topology, limits)
    instance = problem.instance
    ways = [{problem.options[o].way for o in np.flatnonzero(instance.there[t]).tolist()} for t in range(6)]
    assert ways[0] == {Way.WHOLE}
    assert ways[1] == {Way.ROWS, Way.COPIES}
    assert ways[2] == {Way.COLUMNS}
    assert Way.COPIES not in ways[3]
    assert instance.allowed is not None
    assert instance.allowed[3].tolist() == [False, True, True, False]
    assert instance.allowed[4].tolist() == [True, True, False, False]  # pieces of one host
    assert instance.allowed[5].all()


def ways_of(limits: Limits, topology: Topology, rows: int = 1000, dim: int = 64) -> list[str]:
    work = TableWork("t", rows, dim, optimizer=PLAIN)
    problem = build([work], topology, {"t": limits})
    return [str(problem.options[o]) for o in np.flatnonzero(problem.instance.there[0]).tolist()]


def test_a_table_limited_to_some_ranks_has_no_more_pieces_than_these_where_there_is_a_choice() -> None:
    assert ways_of(Limits(ranks=(1, 2), min_partition=8), Topology(5)) == ["whole", "columns x 2", "rows x 2"]
    three = ways_of(Limits(ranks=(1, 2, 4), min_partition=16), Topology(5))
    assert three == ["whole", "columns x 2", "rows x 2", "rows x 3"]
    columns = Limits((ShardingType.COLUMN_WISE,), min_partition=16, ranks=(3,))
    assert ways_of(columns, Topology(5)) == ["columns x 2", "columns x 4"]  # two blocks or four on one rank
    every = ways_of(Limits(ranks=(0, 1, 2)), Topology(3))
    assert every == ["whole", "copies over 3 ranks", "columns x 2", "rows x 2", "rows over 3 ranks"]
    assert ways_of(Limits(ranks=(0,)), Topology(1)) == ["whole"]


def test_a_host_counts_its_ranks_only_once_and_hosts_as_one_place() -> None:
    """Rows over a host are one piece, which two ranks allow as well as one."""
    found = ways_of(Limits(ranks=(2, 3)), Topology(4, local_world_size=2))
    assert found == ["whole", "columns x 2", "rows x 2", "rows over 2 ranks", "grid x 2 over 2 ranks"]


def test_column_tiles_are_no_narrower_than_32_columns_or_what_limits_say() -> None:
    topology = Topology(4)
    assert "columns x 2" in ways_of(Limits(), topology, dim=64)
    assert "columns x 2" not in ways_of(Limits(), topology, dim=62)
    assert "columns x 2" in ways_of(Limits(min_partition=31), topology, dim=62)
    assert "columns x 4" not in ways_of(Limits(min_partition=16), topology, dim=60)
    assert "columns x 4" in ways_of(Limits(min_partition=15), topology, dim=60)
    assert "columns x 3" not in ways_of(Limits(min_partition=1), topology, dim=64)


def test_rows_that_do_not_fill_their_ranges_are_not_cut_unless_asked_for_over_all_ranks() -> None:
    """5 rows make three ranges of the four: 2, 2, 1."""
    assert [way for way in ways_of(Limits(), Topology(4), rows=5) if "rows" in way] == [
        "rows x 2",
        "rows x 3",
    ]
    asked = ways_of(Limits((ShardingType.ROW_WISE,)), Topology(4), rows=5)
    assert asked == ["rows x 2", "rows x 3", "rows over 4 ranks"]
    two = Topology(4, local_world_size=2)
    assert "grid x 2 over 2 ranks" not in ways_of(Limits(), two, rows=1)
    assert "grid x 2 over 2 ranks" in ways_of(Limits((ShardingType.GRID_SHARD,)), two, rows=1)


@pytest.mark.parametrize("full", [False, True])
def test_tables_that_must_lie_within_a_host_are_shared_out_among_hosts(full: bool) -> None:
    """By their traffic, and by their bytes where memory is short."""
    sizes = [600_000, 1_000, 300_000, 2_000, 200_000, 100_000]
    tables = [TableWork(f"t{i}", rows, 64, optimizer=PLAIN, reads=[Reads(512, 1)]) for i, rows in enumerate(sizes)]
    limits = {table.name: Limits((ShardingType.TABLE_COLUMN_WISE,)) for table in tables}
    topology = Topology(4, hbm_cap=90 * 2**20 if full else 2**40, local_world_size=2)
    for order in (tables, tables[::-1]):
        instance = build(order, topology, limits).instance
        assert instance.allowed is not None
        first = {name for name, ranks in zip(instance.names, instance.allowed.tolist(), strict=True) if ranks[0]}
        # Where memory is short, 600,000 rows on one host, and 300,000 and 200,000 on the other.
        assert first == ({"t0", "t1", "t5"} if full else {"t0", "t2", "t4"})


def test_the_bound_lets_tables_that_must_lie_within_a_host_lie_on_any() -> None:
    tables = [TableWork(f"t{i}", 1_000, 64, optimizer=PLAIN) for i in range(4)]
    limits = {table.name: Limits((ShardingType.TABLE_COLUMN_WISE,)) for table in tables[:2]}
    problem = build(tables, Topology(4, local_world_size=2), limits)
    assert problem.instance.allowed is not None
    assert problem.lower.allowed is None
    one = build(tables, Topology(4), limits)
    assert one.instance.allowed is None
    assert one.lower is one.instance


def test_of_rows_over_a_host_the_bound_knows_how_many_ranks_that_host_has() -> None:
    topology = Topology(6, hosts=[[0, 1], [2, 3, 4, 5]])
    table = TableWork("t", 1_000_000, 64, optimizer=PLAIN, reads=[Reads(512, 1)], sums_in_hosts=False)
    problem = build([table], topology)
    rows = problem.stages.index("rows")
    for host, ranks in enumerate((2, 4)):
        o = [str(option) for option in problem.options].index(f"rows over {ranks} ranks")
        tiling = problem.sharding(0, o, (host,)).tiling
        assert tiling is not None
        lower = evaluate(problem.lower, np.array([o]), [(host,)]).stage[rows] / 1e12
        owner = price([tiling], problem.model).stages["rows"][topology.ranks_of(host)[0]]
        assert lower == pytest.approx(owner, rel=1e-3)


def uneven_rows(reads: Reads) -> tuple[Problem, int, Solution, Tiling]:
    """One table in row ranges on 8 ranks: half of it, and seven parts of a fourteenth."""
    problem = build([TableWork("t", 1_000_000, 64, optimizer=PLAIN, reads=[reads])], Topology(8))
    o = [str(option) for option in problem.options].index("rows over 8 ranks")
    shares = np.array([SHARE // 2, *[SHARE // 14] * 6])
    shares = np.append(shares, SHARE - shares.sum())
    tiling = problem.sharding(0, o, (), shares).tiling
    assert tiling is not None
    return problem, o, evaluate(problem.instance, np.array([o]), [()], {0: shares}), tiling


def test_parts_of_an_uneven_split_pay_for_themselves_however_few_rows_they_have() -> None:
    problem, o, found, tiling = uneven_rows(Reads(512, 1))
    own, ids = found.load[:, 0] / 1e12, price([tiling], problem.model).stages["ids"]
    assert own - own.min() == pytest.approx(ids - ids.min(), rel=0.01, abs=2e-9)
    # One large part, and seven alike: all of them pay for being one.
    assert problem.instance.fixed[0, o, 0] == problem.model.speeds.part * 8 * 1e12
    # Each bag has one id here: what a range sends goes with its rows.
    assert problem.instance.fixed[0, o, 1:].max() < 1e-3 * problem.instance.cost[0, o, 1:].max()


def test_bags_of_many_ids_are_in_any_range_however_few_rows_it_has() -> None:
    problem, _, found, tiling = uneven_rows(Reads(512, 50))
    rows = problem.stages.index("rows")
    sent = price([tiling], problem.model).stages["rows"]
    # 97 % of the bags have an id in a fourteenth of the rows, 100 % in the half.
    assert found.load[:, rows].max() / 1e12 == pytest.approx(sent.max(), rel=0.05)
    assert found.load[:, rows].min() > 0.9 * found.load[:, rows].max()


def test_pins_are_base_loads_and_the_rest_is_planned() -> None:
    topology, tables = Topology(4, "cpu"), works(6)
    whole = build(tables, topology)
    option, places, tilings = drawn(whole, topology, (Way.WHOLE,))
    pins = {w.name: t for w, t in zip(tables[:3], tilings[:3], strict=True)}
    rest = build(tables, topology, pinned=pins)
    assert rest.instance.names == tuple(w.name for w in tables[3:])
    columns = [whole.options.index(option) for option in rest.options]
    assert np.array_equal(rest.instance.width, whole.instance.width[3:, columns])
    here = [rest.options.index(whole.options[o]) for o in option[3:]]
    both = evaluate(rest.instance, np.array(here), places[3:])
    alone = evaluate(whole.instance, option, places)
    assert both.memory == pytest.approx(alone.memory, rel=1e-4)
    assert both.cost == pytest.approx(alone.cost, rel=0.02)
    assert "exchange" not in rest.charges  # the pinned tables pay for it


def test_where_all_is_pinned_nothing_is_left_to_choose() -> None:
    topology, tables = Topology(2, "cpu"), works(3)
    _, _, tilings = drawn(build(tables, topology), topology, None)
    problem = build(tables, topology, pinned={w.name: t for w, t in zip(tables, tilings, strict=True)})
    assert problem.instance.tables == 0
    solution = evaluate(problem.instance, np.zeros(0, np.int64), [])
    assert solution.cost / 1e12 == pytest.approx(price(tilings, Model(Workload(tables), topology)).seconds)


def test_reserved_memory_and_caps_are_kept_in_their_tier() -> None:
    reserved = np.array([[100, 7]] * 2)
    problem = build(works(2), Topology(2, hbm_cap=1 << 30, ddr_cap=1 << 31), reserved=reserved)
    assert problem.instance.cap.tolist() == [[1 << 30, 1 << 31]] * 2
    assert (problem.instance.base_memory[:, 1] == 7).all()
    assert (problem.instance.base_memory[:, 0] > 100).all()
    cpu = build(works(2), Topology(2, "cpu")).instance
    assert (cpu.memory[:, :, 0] == 0).all()
    assert (cpu.memory[cpu.there][:, 1] > 0).all()


def test_ordered_ids_get_uneven_rows() -> None:
    """Equal numbers of ids where memory has room; else no range has more than twice its part of the rows."""
    table = TableWork("t", 100_000, 16, optimizer=specs.SGD(0.1), reads=[Reads(512, 4)],
                      skew=Skew(100_000, 1.1, ordered=True))  # fmt: skip
    even = dataclasses.replace(table, name="even", skew=Skew(100_000, 1.1))
    for cap, longest in ((128 << 30, 100_000), (24 << 20, 50_001)):
        problem = build([table, even], Topology(4, "cpu", ddr_cap=cap))
        o = [str(option) for option in problem.options].index("rows over 4 ranks")
        assert problem.instance.divisible[:, o].tolist() == [False, True]
        tiling = problem.sharding(0, o, ()).tiling
        assert tiling is not None
        sizes = [tile.r1 - tile.r0 for tile in tiling.tiles()]
        assert sizes == sorted(sizes)
        assert sizes[0] < 10_000
        assert sizes[-1] <= longest
        reads = [float(problem.model.workload.share(0, tile.r0, tile.r1)) for tile in tiling.tiles()]
        assert max(reads) < (0.27 if longest == 100_000 else 0.42)
        assert (sizes[-1] > 50_001) == (longest == 100_000)
    shares = np.array([SHARE // 2, SHARE // 4, SHARE // 8, SHARE // 8])
    uneven = problem.sharding(1, o, (), shares).tiling
    assert uneven is not None
    assert [t.r1 - t.r0 for t in uneven.tiles()] == [50_000, 25_000, 12_500, 12_500]


def test_cuts_of_some_tables_in_frequency_order_are_those_of_all_of_them() -> None:
    works = [TableWork(f"t{i}", 1000 + i, 16, skew=Skew(500 + i, 0.6 + i / 4, ordered=True)) for i in range(4)]
    model, which = Model(Workload(works), Topology(8, "cpu")), np.array([0, 1, 3, 4])
    ranges = RangesByFrequency(model, np.arange(4))
    for some in (np.array([1, 3]), np.arange(4), np.array([2])):
        alone = RangesByFrequency(model, some)
        assert ranges.cuts(some, 4, 0.0, which).tolist() == alone.cuts(some, 4, 0.0, which).tolist()


@pytest.mark.parametrize("head", [0.0, 0.05])
def test_cuts_in_frequency_order_do_not_depend_on_blocks_of_tables(
    monkeypatch: pytest.MonkeyPatch, head: float
) -> None:
    works = [TableWork(f"t{i}", 1000 + i, 16, skew=Skew(500 + i, 0.6 + i / 4, ordered=True)) for i in range(7)]
    model, some, which = Model(Workload(works), Topology(8, "cpu")), np.array([0, 1, 4, 6]), np.array([0, 1, 3, 4])
    whole = RangesByFrequency(model, np.arange(7)).cuts(some, 4, head, which)
    monkeypatch.setattr("tilerec.planner.cost.cuts.BLOCK", 2)
    assert RangesByFrequency(model, np.arange(7)).cuts(some, 4, head, which).tolist() == whole.tolist()


@pytest.mark.parametrize("head", [0.0, 0.2, 0.7])
@pytest.mark.parametrize("distinct", [300, 1000])
def test_shares_at_the_edges_of_buckets_are_those_of_rows(distinct: int, head: float) -> None:
    """A head may end behind the last id that occurs."""
    skew = Skew(distinct, 1.1, ordered=True)
    model = Model(Workload([TableWork("t", 1000, 16, skew=skew, reads=[Reads(50)])]), Topology(8, "cpu"))
    laws, first, line = model.workload.laws, np.array([int(1000 * head)]), np.array([0])
    rows = np.append(np.clip(laws.edges - 1.0, first, max(distinct, int(first[0]))), 1000.0)[None]
    reads, seen = laws.reads_at_edges(line, first), model.seen_by_feature.at_edges(line, first)
    assert reads.tolist() == laws.reads(line[:, None], rows).tolist()
    assert seen.tolist() == model.seen_by_feature.between(line[:, None], 0, rows).tolist()


@pytest.mark.parametrize("pieces", [2, 5, 31])
def test_row_cuts_share_what_travels(pieces: int) -> None:
    """Distinct ids where repeated ones travel once; every id else. No range is longer than memory allows."""
    works = [
        TableWork("once", 5000, 8, skew=Skew(5000, 1.0, ordered=True), reads=[Reads(3000)]),
        TableWork("each", 5000, 8, skew=Skew(5000, 1.0, ordered=True), reads=[Reads(3000, 6)]),
        TableWork("few", 40, 8, skew=Skew(9, 1.0, ordered=True), reads=[Reads(10)]),
        TableWork("none", 4000, 8, skew=Skew(30, 1.0, ordered=True), reads=[]),
    ]
    model = Model(Workload(works), Topology(pieces, "cpu"))
    seen = model.seen_by_feature
    for longest in (1e9, 2.0, 1.5):
        model.__dict__["longest_range"] = longest
        cuts = row_cuts(model, np.arange(4), pieces)
        rows = np.diff(cuts, axis=1)
        assert np.all(rows >= 1)
        assert cuts[:, 0].tolist() == [0] * 4
        assert cuts[:, -1].tolist() == [5000, 5000, 40, 4000]
        assert np.all(rows <= np.maximum(longest * np.array([[5000], [5000], [40], [4000]]) / pieces + 1, 1))
        once = seen.between(0, cuts[0, :-1], cuts[0, 1:]) / seen.whole[0]
        reads = model.workload.share(1, cuts[1, :-1], cuts[1, 1:])
        if longest > pieces:
            # A row is not cut: the most frequent id has a ninth of all.
            assert once.max() < 1.06 / pieces + 1 / seen.whole[0]
            assert reads.max() < max(1.05 / pieces + 0.01, 0.12)
        elif pieces > 2:
            # The last ranges are as long as may be, and those before have equal reads.
            assert rows[1, -1] == pytest.approx(longest * 5000 / pieces, abs=2)
            assert reads[-1] < reads[0]
            assert reads[0] == pytest.approx(reads[1], rel=0.1) or pieces > 5
    for rows_of in range(1, 40):
        assert int(even_pieces(rows_of, 7)) == len(ceil_chunks(rows_of, 7)) - 1
    assert sizes_of_shares(10, np.array([SHARE // 3, SHARE - SHARE // 3])) == [3, 7]


def test_one_rank_has_one_option() -> None:
    assert [str(o) for o in enumerate_options(Topology(1, "cpu"), [64])] == ["whole"]
    problem = build(works(3), Topology(1, "cpu"))
    solution = evaluate(problem.instance, np.zeros(3, np.int64), [(0,)] * 3)
    assert solution.cost > 0


def test_hosts_of_different_sizes_have_options_of_their_own() -> None:
    topology = Topology(5, hosts=[[0, 1, 2], [3, 4]])
    problem = build([TableWork("t", 1000, 64)], topology)
    assert {"rows over 3 ranks", "rows over 2 ranks", "rows over 5 ranks"} <= {str(o) for o in problem.options}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"limits": {"nobody": Limits()}}, r"limits name \['nobody'\]"),
        (
            {"limits": {"t00": Limits((ShardingType.GRID_SHARD,), min_partition=100)}},
            "Table 't00': nothing that",
        ),
        ({"reserved": np.zeros((3, 2), np.int64)}, "reserved has shape"),
    ],
)
def test_what_cannot_be_is_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(works(2), Topology(4, local_world_size=2), **kwargs)


def test_numbers_do_not_depend_on_the_order_of_tables() -> None:
    tables = works(8)
    forward, backward = build(tables, Topology(4)), build(tables[::-1], Topology(4))
    assert np.array_equal(forward.instance.cost, backward.instance.cost[::-1])
    assert np.array_equal(forward.instance.memory, backward.instance.memory[::-1])


def test_a_charge_is_what_some_choices_pay_and_others_do_not() -> None:
    """Whole tables exchange in any case, and need nothing else; copies and ranges of rows are a choice."""
    whole = Limits((ShardingType.TABLE_WISE,))
    assert build(works(1), Topology(3), {"t00": whole}).charges == ()
    choice = Limits((ShardingType.TABLE_WISE, ShardingType.ROW_WISE))
    assert build(works(1), Topology(3), {"t00": choice}).charges == ("partly filled",)


def pooled(count: int, seed: int) -> list[TableWork]:
    """Tables of bags of many ids."""
    draw = random.Random(seed)
    return [
        TableWork(f"t{i:02d}", 24 * int(10 ** draw.uniform(2, 4)), draw.choice([32, 64, 128]), optimizer=PLAIN,
                  reads=[Reads(512, draw.choice([2, 5, 20, 60]))])
        for i in range(count)
    ]  # fmt: skip


def test_a_host_that_adds_up_its_rows_waits_for_those_of_others() -> None:
    """One host holds tables whole, and the other has sums: it sends little, and receives all that the first sends."""
    topology = Topology(8, local_world_size=4)
    heavy = [dataclasses.replace(table, name=f"heavy {table.name}", reads=[Reads(4096, 2)]) for table in pooled(4, 0)]
    problem = build([*heavy, *pooled(4, 1)], topology)
    rows = [(option.way, option.width) for option in problem.options].index((Way.ROWS, 4))
    whole = [str(option) for option in problem.options].index("whole")
    option = np.array([whole] * 4 + [rows] * 4)
    places: list[tuple[int, ...]] = [*((rank,) for rank in range(4)), *([(1,)] * 4)]
    tilings: Any = [problem.sharding(t, int(o), places[t]).tiling for t, o in enumerate(option)]
    priced = price(tilings, problem.model)
    instance = problem.instance
    assert instance.phase.tolist() == [0, 1, 2, 3, 4, 2, 3]
    found = evaluate(instance, option, places)
    assert np.all(found.load[4:, 5] > found.load[4:, 2])
    alone = dataclasses.replace(instance, home=instance.home * (instance.phase == np.arange(7)))
    assert evaluate(alone, option, places).cost <= found.cost <= priced.seconds * 1e12


@pytest.mark.parametrize("local", [2, *(pytest.param(n, marks=NIGHTLY) for n in (4, 8))])
def test_with_sums_inside_hosts_a_search_finds_what_its_plan_costs(local: int) -> None:
    topology = Topology(8 * local, local_world_size=local)
    for seed in range(2):
        problem = build(pooled(24, seed), topology)
        found = solve(problem.instance)
        even = evaluate(problem.instance, found.option, found.places)
        tilings: Any = [problem.sharding(t, int(o), found.places[t]).tiling for t, o in enumerate(found.option)]
        priced = price(tilings, apart(problem, found.option)).seconds
        assert np.any(problem.instance.width[np.arange(24), found.option] == local)
        assert even.cost / 1e12 == pytest.approx(priced, rel=5e-3)
        assert even.cost / 1e12 <= priced * (1 + ROUGH)


@pytest.mark.parametrize(
    "dear", ["network_in", "link_out", *(pytest.param(d, marks=NIGHTLY) for d in ("network_out", "link_in"))]
)
def test_with_sums_inside_two_hosts_no_arrangement_is_below_the_bound(dear: str) -> None:
    topology = Topology(4, local_world_size=2, inter_host_bw=gigabytes_per_second(20))
    speeds = default_speeds(topology)
    for factor in (1.0, 20.0):
        dearer = dataclasses.replace(speeds, **{dear: factor * getattr(speeds, dear)})
        measured = dataclasses.replace(topology, speeds=dearer)
        split = Limits((ShardingType.TABLE_WISE, ShardingType.TABLE_ROW_WISE))
        for seed in range(3):
            tables = pooled(3, seed)
            problem = build(tables, measured, {table.name: split for table in tables})
            assert problem.instance.twins
            least = np.inf
            for option, places, seconds in every_arrangement(problem, measured):
                assert evaluate(problem.lower, option, places).cost / 1e12 <= seconds * (1 + ROUGH)
                least = min(least, seconds)
            assert lower_bound(problem.lower, int(least * 2e12)) / 1e12 <= least * (1 + ROUGH)


@pytest.mark.parametrize("cached", [False, True])
def test_options_that_no_table_in_frequency_order_may_use_are_those_of_the_other_tables(cached: bool) -> None:
    tables = works(4, optimizer=specs.SGD(0.1))
    first = dataclasses.replace(tables[0], skew=Skew(100, 1.0, ordered=True))
    behind = {table.name: Limits(cached=cached) for table in tables[1:]}
    limits = {first.name: Limits((ShardingType.TABLE_WISE,)), **behind}
    problem, others = build([first, *tables[1:]], Topology(4), limits), build(tables[1:], Topology(4), behind)
    assert problem.options == others.options
    assert problem.instance.there[0].sum() == 1
    assert np.array_equal(problem.instance.there[1:], others.instance.there)


@pytest.mark.parametrize("ordered", [False, True])
def test_the_times_that_a_bound_takes_from_estimates_are_those_that_it_would_have(
    monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    topology, tables = Topology(8, "cuda", local_world_size=4), works(8, optimizer=specs.RowWiseAdagrad(0.1))
    if ordered:
        tables = [
            dataclasses.replace(table, skew=Skew(table.rows // 2, 1.05, ordered=i % 3 > 0))
            for i, table in enumerate(tables)
        ]
    taken = build(tables, topology, min_partition=8)
    assert taken.lower is not taken.instance  # places of column blocks tell what their row sums cost
    monkeypatch.setattr(OptionAmounts, "as_in_bound", lambda amounts, option: False)
    anew = build(tables, topology, min_partition=8)
    for field in dataclasses.fields(Instance):
        first, second = getattr(taken.lower, field.name), getattr(anew.lower, field.name)
        assert np.array_equal(first, second), field.name
