"""Strategies on sizes that no machine holds: who gets which rows and columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import ConfigError
from tilerec.sharding.strategies import (
    STRATEGIES,
    column_pieces,
    column_wise,
    complete,
    data_parallel,
    grid,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tilerec.spec.plan import ParameterSharding, ShardingType
from tilerec.spec.tile import Rectangle, Tiling
from tilerec.spec.topology import Topology

TWO_HOSTS = Topology(16, local_world_size=8)
FOUR = Topology(4, local_world_size=2)
BIG = 1_600_000_000


def test_row_wise_over_two_hosts_uses_all_ranks() -> None:
    tiling = row_wise("t", BIG, 128, None, TWO_HOSTS)
    for rank in range(16):
        assert tiling.tiles_of(rank) == (Rectangle(rank * 10**8, (rank + 1) * 10**8, 0, 128),)


def test_table_row_wise_stays_on_one_host() -> None:
    tiling = table_row_wise("t", BIG, 128, TWO_HOSTS.ranks_of(1), TWO_HOSTS)
    assert tiling.ranks() == tuple(range(8, 16))
    assert all(tiling.tiles_of(rank)[0].rows == 2 * 10**8 for rank in range(8, 16))


def test_grid_spreads_columns_over_hosts_and_rows_over_their_ranks() -> None:
    tiling = grid("t", BIG, 128, None, TWO_HOSTS)
    for rank in range(16):
        c0, local = 64 * (rank // 8), rank % 8
        want = Rectangle(local * 2 * 10**8, (local + 1) * 2 * 10**8, c0, c0 + 64)
        assert tiling.tiles_of(rank) == (want,)


def test_grid_covers_the_whole_table_however_wide() -> None:
    tiling = grid("t", 10, 512, range(4), FOUR)
    assert [tiling.tiles_of(rank) for rank in range(4)] == [
        (Rectangle(0, 5, 0, 256),),
        (Rectangle(5, 10, 0, 256),),
        (Rectangle(0, 5, 256, 512),),
        (Rectangle(5, 10, 256, 512),),
    ]


def test_grid_comes_back_to_a_host_for_a_further_block() -> None:
    tiling = grid("t", 10, 6, (0, 1, 2, 3, 0, 1), FOUR)
    assert tiling.tiles_of(0) == (Rectangle(0, 5, 0, 2), Rectangle(0, 5, 4, 6))
    assert tiling.tiles_of(3) == (Rectangle(5, 10, 2, 4),)
    assert grid("t", 10, 6, (0, 1, 0, 1), FOUR).tiles_of(1) == (Rectangle(5, 10, 0, 6),)
    on_single_ranks = grid("t", 10, 6, (0, 0), Topology(1))
    assert on_single_ranks.tiles_of(0) == (Rectangle(0, 10, 0, 6),)


def test_grid_on_uneven_hosts_cuts_each_block_by_its_hosts_ranks() -> None:
    tiling = grid("t", 10, 8, None, Topology(3, hosts=[[0, 2], [1]]))
    assert tiling.tiles_of(0) == (Rectangle(0, 5, 0, 4),)
    assert tiling.tiles_of(2) == (Rectangle(5, 10, 0, 4),)
    assert tiling.tiles_of(1) == (Rectangle(0, 10, 4, 8),)


def test_data_parallel_puts_a_copy_on_every_rank() -> None:
    tiling = data_parallel("t", 10, 4, None, FOUR)
    assert tiling.replicated
    assert all(tiling.tiles_of(rank) == (Rectangle(0, 10, 0, 4),) for rank in range(4))


def test_table_wise_is_one_tile() -> None:
    assert table_wise("t", 10, 4, [2], FOUR).tiles_of(2) == (Rectangle(0, 10, 0, 4),)
    assert table_wise("t", 10, 4, None, Topology(1)).ranks() == (0,)


@pytest.mark.parametrize(("rows", "sizes"), [(7, [2, 2, 2, 1]), (5, [2, 2, 1, 0]), (1, [1, 0, 0, 0])])
def test_rows_that_do_not_divide_are_chunked_from_the_front(rows: int, sizes: list[int]) -> None:
    tiling = row_wise("t", rows, 4, None, FOUR)
    assert [sum(r.rows for r in tiling.tiles_of(rank)) for rank in range(4)] == sizes


def test_row_sizes_may_be_given() -> None:
    tiling = row_wise("t", 7, 4, [3, 0, 1], FOUR, sizes=[5, 0, 2])
    assert tiling.tiles_of(3) == (Rectangle(0, 5, 0, 4),)
    assert tiling.tiles_of(0) == ()
    assert tiling.tiles_of(1) == (Rectangle(5, 7, 0, 4),)
    assert table_row_wise("t", 7, 4, [2, 3], FOUR, sizes=[6, 1]).tiles_of(3) == (Rectangle(6, 7, 0, 4),)


def test_columns_are_split_evenly_or_by_widths() -> None:
    assert column_wise("t", 10, 6, [2, 0], FOUR).tiles_of(0) == (Rectangle(0, 10, 3, 6),)
    given_widths = column_wise("t", 10, 257, [1, 3], FOUR, widths=[256, 1])
    assert given_widths.tiles_of(3) == (Rectangle(0, 10, 256, 257),)
    twice = column_wise("t", 10, 6, [0, 1, 0], FOUR)
    assert twice.tiles_of(0) == (Rectangle(0, 10, 0, 2), Rectangle(0, 10, 4, 6))
    assert table_column_wise("t", 10, 6, [2, 3], FOUR).ranks() == (2, 3)


def test_columns_without_ranks_go_to_as_many_as_divide_them() -> None:
    assert column_wise("t", 10, 64, None, Topology(3)).ranks() == (0, 1)
    assert column_wise("t", 10, 7, None, Topology(3)).ranks() == (0,)
    assert table_column_wise("t", 10, 9, None, Topology(4)).ranks() == (0,)
    assert grid("t", 10, 7, None, FOUR).ranks() == (0, 1)


def test_column_pieces_divide_and_keep_a_least_width() -> None:
    assert column_pieces(64, 6) == 4
    assert column_pieces(64, 64) == 16
    assert column_pieces(64, 64, 1) == 64
    assert column_pieces(128, 100, 33) == 2
    assert column_pieces(3, 8) == 1
    assert column_pieces(64, 0) == 1


def test_ten_billion_rows_are_cut_like_any_others() -> None:
    tiling = row_wise("t", 10**10, 64, None, Topology(1000, local_world_size=8))
    assert tiling.tiles_of(999) == (Rectangle(9_990_000_000, 10**10, 0, 64),)


def test_a_host_whose_ranks_are_not_successive_is_a_host_all_the_same() -> None:
    topology = Topology(4, hosts=[[0, 2], [1, 3]])
    tiling = table_row_wise("t", 10, 4, topology.ranks_of(1), topology)
    assert [tiling.tiles_of(rank) for rank in (1, 3)] == [(Rectangle(0, 5, 0, 4),), (Rectangle(5, 10, 0, 4),)]
    assert len(grid("t", 10, 8, topology.ranks_of(0) + topology.ranks_of(1), topology).blocks) == 2


@given(
    st.sampled_from([kind for kind in ShardingType if kind is not ShardingType.EXPLICIT]),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 3), (6, 2), (5, 1)]),
)
def test_every_strategy_covers_every_table(kind: ShardingType, rows: int, dim: int, world: tuple[int, int]) -> None:
    topology = Topology(world[0], local_world_size=world[1])
    ranks = None
    if kind is ShardingType.TABLE_WISE:
        ranks = [world[0] - 1]
    elif kind in (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE):
        ranks = topology.ranks_of(topology.host_count - 1)
        ranks = ranks[: column_pieces(dim, len(ranks))] if kind is ShardingType.TABLE_COLUMN_WISE else ranks
    tiling = STRATEGIES[kind]("t", rows, dim, ranks, topology)  # Tiling.of refuses holes and overlaps
    assert sum(t.rectangle.cells for t in tiling.tiles()) == rows * dim
    tiling.check("t", topology.world_size)


@pytest.mark.parametrize(
    ("kind", "ranks", "message"),
    [
        ("table_wise", None, "table_wise got ranks None; expected one rank"),
        ("table_wise", [0, 1], r"table_wise got ranks \[0, 1\]; expected one rank"),
        ("table_wise", [4], "ranks contain 4; the world has ranks 0 to 3"),
        ("row_wise", [], "ranks are empty"),
        ("row_wise", [0, 0], r"row_wise got ranks \[0, 0\]; name one or more from 0 up, each of them once"),
        ("data_parallel", [1, 1], r"data_parallel got ranks \[1, 1\]"),
        (
            "column_wise",
            [0, 1, 2],
            r"3 column tiles do not divide embedding_dim 64; use 1, 2, 4, 8, 16, 32 ranks",
        ),
        ("table_row_wise", None, "got no ranks and there are 2 hosts"),
        (
            "table_row_wise",
            [1, 2],
            r"got ranks 1-2 of hosts \[0, 1\]; expected ranks of one host .* or use row_wise",
        ),
        ("table_column_wise", [0, 3], "expected ranks of one host .* or use column_wise"),
        ("grid_shard", [0, 1, 2, 3, 0, 1], "grid_shard got 3 hosts, and 3 column tiles do not divide"),
        ("explicit", [0], "sharding_type is explicit and no tiling is given"),
    ],
)
def test_ranks_that_do_not_fit_a_type_are_refused(kind: str, ranks: list[int] | None, message: str) -> None:
    with pytest.raises(ConfigError, match="Table 'item': .*" + message):
        complete(ParameterSharding(kind, ranks=ranks), "item", 100, 64, FOUR)


def test_negative_ranks_are_refused() -> None:
    for strategy in (table_wise, row_wise, data_parallel, column_wise):
        with pytest.raises(ConfigError, match=r"Table 't': .*-1"):
            strategy("t", 4, 4, [-1], FOUR)


def test_sizes_that_do_not_sum_to_the_table_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"row_wise got sizes \[5, 1\] for 2 pieces of 7 rows"):
        row_wise("t", 7, 4, [0, 1], FOUR, sizes=[5, 1])
    with pytest.raises(ConfigError, match=r"got sizes \[8, -1\]"):
        row_wise("t", 7, 4, [0, 1], FOUR, sizes=[8, -1])
    with pytest.raises(ConfigError, match=r"got widths \[4, 0\] .* above 0"):
        column_wise("t", 7, 4, [0, 1], FOUR, widths=[4, 0])
    with pytest.raises(ConfigError, match=r"got widths \[4\] for 2 pieces"):
        grid("t", 7, 4, None, FOUR, widths=[4])


def test_complete_fills_in_a_tiling_and_keeps_the_rest() -> None:
    draft = ParameterSharding("row_wise", "dense", ranks=[3, 1], ids_per_bag=2.0)
    done = complete(draft, "t", 10, 4, FOUR)
    assert done.tiling == Tiling.of("t", 10, 4, [(0, 5, 0, 4, 3), (5, 10, 0, 4, 1)])
    assert (done.kind, done.kernel, done.ranks, done.ids_per_bag) == (draft.kind, draft.kernel, (3, 1), 2.0)
    assert complete(ParameterSharding("row_wise"), "t", 10, 4, FOUR).ranks == (0, 1, 2, 3)
    assert complete(done, "t", 10, 4, FOUR) is done


def test_a_bare_tiling_is_an_explicit_sharding() -> None:
    tiling = Tiling.of("t", 10, 4, [(0, 9, 0, 4, 3), (9, 10, 0, 4, (0, 1))])
    done = complete(tiling, "t", 10, 4, FOUR)
    assert done.kind is ShardingType.EXPLICIT
    assert done.tiling is tiling


def test_a_tiling_of_another_table_or_world_is_refused() -> None:
    tiling = Tiling.of("t", 10, 4, [(0, 10, 0, 4, 3)])
    with pytest.raises(ConfigError, match="its tiling is of 10 x 4 cells and the table has 11 x 4"):
        complete(tiling, "t", 11, 4, FOUR)
    with pytest.raises(ConfigError, match="on rank 3; expected ranks 0 to 1"):
        complete(tiling, "t", 10, 4, Topology(2))
