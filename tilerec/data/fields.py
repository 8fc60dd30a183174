"""Fields of a batch from columns: checks, transforms and rows of tables, for the rows of one row group.

Each field reads its column as NumPy arrays (`arrow_values.py`). An error names the place, the column, the row and the
next move.

Legend: n rows, N ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tilerec.data.arrow_values import Offsets, Values, read_values
from tilerec.data.chosen_rows import RowHash
from tilerec.data.columns import MISSING_ROW, Columns, DenseColumn, IdColumn, LabelColumn
from tilerec.data.rows import hash_rows, hash_values, mix, rows_of_hashes
from tilerec.data.transform import signed_log
from tilerec.errors import InputError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
ReadColumn = Callable[[str], pa.ChunkedArray]
"""Returns a column of the row group by name."""
Bounds = tuple[float, float]
"""Least and greatest value."""

MISSING_ID = int(hash_values(pa.array([b"missing"]))[0].view(np.int64))
"""The id of missing values in tables of managed collision."""


@dataclass(frozen=True)
class BagIds:
    """Ids of one feature.

    Attributes:
        values: int64 [N].
        offsets: start of each row's ids, and the end of the last, int32 or int64 [n + 1], from 0 to N; None if each
            row has one, so N = n.
        weights: float32 [N], or None.
        row_hash: None: the ids are rows of the table. Otherwise they are ids of which it makes rows.
    """

    values: Ints
    offsets: Offsets | None = None
    weights: Floats | None = None
    row_hash: RowHash | None = None

    def with_rows(self) -> BagIds:
        """Return the same with rows as ids."""
        if self.row_hash is None:
            return self
        rows, first_row = self.row_hash
        return BagIds(hash_rows(self.values, rows, first_row=first_row), self.offsets, self.weights)


def read_label(label: LabelColumn, read: ReadColumn, where: str, bounds: Bounds | None = None) -> Floats:
    """Return the labels of a task, float32 [n].

    Args:
        bounds: least and greatest label that the task accepts; None: every finite number.

    Raises:
        InputError: missing labels, or labels out of bounds.
    """
    values_n, missing_n, finite = _numbers(read(label.column))
    if missing_n is not None:
        raise _missing(where, "label column", label.column, missing_n, "Remove these rows, or fill them in.")
    if not finite:
        _check_finite(values_n, where, "label column", label.column)
    if label.at_least is not None:
        return (values_n >= label.at_least).astype(np.float32)
    labels_n = _as_float32(values_n, where, "label column", label.column)
    if bounds is not None and len(labels_n):
        low, high = bounds
        if labels_n.min() < low or labels_n.max() > high:
            row = int(((labels_n < low) | (labels_n > high)).argmax())
            raise InputError(
                f"{where}: label column {label.column!r}: got {values_n[row]:.9g} in row {row}; expected {low:g} to "
                f"{high:g}. Set at_least on the column (labels of at least that number become 1), or convert it."
            )
    return labels_n


def read_sample_weight(column: str, read: ReadColumn, where: str) -> Floats:
    """Return the weights of samples, float32 [n]. Raise `InputError` unless all are finite and at least 0."""
    values_n, missing_n, finite = _numbers(read(column))
    if missing_n is not None:
        raise _missing(where, "weight column", column, missing_n, "Fill them in; 0 leaves a sample out.")
    if not finite:
        _check_finite(values_n, where, "weight column", column)
    if len(values_n) and values_n.min() < 0:
        row = int(np.argmax(values_n < 0))
        raise InputError(
            f"{where}: weight column {column!r}: got {values_n[row]:g} in row {row}; expected at least 0. Correct it."
        )
    return _as_float32(values_n, where, "weight column", column)


def read_dense(dense: DenseColumn, read: ReadColumn, where: str) -> Floats:
    """Return a dense feature, transformed, float32 [n]. Raise `InputError` for infinity, and for missing values."""
    values_n, missing_n, finite = _numbers(read(dense.column))
    if missing_n is not None:
        if dense.missing == "error":
            raise _missing(
                where,
                "dense column",
                dense.column,
                missing_n,
                "Fill them in, or set missing='zero' on the column.",
            )
        values_n = np.where(missing_n, 0, values_n)
    if not finite:
        _check_finite(values_n, where, "dense column", dense.column)
    if dense.transform == "log":
        out_n = signed_log(values_n)
    elif dense.transform == "normalize":
        with np.errstate(over="ignore"):
            normal_n = (values_n - dense.mean) / dense.std
        out_n = _as_float32(normal_n, where, "dense column", dense.column, of=values_n)
    else:
        out_n = _as_float32(values_n, where, "dense column", dense.column)
    if missing_n is not None and dense.transform == "normalize":
        out_n[missing_n] = 0
    return out_n


def read_ids(columns: Columns, column: IdColumn, read: ReadColumn, where: str) -> BagIds:
    """Return the ids of a feature as rows of its table.

    Raises:
        InputError: missing ids, row numbers outside of the table, weights that do not match the lists.
    """
    return read_ids_unhashed(columns, column, read, where).with_rows()


def read_ids_unhashed(columns: Columns, column: IdColumn, read: ReadColumn, where: str) -> BagIds:
    """Return what `read_ids` does, but integers of a hashed table, one in each row, as they are, with a `row_hash`."""
    found = read_values(read(column.column))
    if _can_hash_later(columns, column, found):
        table = columns.table_of(column)
        return BagIds(_signed(found.values), row_hash=RowHash(table.rows, columns.first_row(column)))
    if column.boundaries:
        found = _bucketised(column, found, columns.first_row(column))
    missing_N = found.missing
    if (missing_N is not None or found.missing_lists is not None) and column.missing == "error":
        mask = found.missing_lists if missing_N is None else missing_N
        inside = found.offsets is not None and missing_N is not None
        assert mask is not None
        raise _missing(
            where,
            "id column",
            column.column,
            mask,
            "Set missing='empty' (no id) or missing='row' (a row of their own) on the column.",
            found.offsets if inside else None,
        )
    rows_N = _rows(columns, column, found, where)
    weights_N = _weights(column, found, read, where) if column.weights else None
    bags = BagIds(rows_N, found.offsets, weights_N)
    if missing_N is not None and column.missing == "row":
        table = columns.table_of(column)
        bags.values[missing_N] = MISSING_ID if table.ids == "managed" else MISSING_ROW
    elif missing_N is not None:
        bags = _without(bags, missing_N)
    if found.missing_lists is not None and column.missing == "row":
        bags = _with_missing_rows(
            bags,
            found.missing_lists,
            MISSING_ID if columns.table_of(column).ids == "managed" else MISSING_ROW,
        )
    if column.multi_hot > 1:
        return _multi_hot(bags, column.multi_hot, columns.table_of(column).rows)
    return _latest(bags, column.max_length) if column.max_length else bags


class _Numbers(NamedTuple):
    """Numbers of a column, which of them are null or NaN (None: none), and True if no number can be infinite."""

    values: npt.NDArray[Any]
    missing: npt.NDArray[np.bool_] | None
    finite: bool


def _numbers(column: pa.ChunkedArray) -> _Numbers:
    """Return a column's numbers."""
    found = read_values(column)
    values_n, missing_n = found.values, found.missing
    if values_n.dtype.kind != "f":
        return _Numbers(values_n, missing_n, True)
    # One sum is cheaper than a test of each value. It is NaN if a value is (or for infinities of both signs).
    total = _quiet_sum(values_n)
    if np.isnan(total):
        nan_n = np.isnan(values_n)
        if nan_n.any():
            missing_n = nan_n if missing_n is None else missing_n | nan_n
    return _Numbers(values_n, missing_n, bool(np.isfinite(total)))


