"""Tilings: the placement of a table's cells on ranks.

Nouns
  rectangle  rows [r0, r1) x columns [c0, c1) of a table of `rows` x `dim` cells
  tile       a rectangle and its owners: the ranks that hold a copy of it (replicas), ascending, at least one
  block      columns [c0, c1) over all rows: row cuts 0 = cuts[0] < cuts[1] < … < cuts[k] = rows, and the owners of
             each of the k row ranges
  tiling     columns first, rows within: blocks from left to right that cover the table exactly once
  head       copies of hot rows on every rank, beside the table (`hot_rows.py`), as rows [rows, rows + h)

    tile (b, i)  =  rows [blocks[b].cuts[i], blocks[b].cuts[i + 1])  x  columns [blocks[b].c0, blocks[b].c1)

A tiling is canonical: row ranges are not empty, neighbouring row ranges of a block have different owners, and
neighbouring blocks have different cuts or owners. So two tilings are equal exactly if they place every cell on the same
ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from tilerec.errors import ConfigError
from tilerec.json_document import MOST_PIECES, JsonValue
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.ranks import owners_to_text, ranks_to_text, read_owners


class Rectangle(NamedTuple):
    """Rows [r0, r1) x columns [c0, c1)."""

    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def rows(self) -> int:
        return self.r1 - self.r0

    @property
    def width(self) -> int:
        return self.c1 - self.c0

    @property
    def cells(self) -> int:
        return (self.r1 - self.r0) * (self.c1 - self.c0)

    def __str__(self) -> str:
        return f"rows [{self.r0}, {self.r1}) x columns [{self.c0}, {self.c1})"


class Tile(NamedTuple):
    """A rectangle and the ranks that hold it, ascending; several ranks are replicas."""

    r0: int
    r1: int
    c0: int
    c1: int
    owners: tuple[int, ...]

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(self.r0, self.r1, self.c0, self.c1)

    def __str__(self) -> str:
        return f"{self.rectangle} on rank{'s' * (len(self.owners) > 1)} {ranks_to_text(self.owners)}"


class ColumnBlock(NamedTuple):
    """Columns [c0, c1): row range i is [cuts[i], cuts[i + 1]), on the ranks owners[i] (replicas, ascending)."""

    c0: int
    c1: int
    cuts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]


class Head(NamedTuple):
    """Copies of hot rows, on all ranks of the world."""

    hot: HotRows
    owners: tuple[int, ...]


def ceil_chunks(rows: int, parts: int) -> tuple[int, ...]:
    """Return the cuts of `rows` into at most `parts` ranges of ceil(rows / parts) rows; the last may be shorter.

    The cuts of `torch.chunk`; no range is empty. 7 rows in 4 parts: 2, 2, 2, 1 -> (0, 2, 4, 6, 7). 5 rows in 4 parts:
    2, 2, 1 -> (0, 2, 4, 5).
    """
    size = -(-rows // parts)
    return (*range(0, rows, size), rows)


@dataclass(frozen=True)
class Tiling:
    """Canonical cover of a `rows` x `dim` table. `Tiling.of` makes one from any cover; sharding strategies make "
    "them. `tiles` and `tiles_of` are those of the cover; `held` has the head, too."""

    rows: int
    dim: int
    blocks: tuple[ColumnBlock, ...]
    head: Head | None = None

    def __post_init__(self) -> None:
        # `of` checks covers of callers and raises errors for users; these assertions check sharding strategies.
        assert self.rows > 0
        assert self.dim > 0
        edge = 0
        before: ColumnBlock | None = None
        for block in self.blocks:
            c0, c1, cuts, owners = block
            assert c0 == edge < c1, "blocks are contiguous"
            assert cuts[0] == 0 and cuts[-1] == self.rows and len(cuts) == len(owners) + 1  # noqa: PT018
            assert all(a < b for a, b in pairwise(cuts)), "row ranges ascend and are not empty"
            assert all(a != b for a, b in pairwise(owners)), "neighbours differ in owners"
            assert before is None or before[2:] != block[2:], "neighbouring blocks differ"
            before, edge = block, c1
        assert edge == self.dim, "blocks reach the last column"

    @staticmethod
    def of(name: str, rows: int, dim: int, tiles: Iterable[Sequence[Any]]) -> Tiling:
        """Return the canonical tiling of any cover: cut at all column edges, then merge neighbours with equal owners.

        Args:
            name: the table's name, for messages.
            tiles: `Tile`s or `(r0, r1, c0, c1, owners)`, in any order; `owners` is one rank or several. Empty row
                ranges (r0 == r1) are dropped.

        Raises:
            ConfigError: a cell is in no tile or in two; a tile reaches outside the table, or has no columns or no
                owners.

        A table of 4 rows and 8 columns: `[(0, 4, 0, 2, 0), (0, 4, 2, 4, 0), (0, 3, 4, 8, 1), (3, 4, 4, 8, 0)]` has
        blocks `(0, 4, (0, 4), ((0,),))` and `(4, 8, (0, 3, 4), ((1,), (0,)))`.
        """
        if rows < 1 or dim < 1:
            raise ConfigError(f"Table '{name}': got {rows} x {dim} cells; expected at least 1 x 1. Give it a cell.")
        cover = [tile for tile in (_read_tile(name, rows, dim, item) for item in tiles) if tile.r0 < tile.r1]
        edges = sorted({0, dim, *(t.c0 for t in cover), *(t.c1 for t in cover)})
        columns: list[list[Tile]] = [[] for _ in edges[1:]]
        spans = [range(bisect_right(edges, t.c0) - 1, bisect_right(edges, t.c1) - 1) for t in cover]
        pieces = sum(map(len, spans))
        if pieces > MOST_PIECES:
            raise ConfigError(
                f"Table '{name}': got {len(cover):,} tiles, which all column edges cut into {pieces:,} pieces; "
                f"expected at most {MOST_PIECES:,}. Align the column edges of the tiles."
            )
        for tile, span in zip(cover, spans, strict=True):
            for b in span:
                columns[b].append(tile)
        blocks: list[ColumnBlock] = []
        for (c0, c1), inside in zip(pairwise(edges), columns, strict=True):
            cuts, owners = _stack(name, rows, c0, c1, inside)
            if blocks and (blocks[-1].cuts, blocks[-1].owners) == (cuts, owners):
                blocks[-1] = blocks[-1]._replace(c1=c1)
            else:
                blocks.append(ColumnBlock(c0, c1, cuts, owners))
        return Tiling(rows, dim, tuple(blocks))

    def tiles(self) -> tuple[Tile, ...]:
        """Return all tiles, in column-then-row order."""
        return tuple(
            Tile(r0, r1, block.c0, block.c1, owners)
            for block in self.blocks
            for (r0, r1), owners in zip(pairwise(block.cuts), block.owners, strict=True)
        )

    def tiles_of(self, rank: int) -> tuple[Rectangle, ...]:
        """Return a rank's rectangles in column-then-row order: those of `<table>.weight`, `<table>.weight.1`, ….

        They are the rank's part of `rectangles(tiling)`, without the head; empty for a rank without a tile.
        """
        return self._held.get(rank, ())

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold a tile, ascending."""
        return self._ranks

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted({r for block in self.blocks for owners in block.owners for r in owners}))

    @property
    def cells(self) -> int:
        """`rows * dim`."""
        return self.rows * self.dim

    def with_hot(self, name: str, hot: HotRows | None, world_size: int) -> Tiling:
        """Return this tiling with a copy of hot rows on every rank; without one if each rank holds all rows anyway.

        Args:
            name: the table's name, for messages. hot: None or empty: no row.

        Raises:
            ConfigError: an id is no row of the table, or other rows are on every rank by the tiling itself.
        """
        everyone = tuple(range(world_size))
        alone = [own == everyone for block in self.blocks for own in block.owners]
        if hot is not None and len(hot) and hot.ids[-1] >= self.rows:
            raise ConfigError(
                f"Table '{name}': got the hot id {hot.ids[-1]}; expected ids of its {self.rows:,} rows. Leave it out, "
                "or pass the ids of this table."
            )
        if hot is None or not len(hot) or all(alone):
            return self.bare
        if any(alone):
            raise ConfigError(
                f"Table '{name}': got hot rows beside a tiling with some rows on every rank; expected one of the two. "
                "Leave out hot=, or the rows on every rank of the tiling."
            )
        return Tiling(self.rows, self.dim, self.blocks, Head(hot, everyone))

    @property
    def bare(self) -> Tiling:
        """This tiling without a head."""
        return self if self.head is None else Tiling(self.rows, self.dim, self.blocks)

    @cached_property
    def held(self) -> Tiling:
        """The tiling of the rows as ranks hold them: this one, and below its rows those of the head."""
        if self.head is None:
            return self
        rows = self.rows + len(self.head.hot)
        blocks = [
            block._replace(cuts=(*block.cuts, rows), owners=(*block.owners, self.head.owners)) for block in self.blocks
        ]
        return Tiling(rows, self.dim, tuple(blocks))

    @cached_property
    def replicated(self) -> bool:
        """True if any tile is on several ranks."""
        return any(len(owners) > 1 for block in self.blocks for owners in block.owners)

    @cached_property
    def _merged(self) -> tuple[Tile, ...]:
        if len(self.blocks) == 1:
            return self.tiles()
        merged: list[Tile] = []
        # Rectangles that end at the current block's left edge: the block may extend them to the right.
        growing: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for block in self.blocks:
            grown: dict[tuple[int, int, tuple[int, ...]], int] = {}
            for (r0, r1), owners in zip(pairwise(block.cuts), block.owners, strict=True):
                at = growing.get((r0, r1, owners))
                if at is None:
                    at = len(merged)
                    merged.append(Tile(r0, r1, block.c0, block.c1, owners))
                else:
                    merged[at] = merged[at]._replace(c1=block.c1)
                grown[(r0, r1, owners)] = at
            growing = grown
        # A rectangle is appended at its left edge, in row order, so the list is in column-then-row order.
        return tuple(merged)

    @cached_property
    def _held(self) -> dict[int, tuple[Rectangle, ...]]:
        held: dict[int, list[Rectangle]] = {}
        for tile in self._merged:
            for rank in tile.owners:
                held.setdefault(rank, []).append(tile.rectangle)
        return {rank: tuple(own) for rank, own in held.items()}

    def check(self, name: str, world_size: int) -> None:
        """Raise if a tile is on a rank from `world_size` up.

        Raises:
            ConfigError: the message names the first such tile.
        """
        if self.ranks()[-1] < world_size:
            return
        tile = next(t for t in self.tiles() if t.owners[-1] >= world_size)
        raise ConfigError(
            f"Table '{name}': got {tile.rectangle} on rank {tile.owners[-1]}; expected ranks 0 to "
            f"{world_size - 1}. Start {tile.owners[-1] + 1} or more ranks, or plan for {world_size}."
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Return the blocks as JSON values, without values that have their default (see `from_json`)."""
        return [
            {
                **({} if (block.c0, block.c1) == (0, self.dim) else {"columns": [block.c0, block.c1]}),
                **({} if block.cuts == ceil_chunks(self.rows, len(block.owners)) else {"rows": list(block.cuts)}),
                "ranks": owners_to_text(block.owners),
            }
            for block in self.blocks
        ]

    @staticmethod
    def from_json(name: str, rows: int, dim: int, blocks: Sequence[dict[str, Any]] | JsonValue) -> Tiling:
        """Build a tiling from its blocks: `{"columns": [c0, c1], "rows": [0, …, rows], "ranks": "0-3,{4,5}"}`.

        `ranks` lists the owner of each row range, with replicas in braces; a JSON list also works. Without `columns`
        the block has all columns. Without `rows` they are cut evenly (`ceil_chunks`).

        Raises:
            ConfigError: a block cannot be read, or the blocks do not cover the table exactly once.
        """
        value = JsonValue.of(blocks, f"Table '{name}'")
        tiles: list[tuple[int, int, int, int, tuple[int, ...]]] = []
        for block in value.items('a list of blocks such as [{"ranks": "0-3"}]'):
            found = block.record(("columns", "rows", "ranks"), ("ranks",))
            owners = read_owners(found["ranks"])
            block.spend(len(owners))  # one row cut per owner
            edges = {key: [x.whole() for x in found[key].items()] for key in ("columns", "rows") if key in found}
            columns = edges.get("columns", [0, dim])
            cuts = edges.get("rows", ceil_chunks(rows, max(1, len(owners))))
            if len(columns) != 2 or len(cuts) != len(owners) + 1:
                raise ConfigError(
                    f"{block.where}: got {len(owners):,} owners for {len(cuts) - 1:,} row ranges and {len(columns):,} "
                    "column edges; expected 2 column edges and one owner per row range. Correct the block."
                )
            tiles += [
                (r0, r1, columns[0], columns[1], replicas)
                for (r0, r1), replicas in zip(pairwise(cuts), owners, strict=True)
            ]
        try:
            return Tiling.of(name, rows, dim, tiles)
        except ConfigError as error:
            raise value.refused(error) from error


