"""Copies of hot rows on a rank, and the rows of the table that they are copies of.

The rows of the table are the truth at any time between two backward passes. A pass updates the copies, on all ranks
alike; then each rank that holds some of their rows writes these (`write_back`), without a message. So code that reads
or saves rows need not know of the copies. Code that writes rows fills the copies anew (`LogicalTensor.load`).

The tiles of a cached table are in host memory or in files, and its copies on the device. There, `TableRows.settle`
writes them all (`write_all`), as it writes cache lines; a pass only announces the rows.

Legend: H hot rows, U updated ones of them, N ids, T tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.ops.cache.definition import indexable
from tilerec.ops.gradient.record import GradientRecord
from tilerec.sharding.replica_messages import id_bounds
from tilerec.spec.tile import Tile, Tiling
from tilerec.storage.file_rows import home_rows, select_rows
from tilerec.storage.table_rows import TableRows


class HotCopies(NamedTuple):
    """Copies of rows of a logical tensor, on every rank: int64 `[H]` ascending, and memory `[H, columns]` or `[H]`."""

    rows_H: Tensor
    memory: Tensor


def names_of(tiling: Tiling, tile: Tile) -> Tensor | None:
    """Return the numbers in the table of the rows of a head, int64 [H]; None for other tiles."""
    if tiling.head is None or not is_head(tiling, tile):
        return None
    return torch.from_numpy(tiling.head.hot.ids.copy())


def is_head(tiling: Tiling, tile: Tile) -> bool:
    """Return True if a tile is the head of a table."""
    return tiling.head is not None and tile.r0 == tiling.rows


class Head(NamedTuple):
    """A head, and the tiles of its table on this rank that follow it."""

    rows: TableRows
    tiles: Sequence[TableRows]


def write_updated(heads: Sequence[Head], record: GradientRecord) -> None:
    """Write the rows of heads that an update with the gradients of a record has changed to their places."""
    place = {head.rows.handle: h for h, head in enumerate(heads) if head.tiles}
    if place:
        bounds = zip(record.sinks, id_bounds(record), strict=True)
        write_back(heads, record.ids, [(place[sink], *range_) for sink, range_ in bounds if sink in place])


@torch.no_grad()
def write_back(heads: Sequence[Head], ids_N: Tensor, updated: Sequence[tuple[int, int, int]]) -> None:
    """Copy updated rows of heads, with their optimizer state, to their places among this rank's tiles.

    Args:
        ids_N: numbers in heads, int32 or int64; repeats are allowed.
        updated: (head, begin, end): this head's rows `ids_N[begin:end]` have changed.
    """
    tiles = [(h, tile) for h, head in enumerate(heads) for tile in head.tiles]
    if not tiles:
        return
    first_rows = [tile.place.row_offset for _, tile in tiles]
    end_rows = [first + tile.leaf.shape[0] for first, (_, tile) in zip(first_rows, tiles, strict=True)]
    sources_U, targets_U, counts_T = torch.ops.tilerec.updated_hot_rows(
        ids_N, [h for h, _, _ in updated], [begin for _, begin, _ in updated], [end for _, _, end in updated],
        [head.rows.names for head in heads], [h for h, _ in tiles], first_rows, end_rows,
    )  # fmt: skip
    edges = list(itertools.accumulate(counts_T.tolist(), initial=0))
    # Of each tensor with rows to write: target, source, range of the rows, first column.
    copies: list[tuple[Tensor, Tensor, int, int, int]] = []
    written = [item for item in zip(tiles, edges, edges[1:], strict=False) if item[1] < item[2]]
    for (h, tile), begin, end in written:
        tile.about_to_write(targets_U[begin:end] if tile.observers else None)
        if tile.cache is None:  # else `settle` writes
            for target, source in zip(tile.host(), heads[h].rows.host(), strict=True):
                copies.append((target, source, begin, end, 0 if target.dim() == 1 else tile.place.column_offset))
    if copies:
        targets, sources, *numbers = (list(values) for values in zip(*copies, strict=True))
        torch.ops.tilerec.copy_rows_(targets, sources, targets_U, sources_U, *numbers)
        torch.autograd.graph.increment_version(targets)
    for (_, tile), *_ in written:
        tile.wrote()


@torch.no_grad()
def write_all(head: TableRows, tile: TableRows) -> None:
    """Copy all rows of a head that lie in a tile, with their state, to the tile in host memory or in files."""
    host = torch.device("cpu")
    rows, parts = _copies_in(head, tile)
    if rows.numel():
        at = torch.arange(rows.numel(), device=host)
        home_rows(tile.host(), host).write_from([own.to(host).contiguous() for own in parts], at, rows)


@torch.no_grad()
def first_other_row(head: TableRows, tile: TableRows) -> tuple[str, int] | None:
    """Return a tensor's name and the first row of the table that differs there in a tile and in a head, or None."""
    tile.settle()
    rows, parts = _copies_in(head, tile)
    for held, copies in zip(tile.host(), parts, strict=True):
        own = select_rows(indexable(held), rows.to(held.device)).to(copies.device)
        if rows.numel():
            other = (_bytes_of_rows(own) != _bytes_of_rows(indexable(copies))).any(1).nonzero()
            if len(other):
                name = next((name for name, own in tile.state.items() if own is held), "weight")
                return name, int(rows[other[0]]) + tile.place.row_offset
    return None


def _copies_in(head: TableRows, tile: TableRows) -> tuple[Tensor, list[Tensor]]:
    """Return the hot rows that lie in a tile, as rows of the tile (on the CPU), and the copies of their tensors."""
    first, width, r0 = tile.place.column_offset, tile.leaf.shape[1], tile.place.row_offset
    assert head.names is not None
    names_H = head.names.cpu()
    begin, end = torch.searchsorted(names_H, names_H.new_tensor([r0, r0 + tile.leaf.shape[0]])).tolist()
    parts = [own[begin:end] if own.dim() == 1 else own[begin:end, first : first + width] for own in head.host()]
    return names_H[begin:end] - r0, parts


def _bytes_of_rows(tensor: Tensor) -> Tensor:
    """Return `[rows, bytes]`."""
    return tensor.contiguous().view(torch.uint8).view(tensor.shape[0], -1)
