"""What a layout reads off tilings and hosts: who is sent what, who adds up for whom. No memory is touched."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.parity.harness import TILINGS, WORLDS, grid, row_wise, table_row_wise
from tilerec.sharding.layout import ExchangeLayout, Merge, SlotRead, TableLayout, reader, rectangles
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

TWO_BY_EIGHT = Topology(16, "cpu", local_world_size=8)
HOSTS = TWO_BY_EIGHT.host_ranks
ROWS, DIM = 1_600_000_000, 128


def layout(tiling: Tiling, rank: int, topology: Topology = TWO_BY_EIGHT, fan_in: float = 2.0) -> ExchangeLayout:
    return ExchangeLayout([TableLayout("t", tiling, fan_in)], [SlotRead(0, "f")], topology, rank)


# ---------------------------------------------------------------------------------------------------- 2 hosts x 8 ranks


def test_row_wise_gives_each_of_16_ranks_an_equal_share_of_16e8_rows() -> None:
    tiling = row_wise(ROWS, DIM, HOSTS, 1)
    for rank in range(16):
        (tile,) = (tile for _, tile in (layout(tiling, rank).rectangles[r] for r in layout(tiling, rank).held))
        assert tile[:4] == (rank * 100_000_000, (rank + 1) * 100_000_000, 0, DIM)


def test_table_row_wise_lies_on_one_host() -> None:
    tiling = table_row_wise(ROWS, DIM, HOSTS, 1)
    for rank in range(16):
        sizes = [
            tile.r1 - tile.r0 for _, tile in (layout(tiling, rank).rectangles[r] for r in layout(tiling, rank).held)
        ]
        assert sizes == ([] if rank < 8 else [200_000_000])


def test_table_row_wise_adds_up_inside_its_host_and_only_for_homes_of_others() -> None:
    tiling = table_row_wise(ROWS, DIM, HOSTS, 1)
    for home in range(16):
        merges = layout(tiling, home).own_merges
        if home >= 8:
            assert merges == []  # the rows are on its own host
        else:
            # The proxy is the owner with the home's local rank: the work is spread.
            assert merges == [Merge(8 + home, tuple(range(8)))]


def test_row_wise_over_hosts_is_grouped_by_host() -> None:
    tiling = row_wise(ROWS, DIM, HOSTS, 1)
    for home in range(16):
        (merge,) = layout(tiling, home).own_merges
        other = 8 if home < 8 else 0
        assert merge == Merge(other + home % 8, tuple(range(other, other + 8)))


def test_grid_adds_up_the_columns_that_the_other_host_holds() -> None:
    tiling = grid(ROWS, DIM, HOSTS, 0)
    own = layout(tiling, 3)
    assert {unit.c0 for part in own.parts for unit in part.units} == {0, tiling.blocks[1].c0}
    (merge,) = own.own_merges
    assert merge.proxy == 11
    assert {own.parts[p].owners[0] for p in merge.parts} == set(range(8, 16))


def test_features_of_one_id_are_never_added_up() -> None:
    for tiling in (
        row_wise(ROWS, DIM, HOSTS, 1),
        table_row_wise(ROWS, DIM, HOSTS, 1),
        grid(ROWS, DIM, HOSTS, 0),
    ):
        own = layout(tiling, 3, fan_in=1.0)
        assert own.own_merges == []
        assert not own.hierarchical


def test_one_host_has_nothing_to_add_up() -> None:
    one = Topology(16, "cpu")
    assert not layout(row_wise(ROWS, DIM, one.host_ranks, 1), 0, one).hierarchical


def test_a_proxy_of_a_small_host_serves_several_homes() -> None:
    topology = Topology(5, "cpu", hosts=[[0, 1, 2], [3, 4]])
    tiling = Tiling.of("t", 10, 4, [(0, 5, 0, 4, 3), (5, 10, 0, 4, 4)])
    assert [layout(tiling, home, topology).own_merges[0].proxy for home in range(3)] == [3, 4, 3]


def test_homes_that_are_each_alone_on_a_host_share_the_proxies_of_another() -> None:
    topology = Topology(6, "cpu", hosts=[[0], [1], [2], [3], [4, 5]])
    tiling = Tiling.of("t", 10, 4, [(0, 5, 0, 4, 4), (5, 10, 0, 4, 5)])
    assert [layout(tiling, home, topology).own_merges[0].proxy for home in range(4)] == [4, 5, 4, 5]


# ---------------------------------------------------------------------------------------------------- parts and routes


def test_column_tiles_of_the_same_rows_and_owner_share_one_part() -> None:
    """Columns [0, 2) and [4, 6) on rank 0 read the same ids: one part, two units."""
    topology = Topology(2, "cpu")
    tiling = Tiling.of("t", 10, 6, [(0, 10, 0, 2, 0), (0, 10, 2, 4, 1), (0, 10, 4, 6, 0)])
    own = layout(tiling, 0, topology)
    assert [(part.owners, [(u.c0, u.width) for u in part.units]) for part in own.parts] == [
        ((0,), [(0, 2), (4, 2)]),
        ((1,), [(2, 2)]),
    ]
    # One set of row cuts per set of owners, each sent once.
    assert [len(parts) for parts in own.sent] == [1, 1]


def test_blocks_with_other_row_cuts_skip_the_ranges_that_are_fed_already() -> None:
    topology = Topology(2, "cpu")
    tiles = [(0, 4, 0, 2, 0), (4, 10, 0, 2, 1), (0, 4, 2, 4, 0), (4, 7, 2, 4, 0), (7, 10, 2, 4, 1)]
    tiling = Tiling.of("t", 10, 4, tiles)
    own = layout(tiling, 0, topology)
    assert [route.cuts for route in own.routes] == [(0, 4, 10), (0, 7, 10)]
    tiling = Tiling.of(
        "t", 10, 4, [(0, 4, 0, 2, 0), (4, 10, 0, 2, 1), (0, 4, 2, 4, 0), (4, 7, 2, 4, 1), (7, 10, 2, 4, 0)]
    )
    own = layout(tiling, 0, topology)
    assert [route.parts for route in own.routes] == [
        (0, 1),
        (-1, 2, 3),
    ]  # rows [0, 4) of rank 0 are fed by part 0


def test_every_feature_of_a_table_has_parts_of_its_own() -> None:
    topology = Topology(2, "cpu")
    tiling = Tiling.of("t", 10, 4, [(0, 5, 0, 4, 0), (5, 10, 0, 4, 1)])
    own = ExchangeLayout([TableLayout("t", tiling)], [SlotRead(0, "a"), SlotRead(0, "b")], topology, 0)
    assert [(part.slot, part.owners) for part in own.parts] == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]
    assert len(own.rectangles) == 2


# ---------------------------------------------------------------------------------------------------- readers


@pytest.mark.parametrize(
    ("owners", "home", "expected"),
    [
        ((5,), 0, 5),
        ((0, 9), 9, 9),  # the home itself
        ((1, 2, 9), 4, 1),  # an owner on its host, by local rank: 4 % 2
        ((1, 2, 9), 5, 2),
        ((8, 9, 10), 0, 8),  # none on its host: by turns
        ((8, 9, 10), 1, 9),
        ((8, 9, 10), 3, 8),
    ],
)
def test_a_home_reads_from_itself_then_its_host_then_by_turns(
    owners: tuple[int, ...], home: int, expected: int
) -> None:
    assert reader(owners, home, TWO_BY_EIGHT) == expected


def test_replicas_are_read_where_they_are_near_and_never_added_up() -> None:
    tiling = Tiling.of("t", 100, 4, [(0, 50, 0, 4, (0, 8)), (50, 100, 0, 4, (1, 9))])
    for home in range(16):
        own = layout(tiling, home)
        assert own.own_merges == []
        expected = {0, 1} if home < 8 else {8, 9}
        assert {owner for owner, parts in enumerate(own.sent) if parts} == expected


# ---------------------------------------------------------------------------------------------------- all ranks agree


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", TILINGS)
def test_what_is_sent_is_what_is_expected(name: str, world: str) -> None:
    """Between every pair of ranks and for every stage, both sides list the same segments in the same order."""
    hosts = WORLDS[world]
    size = sum(map(len, hosts))
    topology = Topology(size, "cpu", hosts=hosts)
    sizes = ((10, 4), (7, 3), (17, 20))
    tables = [TableLayout(f"t{i}", TILINGS[name](*shape, hosts, i)) for i, shape in enumerate(sizes)]
    slots = [SlotRead(0, "a"), SlotRead(0, "b"), SlotRead(1, "c"), SlotRead(2, "a"), SlotRead(2, "d")]
    layouts = [ExchangeLayout(tables, slots, topology, rank) for rank in range(size)]
    for own in layouts:
        assert own.parts == layouts[0].parts
        assert own.routes == layouts[0].routes
    for home in layouts:
        for owner in layouts:
            assert home.sent[owner.rank] == owner.received[home.rank]
            direct = [(s.slot, s.width) for s in owner.direct[home.rank]]
            merged = [
                (owner.parts[merge.parts[0]].slot, unit.width)
                for merge in owner.merging[home.rank]
                for unit in owner.parts[merge.parts[0]].units
            ]
            assert [(s.slot, s.width) for s in home.home[owner.rank]] == direct + merged
            inner = [s.width for s in owner.inner[home.rank]]
            assert [s.width for s in home.siblings[owner.rank]] == inner
    for home in layouts:
        for slot, read in enumerate(slots):
            tiling = tables[read.table].tiling
            for row in range(tiling.rows):
                columns = sorted(
                    (unit.c0, unit.c0 + unit.width)
                    for part in home.parts
                    if part.slot == slot and part.r0 <= row < part.r1
                    for unit in part.units
                )
                assert columns[0][0] == 0
                assert columns[-1][1] == tiling.dim
                assert all(a[1] == b[0] for a, b in pairwise(columns)), "every element of a row comes back once"


@pytest.mark.parametrize("name", TILINGS)
def test_rectangles_cover_the_table_once(name: str) -> None:
    for hosts in WORLDS.values():
        tiling = TILINGS[name](17, 20, hosts, 2)
        assert sum((t.r1 - t.r0) * (t.c1 - t.c0) for t in rectangles(tiling)) == 17 * 20
