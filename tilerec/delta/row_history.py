"""`row_history`: which entries of a log have a row, and so why the row is as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.pieces import Box
from tilerec.delta.encodings import PART
from tilerec.delta.log import DeltaLog, Entry
from tilerec.delta.staged import stage
from tilerec.errors import InputError
from tilerec.ops.hash.definition import HashRange, HashState, zch_find
from tilerec.ops.quantized.row_format import dequantize_rows
from tilerec.quantized.row_type import ROW_TYPES

_RANK = re.compile(r"rank([0-9]+)-")


class RowWrite(NamedTuple):
    """Values of a row, or of its part that one rank held, in one entry.

    Args:
        rank: that wrote it; -1 if the file's name does not say.
        columns: first and last of its columns; the last is not included.
        values: the numbers; of quantized rows those that they stand for.
    """

    entry: Entry
    rank: int
    columns: tuple[int, int]
    values: Tensor


def tables_of(entry: Entry) -> list[str]:
    """Return the names of an entry's tensors with rows of two or more dimensions or ids, without the model's name."""
    return [name.removeprefix(f"{PART}.") for name in entry.manifest.tensors]


def row_history(log: DeltaLog, tensor: str, row: int) -> Iterator[RowWrite]:
    """Yield the values of a row in each entry that has it, newest first, back to the newest base before them.

    Args:
        tensor: its name in the model: `ebc.embedding_bags.user.weight`.
        row: its number.

    Raises:
        InputError: the log has no such tensor or row, lacks an entry, or is damaged. FileError: it cannot be read.
    """
    name = f"{PART}.{tensor}"
    newer: Entry | None = None
    for entry_name in reversed(log.names()):
        entry = log.open(entry_name)
        if newer is not None and newer.record.previous != entry.record.state:
            raise InputError(
                f"Delta log {newer.path}: got {entry.name} before it, which is not the state that it continues; "
                f"expected number {newer.record.sequence - 1} of the same log. Restore the missing entry, which may "
                "have the row."
            )
        newer = entry
        saved = entry.manifest.tensors.get(name)
        if saved is None or not saved.shape or not 0 <= row < saved.shape[0]:
            had = f"a tensor {list(saved.shape)}" if saved is not None else "no such tensor"
            raise InputError(
                f"Delta log {entry.path}: got row {row} of {tensor}, and {had} in it; expected one of its rows. Its "
                f"tensors are {', '.join(tables_of(entry)[:20])}."
            )
        for part in stage(entry, [name]).get(name, []):
            numbers = part.rows_U
            if numbers is None:
                at = row - part.box.offsets[0]
                found = 0 <= at < part.box.sizes[0]
            else:
                at = int(torch.searchsorted(numbers, row))
                found = at < numbers.numel() and int(numbers[at]) == row
            if found:
                match = _RANK.search(part.file)
                first, count = (part.box.offsets[1], part.box.sizes[1]) if len(part.box.sizes) > 1 else (0, 1)
                values = part.values[at].reshape(-1)
                kind, columns = entry.record.row_types.get(name, ("", 0))
                if kind in ROW_TYPES and ROW_TYPES[kind].bits:  # quantized rows are whole
                    values, count = dequantize_rows(values[None], columns, ROW_TYPES[kind].bits)[0], columns
                yield RowWrite(entry, int(match[1]) if match else -1, (first, first + count), values)
        if entry_name.is_base:
            return


def row_of_id(log: DeltaLog, tensor: str, id_: int) -> int:
    """Return the row that a raw id has in the newest state, for a table with managed ids.

    Args:
        tensor: weight of the table, as for `row_history`.

    Raises:
        InputError: the table has no managed ids, or the id has no row of its own.
    """
    names = log.names()
    table = tensor.split(".")[-2] if "." in tensor else tensor
    path = str(log.folder(names[-1]).path) if names else log.path
    contents = SavedContents(path)
    found = [name for name in contents.manifest.tensors if name.endswith(f".{table}.ids")]
    if len(found) != 1:
        raise InputError(
            f"Delta log {path}: got {len(found)} tensors named {table}.ids; expected one, of a table with managed ids. "
            "Give the row's number instead."
        )
    prefix = found[0].removesuffix("ids")
    count, size, shared, max_probe = (int(number) for number in _whole(contents, f"{prefix}geometry").tolist())
    ids_E, used_E = _whole(contents, f"{prefix}ids"), _whole(contents, f"{prefix}used")
    empty = torch.empty(0, dtype=torch.int64)
    state = HashState(ids_E, used_E, empty, empty, empty, empty, torch.empty(0, 0, dtype=torch.int32))
    place = int(zch_find(torch.tensor([id_]), state, HashRange(count, size - shared, max_probe)).rows_N[0])
    if place < 0:
        raise InputError(
            f"Delta log {path}: got the id {id_} of {table}, which has no row of its own; expected an id that has one. "
            "It reads a shared row, or none."
        )
    return place + place // (size - shared) * shared


def _whole(contents: SavedContents, name: str) -> Tensor:
    saved = contents.manifest.tensors[name]
    return contents.box_of(name, Box((0,) * len(saved.shape), saved.shape))
