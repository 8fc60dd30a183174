"""`RowGroups`: a source of rows in groups of known size, which can be read in any order; sources in memory.

Legend: G row groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from tilerec.errors import InputError

Bounds = tuple[Any, Any]


class GroupReader(ABC):
    """One open row group."""

    @abstractmethod
    def read(self, columns: Sequence[str]) -> pa.Table:
        """Decode columns of all rows."""

    def column_bytes(self, column: str) -> int:
        """Return the bytes of a column in memory, roughly; 0 if they need not be counted."""
        return 0

    def bounds(self, column: str) -> Bounds | None:
        """Return the least and the greatest value of a column, if known without reading it and without nulls."""
        return None


class RowGroups(ABC):
    """Rows in groups that can be read in any order, by several threads.

    Attributes:
        name: of the source, for messages.
        schema: names and types of the columns.
        group_rows: rows of each group [G].
        group_files: number of the file that each group belongs to [G].
    """

    name: str
    schema: pa.Schema
    group_rows: tuple[int, ...]
    group_files: tuple[int, ...]

    @abstractmethod
    def where(self, group: int) -> str:
        """Return the file and the row group, for messages."""

    @abstractmethod
    def open(self, group: int) -> AbstractContextManager[GroupReader]:
        """Open a row group; raise `InputError` if it cannot be read."""

    @abstractmethod
    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise `InputError` if files differ in one of the columns."""


class _TableReader(GroupReader):
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def read(self, columns: Sequence[str]) -> pa.Table:
        return self._table.select(list(columns))


class TableGroups(RowGroups):
    """Rows of an Arrow table in memory.

    Args:
        table: a `pyarrow.Table`, or anything that exports the Arrow stream protocol, such as a pandas or Polars frame.
        rows_per_group: rows of each group but the last; groups are slices, without a copy.
    """

    def __init__(self, table: Any, *, rows_per_group: int = 1 << 16) -> None:
        self._table = as_table(table)
        self.name = "table"
        self.schema = self._table.schema
        self._step = rows_per_group
        rows = self._table.num_rows
        self.group_rows = tuple(min(self._step, rows - at) for at in range(0, rows, self._step))
        self.group_files = (0,) * len(self.group_rows)

    def where(self, group: int) -> str:
        start = group * self._step
        return f"table, rows {start} to {start + self.group_rows[group] - 1}"

    @contextmanager
    def open(self, group: int) -> Iterator[GroupReader]:
        yield _TableReader(self._table.slice(group * self._step, self.group_rows[group]))

    def check_columns(self, columns: Sequence[str]) -> None:
        """Return: a table has one schema."""


def as_table(data: Any) -> pa.Table:
    """Return the data as an Arrow table; a pandas index is left out."""
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    try:
        if type(data).__module__.partition(".")[0] == "pandas":
            return pa.Table.from_pandas(data, preserve_index=False)
        return pa.table(data)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"table: got a {type(data).__name__} that Arrow cannot read ({error}); expected a pyarrow table, a pandas "
            "or Polars frame, or a dict of columns. Convert it."
        ) from error


class MapGroups(RowGroups):
    """Rows of a map-style `torch.utils.data.Dataset` whose samples are dicts.

    Values are numbers, text, or one-dimensional lists, arrays or tensors. The samples of a group are fetched one by
    one, or with the data set's `__getitems__` if it has one.

    Args:
        dataset: the data set; it is read from a background thread.
        rows_per_group: samples that are fetched and kept in memory together.
    """

    def __init__(self, dataset: Any, *, rows_per_group: int = 1 << 13) -> None:
        self._dataset = dataset
        self._step = rows_per_group
        self.name = type(dataset).__name__
        rows = len(dataset)
        self.group_rows = tuple(min(self._step, rows - at) for at in range(0, rows, self._step))
        self.group_files = (0,) * len(self.group_rows)
        self.schema = self._fetch(0, 1).schema if rows else pa.schema([])

    def where(self, group: int) -> str:
        start = group * self._step
        return f"{self.name}, samples {start} to {start + self.group_rows[group] - 1}"

    @contextmanager
    def open(self, group: int) -> Iterator[GroupReader]:
        yield _TableReader(self._fetch(group * self._step, self.group_rows[group]))

    def check_columns(self, columns: Sequence[str]) -> None:
        """Return: each group is checked when it is read."""

    def _fetch(self, start: int, count: int) -> pa.Table:
        indices = list(range(start, start + count))
        many = getattr(self._dataset, "__getitems__", None)
        samples = many(indices) if many is not None else [self._dataset[index] for index in indices]
        first = samples[0]
        if not isinstance(first, dict):
            raise InputError(
                f"{self.name}: got a sample of type {type(first).__name__}; expected a dict from column names to "
                "values. Wrap the data set."
            )
        columns: dict[str, pa.Array] = {}
        for name in first:
            try:
                columns[name] = pa.array([_plain(sample[name]) for sample in samples])
            except (KeyError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise InputError(
                    f"{self.name}, samples {start} to {start + count - 1}: column {name!r}: got a sample without it, "
                    "or "
                    f"with another type ({error}); expected one type. Return the same columns for every sample."
                ) from error
        return pa.table(columns)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    return value
