"""Division of rows into a training part and a held-out part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as arrow

from tilerec.data.columns import nearest
from tilerec.data.file_list import FilePath
from tilerec.data.row_groups import RowGroups
from tilerec.errors import ConfigError, InputError

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class HoldOut:
    """Rule that holds rows out of training; at most one of its three ways, or none for no held-out part.

    Attributes:
        every: k; the last of every k rows, counted through all files.
        column, at_least: rows whose value in this column is at least this number, date or text, such as "1700000000"
            or "2024-06-01": a split by time.
        path: other files with the held-out rows.
    """

    every: int = 0
    column: str = ""
    at_least: str = ""
    path: tuple[FilePath, ...] = ()

    def __post_init__(self) -> None:
        if sum((bool(self.every), bool(self.column), bool(self.path))) > 1:
            raise ConfigError(
                f"hold_out: got every={self.every}, column={self.column!r} and path={self.path}; expected at most one. "
                "Leave the others out."
            )
        if self.every < 0 or self.every == 1:
            raise ConfigError(
                f"hold_out.every: got {self.every}; expected 0, or 2 or more, so training has rows. Change it."
            )
        if bool(self.column) != bool(self.at_least):
            raise ConfigError(
                f"hold_out: got column={self.column!r} and at_least={self.at_least!r}; expected both or neither. Set "
                "the first value that is held out."
            )


NO_HOLD_OUT = HoldOut()


class HeldOutRows:
    """The held-out rows of each row group of a source.

    With a column, that column of a row group is read, unless the statistics of the group decide.

    Raises:
        ConfigError: the source lacks the column, or `at_least` is not a value of its type.
        InputError: the column has nulls, or NaNs in a row group that its statistics do not leave out.
    """

    def __init__(self, rule: HoldOut, source: RowGroups) -> None:
        self._rule, self._source = rule, source
        self._threshold = self._scalar() if rule.column else None
        self._counts: dict[int, int] = {}

    def count(self, group: int) -> int:
        """Return the number of held-out rows of a row group."""
        if group not in self._counts:
            self._counts[group] = self._count(group)
        return self._counts[group]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of held-out rows of each row group."""
        return tuple(self.count(group) for group in range(len(self._source.group_rows)))

    def mask(self, group: int) -> Mask | None:
        """Return True for each row that is held out; None if no row of the group is."""
        rows, count = self._source.group_rows[group], self.count(group)
        if not count:
            return None
        if count == rows:
            return np.ones(rows, np.bool_)
        if self._rule.every:
            first = self._source.first_row(group)
            return np.arange(first, first + rows) % self._rule.every == self._rule.every - 1
        return self._above(group)

    def _count(self, group: int) -> int:
        rule, rows = self._rule, self._source.group_rows[group]
        if rule.every:
            first = self._source.first_row(group)
            return (first + rows) // rule.every - first // rule.every
        if not rule.column:
            return 0
        with self._source.open(group) as reader:
            bounds = reader.bounds(rule.column)
        if bounds is not None:
            low, high = (self._at_least(pa.array([value], self._type)) for value in bounds)
            if not high.any():
                return 0
            if low.all() and not pa.types.is_floating(self._type):  # statistics do not show NaNs
                return rows
        return int(self._above(group).sum())

    def _above(self, group: int) -> Mask:
        with self._source.open(group) as reader:
            column = reader.read([self._rule.column]).column(0)
        missing = arrow.sum(arrow.is_null(column, nan_is_null=True)).as_py()
        if missing:
            raise InputError(
                f"{self._source.where(group)}: hold_out column {self._rule.column!r}: got {missing} missing values; "
                "expected a value in each row. Fill them in."
            )
        return self._at_least(column.cast(self._type))

    def _at_least(self, column: pa.ChunkedArray | pa.Array) -> Mask:
        return np.asarray(arrow.greater_equal(column, self._threshold))

    @property
    def _type(self) -> pa.DataType:
        kind = self._source.schema.field(self._rule.column).type
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    def _scalar(self) -> Any:
        name = self._rule.column
        if name not in self._source.schema.names:
            raise ConfigError(
                f"{self._source.name}: got hold_out.column={name!r}, which is not there; "
                f"{nearest(name, self._source.schema.names)}"
            )
        try:
            return pa.scalar(self._rule.at_least).cast(self._type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ConfigError(
                f"hold_out.at_least: got {self._rule.at_least!r} for column {name!r} of type {self._type}; expected a "
                f"value of that type ({error}). Write it as the data does."
            ) from error


def row_indices(masks: Sequence[Mask | None], rows: Sequence[int], *, held_out: bool) -> npt.NDArray[np.int64]:
    """Return the numbers of the held-out rows, or of the others, in consecutive row groups laid end to end."""
    if all(mask is None for mask in masks):
        return np.arange(0 if held_out else sum(rows))
    joined = np.concatenate(
        [np.zeros(count, np.bool_) if mask is None else mask for mask, count in zip(masks, rows, strict=True)]
    )
    return np.flatnonzero(joined == held_out)
