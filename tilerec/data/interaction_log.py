"""`InteractionLog`: (user, item, time) rows of files, in memory.

Memory: 8 bytes per value for integers (the bytes of texts for texts) and 8 per time, while it is read; the data set
keeps 20 bytes per interaction.

Legend: n interactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as arrow

from tilerec.data.arrow_values import kind_of
from tilerec.data.columns import nearest
from tilerec.data.row_groups import RowGroups
from tilerec.errors import ConfigError, InputError


@dataclass(frozen=True)
class LogColumns:
    """Columns of an interaction log.

    Attributes:
        user, item: integers or texts.
        time: numbers, dates or times; "": the rows of a user are in order of time.
        rating: a column of numbers; "": none.
        at_least: with `rating`, rows with a lower number are left out.
    """

    user: str = "user"
    item: str = "item"
    time: str = ""
    rating: str = ""
    at_least: float = 0.0

    @property
    def names(self) -> list[str]:
        """The columns to read, each once: a column may have several roles."""
        return list(dict.fromkeys(name for name in (self.user, self.item, self.time, self.rating) if name))


@dataclass(frozen=True)
class InteractionLog:
    """Interactions in the order of the files.

    Attributes:
        users, items: int64 or large_binary [n].
        times: int64 or float64 [n]; None: the order of the files is the order of time.
        rows: rows read, with those below the rating.
        name: of the source, for messages.
    """

    users: pa.Array
    items: pa.Array
    times: npt.NDArray[Any] | None
    rows: int
    name: str


def read_log(source: RowGroups, columns: LogColumns) -> InteractionLog:
    """Read an interaction log.

    Raises:
        ConfigError: a column does not exist.
        InputError: the data cannot be read; a value is missing, or has a type that cannot be used.
    """
    for role in ("user", "item", "time", "rating"):
        name = getattr(columns, role)
        if name and name not in source.schema.names:
            raise ConfigError(
                f"{source.name}: got data.{role}={name!r}, which is not there; {nearest(name, source.schema.names)}"
            )
    source.check_columns(columns.names)
    users: list[pa.Array] = []
    items: list[pa.Array] = []
    times: list[npt.NDArray[Any]] = []
    for group in range(len(source.group_rows)):
        with source.open(group) as reader:
            table = reader.read(columns.names)
        where = source.where(group)
        for name in columns.names:
            if table.column(name).null_count:
                raise InputError(
                    f"{where}: column {name!r}: got {table.column(name).null_count} missing values; expected a value "
                    "in each row. Remove these rows, or fill them in."
                )
        if columns.rating:
            rating = _numbers(table.column(columns.rating), columns.rating, where)
            table = table.filter(pa.array(rating >= columns.at_least))
        users.append(_ids(table.column(columns.user), columns.user, where))
        items.append(_ids(table.column(columns.item), columns.item, where))
        if columns.time:
            times.append(_numbers(table.column(columns.time), columns.time, where))
    if columns.rating and not any(map(len, users)):
        raise InputError(
            f"{source.name}: got no row with {columns.rating} of at least {columns.at_least:g}; expected some. Lower "
            "data.at_least, or add data."
        )
    return InteractionLog(
        _joined(users, columns.user, source.name),
        _joined(items, columns.item, source.name),
        np.concatenate(times) if times else None,
        sum(source.group_rows),
        source.name,
    )


def _ids(column: pa.ChunkedArray, name: str, where: str) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = kind_of(column.type)
    if kind not in ("integer", "text"):
        raise InputError(f"{where}: column {name!r}: got {column.type}; expected integers or text. Convert it.")
    try:
        return column.cast(pa.int64() if kind == "integer" else pa.large_binary()).combine_chunks()
    except pa.ArrowInvalid as error:
        raise InputError(
            f"{where}: column {name!r}: got {error}; expected 64-bit integers. Store it as text."
        ) from error


def _numbers(column: pa.ChunkedArray, name: str, where: str) -> npt.NDArray[Any]:
    kind = column.type
    if pa.types.is_temporal(kind):
        column = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    elif kind_of(kind) not in ("integer", "number"):
        raise InputError(f"{where}: column {name!r}: got {kind}; expected numbers or times. Convert it.")
    values: npt.NDArray[Any] = column.to_numpy()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise InputError(f"{where}: column {name!r}: got a value that is not finite; expected numbers. Correct it.")
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)


def _joined(parts: Sequence[pa.Array], name: str, source: str) -> pa.Array:
    kinds = {part.type for part in parts}
    if len(kinds) > 1:
        raise InputError(
            f"{source}: column {name!r}: got {' and '.join(sorted(map(str, kinds)))} in different files; expected one "
            "type. Convert the files."
        )
    return pa.concat_arrays(parts) if parts else pa.array([], pa.int64())


def readable(values: pa.Array) -> pa.Array:
    """Return texts as UTF-8 where they all are; other values unchanged."""
    if not pa.types.is_large_binary(values.type):
        return values
    try:
        return values.cast(pa.large_utf8()).cast(pa.utf8())
    except pa.ArrowInvalid:
        return values


@dataclass(frozen=True)
class ValueRows:
    """A vocabulary: known values, each with its own row; row 0 is for all others.

    Attributes:
        values: distinct, int64 or large_binary; value i has row i + 1.
        feature: its name, for messages.
    """

    values: pa.Array
    feature: str

    @staticmethod
    def of(values: pa.Array, feature: str) -> ValueRows:
        """Return the vocabulary of all values, in ascending order."""
        distinct = arrow.unique(values)
        return ValueRows(distinct.take(arrow.sort_indices(distinct)), feature)

    @property
    def num_rows(self) -> int:
        """Rows of a table: one per value, and row 0."""
        return len(self.values) + 1

    def rows(self, values: pa.Array, name: str) -> npt.NDArray[np.int64]:
        """Return the row of each value, int64.

        Raises:
            InputError: the values have another type than the vocabulary.
        """
        if values.type != self.values.type:
            if not len(values):
                return np.zeros(0, np.int64)
            kinds = {pa.int64(): "integers", pa.large_binary(): "text"}
            raise InputError(
                f"{name}: {self.feature}: got {kinds.get(values.type, values.type)}; expected "
                f"{kinds.get(self.values.type, self.values.type)}, as in the training data. Convert the column."
            )
        places = arrow.index_in(values, self.values)
        found: npt.NDArray[np.int64] = places.fill_null(-1).to_numpy().astype(np.int64) + 1
        return found
