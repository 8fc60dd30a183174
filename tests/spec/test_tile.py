"""Tilings: canonical covers, what they refuse, and that they stay fast with many ranks and rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import ConfigError
from tilerec.spec.tile import ColumnBlock, Rectangle, Tile, Tiling, ceil_chunks, rectangles


@st.composite
def covers(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int, int, tuple[int, ...]]]]:
    """A small table cut again and again, with one to three owners per piece."""
    rows, dim = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    pieces = [(0, rows, 0, dim)]
    for _ in range(draw(st.integers(0, 7))):
        r0, r1, c0, c1 = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        if draw(st.booleans()):
            cut = draw(st.integers(r0, r1))
            pieces += [(r0, cut, c0, c1), (cut, r1, c0, c1)]
        elif c1 - c0 > 1:
            cut = draw(st.integers(c0 + 1, c1 - 1))
            pieces += [(r0, r1, c0, cut), (r0, r1, cut, c1)]
        else:
            pieces.append((r0, r1, c0, c1))
    owners = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
    return rows, dim, [(*piece, tuple(draw(owners))) for piece in draw(st.permutations(pieces))]


def cells_of(rows: int, dim: int, tiles: object) -> np.ndarray:
    """Per cell, its owners as bits; asserts that no cell is given twice."""
    held = np.zeros((rows, dim), dtype=np.int64)
    for r0, r1, c0, c1, owners in tiles:  # type: ignore[attr-defined]
        assert not held[r0:r1, c0:c1].any()
        held[r0:r1, c0:c1] = sum(1 << rank for rank in owners)
    return held


@given(covers())
def test_any_cover_becomes_a_tiling_that_places_every_cell_alike(cover: tuple) -> None:  # type: ignore[type-arg]
    rows, dim, tiles = cover
    tiling = Tiling.of("t", rows, dim, tiles)
    want = cells_of(rows, dim, tiles)
    assert want.all()
    assert (cells_of(rows, dim, tiling.tiles()) == want).all()
    assert (cells_of(rows, dim, rectangles(tiling)) == want).all()


@given(covers())
def test_the_tiling_of_a_cover_is_canonical(cover: tuple) -> None:  # type: ignore[type-arg]
    rows, dim, tiles = cover
    tiling = Tiling.of("t", rows, dim, tiles)
    assert Tiling.of("t", rows, dim, tiling.tiles()) == tiling
    assert Tiling.of("t", rows, dim, rectangles(tiling)) == tiling
    single_cells = [
        (r, r + 1, c, c + 1, [rank for rank in range(4) if held >> rank & 1])
        for (r, c), held in np.ndenumerate(cells_of(rows, dim, tiles))
    ]
    assert Tiling.of("t", rows, dim, single_cells) == tiling


@given(covers())
def test_what_ranks_hold_are_the_rectangles_they_own_in_their_order(cover: tuple) -> None:  # type: ignore[type-arg]
    rows, dim, tiles = cover
    tiling = Tiling.of("t", rows, dim, tiles)
    merged = rectangles(tiling)
    assert list(merged) == sorted(merged, key=lambda t: (t.c0, t.r0))
    for rank in range(4):
        assert tiling.tiles_of(rank) == tuple(t.rectangle for t in merged if rank in t.owners)
    assert tiling.ranks() == tuple(sorted({rank for tile in tiles for rank in tile[4] if tile[0] < tile[1]}))
    assert tiling.replicated == any(len(t.owners) > 1 for t in merged)


@given(covers())
def test_json_keeps_a_tiling(cover: tuple) -> None:  # type: ignore[type-arg]
    rows, dim, tiles = cover
    tiling = Tiling.of("t", rows, dim, tiles)
    assert Tiling.from_json("t", rows, dim, json.loads(json.dumps(tiling.to_json()))) == tiling


def test_a_cover_is_refined_at_its_column_cuts_and_neighbours_merge() -> None:
    tiling = Tiling.of("t", 4, 8, [(0, 4, 0, 2, 0), (0, 4, 2, 4, 0), (0, 3, 4, 8, 1), (3, 4, 4, 8, 0)])
    assert tiling.blocks == (ColumnBlock(0, 4, (0, 4), ((0,),)), ColumnBlock(4, 8, (0, 3, 4), ((1,), (0,))))
    assert tiling.tiles_of(0) == (Rectangle(0, 4, 0, 4), Rectangle(3, 4, 4, 8))


def test_blocks_of_other_cuts_leave_a_rank_whole_rectangles() -> None:
    tiling = Tiling.of("t", 20, 8, [(0, 10, 0, 8, 0), (10, 20, 0, 4, 1), (10, 20, 4, 8, 2)])
    assert len(tiling.blocks) == 2
    assert tiling.tiles_of(0) == (Rectangle(0, 10, 0, 8),)
    assert rectangles(tiling)[0] == Tile(0, 10, 0, 8, (0,))


def test_neighbours_with_other_replicas_stay_apart_on_a_rank_that_holds_both() -> None:
    tiling = Tiling.of("t", 10, 4, [(0, 5, 0, 4, (0, 1)), (5, 10, 0, 4, (0, 2))])
    assert tiling.tiles_of(0) == (Rectangle(0, 5, 0, 4), Rectangle(5, 10, 0, 4))
    columns = Tiling.of("t", 10, 4, [(0, 10, 0, 2, (0, 1)), (0, 10, 2, 4, (0, 2))])
    assert columns.tiles_of(0) == (Rectangle(0, 10, 0, 2), Rectangle(0, 10, 2, 4))


def test_rows_are_chunked_as_torch_chunks_them() -> None:
    assert ceil_chunks(7, 4) == (0, 2, 4, 6, 7)
    assert ceil_chunks(5, 4) == (0, 2, 4, 5)
    assert ceil_chunks(1, 4) == (0, 1)
    assert ceil_chunks(8, 4) == (0, 2, 4, 6, 8)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ([(0, 100, 0, 256, 0)], r"got no tile with rows \[0, 100\) x columns \[256, 512\)"),
        ([], r"got no tile with rows \[0, 100\) x columns \[0, 512\)"),
        ([(10, 100, 0, 512, 0)], r"got no tile with rows \[0, 10\) x columns \[0, 512\)"),
        (
            [(0, 40, 0, 512, 0), (60, 100, 0, 512, 1)],
            r"got no tile with rows \[40, 60\) x columns \[0, 512\)",
        ),
        (
            [(0, 60, 0, 512, 0), (40, 100, 0, 512, 1)],
            r"rows \[40, 60\) x columns \[0, 512\) in two tiles, .* on rank 0 and .* on rank 1",
        ),
        ([(0, 100, 0, 512, 0), (0, 100, 0, 512, 1)], "in two tiles"),
        ([(0, 101, 0, 512, 0)], "; expected a part of the table's 100 rows x 512 columns"),
        ([(-1, 100, 0, 512, 0)], "; expected a part of the table"),
        ([(60, 40, 0, 512, 0)], "; expected a part of the table"),
        (
            [(0, 100, 0, 512, 0), (0, 100, 7, 7, 0)],
            r"columns \[7, 7\); expected at least one column. Leave it out",
        ),
        ([(0, 100, 0, 512, ())], r"got owners \[\] of .*; expected one or more ranks"),
        ([(0, 100, 0, 512, (1, 1))], r"got owners \[1, 1\]"),
        ([(0, 100, 0, 512, -1)], r"got owners \[-1\]"),
        ([(0, 100, 0, 512)], "; expected a tile"),
        ([(0, 100, 0, "x", 1)], "; expected a tile"),
        ([(0, 100, 0, 512, "01")], "; expected a tile"),
        ([7], "got 7; expected a tile"),
    ],
)
def test_what_is_no_cover_is_refused_with_the_rectangle(tiles: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match="Table 'item': .*" + message):
        Tiling.of("item", 100, 512, tiles)  # type: ignore[arg-type]


def test_a_table_without_cells_has_no_tiling() -> None:
    with pytest.raises(ConfigError, match="Table 't': got 0 x 4 cells"):
        Tiling.of("t", 0, 4, [])


def test_empty_row_ranges_are_dropped() -> None:
    tiling = Tiling.of("t", 5, 4, [(0, 5, 0, 4, 0), (5, 5, 0, 4, 1)])
    assert tiling.ranks() == (0,)
    assert tiling.tiles_of(1) == ()


def test_a_rank_outside_the_world_is_named_with_its_tile() -> None:
    tiling = Tiling.of("t", 10, 4, [(0, 5, 0, 4, 0), (5, 10, 0, 4, 3)])
    tiling.check("t", 4)
    with pytest.raises(ConfigError, match=r"Table 't': got rows \[5, 10\) .* on rank 3; expected ranks 0 to 1"):
        tiling.check("t", 2)


def test_ten_billion_rows_are_numbers_like_any_others() -> None:
    rows = 10**10
    tiling = Tiling.of("t", rows, 64, [(r, r + rows // 4, 0, 64, r * 4 // rows) for r in range(0, rows, rows // 4)])
    assert tiling.tiles_of(3) == (Rectangle(7_500_000_000, rows, 0, 64),)
    assert tiling.cells == 64 * rows


def test_covers_of_many_tiles_are_checked_by_a_sweep() -> None:
    """50,000 tiles in no order: comparing each with each would take an hour."""
    world = 50_000
    places = [(i * 617) % world for i in range(world)]
    tiling = Tiling.of("t", world, 8, [(r, r + 1, 0, 8, r) for r in places])
    assert len(tiling.blocks[0].owners) == world
    with pytest.raises(ConfigError, match=r"got no tile with rows \[617, 618\) x columns \[0, 8\)"):
        Tiling.of("t", world, 8, [(r, r + 1, 0, 8, r) for r in places if r != 617])


def test_a_row_wise_tiling_over_many_ranks_is_written_in_one_word() -> None:
    cuts = ceil_chunks(10**6, 1000)
    tiling = Tiling.of("t", 10**6, 8, [(cuts[i], cuts[i + 1], 0, 8, i) for i in range(1000)])
    assert tiling.to_json() == [{"ranks": "0-999"}]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([{"rows": [0, 10]}], r"\[0\]: got an object without \"ranks\""),
        ([{"ranks": "0", "colums": [0, 4]}], 'got unknown "colums"'),
        (["0-3"], r"\[0\]: got \"0-3\"; expected an object"),
        ([{"ranks": "0-1", "rows": [0, 10]}], "2 owners for 1 row ranges"),
        ([{"ranks": "0", "columns": 4}], r"\[0\]\.columns: got 4; expected a list"),
        ([{"ranks": "0", "rows": 10}], r"\[0\]\.rows: got 10; expected a list"),
        ([{"ranks": "0", "rows": ["a", "b"]}], r"\[0\]\.rows\[0\]: got \"a\"; expected a whole number"),
        ([{"ranks": ""}], "0 owners"),
        ([{"ranks": "0", "columns": [0, 2]}], r"got no tile with rows \[0, 10\) x columns \[2, 4\)"),
    ],
)
def test_json_that_is_no_tiling_is_refused(blocks: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match="Table 't': .*" + message):
        Tiling.from_json("t", 10, 4, blocks)


def test_names_of_rectangles_and_tiles_are_what_messages_say() -> None:
    tile = Tile(0, 5, 2, 4, (1, 2, 3))
    assert str(tile) == "rows [0, 5) x columns [2, 4) on ranks 1-3"
    assert (tile.rectangle.rows, tile.rectangle.width, tile.rectangle.cells) == (5, 2, 10)
