"""`StagedRows`: the contents of a delta in memory, every byte checked, before anything is written.

Legend: U listed rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BlockReader, Part
from tilerec.checkpoint.chain import unreadable
from tilerec.checkpoint.pieces import Box, Piece
from tilerec.checkpoint.read_boxes import Target, read_boxes
from tilerec.delta.log import Entry
from tilerec.errors import InputError


class StagedRows(NamedTuple):
    """Values of a part of a tensor.

    Args:
        rows_U: numbers of the rows in the tensor, int64, ascending; None: all rows of the box.
        box: the columns are those of the box.
        file: that they come from.
    """

    rows_U: Tensor | None
    box: Box
    values: Tensor
    file: str


def stage(entry: Entry, names: Collection[str] | None = None) -> dict[str, list[StagedRows]]:
    """Read an entry; return its parts by the name of their tensor.

    Args:
        names: of the tensors to read; None: all.

    Raises:
        InputError: it is damaged. FileError: it cannot be read.
    """
    found: dict[str, list[StagedRows]] = {}
    targets: list[Target] = []
    parts: dict[str, list[Part]] = {}  # by file
    numbers: dict[tuple[str, int], Tensor] = {}
    listed: list[tuple[Tensor, Box, str]] = []
    folder, manifest = entry.folder, entry.manifest

    def read(place: tuple[str, int], out: Tensor) -> Tensor:
        parts.setdefault(place[0], []).append(Part(place[1], out.reshape(-1).view(torch.uint8).numpy().data))
        return out

    # Each file is read once, from its start to its end, into the memory of its parts. One thread at a time works, since
    # requests need the other cores.
    for name, saved in manifest.tensors.items():
        if names is not None and name not in names:
            continue
        staged = found.setdefault(name, [])
        for chunk in saved.chunks:
            values = torch.empty(chunk.box.sizes, dtype=saved.dtype)
            targets.append(Target(Piece(chunk.box, values), saved))
            staged.append(StagedRows(None, chunk.box, values, chunk.file))
        for rows in sorted(saved.rows, key=lambda rows: rows.values):
            if rows.numbers not in numbers:
                numbers[rows.numbers] = read(rows.numbers, torch.empty(rows.count, dtype=torch.int64))
            values = torch.empty((rows.count, *rows.box.sizes[1:]), dtype=saved.dtype)
            listed.append((numbers[rows.numbers], rows.box, rows.numbers[0]))
            staged.append(StagedRows(numbers[rows.numbers], rows.box, read(rows.values, values), rows.values[0]))
    try:
        for name, own in parts.items():
            file = manifest.files[name]
            with (
                folder.open(name) as stream,
                BlockReader(stream, f"{folder.path}/{name}", file.size, file.crcs, checks=0) as reader,
            ):
                reader.read(sorted(own, key=lambda part: part.first))
        read_boxes(folder, manifest, targets)
    except OSError as error:
        raise unreadable(folder, error) from error
    for rows_U, box, file_name in listed:
        _check(rows_U, box, f"{folder.path}/{file_name}")
    return found


def _check(rows_U: Tensor, box: Box, path: str) -> None:
    first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
    if int(rows_U[0]) < first or int(rows_U[-1]) >= last or not bool((rows_U[1:] > rows_U[:-1]).all()):
        raise InputError(
            f"Delta log {path}: got row numbers from {int(rows_U[0])} to {int(rows_U[-1])}; expected ascending numbers "
            f"in [{first}, {last}). Begin again at a base."
        )