def rectangles(tiling: Tiling) -> tuple[Tile, ...]:
    """Return the tiles of a tiling and its head, with tiles of neighbouring blocks merged if rows and owners are equal.

    They are in column-then-row order. Neighbours with different owners are not merged even if one rank holds both: ids
    are sent by (rows, owners), and one set of ids reads one rectangle.

    Example 1, three rectangles: columns [0, 4) on rank 0; columns [4, 8) with rows [0, 5) on rank 0, [5, 9) on rank 1.
    Example 2, also three: columns [0, 4) and [4, 8), both cut at row 5, with rows [0, 5) on rank 0 and the other rows
    on ranks 1 and 2. They are rows [0, 5) x columns [0, 8), and two rectangles of rows [5, 9).
    """
    return (tiling if tiling.head is None else tiling.held)._merged


def _read_tile(name: str, rows: int, dim: int, item: Sequence[Any]) -> Tile:
    try:
        r0, r1, c0, c1 = (int(edge) for edge in item[:4])
        given = item[4]
        owners = (given,) if isinstance(given, int) else tuple(given)
        whole = len(item) == 5 and all(isinstance(r, int) and not isinstance(r, bool) for r in owners)
    except (TypeError, ValueError, IndexError):
        whole = False
    if not whole:
        raise ConfigError(f"Table '{name}': got {item!r}; expected a tile. Write (r0, r1, c0, c1, owners).")
    rectangle = Rectangle(r0, r1, c0, c1)
    if not (0 <= r0 <= r1 <= rows and 0 <= c0 <= c1 <= dim):
        raise ConfigError(
            f"Table '{name}': got {rectangle}; expected a part of the table's {rows} rows x {dim} columns. Shrink it."
        )
    if c0 == c1:
        raise ConfigError(f"Table '{name}': got {rectangle}; expected at least one column. Leave it out.")
    if not owners or min(owners) < 0 or len(set(owners)) < len(owners):
        raise ConfigError(
            f"Table '{name}': got owners {list(owners)} of {rectangle}; expected one or more ranks from 0. List each "
            "once."
        )
    return Tile(r0, r1, c0, c1, tuple(sorted(owners)))


