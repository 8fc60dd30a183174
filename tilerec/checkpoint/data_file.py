"""Data files of a checkpoint: safetensors files of chunks, written from start to end.

    8 bytes with the size of the header | header (JSON: dtype, shape and bytes of each chunk) | the chunks' bytes

A chunk has the name of its tensor, if it is the whole tensor; else the name and the rows and columns:
`model.table.weight[0:1000, 0:64]`. So any reader of safetensors files can use them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BlockWriter
from tilerec.checkpoint.dtypes import DTYPE_NAMES
from tilerec.checkpoint.pieces import Box

CHUNK_BYTES = 1 << 26  # most bytes of a chunk, unless one row is larger
_ALIGNMENT = 8


class PlannedChunk(NamedTuple):
    """A chunk to write: a box of a tensor of some shape, and the memory of the box."""

    name: str
    shape: tuple[int, ...]
    box: Box
    memory: Tensor

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return self.box.cells * self.memory.dtype.itemsize

    @property
    def key(self) -> str:
        """Name in the file."""
        if self.box.sizes == self.shape:
            return self.name
        spans = (f"{low}:{low + size}" for low, size in zip(self.box.offsets, self.box.sizes, strict=True))
        return f"{self.name}[{', '.join(spans)}]"


def chunks_of(name: str, shape: tuple[int, ...], box: Box, memory: Tensor) -> Iterator[PlannedChunk]:
    """Yield a box cut into chunks of whole rows of at most `CHUNK_BYTES`."""
    if not box.sizes or not box.cells:
        yield PlannedChunk(name, shape, box, memory)
        return
    row = box.cells // box.sizes[0] * memory.dtype.itemsize
    step = max(1, CHUNK_BYTES // row)
    for first in range(0, box.sizes[0], step):
        rows = min(step, box.sizes[0] - first)
        part = Box((box.offsets[0] + first, *box.offsets[1:]), (rows, *box.sizes[1:]))
        yield PlannedChunk(name, shape, part, memory[first : first + rows])


def starts_of(chunks: Sequence[PlannedChunk]) -> tuple[bytes, list[int]]:
    """Return the header of a file with these chunks, and the byte at which each chunk starts."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, at = [], 0
    for chunk in chunks:
        starts.append(at)
        header[chunk.key] = {
            "dtype": DTYPE_NAMES[chunk.memory.dtype],
            "shape": chunk.box.sizes,
            "data_offsets": (at, at + chunk.bytes),
        }
        at += chunk.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, [start + len(head) for start in starts]


def write_chunks(writer: BlockWriter, chunks: Sequence[PlannedChunk], head: bytes) -> None:
    """Write a file with these chunks."""
    writer.write(head)
    for chunk in chunks:
        if chunk.bytes:
            writer.write(bytes_of(chunk.memory))


def bytes_of(memory: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row; a view if the tensor is contiguous on the CPU."""
    return memory.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
