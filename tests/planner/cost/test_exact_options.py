"""The numbers of an instance against `price`, term by term: any wrong rate, amount or charge is a difference.

Rates are such that every term of a step counts, none the double of another, and rows can be cut into even ranges. So
both agree to rounding, and not to the 0.02 % that plans of ordinary tables allow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tilerec.planner.cost.model import Model
from tilerec.planner.cost.options import Problem, build
from tilerec.planner.cost.price import Price, price
from tilerec.planner.cost.ways import Limits, Option, Way
from tilerec.planner.cost.workload import Reads, Skew, TableWork, Workload
from tilerec.planner.search.instance import SHARE, Solution, evaluate
from tilerec.spec import optimizer as specs
from tilerec.spec.plan import Wire
from tilerec.spec.speeds import Speeds
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

UNIT = 1e-7
RATES = {
    "lookup_far": 7.0, "lookup_near": 3.0, "lookup_bag": 5.0, "update_far": 11.0, "update_near": 2.0,
    "update_id": 13.0, "update_bag": 17.0, "place": 19.0, "pick": 23.0,
}  # fmt: skip
SINGLE = {
    "route": 29.0, "copy": 0.25, "link_in": 0.0, "link_out": 0.0, "network_in": 0.0, "network_out": 0.0,
    "call": 4.7e3, "call_peer": 5.3e3, "step": 5.9e4, "part": 6.1e3, "replica": 6.7e4, "row_sum": 7.1e5,
}  # fmt: skip
LINKS = {"link_in": 2.0, "link_out": 2.0, "network_in": 3.0, "network_out": 3.0}
ROWS = 50_400
DEPTH = 2
SGD = specs.SGD(0.1)
TABLES = [
    TableWork("bags", ROWS, 64, optimizer=SGD, reads=[Reads(300, 1)]),
    TableWork("mixed", ROWS, 64, optimizer=specs.Adam(0.1), reads=[Reads(300, 4, True), Reads(200, 0.5)]),
    TableWork("formats", ROWS, 64, DataType.BF16, optimizer=specs.RowWiseAdagrad(0.1), reads=[Reads(300, 5)],
              wire=Wire("bf16", "int8")),
    TableWork("bare", ROWS, 64, reads=[Reads(300, 3)]),
    TableWork("small", 840, 64, optimizer=specs.Adagrad(0.1), reads=[Reads(300, 9), Reads(100, 2)]),
    TableWork("tiny", 60, 64, optimizer=SGD, reads=[Reads(100, 2)], collection="other"),
]  # fmt: skip
WIDE = [dataclasses.replace(TABLES[1], data_type=DataType.FP64), *TABLES[2:]]


def speeds(duplex: bool, links: bool = False) -> Speeds:
    single = SINGLE | (LINKS if links else {})
    return Speeds(
        **{name: (rate * UNIT, 2 * rate * UNIT) for name, rate in RATES.items()},  # type: ignore[arg-type]
        **{name: rate * UNIT for name, rate in single.items()},  # type: ignore[arg-type]
        widths=(8, 256), cache=100_000, duplex=duplex,
    )  # fmt: skip


def measured(topology: Topology, duplex: bool, links: bool = False) -> Topology:
    return dataclasses.replace(topology, speeds=speeds(duplex, links))


def options_of(tables: Sequence[TableWork], topology: Topology) -> list[Option]:
    problem = build(tables, topology)
    return [option for o, option in enumerate(problem.options) if problem.instance.there[:, o].all()]


def arranged(
    tables: Sequence[TableWork], topology: Topology, option: Option, places: Sequence[tuple[int, ...]]
) -> tuple[Problem, Solution, Price]:
    """All tables cut one way: as the instance has it, and the price of the tilings."""
    problem = build(tables, topology, pipeline_depth=DEPTH)
    o = problem.options.index(option)
    solution = evaluate(problem.instance, np.full(len(tables), o), places)
    tilings: Any = [problem.sharding(t, o, where).tiling for t, where in enumerate(places)]
    if option.way is Way.ROWS and option.width == 1:
        # Ranges on single ranks are not added up inside hosts.
        tables = [dataclasses.replace(table, sums_in_hosts=False) for table in tables]
    return problem, solution, price(tilings, Model(Workload(tables), topology, DEPTH))


def first_places(option: Option, topology: Topology) -> tuple[int, ...]:
    everywhere = option.width == topology.world_size > 1
    return () if everywhere else tuple(range(option.pieces))


def same(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= 1e-7 * wanted


ONE_HOST = [Topology(1, "cpu"), Topology(3, "cpu"), Topology(4)]
ALIKE = [*ONE_HOST, Topology(6, local_world_size=3), Topology(4, "cpu", local_world_size=2)]


@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("topology", ALIKE, ids=str)
def test_work_and_collectives_of_every_option_are_those_of_its_tilings(topology: Topology, duplex: bool) -> None:
    """But for links: the slowest rank holds a piece of each table, and is no home of as much."""
    topology = measured(topology, duplex)
    for tables in (TABLES, WIDE):
        for option in options_of(tables, topology):
            places = [first_places(option, topology)] * len(tables)
            _, solution, priced = arranged(tables, topology, option, places)
            assert same(solution.cost / 1e12, priced.seconds), option


@pytest.mark.parametrize("topology", [Topology(1, "cpu"), Topology(3, "cpu")], ids=str)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_one_table_pays_for_the_collectives_that_it_needs(table: TableWork, topology: Topology) -> None:
    topology = measured(topology, True)
    for option in options_of([table], topology):
        _, solution, priced = arranged([table], topology, option, [first_places(option, topology)])
        assert same(solution.cost / 1e12, priced.seconds), option


def balanced(topology: Topology, option: Option) -> list[tuple[int, ...]]:
    """Every choice of ranks, or hosts, once: no rank holds more than another."""
    if option.width == topology.world_size:
        return [()]
    units = topology.world_size if option.width == 1 else topology.host_count
    return list(itertools.combinations(range(units), option.pieces))


@pytest.mark.parametrize(
    ("topology", "duplex"),
    [
        (Topology(3, "cpu"), False),
        (Topology(3), True),
        (Topology(6, local_world_size=3), True),
        (Topology(4, "cpu", local_world_size=2), False),
        (Topology(4, local_world_size=2, nic="host"), True),
        (Topology(4, local_world_size=2, nic="device"), False),
        (Topology(3, local_world_size=1, nic="device"), False),
    ],
    ids=lambda value: f"{value}",
)
def test_exchanges_of_every_option_are_those_of_its_tilings_where_ranks_hold_as_much(
    topology: Topology, duplex: bool
) -> None:
    """Column blocks lie on every pair of ranks here, so they share a host as often as on average."""
    topology = measured(topology, duplex, links=True)
    for option in options_of(TABLES, topology):
        every = balanced(topology, option)
        tables = [dataclasses.replace(table, name=f"{table.name} {i}") for table in TABLES for i in range(len(every))]
        _, solution, priced = arranged(tables, topology, option, every * len(TABLES))
        assert same(solution.cost / 1e12, priced.seconds), option


@pytest.mark.parametrize("topology", [Topology(3), Topology(4, local_world_size=2)], ids=str)
def test_cached_tables_cost_what_cached_tilings_cost(topology: Topology) -> None:
    topology = measured(topology, True)
    tables = [dataclasses.replace(table, load_factor=0.1) for table in TABLES if table.optimizer is not None]
    limits = {table.name: Limits(on_device=False, cached=True) for table in tables}
    problem = build(tables, topology, limits, pipeline_depth=DEPTH)
    for o, option in enumerate(problem.options):
        assert option.cached
        places = first_places(option, topology)
        solution = evaluate(problem.instance, np.full(len(tables), o), [places] * len(tables))
        tilings: Any = [problem.sharding(t, o, places).tiling for t in range(len(tables))]
        alone = option.way is Way.ROWS and option.width == 1
        held = [dataclasses.replace(table, cached=True, sums_in_hosts=False if alone else None) for table in tables]
        priced = price(tilings, Model(Workload(held), topology, DEPTH))
        assert same(solution.cost / 1e12, priced.seconds), option
        if option.width == topology.world_size or option.way is Way.WHOLE:
            assert solution.memory == pytest.approx(priced.memory, rel=1e-5, abs=40)


@pytest.mark.parametrize("topology", ALIKE, ids=str)
def test_memory_of_even_arrangements_is_that_of_their_tilings_on_every_rank(topology: Topology) -> None:
    """What homes get beyond a table's output too, also on ranks that hold no piece."""
    topology = measured(topology, True)
    for tables in (TABLES, WIDE):
        for option in options_of(tables, topology):
            places = [first_places(option, topology)] * len(tables)
            _, solution, priced = arranged(tables, topology, option, places)
            assert solution.memory == pytest.approx(priced.memory, rel=1e-6, abs=len(tables) + 1), option


