"""Rows of a trained model's tables in blocks: a conversion holds a block of the float rows, and never a whole table.

    model file   is mapped: tables are views of the file, and the pages that were read go back to the system
    checkpoint   blocks are read through its chain, into one buffer
    memory       blocks are views of tensors on any device

Names are those of a state dict: `ebc.embedding_bags.item.weight`. A block is valid until the next one is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilerec.atomic_file import open_replacement
from tilerec.checkpoint.chain import Wanted, open_chain, unreadable
from tilerec.checkpoint.data_file import Entry, bytes_of, starts_of
from tilerec.checkpoint.dtypes import DTYPES
from tilerec.checkpoint.folder import folder_at
from tilerec.checkpoint.pieces import Box, Piece
from tilerec.checkpoint.scratch_memory import scratch_tensor
from tilerec.errors import ConfigError
from tilerec.ops.backends import release_pages

BLOCK_BYTES = 1 << 22
"""Most bytes of a block, unless one row is larger."""


class RowBlock(NamedTuple):
    """Consecutive rows of a table: the number of the first one, and the rows `[n, dim]`."""

    first: int
    rows: Tensor


class SavedRows(Protocol):
    """A source of tables' rows."""

    def blocks(self, name: str) -> Iterator[RowBlock]:
        """Yield all rows of a table in order."""


class HeldRows:
    """Tables in memory, by name."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        self.tables = dict(tables)

    def blocks(self, name: str) -> Iterator[RowBlock]:
        """Yield all rows of a table in order."""
        rows = self.tables[name]
        step = _block_rows(rows.shape[1], rows.dtype)
        for first in range(0, rows.shape[0], step):
            yield RowBlock(first, rows[first : first + step])


class MappedRows(HeldRows):
    """Tables of a safetensors file that stays as it is. Nothing may write to the tensors.

    Args:
        names: of the tables.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        memory = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[8 + size :]
        tables: dict[str, Tensor] = {}
        for name in names:
            low, high = header[name]["data_offsets"]
            tables[name] = memory[low:high].view(DTYPES[header[name]["dtype"]]).view(header[name]["shape"])
        super().__init__(tables)

    def blocks(self, name: str) -> Iterator[RowBlock]:
        """Yield all rows of a table in order; pages of earlier blocks have gone back to the system."""
        for block in super().blocks(name):
            yield block
            release_pages(block.rows)


class CheckpointRows:
    """Tables of the part `model` of a checkpoint.

    Args:
        shapes: of the tables, by name.

    Raises:
        FileError, InputError: the checkpoint cannot be read, or is damaged.
        ConfigError: it lacks a table, or has one of another shape.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._chain = open_chain(folder_at(path))
        for name, shape in shapes.items():
            saved = self._chain.tensors.get(f"model.{name}")
            if saved is None or tuple(saved.shape) != shape:
                got = "no tensor" if saved is None else f"the shape {list(saved.shape)}"
                raise ConfigError(
                    f"Checkpoint {path}: got {got} for model.{name}; expected the shape {list(shape)}. The run's model "
                    "or its tables have changed since; use the run file of the checkpoint."
                )

    def blocks(self, name: str) -> Iterator[RowBlock]:
        """Yield all rows of a table in order. Raises InputError, FileError: the checkpoint is damaged or gone."""
        saved = self._chain.tensors[f"model.{name}"]
        count, dim = saved.shape
        step = _block_rows(dim, saved.dtype)
        buffer = scratch_tensor((min(step, count), dim), saved.dtype)
        for first in range(0, count, step):
            rows = buffer[: count - first]
            try:
                self._chain.read([Wanted(Piece(Box((first, 0), tuple(rows.shape)), rows), f"model.{name}")])
            except OSError as error:
                raise unreadable(folder_at(self._chain.path), error) from error
            yield RowBlock(first, rows)

    def mapped(self, folder: Path, names: Sequence[str]) -> MappedRows:
        """Copy tables to a file in a folder, and map it. Raises FileError: the file cannot be written."""
        tensors = {name: self._chain.tensors[f"model.{name}"] for name in names}
        entries = [Entry(name, saved.dtype, saved.shape) for name, saved in tensors.items()]
        entries.sort(key=lambda entry: -entry.dtype.itemsize)  # each begins at a multiple of its item size
        head, _ = starts_of(entries)
        path = folder / "tables.safetensors"
        with open_replacement(path, "Tables", f"space for {sum(entry.bytes for entry in entries):,} bytes") as file:
            file.write(head)
            for entry in entries:
                for block in self.blocks(entry.key):
                    file.write(bytes_of(block.rows))
        return MappedRows(path, names)


def _block_rows(dim: int, dtype: torch.dtype) -> int:
    return max(1, BLOCK_BYTES // max(1, dim * dtype.itemsize))
