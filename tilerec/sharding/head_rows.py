"""Copies of hot rows on a rank, and the rows of the table that they are copies of.

The rows of the table are the truth at any time between two backward passes. A pass updates the copies, on all ranks
alike; then each rank that holds some of their rows writes these (`write_back`), without a message. So code that reads
or saves rows need not know of the copies. Code that writes rows fills the copies anew (`LogicalTensor.load`).

The tiles of a cached table are in host memory or in files, and its copies on the device. There, `TableRows.settle`
writes them all (`write_all`), as it writes cache lines; a pass only announces the rows.

Legend: H hot rows, U updated ones of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.ops.marks.definition import empty_marks, marked_rows
from tilerec.ops.runtime.upload import upload
from tilerec.spec.tile import Tile, Tiling
from tilerec.storage.file_rows import home_rows
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


class UpdatedHead(NamedTuple):
    """Rows of a head that an update has changed.

    Attributes:
        rows: the head.
        tiles: other tiles of its table on this rank.
        changed: numbers in the head, int [N] each; repeats are allowed.
    """

    rows: TableRows
    tiles: Sequence[TableRows]
    changed: Sequence[Tensor]


@torch.no_grad()
def write_back(heads: Sequence[UpdatedHead]) -> None:
    """Copy updated rows of heads, with their optimizer state, to their places among this rank's tiles.

    Rows of all heads are found at once, as positions in one list of all hot rows. For each tile only its copies are
    left. With 26 heads of 200 rows this takes a tenth of the time of one head after another (Intel Xeon).
    """
    names = [head.rows.names for head in heads if head.rows.names is not None]
    edges = [
        (h << _TABLE_BITS) + edge
        for h, head in enumerate(heads)
        for tile in head.tiles
        for edge in (tile.place.row_offset, tile.place.row_offset + tile.leaf.shape[0])
    ]
    if not edges:
        return
    device = names[0].device
    starts = list(itertools.accumulate([own.numel() for own in names], initial=0))
    marks = empty_marks(starts[-1], device)
    ids = [own.long() + start for head, start in zip(heads, starts, strict=False) for own in head.changed]
    torch.ops.tilerec.mark_rows_.default([marks], [torch.cat(ids) if ids else names[0][:0]], [starts[-1]])
    updated_U = marked_rows(marks, starts[-1])
    keys = torch.cat([own + (h << _TABLE_BITS) for h, own in enumerate(names)])
    bounds = iter(torch.searchsorted(updated_U, torch.searchsorted(keys, upload(edges, device))).tolist())
    rows_U = torch.cat(names)[updated_U]
    for head, start in zip(heads, starts, strict=False):
        for tile in head.tiles:
            begin, end = next(bounds), next(bounds)
            if begin < end:
                _copy_rows(tile, rows_U[begin:end] - tile.place.row_offset, head.rows, updated_U[begin:end] - start)


_TABLE_BITS = 40
"""Bits of a row's number, beside that of its table in one number."""


def _copy_rows(tile: TableRows, at_U: Tensor, head: TableRows, source_U: Tensor) -> None:
    """Copy some rows of a head, with their state, to rows of a tile."""
    first, width = tile.place.column_offset, tile.leaf.shape[1]
    tile.about_to_write(at_U)
    if tile.cache is not None:  # `settle` writes
        tile.wrote()
        return
    targets = tile.host()
    for target, source in zip(targets, head.host(), strict=True):
        own = source if source.dim() == 1 else source[:, first : first + width]
        indexable(target).index_copy_(0, at_U, indexable(own).index_select(0, source_U))
    torch.autograd.graph.increment_version(targets)
    tile.wrote()


@torch.no_grad()
def write_all(head: TableRows, tile: TableRows) -> None:
    """Copy all rows of a head that lie in a tile, with their state, to the tile in host memory or in files."""
    first, width, r0 = tile.place.column_offset, tile.leaf.shape[1], tile.place.row_offset
    assert head.names is not None
    names_H, host = head.names.cpu(), torch.device("cpu")
    begin, end = torch.searchsorted(names_H, names_H.new_tensor([r0, r0 + tile.leaf.shape[0]])).tolist()
    if begin == end:
        return
    rows, at = names_H[begin:end] - r0, torch.arange(end - begin, device=host)
    parts = [own[begin:end] if own.dim() == 1 else own[begin:end, first : first + width] for own in head.host()]
    home_rows(tile.host(), host).write_from([own.to(host).contiguous() for own in parts], at, rows)


def indexable(rows: Tensor) -> Tensor:
    """Return rows as numbers of a type that torch indexes: it does not index all 8-bit floats."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
