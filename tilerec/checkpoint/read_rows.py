"""Read the changed rows of tensors from an incremental checkpoint into memory, over the rows of its base.

Row numbers of a list are read as a whole, 8 bytes a row. Values go through a buffer of `SCRATCH_BYTES`; of a list of
many rows, a piece reads just those that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BlockReader
from tilerec.checkpoint.folder import CheckpointFolder
from tilerec.checkpoint.manifest import Manifest, RowList
from tilerec.checkpoint.pieces import Box, Piece
from tilerec.errors import InputError

SCRATCH_BYTES = 1 << 24


class RowTarget(NamedTuple):
    """A piece, in which listed rows are replaced."""

    piece: Piece
    rows: RowList


RowNumbers = dict[tuple[str, int], Tensor]
"""Numbers of listed rows that have been read, by their file and byte."""


def read_rows(
    folder: CheckpointFolder, manifest: Manifest, targets: Sequence[RowTarget], numbers: RowNumbers
) -> None:  # fmt: skip
    """Replace rows of the pieces.

    Args:
        numbers: kept between calls; gets those that are read.

    Raises:
        InputError: a file is damaged. OSError: a file cannot be read.
    """
    with ExitStack() as opened:
        readers: dict[str, BlockReader] = {}

        def reader(name: str) -> BlockReader:
            if name not in readers:
                file = manifest.files[name]
                path = f"{folder.path}/{name}"
                stream = opened.enter_context(folder.open(name))
                readers[name] = opened.enter_context(BlockReader(stream, path, file.size, file.crcs))
            return readers[name]

        for piece, rows in sorted(targets, key=lambda target: (target.rows.values, target.piece.box)):
            both = rows.box.overlap(piece.box)
            if both is None:
                continue
            file, start = rows.numbers
            path = f"{folder.path}/{file}"
            place = path, start
            if place not in numbers:
                numbers[place] = _numbers(reader(file), rows, path)
            _replace(reader(rows.values[0]), rows, numbers[place], piece, both)


def _numbers(reader: BlockReader, rows: RowList, path: str) -> Tensor:
    """Return the row numbers, int64 `[count]`."""
    found = torch.empty(rows.count, dtype=torch.int64)
    reader.read_into(rows.numbers[1], _bytes(found))
    first, last = rows.box.offsets[0], rows.box.offsets[0] + rows.box.sizes[0]
    if int(found[0]) < first or int(found[-1]) >= last or not bool((found[1:] > found[:-1]).all()):
        raise InputError(
            f"Checkpoint {path}: got row numbers from {int(found[0])} to {int(found[-1])}; expected ascending numbers "
            f"in [{first}, {last}). Load an earlier checkpoint."
        )
    return found


def _replace(reader: BlockReader, rows: RowList, numbers_U: Tensor, piece: Piece, both: Box) -> None:
    """Write the listed rows of the cells `both` into a piece."""
    own, memory = piece
    edges = torch.tensor([both.offsets[0], both.offsets[0] + both.sizes[0]])
    low, high = torch.searchsorted(numbers_U, edges).tolist()
    row = rows.box.cells // rows.box.sizes[0] * memory.dtype.itemsize
    step = max(1, SCRATCH_BYTES // row)
    columns = Box((own.offsets[0], *both.offsets[1:]), (own.sizes[0], *both.sizes[1:]))
    place = own.within(memory, columns)
    for first in range(low, high, step):
        count = min(step, high - first)
        values = torch.empty((count, *rows.box.sizes[1:]), dtype=memory.dtype)
        reader.read_into(rows.values[1] + first * row, _bytes(values))
        for dim in range(1, len(both.sizes)):
            values = values.narrow(dim, both.offsets[dim] - rows.box.offsets[dim], both.sizes[dim])
        at = (numbers_U[first : first + count] - own.offsets[0]).to(place.device)
        if memory.dtype.itemsize == 1:  # torch does not index tensors of all 8-bit floats
            place, values = place.view(torch.uint8), values.view(torch.uint8)
        place[at] = values.to(place.device)


def _bytes(memory: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, to write to."""
    return memory.detach().reshape(-1).view(torch.uint8).numpy().data
