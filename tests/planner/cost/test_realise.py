"""From an option and its places to a sharding: type, ranks, tiles, and whether rows are added up inside hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilerec.planner.cost.model import Model
from tilerec.planner.cost.realise import sharding_of
from tilerec.planner.cost.ways import Option, Way
from tilerec.planner.cost.workload import Skew, TableWork, Workload
from tilerec.planner.search.instance import SHARE
from tilerec.spec.plan import Wire
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

ONE, TWO = Topology(4), Topology(4, local_world_size=2)
ROWS, COLUMNS = Option(Way.ROWS, 2, 1), Option(Way.COLUMNS, 2, 1)
Tile = tuple[int, int, int, int, tuple[int, ...]]


def made(
    option: Option, places: tuple[int, ...], topology: Topology, shares: list[int] | None = None, **table: Any
) -> tuple[str, tuple[int, ...], list[Tile], float | None]:
    """Type, ranks, tiles in their order, and the ids per bag that the plan states."""
    work = Workload([TableWork("other", 7, 3), TableWork("t", 12, 8, **table)])
    uneven = None if shares is None else np.array(shares)
    sharding = sharding_of(Model(work, topology), 1, option, places, uneven)
    assert sharding.tiling is not None
    assert (sharding.tiling.rows, sharding.tiling.dim) == (12, 8)
    tiles = [(t.r0, t.r1, t.c0, t.c1, t.owners) for t in sharding.tiling.tiles()]
    return sharding.kind.value, tuple(sharding.ranks or ()), tiles, sharding.ids_per_bag


def test_a_whole_table_is_one_tile_and_copies_are_one_on_every_rank() -> None:
    whole, copies = Option(Way.WHOLE, 1, 1), Option(Way.COPIES, 1, 4)
    assert made(whole, (2,), TWO) == ("table_wise", (2,), [(0, 12, 0, 8, (2,))], None)
    everyone = (0, 1, 2, 3)
    assert made(copies, (), TWO) == ("data_parallel", everyone, [(0, 12, 0, 8, everyone)], None)


@pytest.mark.parametrize(
    ("places", "topology", "kind"),
    [
        ((0, 1), ONE, "column_wise"),
        ((0, 1), TWO, "table_column_wise"),
        ((1, 2), TWO, "column_wise"),
        ((3, 2), TWO, "table_column_wise"),
    ],
)
def test_column_blocks_of_one_of_several_hosts_are_table_column_wise(
    places: tuple[int, ...], topology: Topology, kind: str
) -> None:
    first, second = sorted(places)
    blocks = [(0, 12, 0, 4, (first,)), (0, 12, 4, 8, (second,))]
    assert made(COLUMNS, places, topology) == (kind, (first, second), blocks, None)


def test_column_blocks_that_meet_on_a_rank_are_one_tile() -> None:
    kind, _, tiles, _ = made(COLUMNS, (1, 1), TWO)
    assert (kind, tiles) == ("column_wise", [(0, 12, 0, 8, (1,))])


@pytest.mark.parametrize(
    ("places", "topology", "kind", "ids_per_bag"),
    [
        ((0, 1), ONE, "row_wise", None),
        ((1, 0), TWO, "table_row_wise", 1.0),  # single ranges are not added up, though they share a host
        ((1, 2), TWO, "row_wise", 1.0),
    ],
)
def test_ranges_of_rows_lie_on_their_ranks(
    places: tuple[int, ...], topology: Topology, kind: str, ids_per_bag: float | None
) -> None:
    ranges = [(0, 6, 0, 8, (places[0],)), (6, 12, 0, 8, (places[1],))]
    assert made(ROWS, places, topology) == (kind, places, ranges, ids_per_bag)


def test_ranges_that_meet_on_a_rank_stay_ranges() -> None:
    """12 rows in five: 2, 2, 3, 2 and 3."""
    kind, _, tiles, _ = made(Option(Way.ROWS, 5, 1), (1, 1, 2, 1, 3), TWO)
    assert kind == "row_wise"
    rows = {rank: sum(r1 - r0 for r0, r1, *_, owners in tiles if owners == (rank,)) for rank in (1, 2, 3)}
    assert rows == {1: 6, 2: 3, 3: 3}
    assert made(ROWS, (1, 1), TWO)[0] == "row_wise"


def test_rows_over_a_host_or_all_ranks_are_added_up_inside_hosts() -> None:
    thirds = [(3 * i, 3 * i + 3, 0, 8, (i,)) for i in range(4)]
    assert made(Option(Way.ROWS, 1, 4), (), TWO) == ("row_wise", (0, 1, 2, 3), thirds, None)
    halves = [(0, 6, 0, 8, (2,)), (6, 12, 0, 8, (3,))]
    assert made(Option(Way.ROWS, 1, 2), (1,), TWO) == ("table_row_wise", (2, 3), halves, None)


def test_a_grid_of_a_table_in_frequency_order_has_short_ranges_of_frequent_rows() -> None:
    kind, ranks, tiles, _ = made(Option(Way.GRID, 2, 2), (0, 1), TWO, skew=Skew(12, 1.05, ordered=True))
    cut = tiles[0][1]
    assert (kind, ranks) == ("grid_shard", (0, 1, 2, 3))
    assert 0 < cut < 6
    assert tiles == [
        (0, cut, 0, 4, (0,)), (cut, 12, 0, 4, (1,)), (0, cut, 4, 8, (2,)), (cut, 12, 4, 8, (3,)),
    ]  # fmt: skip


def test_a_grid_has_a_block_for_each_host() -> None:
    kind, ranks, tiles, _ = made(Option(Way.GRID, 2, 2), (0, 1), TWO)
    assert (kind, ranks) == ("grid_shard", (0, 1, 2, 3))
    assert sorted(tiles) == [
        (0, 6, 0, 4, (0,)), (0, 6, 4, 8, (2,)), (6, 12, 0, 4, (1,)), (6, 12, 4, 8, (3,)),
    ]  # fmt: skip


def test_shares_of_rows_are_whole_rows_and_a_rank_without_any_takes_no_part() -> None:
    quarters = [SHARE // 4, SHARE - SHARE // 4]
    assert made(ROWS, (2, 0), ONE, quarters)[2] == [(0, 3, 0, 8, (2,)), (3, 12, 0, 8, (0,))]
    three = Option(Way.ROWS, 3, 1)
    tiny = [SHARE // 2, 1, SHARE - SHARE // 2 - 1]
    found = made(three, (0, 2, 1), TWO, tiny)
    halves = [(0, 6, 0, 8, (0,)), (6, 12, 0, 8, (1,))]
    assert found == ("table_row_wise", (0, 1), halves, 1.0)  # those that are left share a host
    assert made(three, (0, 1, 2), TWO, tiny)[0] == "row_wise"
    assert made(three, (0, 2, 1), ONE, tiny)[0] == "row_wise"
    assert made(ROWS, (1, 2), TWO, [0, SHARE])[::2] == ("row_wise", [(0, 12, 0, 8, (2,))])


def test_ordered_ids_have_small_ranges_first_unless_shares_are_given() -> None:
    tiles = made(ROWS, (0, 1), ONE, skew=Skew(12, 1.0, ordered=True))[2]
    # Zipf's law: the first two of twelve have (1 + 1/2) / 3.1 = 0.48 of the traffic, the first three 0.59.
    assert [r1 - r0 for r0, r1, *_ in tiles] == [2, 10]
    # Where repeated ids travel once, each of the twelve travels, whatever its share of 512 ids.
    once = made(ROWS, (0, 1), ONE, skew=Skew(12, 1.0, ordered=True), wire=Wire(distinct=True))[2]
    assert [r1 - r0 for r0, r1, *_ in once] == [6, 6]
    even = made(ROWS, (0, 1), ONE, skew=Skew(12, 1.0))[2]
    assert [r1 - r0 for r0, r1, *_ in even] == [6, 6]


def test_number_formats_stay_unsaid_where_they_are_plain() -> None:
    for wire, wanted in ((Wire(), None), (Wire("bf16", "int8"), Wire("bf16", "int8"))):
        work = Workload([TableWork("t", 12, 8, DataType.FP16, wire=wire)])
        sharding = sharding_of(Model(work, ONE), 0, Option(Way.WHOLE, 1, 1), (0,), None)
        assert sharding.wire == wanted
        assert sharding.data_type is DataType.FP16
