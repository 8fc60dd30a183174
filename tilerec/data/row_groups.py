"""`RowGroups`: a source of rows in groups of known size, which can be read in any order; sources in memory.

Legend: G row groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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


class RowSource(ABC):
    """Rows with named columns.

    Attributes:
        name: of the source, for messages.
        schema: names and types of the columns.
        sampled: the types are those of the first samples, and a column without values there has an unknown type.
    """

    name: str
    schema: pa.Schema
    sampled = False

    @abstractmethod
    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise `InputError` if files differ in one of the columns."""

    @property
    def fingerprint(self) -> str:
        """Text that is the same on all ranks whose sources are the same; "" if it is not compared."""
        return ""


class RowGroups(RowSource):
    """Rows in groups that can be read in any order, by several threads.

    Attributes:
        group_rows: rows of each group [G].
    """

    group_rows: Sequence[int]

    def first_row(self, group: int) -> int:
        """Return the number of a group's first row in the source."""
        return int(self._first_rows[group])

    @cached_property
    def _first_rows(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *self.group_rows])

    def key_type(self, column: str) -> pa.DataType:
        """Return the type that a column has in tables of keys, the same for all groups."""
        return self.schema.field(column).type

    def in_order(self) -> Iterator[int]:
        """Yield the number of each group in turn."""
        yield from range(len(self.group_rows))

    def close(self) -> None:
        """End the reading of groups."""

    @abstractmethod
    def where(self, group: int) -> str:
        """Return the file and the row group, for messages."""

    @abstractmethod
    def open(self, group: int) -> AbstractContextManager[GroupReader]:
        """Open a row group; raise `InputError` if it cannot be read."""


class TableReader(GroupReader):
    """A row group in memory."""

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

    def where(self, group: int) -> str:
        start = group * self._step
        return f"table, rows {start} to {start + self.group_rows[group] - 1}"

    @contextmanager
    def open(self, group: int) -> Iterator[GroupReader]:
        yield TableReader(self._table.slice(group * self._step, self.group_rows[group]))

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
            "or Polars frame, a dict of columns, or a data set of torch.utils.data. Convert it."
        ) from error