def _quiet_sum(values_n: npt.NDArray[Any]) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        return float(values_n.sum(dtype=values_n.dtype))


def _check_finite(values_n: npt.NDArray[Any], where: str, role: str, column: str) -> None:
    if values_n.dtype.kind == "f" and not np.isfinite(_quiet_sum(values_n)):
        bad_n = ~np.isfinite(values_n)
        if bad_n.any():
            row = int(bad_n.argmax())
            raise InputError(
                f"{where}: {role} {column!r}: got {values_n[row]} in row {row}; expected finite numbers. Correct the "
                "value, or remove the row."
            )


def _as_float32(
    values_N: npt.NDArray[Any],
    where: str,
    role: str,
    column: str,
    *,
    of: npt.NDArray[Any] | None = None,
    offsets_n1: Offsets | None = None,
) -> Floats:
    """Return finite numbers as float32; raise `InputError` for the first one that overflows it.

    Args:
        of: the numbers of the data from which `values_N` were computed; None: `values_N` are those.
        offsets_n1: of the lists that hold the numbers; None: one in each row.
    """
    with np.errstate(over="ignore"):
        floats_N: Floats = values_N.astype(np.float32, copy=False)
    if of is None and values_N.dtype != np.float64:  # whole numbers and narrower floats fit
        return floats_N
    if not np.isfinite(_quiet_sum(floats_N)):
        over_N = ~np.isfinite(floats_N)
        if over_N.any():
            place = int(over_N.argmax())
            row = place if offsets_n1 is None else int(np.searchsorted(offsets_n1[1:], place, side="right"))
            after = "" if of is None else f", which is {values_N[place]:g} after the transform,"
            raise InputError(
                f"{where}: {role} {column!r}: got {(values_N if of is None else of)[place]:g}{after} in row {row}; "
                f"expected numbers within ±{np.finfo(np.float32).max:.3g}, as models compute in float32. Correct the "
                "value, or remove the row."
            )
    return floats_N