def _stack(
    name: str, rows: int, c0: int, c1: int, tiles: list[Tile]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the cuts and owners of one column block that all `tiles` span; raise for gaps and overlaps."""
    cuts: list[int] = [0]
    owners: list[tuple[int, ...]] = []
    before: Tile | None = None
    for tile in sorted(tiles):
        if tile.r0 > cuts[-1]:
            break
        if tile.r0 < cuts[-1]:
            assert before is not None
            both = Rectangle(tile.r0, min(tile.r1, before.r1), c0, c1)
            raise ConfigError(
                f"Table '{name}': got {both} in two tiles, {before} and {tile}; expected it in one. Shrink one of "
                "them, or give one tile both owners if they are replicas."
            )
        if owners and owners[-1] == tile.owners:
            cuts[-1] = tile.r1
        else:
            cuts.append(tile.r1)
            owners.append(tile.owners)
        before = tile
    if cuts[-1] < rows:
        end = min((t.r0 for t in tiles if t.r0 > cuts[-1]), default=rows)
        hole = Rectangle(cuts[-1], end, c0, c1)
        raise ConfigError(
            f"Table '{name}': got no tile with {hole}; expected every cell in one. Extend a tile over them, or add one "
            "with its owner."
        )
    return tuple(cuts), tuple(owners)
