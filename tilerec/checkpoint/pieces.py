"""Pieces of tensors: the boxes that this rank holds, with their memory.

plain tensor        one box, the whole tensor, on every rank
DTensor, TiledTensor   the boxes of this rank, from the methods that torch's own checkpoints use
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.dtypes import DTYPE_NAMES
from tilerec.errors import ConfigError


class Box(NamedTuple):
    """A box of a tensor's cells: its first cell and its size, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def cells(self) -> int:
        """Number of cells."""
        count = 1
        for size in self.sizes:
            count *= size
        return count

    def overlap(self, other: Box) -> Box | None:
        """Return the cells that are in both; None if there are none."""
        low = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        if any(first >= last for first, last in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(last - first for first, last in zip(low, high, strict=True)))

    def within(self, memory: Tensor, part: Box) -> Tensor:
        """Return the view of a part of this box in the box's memory."""
        for dim, (first, low, size) in enumerate(zip(self.offsets, part.offsets, part.sizes, strict=True)):
            memory = memory.narrow(dim, low - first, size)
        return memory


class Piece(NamedTuple):
    """A box that this rank holds, with its memory, of the box's size."""

    box: Box
    memory: Tensor


def is_spread(tensor: Tensor) -> bool:
    """Return True if ranks hold different boxes of the tensor; False if each rank holds all of it."""
    return hasattr(tensor, "__create_chunk_list__")


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise `ConfigError` for a tensor that a checkpoint cannot hold."""
    if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_meta:
        got = "on meta" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}"
        raise ConfigError(
            f"Checkpoint: got tensor {name!r} {got}; expected a dense tensor of {', '.join(DTYPE_NAMES.values())}. "
            "Convert it, or leave it out of the state."
        )


def pieces_of(name: str, tensor: Tensor) -> list[Piece]:
    """Return the boxes of a tensor that this rank holds; their memory is the tensor's own."""
    if not is_spread(tensor):
        return [Piece(Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor)]
    return [Piece(box, memory) for box, memory in _of_chunks(name, tensor) if box.cells]


def _of_chunks(name: str, tensor: Any) -> list[tuple[Box, Tensor]]:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    found = []
    for index, chunk in enumerate(tensor.__create_chunk_list__()):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        memory = tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets, index))
        found.append((box, memory.detach()))
    return found


def written_boxes(name: str, tensor: Tensor) -> list[Box]:
    """Return the boxes of a tensor that this rank may save. A box may be offered by several ranks."""
    if not is_spread(tensor):
        return [Box((0,) * tensor.dim(), tuple(tensor.shape))]
    items: Sequence[Any] = tensor.__create_write_items__(name, tensor)  # type: ignore[attr-defined]
    chunks = [item.tensor_data.chunk for item in items]
    return [box for box in (Box(tuple(c.offsets), tuple(c.sizes)) for c in chunks) if box.cells]
