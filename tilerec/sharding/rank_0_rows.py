"""Rows of a matrix on one rank: of a sharded one, gathered in chunks, so that no other rank holds them."""

from __future__ import annotations

import torch
from torch import Tensor

from tilerec.sharding.logical import LogicalTensor
from tilerec.storage.row_file import clone, copy_rows, fetch, release, tensor_in_file

_CHUNK_BYTES = 1 << 26


def all_rows_on_rank_0(whole: LogicalTensor, folder: str | None, name: str) -> Tensor | None:
    """Return all rows of a logical matrix on rank 0; None on other ranks. Collective.

    Peak memory beside them: two chunks.

    Args:
        folder: they are in a file of this folder; None: in memory.
        name: the table's, for errors.
    """
    shape, dtype = whole.cover.shape, whole.like.dtype
    out: Tensor | None = None
    if whole.group.rank == 0:
        out = whole.like.new_empty(shape) if folder is None else tensor_in_file(folder, shape, dtype, name)
    step = max(1, _CHUNK_BYTES // max(1, shape[1] * dtype.itemsize))
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        chunk = rows_on_rank_0(whole, first, last)
        if out is not None and chunk is not None:
            copy_rows(out[first:last], chunk)
    return out


def rows_on_rank_0(whole: LogicalTensor, first: int, last: int) -> Tensor | None:
    """Return the rows [first, last) of a logical matrix on rank 0; None on other ranks. Collective."""
    group, cover = whole.group, whole.cover
    own = {piece.tile: piece.memory for piece in reversed(whole.pieces)}
    out = whole.like.new_empty((last - first, *cover.shape[1:])) if group.rank == 0 else None
    receives: dict[int, list[Tensor]] = {}
    sends: list[Tensor] = []
    sent: list[Tensor] = []
    for t in cover.written:
        tile = cover.tiles[t]
        low, high = max(first, tile.r0), min(last, tile.r1)
        if low >= high:
            continue
        sender = 0 if 0 in tile.owners else tile.owners[0]
        here = own[t][low - tile.r0 : high - tile.r0] if t in own else None
        if out is not None:
            place = out[low - first : high - first, tile.c0 : tile.c1]
            if here is not None:
                copy_rows(place, here)
            else:
                receives.setdefault(sender, []).append(place)
        elif sender == group.rank and here is not None:
            sends.append(here.reshape(-1))
            fetch(here)
            sent.append(here)
    received = {rank: whole.like.new_empty(sum(place.numel() for place in places)) for rank, places in receives.items()}
    if received or sends:
        group.exchange("rows of a model file", received, {0: torch.cat(sends)} if sends else {}).wait()
    for here in sent:
        release(here)
    for rank, places in receives.items():
        at = 0
        for place in places:
            place.copy_(received[rank][at : at + place.numel()].view(place.shape))
            at += place.numel()
    return out


def contiguous_rows(rows: Tensor) -> Tensor:
    """Return rows in contiguous memory: themselves, or a copy in a file of its own if state lies between them."""
    return rows if rows.is_contiguous() else clone(rows)
