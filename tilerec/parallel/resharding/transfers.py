"""Transfers and messages of a reshard: the cells that each rank sends to each other rank.

Nouns
  transfer  a rectangle inside one old and one new tile: from a leaf of one rank to a leaf of another or the same rank
  slice     some rows of a transfer, of one of the tensors that move with it
  message   slices from one rank to another, in contiguous memory

Example: a table of 10 rows on rank 0 moves to rows 0-4 on rank 0 and rows 5-9 on rank 1.
    transfers: rows [0, 5) from rank 0 to rank 0, a copy; rows [5, 10) from rank 0 to rank 1

Sender and receiver compute the same messages, so only values are sent. If the receiver of a cell owns it already, it
copies the cell. Otherwise an owner on its host sends it, or else the owners take turns (`layout.reader`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tilerec.sharding.layout import reader
from tilerec.spec.tile import Rectangle, Tile, Tiling, rectangles
from tilerec.spec.topology import Topology

ALIGNMENT = 16
"""Alignment in bytes of each slice in a message, so that a view of any dtype can begin there."""


class Transfer(NamedTuple):
    """A rectangle, its source and its target. Leaves are numbered as `Tiling.tiles_of` lists them."""

    source: int
    source_leaf: int
    target: int
    target_leaf: int
    rectangle: Rectangle

    @property
    def stays(self) -> bool:
        return self.source == self.target


Leaves = list[dict[int, int]]
"""Per tile: owner -> number of the tile among the owner's leaves."""


class Slice(NamedTuple):
    """Rows [r0, r1) of a transfer, of one part of one table."""

    table: int
    part: int
    transfer: Transfer
    r0: int
    r1: int
    bytes: int


def transfers(old: Tiling, new: Tiling, topology: Topology) -> list[Transfer]:
    """Return the transfers that fill every tile of `new` from tiles of `old`, in the same order on all ranks."""
    before, after = rectangles(old), rectangles(new)
    return _overlaps(before, after, _leaf_numbers(before), _leaf_numbers(after), topology)


def row_transfers(old: Tiling, new: Tiling, topology: Topology) -> list[Transfer]:
    """Return the transfers of numbers per row, with columns [0, 1). Every tile of a row has a copy of its numbers.

    The sources are the tiles with column 0, which together hold every row exactly once.
    """
    before, after = rectangles(old), rectangles(new)
    leaves = _leaf_numbers(before)
    first = [t for t, tile in enumerate(before) if tile.c0 == 0]
    return _overlaps(
        [before[t]._replace(c1=1) for t in first],
        [tile._replace(c0=0, c1=1) for tile in after],
        [leaves[t] for t in first],
        _leaf_numbers(after),
        topology,
    )


def _overlaps(
    old: Sequence[Tile], new: Sequence[Tile], leaves_before: Leaves, leaves_after: Leaves, topology: Topology
) -> list[Transfer]:
    """Return the transfers from `old` to `new` tiles.

    Args:
        old: tiles that hold every cell exactly once.
    """
    # Tiles with equal columns do not overlap. Sorted by rows, those that overlap a target are found by bisection.
    columns: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for t, tile in enumerate(old):
        columns[(tile.c0, tile.c1)].append((tile.r1, t))
    ends = sorted((span, sorted(own)) for span, own in columns.items())
    found: list[Transfer] = []
    for n, target in enumerate(new):
        for (c0, c1), own in ends:
            if c0 >= target.c1 or c1 <= target.c0:
                continue
            for _, t in own[bisect_left(own, (target.r0 + 1, -1)) :]:
                tile = old[t]
                if tile.r0 >= target.r1:
                    break
                rows = max(tile.r0, target.r0), min(tile.r1, target.r1)
                both = Rectangle(*rows, max(c0, target.c0), min(c1, target.c1))
                for rank in target.owners:
                    source = reader(tile.owners, rank, topology)
                    found.append(Transfer(source, leaves_before[t][source], rank, leaves_after[n][rank], both))
    return found


def _leaf_numbers(tiles: Sequence[Tile]) -> Leaves:
    counts: defaultdict[int, int] = defaultdict(int)
    numbers: Leaves = []
    for tile in tiles:
        own: dict[int, int] = {}
        for rank in tile.owners:
            own[rank] = counts[rank]
            counts[rank] += 1
        numbers.append(own)
    return numbers


def messages(slices: Iterable[Slice], most: int) -> Iterator[list[Slice]]:
    """Yield messages of consecutive slices: as many as fit in `most` bytes, at least one."""
    message: list[Slice] = []
    size = 0
    for own in slices:
        begin = _padded(size)
        if message and begin + own.bytes > most:
            yield message
            message, begin = [], 0
        message.append(own)
        size = begin + own.bytes
    if message:
        yield message


def cut(transfer: Transfer, table: int, part: int, row_bytes: int, most: int) -> Iterator[Slice]:
    """Yield the slices of a transfer of one part: at most `most` bytes each, but at least one row.

    Example: rows [0, 5) of 8 bytes each with most = 16: rows [0, 2), [2, 4), [4, 5).
    """
    rows = max(1, most // row_bytes)
    rectangle = transfer.rectangle
    for r0 in range(rectangle.r0, rectangle.r1, rows):
        r1 = min(r0 + rows, rectangle.r1)
        yield Slice(table, part, transfer, r0, r1, (r1 - r0) * row_bytes)


def message_bytes(message: Sequence[Slice]) -> int:
    """Return the bytes of a message: slices begin at multiples of `ALIGNMENT`, and the last one is not padded."""
    return sum(_padded(own.bytes) for own in message[:-1]) + message[-1].bytes


def starts(message: Sequence[Slice]) -> list[int]:
    """Return the byte offset of each slice in a message."""
    found, at = [], 0
    for own in message:
        found.append(at)
        at += _padded(own.bytes)
    return found


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