@pytest.mark.parametrize("rows", [ROWS + 1, 841, 62])
def test_where_the_bound_has_an_instance_of_its_own_memory_is_that_of_the_longest_range(rows: int) -> None:
    """Then no plan of the search is over a cap by its price because of ranges that are not alike."""
    topology = measured(Topology(6, local_world_size=3), True)
    table = dataclasses.replace(TABLES[2], rows=rows)
    problem = build([table], topology, pipeline_depth=DEPTH)
    assert problem.lower is not problem.instance
    for o, option in enumerate(problem.options):
        if not problem.instance.there[0, o]:
            continue
        places = [first_places(option, topology)]
        _, solution, priced = arranged([table], topology, option, places)
        lower = evaluate(problem.lower, np.array([o]), places)
        assert np.all(solution.memory >= priced.memory - 2), option
        assert np.all(lower.memory <= priced.memory + 2), option
        if option.way is Way.ROWS and rows % (option.pieces * option.width):
            assert lower.memory[0, 0] < solution.memory[0, 0], option


@pytest.mark.parametrize("nic", ["device", "host"])
def test_copies_on_hosts_of_several_sizes_take_what_the_slowest_rank_takes(nic: Any) -> None:
    """With a card of its own that is one rank's link and network; of shared cards each is a stage."""
    topology = measured(Topology(4, hosts=[[0], [1, 2, 3]], nic=nic), True, links=True)
    copies = next(option for option in options_of(TABLES[:1], topology) if option.way is Way.COPIES)
    for table in TABLES[:3]:
        problem, solution, priced = arranged([table], topology, copies, [()])
        update = [s for s, name in enumerate(problem.stages) if name.startswith("update")]
        found = int(solution.stage[update].sum()) / 1e12
        wanted = sum(float(priced.stages[problem.stages[s]].max()) for s in update)
        assert found == pytest.approx(wanted, rel=1e-6)


