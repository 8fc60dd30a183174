"""Published values beside those in memory, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilerec.checkpoint.chain import Chain, Wanted
from tilerec.checkpoint.pieces import Box, Piece
from tilerec.checkpoint.row_snapshot import row_bytes

_BLOCK_BYTES = 1 << 24


def published_blocks(chain: Chain, name: str, box: Box) -> Iterator[tuple[int, Tensor]]:
    """Yield the published values of a box in blocks of whole rows, each with the number of its first row."""
    dtype = chain.tensors[name].dtype
    step = max(1, _BLOCK_BYTES // max(1, box.cells // box.sizes[0] * dtype.itemsize))
    last = box.offsets[0] + box.sizes[0]
    for first in range(box.offsets[0], last, step):
        part = Box((first, *box.offsets[1:]), (min(step, last - first), *box.sizes[1:]))
        held = torch.empty(part.sizes, dtype=dtype)
        chain.read([Wanted(Piece(part, held), name)])
        yield first, held


def unequal_rows(held: Tensor, memory: Tensor) -> Tensor:
    """Return the rows of some values whose bits differ from those of the first rows of some memory, int64 [U]."""
    now = memory[: held.shape[0]].detach().to(held.device).contiguous()
    return (row_bytes(held.contiguous()) != row_bytes(now)).any(1).nonzero()[:, 0]
