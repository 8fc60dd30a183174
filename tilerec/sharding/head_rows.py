"""Copies of hot rows on a rank, and the rows of the table that they are copies of.

The rows of the table are the truth at any time between two backward passes. A pass updates the copies, on all ranks
alike; then each rank that holds some of their rows writes these (`write_back`), without a message. So code that reads
or saves rows need not know of the copies. Code that writes rows fills the copies anew (`LogicalTensor.load`).

Legend: H hot rows, U updated ones of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.ops.marks.definition import empty_marks, marked_rows
from tilerec.spec.tile import Tile, Tiling
from tilerec.storage.table_rows import TableRows


class HotCopies(NamedTuple):
    """Copies of rows of a logical tensor, on every rank: int64 `[H]` ascending, and memory `[H, columns]` or `[H]`."""

    rows_H: Tensor
    memory: Tensor


def names_of(tiling: Tiling, tile: Tile) -> Tensor | None:
    """Return the numbers in the table of the rows of a head, int64 [H]; None for other tiles."""
    if tiling.head is None or tile.r0 != tiling.rows:
        return None
    return torch.from_numpy(tiling.head.hot.ids.copy())


@torch.no_grad()
def write_back(head: TableRows, tiles: Sequence[TableRows], updated_N: Tensor) -> None:
    """Copy updated rows of a head, with their optimizer state, to their places among this rank's tiles.

    Args:
        updated_N: their numbers in the head; repeats are allowed.
    """
    names_H = head.names
    assert names_H is not None
    marks, count = empty_marks(names_H.numel(), names_H.device), names_H.numel()
    torch.ops.tilerec.mark_rows_.default([marks], [updated_N.contiguous()], [count])
    updated_U = marked_rows(marks, count)
    rows_U = names_H[updated_U]
    for tile in tiles:
        first, width = tile.place.row_offset, tile.leaf.shape[1]
        here_U = (rows_U >= first) & (rows_U < first + tile.leaf.shape[0])
        at, source_at = rows_U[here_U] - first, updated_U[here_U]
        if not at.numel():
            continue
        tile.about_to_write(at)
        columns = slice(tile.place.column_offset, tile.place.column_offset + width)
        for target, source in zip(tile.host(), head.host(), strict=True):
            own = source if source.dim() == 1 else source[:, columns]
            indexable(target).index_copy_(0, at, indexable(own)[source_at])
        torch.autograd.graph.increment_version(tile.host())
        tile.wrote()


def indexable(rows: Tensor) -> Tensor:
    """Return rows as numbers of a type that torch indexes: it does not index all 8-bit floats."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