def _missing(
    where: str, role: str, column: str, missing_N: npt.NDArray[np.bool_], move: str, offsets_n1: Offsets | None = None
) -> InputError:
    """Return the error for missing rows, or, with the offsets of lists, for missing values inside of them."""
    place, inside = int(missing_N.argmax()), ""
    if offsets_n1 is not None:
        place, inside = int(np.searchsorted(offsets_n1[1:], place, side="right")), " inside of lists"
    return InputError(
        f"{where}: {role} {column!r}: got {int(missing_N.sum()):,} missing values{inside}, the first in row {place}; "
        f"expected none. {move}"
    )


def _bucketised(column: IdColumn, found: Values, first_row: int) -> Values:
    """Return the rows of numbers: the boundaries that are <= the number. A NaN is missing."""
    rows_N = np.searchsorted(np.asarray(column.boundaries), found.values, side="right") + first_row
    missing_N = found.missing
    if found.values.dtype.kind == "f":
        nan_N = np.isnan(found.values)
        if nan_N.any():
            missing_N = nan_N if missing_N is None else missing_N | nan_N
    return Values(rows_N.astype(np.int64), found.offsets, missing_N, found.missing_lists)


def _rows(columns: Columns, column: IdColumn, found: Values, where: str) -> Ints:
    table, values_N = columns.table_of(column), found.values
    if values_N.dtype.kind == "f":  # only samples of PyTorch's data sets can have another type than the first ones
        raise InputError(
            f"{where}: id column {column.column!r}: got numbers with fractions; expected integers or text, as in the "
            "first samples. Return one type for every sample."
        )
    if table.ids == "rows":
        return _checked_rows(column, table.name, table.rows, found, where)
    if table.ids == "vocabulary":
        return columns.vocabularies[table.name].rows_of(values_N if found.hashed else hash_values(values_N))
    if found.hashed:
        hashes_N: npt.NDArray[np.uint64] = values_N
        if table.ids == "managed":
            return hashes_N.view(np.int64)
        return rows_of_hashes(hashes_N, table.rows, columns.first_row(column))
    if table.ids == "managed":
        return hash_values(_signed(values_N)).view(np.int64)
    return hash_rows(_signed(values_N), table.rows, first_row=columns.first_row(column))


def _signed(values_N: npt.NDArray[Any]) -> Ints:
    # Unsigned 64-bit ids keep their bits as int64.
    return values_N.view(np.int64) if values_N.dtype == np.uint64 else values_N.astype(np.int64, copy=False)


def _can_hash_later(columns: Columns, column: IdColumn, found: Values) -> bool:
    """Return True for integers of a hashed table, one in each row."""
    return (
        columns.table_of(column).ids == "hash"
        and found.values.dtype.kind in "iu"
        and not (found.hashed or column.boundaries or column.multi_hot > 1)
        and found.offsets is None
        and found.missing is None
    )


def _checked_rows(column: IdColumn, table: str, rows: int, found: Values, where: str) -> Ints:
    """Return ids that are row numbers, after a check of their range. Missing ids are not checked."""
    values_N = found.values
    if values_N.dtype == np.uint64:
        if len(values_N) and values_N.max() >= rows:
            values_N = np.minimum(values_N, np.uint64(2**63 - 1))
        values_N = values_N.view(np.int64)
    rows_N: Ints = values_N.astype(np.int64, copy=found.missing is not None)
    # As unsigned numbers, negative ids are above every row: one pass.
    if len(rows_N) and rows_N.view(np.uint64).max() >= rows:
        bad_N = (rows_N < 0) | (rows_N >= rows)
        if found.missing is not None:
            bad_N &= ~found.missing
        if bad_N.any():
            place = int(bad_N.argmax())
            row = place
            if found.offsets is not None:
                row = int(np.searchsorted(found.offsets[1:], place, side="right"))
            raise InputError(
                f"{where}: id column {column.column!r}: got id {rows_N[place]} in row {row}; expected row numbers of "
                f"table {table!r} in [0, {rows}). Enlarge the table, or set ids='hash' on it."
            )
    return rows_N