def zeroed(table: TableWork, option: Option) -> bool:
    """Whether its output begins as zeros: where one table's does, so do those of all, but not in an instance."""
    return option.way in (Way.ROWS, Way.GRID) or any(reads.ids_per_bag < 1 for reads in table.reads)


@pytest.mark.parametrize("topology", [Topology(3, "cpu"), Topology(4, local_world_size=2)], ids=str)
@pytest.mark.parametrize("pin", range(len(TABLES)))
def test_what_pinned_tables_pay_for_is_not_paid_again(pin: int, topology: Topology) -> None:
    """One table is given as it lies, in each way; another is planned, in each way: together the price of both."""
    topology = measured(topology, True)
    pinned, free = TABLES[pin], TABLES[(pin + 1) % len(TABLES)]
    every = build([pinned, free], topology)
    for given, fixed in enumerate(every.options):
        for o, option in enumerate(every.options):
            there = every.instance.there
            if (
                option.pieces > 1
                or not (there[0, given] and there[1, o])
                or zeroed(pinned, fixed) != zeroed(free, option)
            ):
                continue
            tiling: Any = every.sharding(0, given, first_places(fixed, topology)).tiling
            places = first_places(option, topology)
            other: Any = every.sharding(1, o, places).tiling
            apart = [
                dataclasses.replace(table, sums_in_hosts=False) if cut.way is Way.ROWS and cut.width == 1 else table
                for table, cut in ((pinned, fixed), (free, option))
            ]
            problem = build(apart, topology, pinned={pinned.name: tiling}, pipeline_depth=DEPTH)
            found = evaluate(problem.instance, np.array([problem.options.index(option)]), [places])
            priced = price([tiling, other], Model(Workload(apart), topology, DEPTH))
            assert same(found.cost / 1e12, priced.seconds), (fixed, option)


UNLIKE = Topology(5, hosts=[[0, 1], [2, 3, 4]])


