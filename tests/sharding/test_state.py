"""Logical tensors over tiles: whole on every rank, moved from any cover to any other."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilerec.sharding
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.sharding.layout import rectangles
from tilerec.sharding.state import Cover, LogicalTensor, Piece, load, shown
from tilerec.spec.tile import Tile, Tiling, ceil_chunks
from tilerec.testing.virtual import run_virtual_ranks

ROWS, DIM = 7, 6

TILINGS = {
    "everywhere": [(0, 7, 0, 6, (0, 1, 2))],
    "one rank": [(0, 7, 0, 6, 1)],
    "5 + 2 rows": [(0, 5, 0, 6, 0), (5, 7, 0, 6, 2)],
    "rows backwards": [(0, 3, 0, 6, 2), (3, 5, 0, 6, 1), (5, 7, 0, 6, 0)],
    "columns": [(0, 7, 0, 2, 0), (0, 7, 2, 4, 1), (0, 7, 4, 6, 2)],
    "two tiles on a rank": [(0, 7, 0, 2, 0), (0, 7, 2, 4, 1), (0, 7, 4, 6, 0)],
    "a replica of some": [(0, 3, 0, 6, (0, 1)), (3, 7, 0, 3, 1), (3, 7, 3, 6, (0, 2))],
}


def tiles_of(name: str) -> tuple[Tile, ...]:
    return rectangles(Tiling.of("t", ROWS, DIM, TILINGS[name]))


def part(whole: Tensor, tile: Tile) -> Tensor:
    """What a tile holds of a whole tensor: its cells, its rows, or the number."""
    if whole.dim() == 2:
        return whole[tile.r0 : tile.r1, tile.c0 : tile.c1].clone()
    return whole[tile.r0 : tile.r1].clone() if whole.dim() else whole.clone()


def logical(group: Group, tiles: Sequence[Tile], whole: Tensor) -> LogicalTensor:
    """A tensor of 2, 1 or 0 dimensions, held beside every tile."""
    if whole.dim() == 2:
        cover = Cover.of_cells((ROWS, DIM), tiles)
    else:
        cover = Cover.of_rows(ROWS, tiles) if whole.dim() else Cover.of_one(tiles)
    held = [tile for tile in tiles if group.rank in tile.owners]
    place = {(t.r0, t.r1, t.c0): i for i, t in enumerate(cover.tiles)}
    keys = [(t.r0, t.r1, t.c0) if whole.dim() == 2 else (t.r0, t.r1, 0) if whole.dim() else (0, 1, 0) for t in held]
    pieces = tuple(Piece(place[key], part(whole, tile)) for key, tile in zip(keys, held, strict=True))
    return LogicalTensor(cover, pieces, group, whole.new_empty(0))


def wholes() -> list[Tensor]:
    cells = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
    return [cells, cells[:, 0].clone(), torch.tensor(3)]


@pytest.mark.parametrize("name", TILINGS)
def test_every_rank_gathers_the_whole_tensor(name: str) -> None:
    def run(group: Group) -> list[Tensor]:
        return [logical(group, tiles_of(name), whole).full() for whole in wholes()]

    for got in run_virtual_ranks(3, run):
        for one, whole in zip(got, wholes(), strict=True):
            assert torch.equal(one, whole)
            assert one.shape == whole.shape


@pytest.mark.parametrize("to", TILINGS)
@pytest.mark.parametrize("name", TILINGS)
def test_values_move_from_any_tiling_to_any_other(name: str, to: str) -> None:
    def run(group: Group) -> None:
        for whole in wholes():
            target = logical(group, tiles_of(to), torch.zeros_like(whole))
            target.load(logical(group, tiles_of(name), whole))
            check(target, tiles_of(to), whole, group)

    run_virtual_ranks(3, run)


def check(got: LogicalTensor, tiles: Sequence[Tile], whole: Tensor, group: Group) -> None:
    held = [tile for tile in tiles if group.rank in tile.owners]
    assert len(held) == len(got.pieces)
    for tile, piece in zip(held, got.pieces, strict=True):
        assert torch.equal(piece.memory, part(whole, tile))


@st.composite
def tilings(draw: st.DrawFn) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
    """Blocks of columns, each with its own row cuts and owners among 3 ranks."""
    columns = [0, *sorted(draw(st.sets(st.integers(1, DIM - 1), max_size=2))), DIM]
    tiles = []
    for c0, c1 in pairwise(columns):
        rows = [0, *sorted(draw(st.sets(st.integers(1, ROWS - 1), max_size=2))), ROWS]
        for r0, r1 in pairwise(rows):
            owners = draw(st.sets(st.integers(0, 2), min_size=1))
            tiles.append((r0, r1, c0, c1, tuple(sorted(owners))))
    return tiles


@given(tilings(), tilings())
def test_values_move_between_drawn_tilings(
    before: list[tuple[int, int, int, int, tuple[int, ...]]],
    after: list[tuple[int, int, int, int, tuple[int, ...]]],
) -> None:
    source, target = (rectangles(Tiling.of("t", ROWS, DIM, tiles)) for tiles in (before, after))

    def run(group: Group) -> None:
        for whole in wholes():
            here = logical(group, source, whole)
            assert torch.equal(here.full(), whole)
            there = logical(group, target, torch.zeros_like(whole))
            there.load(here)
            check(there, target, whole, group)

    run_virtual_ranks(3, run)


@pytest.mark.parametrize("name", TILINGS)
def test_a_whole_tensor_is_cut_into_the_tiles(name: str) -> None:
    def run(group: Group) -> None:
        for whole in wholes():
            target = logical(group, tiles_of(name), torch.zeros_like(whole))
            load(target, whole)
            check(target, tiles_of(name), whole, group)

    run_virtual_ranks(3, run)


def test_values_are_converted_to_the_dtype_of_the_table() -> None:
    whole = wholes()[0]

    def run(group: Group) -> None:
        target = logical(group, tiles_of("5 + 2 rows"), torch.zeros_like(whole))
        target.load(logical(group, tiles_of("columns"), whole.double()))
        check(target, tiles_of("5 + 2 rows"), whole, group)

    run_virtual_ranks(3, run)


def test_only_what_a_rank_lacks_travels() -> None:
    whole = wholes()[0]

    def run(group: Group) -> int:
        source = logical(group, tiles_of("everywhere"), whole)
        logical(group, tiles_of("columns"), whole * 0).load(source)
        logical(group, tiles_of("everywhere"), whole * 0).load(source)
        before = group.traffic.total()
        logical(group, tiles_of("one rank"), whole * 0).load(logical(group, tiles_of("5 + 2 rows"), whole))
        assert before == 0
        return group.traffic["state"].total

    assert run_virtual_ranks(3, run) == [5 * 6 * 4, 0, 2 * 6 * 4]


def test_a_state_dict_shows_the_live_memory_where_every_rank_holds_the_whole() -> None:
    def run(group: Group) -> bool:
        own = logical(group, tiles_of("everywhere"), wholes()[0])
        return shown(own) is own.pieces[0].memory

    assert all(run_virtual_ranks(3, run))


def test_ranks_that_are_threads_are_told_how_to_get_the_whole() -> None:
    def run(group: Group) -> str:
        with pytest.raises(ConfigError, match=r"full_state_dict") as caught:
            shown(logical(group, tiles_of("columns"), wholes()[0]))
        return str(caught.value)

    run_virtual_ranks(3, run)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12])
def test_torch_would_cut_alike_wherever_a_shard_is_claimed(rows: int, size: int) -> None:
    cuts = ceil_chunks(rows, size)
    tiles = [Tile(r0, r1, 0, 4, (rank,)) for rank, (r0, r1) in enumerate(pairwise(cuts))]
    assert Cover.of_cells((rows, 4), tiles).shard_dim(size) == 0
    assert Cover.of_rows(rows, tiles).shard_dim(size) == 0
    parts = torch.arange(rows).chunk(size)
    assert [(int(p[0]), int(p[-1]) + 1) for p in parts] == [(t.r0, t.r1) for t in tiles]
    columns = [Tile(0, 4, t.r0, t.r1, t.owners) for t in tiles]
    # A rank without columns would hold [4, 0] in torch's reading: that is not claimed.
    claimed = 1 if len(tiles) == size > 1 else 0 if size == 1 else None
    assert Cover.of_cells((4, rows), columns).shard_dim(size) == claimed


def test_nothing_is_claimed_that_torch_would_read_otherwise() -> None:
    for name in (
        "5 + 2 rows",
        "one rank",
        "rows backwards",
        "two tiles on a rank",
        "a replica of some",
        "everywhere",
    ):
        assert Cover.of_cells((ROWS, DIM), tiles_of(name)).shard_dim(3) is None
    assert Cover.of_cells((ROWS, DIM), tiles_of("columns")).shard_dim(3) == 1
    assert Cover.of_cells((ROWS, DIM), tiles_of("columns")).shard_dim(4) is None


def test_neither_two_copies_on_one_rank_nor_a_single_number_is_a_shard() -> None:
    """What is written to a shard would miss the second copy; a number has no dimension to cut."""
    twice = Cover.of_rows(ROWS, [Tile(0, ROWS, 0, 2, (0,)), Tile(0, ROWS, 2, DIM, (0,))])
    assert twice.repeated
    assert twice.shard_dim(1) is None
    assert Cover.of_one(tiles_of("everywhere")).shard_dim(3) is None
    assert Cover.of_one(tiles_of("one rank")).shard_dim(3) is None


def test_a_number_per_row_beside_columns_is_written_once() -> None:
    cover = Cover.of_rows(ROWS, tiles_of("columns"))
    assert cover.tiles == (Tile(0, 7, 0, 1, (0, 1, 2)),)
    assert cover.whole_on(3)
    apart = Cover.of_rows(ROWS, tiles_of("a replica of some"))
    assert [apart.tiles[t] for t in apart.written] == [Tile(0, 3, 0, 1, (0, 1)), Tile(3, 7, 0, 1, (0, 1, 2))]
    other_cuts = Tiling.of("t", 7, 6, [(0, 3, 0, 2, 0), (3, 7, 0, 2, 1), (0, 4, 2, 6, 2), (4, 7, 2, 6, 0)])
    crossed = Cover.of_rows(ROWS, rectangles(other_cuts))
    assert [crossed.tiles[t][:2] for t in crossed.written] == [(0, 3), (3, 7)]


def test_a_rank_with_two_tiles_keeps_both_copies_of_a_rows_state_alike() -> None:
    whole = wholes()[1]
    cover = Cover.of_rows(ROWS, tiles_of("two tiles on a rank"))
    assert cover.repeated
    assert not cover.whole_on(2)

    def run(group: Group) -> None:
        target = logical(group, tiles_of("two tiles on a rank"), torch.zeros_like(whole))
        target.load(logical(group, tiles_of("5 + 2 rows"), whole))
        assert len(target.pieces) == (2, 1, 0)[group.rank]
        assert all(torch.equal(memory, whole) for _, memory in target.pieces)

    run_virtual_ranks(3, run)


def test_a_column_of_a_number_per_row_moves_as_the_row_of_them_does() -> None:
    whole = torch.arange(float(ROWS))[:, None]

    def run(group: Group) -> None:
        logicals = []
        for name, scale in (("rows backwards", 1.0), ("5 + 2 rows", 0.0)):
            cover = Cover.of_rows(ROWS, tiles_of(name), column=True)
            assert cover.shape == (ROWS, 1)
            pieces = tuple(
                Piece(t, whole[tile.r0 : tile.r1] * scale)
                for t, tile in enumerate(cover.tiles)
                if group.rank in tile.owners
            )
            logicals.append(LogicalTensor(cover, pieces, group, whole.new_empty(0)))
        source, target = logicals
        assert torch.equal(source.full(), whole)
        target.load(source)
        assert torch.equal(target.full(), whole)

    run_virtual_ranks(3, run)


def test_no_two_files_of_the_package_import_each_other() -> None:
    folder = Path(tilerec.sharding.__file__).parent
    imports: dict[str, set[str]] = {}
    for path in folder.glob("*.py"):
        found = imports.setdefault(path.stem, set())
        for node in ast.walk(ast.parse(path.read_text())):  # also those inside of functions
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tilerec.sharding"):
                names = [alias.name for alias in node.names] if node.module == "tilerec.sharding" else []
                found.update(names or [str(node.module).split(".")[2]])
    assert "tiled_tensor" in imports["state"]
    assert [(a, b) for a in imports for b in imports[a] if a in imports.get(b, ())] == []