def _weights(column: IdColumn, found: Values, read: ReadColumn, where: str) -> Floats:
    """Return the weight of each id. The lists must have the lengths of the ids' lists."""
    given = read_values(read(column.weights))
    if given.offsets is None or found.offsets is None or not np.array_equal(given.offsets, found.offsets):
        row = 0
        if given.offsets is not None and found.offsets is not None:
            row = int((given.offsets != found.offsets)[1:].argmax())
        raise InputError(
            f"{where}: weight column {column.weights!r}: got a list of another length than that of id column "
            f"{column.column!r} in row {row}; expected one weight per id. Correct the row."
        )
    if given.missing is not None:
        raise _missing(where, "weight column", column.weights, given.missing, "Fill them in.", given.offsets)
    _check_finite(given.values, where, "weight column", column.weights)
    return _as_float32(given.values, where, "weight column", column.weights, offsets_n1=given.offsets)


def _without(bags: BagIds, missing_N: npt.NDArray[np.bool_]) -> BagIds:
    """Return the bags without the missing ids."""
    present_N = ~missing_N
    running_N1 = np.zeros(len(present_N) + 1, np.int64)
    np.cumsum(present_N, out=running_N1[1:])
    offsets_n1 = running_N1 if bags.offsets is None else running_N1[bags.offsets]
    weights_N = None if bags.weights is None else bags.weights[present_N]
    return BagIds(bags.values[present_N], offsets_n1, weights_N)


def _with_missing_rows(bags: BagIds, missing_n: npt.NDArray[np.bool_], value: int) -> BagIds:
    """Return the bags with the id `value`, of weight 1, where the list is missing."""
    assert bags.offsets is not None
    places = bags.offsets[:-1][missing_n]
    weights_N = None if bags.weights is None else np.insert(bags.weights, places, np.float32(1))
    offsets_n1 = bags.offsets.astype(np.int64)
    offsets_n1[1:] += np.cumsum(missing_n)
    return BagIds(np.insert(bags.values, places, value), offsets_n1, weights_N)


def _multi_hot(bags: BagIds, count: int, rows: int) -> BagIds:
    """Return bags of `count` rows per id: its row, and count - 1 rows that a hash of it draws from [0, rows)."""
    draws_N1 = bags.values.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(1, count, dtype=np.uint64)
    drawn_N1 = rows_of_hashes(mix(draws_N1.reshape(-1)), rows).reshape(-1, count - 1)
    values = np.concatenate([bags.values[:, None], drawn_N1], axis=1).reshape(-1)
    offsets_n1 = np.arange(len(bags.values) + 1) if bags.offsets is None else bags.offsets.astype(np.int64)
    return BagIds(values, offsets_n1 * count)


def _latest(bags: BagIds, most: int) -> BagIds:
    """Return the bags with their last `most` ids."""
    if bags.offsets is None or len(bags.offsets) < 2:
        return bags
    lengths_n = np.diff(bags.offsets)
    if lengths_n.max() <= most:
        return bags
    ends_n: Ints = bags.offsets[1:].astype(np.int64)
    from_end_N = np.repeat(ends_n, lengths_n) - np.arange(len(bags.values))
    kept_N = from_end_N <= most
    weights_N = None if bags.weights is None else bags.weights[kept_N]
    offsets_n1 = np.zeros(len(bags.offsets), np.int64)
    np.cumsum(np.minimum(lengths_n, most), out=offsets_n1[1:])
    return BagIds(bags.values[kept_N], offsets_n1, weights_N)


def wanted_kinds(columns: Columns) -> list[tuple[str, str, Sequence[str]]]:
    """Return (column, role, classes of values that it may have, see `kind_of`) for each role of each column."""
    numbers, ids = ("number", "integer", "boolean"), ("integer", "text", "boolean")
    wanted: list[tuple[str, str, Sequence[str]]] = []
    wanted += [(label.column, "label column", numbers) for label in columns.labels]
    wanted += [(dense.column, "dense column", numbers) for dense in columns.dense]
    if columns.weight:
        wanted.append((columns.weight, "weight column", numbers))
    for column in columns.ids:
        inner: Sequence[str] = ids
        if column.boundaries:
            inner = ("number", "integer")
        elif columns.table_of(column).ids == "rows":
            inner = ("integer", "boolean")
        elif column.type != "auto":
            inner = ("text",) if column.type == "text" else ("integer", "boolean")
        if column.kind != "single":
            inner = tuple(f"list of {kind}" for kind in inner)
        wanted.append((column.column, "id column", inner))
        if column.weights:
            wanted.append((column.weights, "weight column", ("list of number", "list of integer")))
    return wanted