@pytest.mark.parametrize("kind", ["link", "network"])
@pytest.mark.parametrize("ways", [(Way.WHOLE, 1), (Way.COLUMNS, 2), (Way.ROWS, 2)], ids=lambda way: way[0].value)
def test_on_unlike_hosts_the_bound_is_the_least_and_a_whole_table_costs_what_its_host_takes(
    kind: str, ways: tuple[Way, int]
) -> None:
    """Links inside hosts or between them; a rank of the smaller host has fewer homes near, and more far away."""
    every = speeds(True, links=True)
    free = {f"{other}_{way}": 0.0 for other in ("link", "network") if other != kind for way in ("in", "out")}
    topology = dataclasses.replace(UNLIKE, speeds=dataclasses.replace(every, **free))  # type: ignore[arg-type]
    table = TABLES[1]
    problem = build([table], topology, pipeline_depth=DEPTH)
    o = [(option.way, option.pieces) for option in problem.options].index(ways)
    model = Model(Workload([dataclasses.replace(table, sums_in_hosts=False)]), topology, DEPTH)
    prices = {}
    for places in itertools.combinations(range(5), ways[1]):
        tiling: Any = problem.sharding(0, o, places).tiling
        prices[places] = price([tiling], model).seconds
        assert evaluate(problem.lower, np.array([o]), [places]).cost / 1e12 <= prices[places] * (1 + 2e-5)
    first = tuple(range(ways[1]))
    assert evaluate(problem.lower, np.array([o]), [first]).cost / 1e12 == pytest.approx(min(prices.values()), rel=3e-5)
    if ways[0] is Way.WHOLE:
        # A factor of a rank goes for all that an exchange takes there, what each part of it costs among it.
        for places, seconds in prices.items():
            searched = evaluate(problem.instance, np.array([o]), [places]).cost / 1e12
            if seconds == max(prices.values()):
                assert searched == pytest.approx(seconds, rel=3e-5)
            else:  # homes on the smaller host would wait, were it not one piece alone
                assert 0.97 * seconds < searched < (1.03 if kind == "link" else 1.2) * seconds


@pytest.mark.parametrize("hosts", [[[0], [1, 2, 3]], [[0, 1], [2, 3, 4]], [[0], [1], [2, 3]]], ids=str)
@pytest.mark.parametrize(("kind", "nic"), [("network", "host"), ("network", "device"), ("link", "host")])
def test_on_unlike_hosts_whole_tables_cost_what_both_sides_of_their_exchanges_take(
    hosts: list[list[int]], kind: str, nic: Any
) -> None:
    """Directions add up. A card that a host's ranks share takes known bytes wherever tables lie.

    Where each rank has its own links, homes take what they do if each rank holds as much.
    """
    ranks = max(rank for host in hosts for rank in host) + 1
    every = speeds(False, links=True)
    free = {f"{other}_{way}": 0.0 for other in ("link", "network") if other != kind for way in ("in", "out")}
    topology = Topology(ranks, hosts=hosts, nic=nic, speeds=dataclasses.replace(every, **free))  # type: ignore[arg-type]
    known = nic == "host" and kind == "network"
    places = itertools.product(range(ranks), repeat=2) if known else [tuple(range(ranks))]
    for where in places:
        tables = [dataclasses.replace(TABLES[2], name=f"t{i}") for i in range(len(where))]
        option = Option(Way.WHOLE, 1, 1)
        _, solution, priced = arranged(tables, topology, option, [(rank,) for rank in where])
        assert solution.cost / 1e12 == pytest.approx(priced.seconds, rel=5e-4), where


