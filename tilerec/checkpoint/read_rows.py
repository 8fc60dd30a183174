"""Read the changed rows of tensors from an incremental checkpoint into memory, over the rows of its base.

Of a list of rows, a piece reads just those that it holds, through a buffer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BlockReader
from tilerec.checkpoint.folder import CheckpointFolder
from tilerec.checkpoint.manifest import Manifest, RowList
from tilerec.checkpoint.pieces import Box, Piece
from tilerec.checkpoint.row_numbers import RowNumbers, Segment
from tilerec.checkpoint.scratch_memory import scratch_tensor


class RowTarget(NamedTuple):
    """A piece, in which listed rows are replaced."""

    piece: Piece
    rows: RowList


class _OpenFiles:
    """The files of a checkpoint that were read last, as a context: two, since each keeps a block in memory."""

    def __init__(self, folder: CheckpointFolder, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._open: OrderedDict[str, tuple[BlockReader, ExitStack]] = OrderedDict()

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._open.popitem()[1][1].close()

    def path(self, name: str) -> str:
        return f"{self._folder.path}/{name}"

    def reader(self, name: str) -> BlockReader:
        """Return the reader of a file. It may end the one before the last."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name][0]
        if len(self._open) == 2:
            self._open.popitem(last=False)[1][1].close()
        file = self._manifest.files[name]
        with ExitStack() as opened:
            stream = opened.enter_context(self._folder.open(name))
            reader = opened.enter_context(BlockReader(stream, self.path(name), file.size, file.crcs))
            self._open[name] = reader, opened.pop_all()
        return reader


def read_rows(
    folder: CheckpointFolder, manifest: Manifest, targets: Sequence[RowTarget], numbers: RowNumbers, buffer: int
) -> None:  # fmt: skip
    """Replace rows of the pieces.

    Args:
        numbers: kept between calls.
        buffer: bytes of rows that are read at a time, at least one row.

    Raises:
        InputError: a file is damaged. OSError: a file cannot be read.
    """
    with _OpenFiles(folder, manifest) as files:
        for piece, rows in sorted(targets, key=lambda target: (target.rows.values, target.piece.box)):
            both = rows.box.overlap(piece.box)
            if both is None:
                continue
            file, low = rows.numbers[0], both.offsets[0]
            for segment in numbers.between(files.reader(file), files.path(file), rows, low, low + both.sizes[0]):
                _replace(files.reader(rows.values[0]), rows, segment, piece, both, buffer)


def _replace(reader: BlockReader, rows: RowList, segment: Segment, piece: Piece, both: Box, buffer: int) -> None:
    """Write the listed rows of a segment into the cells `both` of a piece."""
    own, memory = piece
    row = rows.box.cells // rows.box.sizes[0] * memory.dtype.itemsize
    step = max(1, buffer // (row + segment.numbers.itemsize))
    columns = Box((own.offsets[0], *both.offsets[1:]), (own.sizes[0], *both.sizes[1:]))
    place = own.within(memory, columns)
    for first in range(0, len(segment.numbers), step):
        numbers_U = segment.numbers[first : first + step]
        values = scratch_tensor((len(numbers_U), *rows.box.sizes[1:]), memory.dtype)
        reader.read_into(rows.values[1] + (segment.at + first) * row, _bytes(values))
        for dim in range(1, len(both.sizes)):
            values = values.narrow(dim, both.offsets[dim] - rows.box.offsets[dim], both.sizes[dim])
        at = (numbers_U - own.offsets[0]).to(place.device)
        target = place
        if memory.dtype.itemsize == 1:  # torch does not index tensors of all 8-bit floats
            target, values = place.view(torch.uint8), values.view(torch.uint8)
        target[at] = values.to(place.device)


def _bytes(memory: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, to write to."""
    return memory.detach().reshape(-1).view(torch.uint8).numpy().data
