"""Read boxes of tensors from the data files of a checkpoint into memory, each rank its own boxes.

Files are read from start to end, one after the other. Rows that a box holds in full go straight into its memory; others
go through buffers of `SCRATCH_BYTES`, of which two or three exist at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BlockReader, Part
from tilerec.checkpoint.folder import CheckpointFolder
from tilerec.checkpoint.manifest import Chunk, Manifest, SavedTensor
from tilerec.checkpoint.pieces import Box, Piece

SCRATCH_BYTES = 1 << 24


class Target(NamedTuple):
    """A piece to fill with the cells of a saved tensor that have the same place."""

    piece: Piece
    saved: SavedTensor


class _Read(NamedTuple):
    """A box to read from a chunk into a piece."""

    chunk: Chunk
    box: Box
    piece: Piece


def read_boxes(folder: CheckpointFolder, manifest: Manifest, targets: Sequence[Target]) -> None:
    """Fill the pieces.

    Raises:
        InputError: a file is damaged. OSError: a file cannot be read.
    """
    reads: defaultdict[str, list[_Read]] = defaultdict(list)
    for piece, saved in targets:
        for chunk in saved.chunks:
            both = chunk.box.overlap(piece.box)
            if both is not None:
                reads[chunk.file].append(_Read(chunk, both, piece))
    for name, some in sorted(reads.items()):
        file = manifest.files[name]
        path = f"{folder.path}/{name}"
        some.sort(key=lambda read: (read.chunk.start, read.box.offsets))
        with folder.open(name) as opened, BlockReader(opened, path, file.size, file.crcs) as reader:
            reader.read(part for read in some for part in _parts(read))


def _parts(read: _Read) -> Iterator[Part]:
    """Yield the bytes that fill the part of a piece that a chunk holds."""
    chunk, box, (own, memory) = read
    dtype = memory.dtype
    if not box.sizes:
        value = torch.empty((), dtype=dtype)
        yield Part(chunk.start, _bytes(value), lambda: memory.copy_(value))
        return
    place = own.within(memory, box)
    row_cells = chunk.box.cells // chunk.box.sizes[0]  # of the chunk
    row = row_cells * dtype.itemsize
    first = box.offsets[0] - chunk.box.offsets[0]
    whole_rows = box.sizes[1:] == chunk.box.sizes[1:]
    if whole_rows and place.is_contiguous() and place.device.type == "cpu":
        yield Part(chunk.start + first * row, _bytes(place))
        return
    step = max(1, SCRATCH_BYTES // row)
    for low in range(0, box.sizes[0], step):
        count = min(step, box.sizes[0] - low)
        scratch = torch.empty((count, *chunk.box.sizes[1:]), dtype=dtype)
        columns = scratch
        for dim in range(1, len(box.sizes)):
            columns = columns.narrow(dim, box.offsets[dim] - chunk.box.offsets[dim], box.sizes[dim])
        copy = partial(place[low : low + count].copy_, columns)
        yield Part(chunk.start + (first + low) * row, _bytes(scratch), copy)


def _bytes(memory: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, to write to."""
    return memory.detach().reshape(-1).view(torch.uint8).numpy().data