@pytest.mark.parametrize(
    "topology",
    [UNLIKE, Topology(5, "cpu", hosts=[[0, 1], [2, 3, 4]]), Topology(4, local_world_size=2, nic="host")],
    ids=lambda topology: f"{topology}, {topology.nic}",
)
def test_bounds_of_sums_and_of_ordered_ids_are_close_below_the_price(topology: Topology) -> None:
    """Two fifths of the price where hosts are unlike, a quarter where traffic is not spread as rows are."""
    duplex = topology.compute_device == "cuda"
    topology = measured(topology, duplex, links=True)
    for table in (TABLES[1], dataclasses.replace(TABLES[1], skew=Skew(ROWS, 1.05, ordered=True))):
        problem = build([table], topology, pipeline_depth=DEPTH)
        for o, option in enumerate(problem.options):
            if not problem.instance.there[0, o]:
                continue
            places = first_places(option, topology)
            if 1 < option.width < topology.world_size:
                hosts = [h for h in range(topology.host_count) if len(topology.ranks_of(h)) == option.width]
                places = tuple(hosts[: option.pieces])
            tiling: Any = problem.sharding(0, o, places).tiling
            alone = option.way is Way.ROWS and option.width == 1
            held = dataclasses.replace(table, sums_in_hosts=False if alone else None)
            priced = price([tiling], Model(Workload([held]), topology, DEPTH))
            lower, searched = (
                evaluate(instance, np.array([o]), [places]) for instance in (problem.lower, problem.instance)
            )
            least = 0.42 if table.skew is None else 0.27
            assert least * priced.seconds < lower.cost / 1e12 <= priced.seconds * (1 + 2e-5), option
            assert 0.65 * priced.seconds < searched.cost / 1e12 < 3 * priced.seconds, option
            uneven = table.skew is not None and option.way in (Way.ROWS, Way.GRID)  # a bound knows the sum
            pairs = [x.sum(0) if uneven else x for x in (lower.memory, priced.memory)]
            assert np.all(pairs[0] <= pairs[1] * (1 + 1e-6) + 2 * topology.world_size), option
            if table.skew is None:
                assert lower.memory.sum() > 0.9 * priced.memory.sum(), option


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("topology", [Topology(4, "cpu"), Topology(4, local_world_size=2)], ids=str)
def test_a_range_that_is_a_little_smaller_saves_what_its_rows_save(topology: Topology, direction: str) -> None:
    """The second of two ranges has 63 / 64 of an even one's rows. Present bags do not go with rows: each has 4 ids.

    Rates of owners alone, and one direction of links and cards: a home gets rows and sends ids.
    """
    none = dict.fromkeys(("route", "copy", "step"), 0.0) | dict.fromkeys(("place", "pick"), (0.0, 0.0))
    other = "out" if direction == "in" else "in"
    none |= {f"link_{other}": 0.0, f"network_{other}": 0.0}
    topology = dataclasses.replace(
        topology,
        speeds=dataclasses.replace(speeds(True, links=True), **none),  # type: ignore[arg-type]
    )
    table = dataclasses.replace(TABLES[1], rows=128 * 400)
    problem = build([table], topology, pipeline_depth=DEPTH)
    o = [str(option) for option in problem.options].index("rows x 2")
    assert problem.instance.divisible[0].tolist() == [option.way is Way.ROWS for option in problem.options]
    small = SHARE // 2 - SHARE // 128
    shares = np.array([SHARE - small, small])
    tiling: Any = problem.sharding(0, o, (0, 2), shares).tiling
    assert [tile.r1 - tile.r0 for tile in tiling.tiles()] == [65 * 400, 63 * 400]
    found = evaluate(problem.instance, np.array([o]), [(0, 2)], {0: shares})
    held = dataclasses.replace(table, sums_in_hosts=False)
    priced = price([tiling], Model(Workload([held]), topology, DEPTH))
    exact = 1e-5
    stages = {"lookup": exact, "update": exact}
    stages |= {"gradients": exact, "ids": 2e-3} if direction == "in" else {"rows": exact}  # lengths go with rows
    for stage, rough in stages.items():
        load = found.load[:, problem.stages.index(stage)] / 1e12
        own = priced.stages[stage]
        assert load[2] - load[1] == pytest.approx(own[2] - own[1], rel=rough), stage


@pytest.mark.parametrize("table", [TABLES[1], TABLES[2]], ids=lambda table: table.name)
def test_on_one_host_ordered_ids_leave_the_bounds_of_what_is_not_cut_by_rows_at_the_price(
    table: TableWork,
) -> None:
    """Sums over rows of column blocks stay in the host, in the bound too."""
    topology = measured(Topology(4, "cpu"), True, links=True)
    ordered = dataclasses.replace(table, skew=Skew(ROWS, 1.05, ordered=True))
    problem = build([ordered], topology, pipeline_depth=DEPTH)
    assert problem.lower is not problem.instance
    for o, option in enumerate(problem.options):
        if option.way is not Way.ROWS:
            assert np.array_equal(problem.lower.cost[:, o], problem.instance.cost[:, o]), option
            assert np.array_equal(problem.lower.home[:, o], problem.instance.home[:, o]), option
            assert np.array_equal(problem.lower.memory[:, o], problem.instance.memory[:, o]), option


@pytest.mark.parametrize("topology", [Topology(4, "cpu"), Topology(4, local_world_size=2)], ids=str)
def test_the_search_takes_homes_of_ordered_ids_as_those_of_even_ranges(topology: Topology) -> None:
    """And the owner of each range as the one with most traffic, in the bound as the one with least."""
    topology = measured(topology, False, links=True)
    skewed, ordered = (
        build([dataclasses.replace(TABLES[1], skew=Skew(ROWS, 1.05, ordered=ordered))], topology)
        for ordered in (False, True)
    )
    several = len(skewed.options)  # the options with heads are further ones
    assert ordered.options[:several] == skewed.options
    assert all(option.head for option in ordered.options[several:])
    assert np.array_equal(ordered.instance.home[:, :several], skewed.instance.home)
    lookup = ordered.stages.index("lookup")
    for o, option in enumerate(skewed.options):
        least, even, most = (
            int(instance.cost[0, o, lookup]) for instance in (ordered.lower, skewed.instance, ordered.instance)
        )
        assert least < even < most if option.way in (Way.ROWS, Way.GRID) else least == even == most, option
