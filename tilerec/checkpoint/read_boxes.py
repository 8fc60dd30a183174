"""Read boxes of tensors from the data files of a checkpoint into memory, each rank its own boxes.

Files are read from start to end, one after the other. Rows that a box holds in full go straight into its memory; others
go through buffers, of which two exist at a time.
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
from tilerec.checkpoint.scratch_memory import DEFAULT_BUDGET, ScratchMemory, scratch_tensor
from tilerec.storage.row_file import bytes_between_rows, copy_rows, fetch, file_of, release

_DEFAULT = ScratchMemory.of(DEFAULT_BUDGET)


class Target(NamedTuple):
    """A piece to fill with the cells of a saved tensor that have the same place."""

    piece: Piece
    saved: SavedTensor


class _Read(NamedTuple):
    """A box to read from a chunk into a piece."""

    chunk: Chunk
    box: Box
    piece: Piece


def read_boxes(
    folder: CheckpointFolder,
    manifest: Manifest,
    targets: Sequence[Target],
    scratch: ScratchMemory = _DEFAULT,
) -> None:
    """Fill the pieces.

    Args:
        scratch: memory that it may take.

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
        with (
            folder.open(name) as opened,
            BlockReader(opened, path, file.size, file.crcs, checks=scratch.checks) as reader,
        ):
            reader.read(
                part
                for chunk, box, (own, memory) in some
                for part in _parts(chunk.start, chunk.box, box, own.within(memory, box), scratch.buffer)
            )


def _parts(start: int, chunk: Box, box: Box, place: Tensor, buffer: int) -> Iterator[Part]:
    """Yield the bytes that fill some memory.

    Args:
        start: first byte of a chunk. chunk: its box. box: the part of it to read into `place`.
        buffer: bytes of a buffer.
    """
    dtype = place.dtype
    if not box.sizes:
        value = torch.empty((), dtype=dtype)
        yield Part(start, _bytes(value), lambda: place.copy_(value))
        return
    row = chunk.cells // chunk.sizes[0] * dtype.itemsize
    first = box.offsets[0] - chunk.offsets[0]
    if box.sizes[1:] == chunk.sizes[1:] and place.is_contiguous() and place.device.type == "cpu":
        step = box.sizes[0] if file_of(place) is None else max(1, buffer // row)
        for low in range(0, box.sizes[0], step):
            block = place[low : low + step]
            fetch(block)
            # Checksums are computed behind the reads, which maps pages again.
            yield Part(start + (first + low) * row, _bytes(block), partial(release, place[: low + step]))
        return
    if row > buffer and len(box.sizes) > 1:  # a row is a chunk of its own, of one dimension less
        inner, part = (Box(one.offsets[1:], one.sizes[1:]) for one in (chunk, box))
        for i in range(box.sizes[0]):
            yield from _parts(start + (first + i) * row, inner, part, place[i], buffer)
        return
    step = max(1, buffer // max(row, bytes_between_rows(place)))
    for low in range(0, box.sizes[0], step):
        count = min(step, box.sizes[0] - low)
        held = scratch_tensor((count, *chunk.sizes[1:]), dtype)
        columns = held
        for dim in range(1, len(box.sizes)):
            columns = columns.narrow(dim, box.offsets[dim] - chunk.offsets[dim], box.sizes[dim])
        yield Part(start + (first + low) * row, _bytes(held), partial(copy_rows, place[low : low + count], columns))


def _bytes(memory: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, to write to."""
    return memory.detach().reshape(-1).view(torch.uint8).numpy().data
