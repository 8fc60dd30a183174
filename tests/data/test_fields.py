"""Fields of a batch: transforms, policies for missing values, rows of ids, and errors that name place and column."""

from __future__ import annotations

import math
import re
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.fields import (
    MISSING_ID,
    BagIds,
    read_dense,
    read_ids,
    read_ids_unhashed,
    read_label,
    read_sample_weight,
)
from tilerec.data.rows import hash_rows, hash_values
from tilerec.errors import ConfigError, InputError

WHERE = "day.parquet, row group 3"


def _read(**columns: Any) -> Any:
    table = pa.table(columns)
    return table.column


def _ids(column: IdColumn, values: Any, table: TableRows | None = None, **others: Any) -> BagIds:
    tables = (table,) if table is not None else ()
    columns = Columns((LabelColumn("y"),), ids=(column,), tables=tables)
    return read_ids(columns, column, _read(c=values, **others), WHERE)


def _bags(found: BagIds) -> list[list[int]]:
    lengths = [1] * len(found.values) if found.offsets is None else np.diff(found.offsets).tolist()
    return [part.tolist() for part in np.split(found.values, np.cumsum(lengths)[:-1])] if lengths else []


def test_labels_are_numbers_or_thresholds() -> None:
    assert read_label(LabelColumn("y"), _read(y=[1, 0, 3]), WHERE).tolist() == [1, 0, 3]
    assert read_label(LabelColumn("y", at_least=3.5), _read(y=[3.0, 3.5, 5.0]), WHERE).tolist() == [0, 1, 1]
    assert read_label(LabelColumn("y"), _read(y=[True, False]), WHERE).tolist() == [1, 0]


@pytest.mark.parametrize("bad", [None, math.nan])
def test_missing_labels_are_named(bad: float | None) -> None:
    message = r"day.parquet, row group 3: label column 'y': got 1 missing values, the first in row 1"
    with pytest.raises(InputError, match=message):
        read_label(LabelColumn("y"), _read(y=pa.array([1.0, bad, 0.0])), WHERE)


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_infinite_numbers_are_named(bad: float) -> None:
    read = _read(y=pa.array([1.0, 2.0, bad, -bad]))
    for reader, role in (
        (lambda: read_label(LabelColumn("y"), read, WHERE), "label"),
        (lambda: read_dense(DenseColumn("y"), read, WHERE), "dense"),
        (lambda: read_sample_weight("y", read, WHERE), "weight"),
    ):
        with pytest.raises(InputError, match=rf"{role} column 'y': got {bad} in row 2; expected finite numbers"):
            reader()


def test_numbers_beyond_float32_are_named() -> None:
    read = _read(y=[1.0, 1e39], narrow=pa.array([0.0, 1e30], pa.float32()), ids=[[1, 2], [3]], w=[[1.0, 1.0], [-1e39]])
    small = DenseColumn("narrow", transform="normalize", std=1e-30)
    weighted = IdColumn("c", kind="list", weights="w")
    for reader, message in (
        (lambda: read_label(LabelColumn("y"), read, WHERE), "label column 'y': got 1e+39 in row 1"),
        (lambda: read_dense(DenseColumn("y"), read, WHERE), "dense column 'y': got 1e+39 in row 1"),
        (lambda: read_sample_weight("y", read, WHERE), "weight column 'y': got 1e+39 in row 1"),
        (lambda: read_dense(small, read, WHERE), "got 1e+30, which is inf after the transform, in row 1"),
        (
            lambda: _ids(weighted, read("ids"), TableRows("c", 10), w=read("w")),
            "weight column 'w': got -1e+39 in row 1",
        ),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            reader()


def test_weights_below_zero_are_named() -> None:
    with pytest.raises(InputError, match=r"weight column 'w': got -2 in row 1; expected at least 0"):
        read_sample_weight("w", _read(w=[1.0, -2.0]), WHERE)


def test_dense_transforms() -> None:
    values = [0.0, math.e - 1, -1.0]
    log = read_dense(DenseColumn("x", transform="log"), _read(x=values), WHERE)
    assert log.tolist() == pytest.approx([0, 1, -math.log(2)])
    normal = read_dense(DenseColumn("x", transform="normalize", mean=3, std=2), _read(x=[3.0, 5.0]), WHERE)
    assert normal.tolist() == [0, 1]


def test_missing_dense_values_are_an_error_or_zero_after_the_transform() -> None:
    read = _read(x=pa.array([5.0, None, math.nan]))
    with pytest.raises(InputError, match=r"dense column 'x': got 2 missing values.*set missing='zero'"):
        read_dense(DenseColumn("x"), read, WHERE)
    column = DenseColumn("x", transform="normalize", mean=3, std=2, missing="zero")
    assert read_dense(column, read, WHERE).tolist() == [1, 0, 0]


def test_ids_are_hashed_alike_alone_and_in_lists() -> None:
    table = TableRows("c", 1000)
    single = _ids(IdColumn("c"), [1, 2, -3], table)
    assert single.values.tolist() == hash_rows(np.array([1, 2, -3]), 1000).tolist()
    listed = _ids(IdColumn("c", kind="list"), [[1], [2, -3]], table)
    assert listed.values.tolist() == single.values.tolist()
    texts = _ids(IdColumn("c"), ["a", "b", "a"], table)
    assert texts.values.tolist() == hash_rows(pa.array([b"a", b"b", b"a"]), 1000).tolist()
    dictionary = _ids(IdColumn("c"), pa.array(["a", "b", "a"]).dictionary_encode(), table)
    assert dictionary.values.tolist() == texts.values.tolist()


def test_ids_of_managed_tables_stay_hashes() -> None:
    found = _ids(IdColumn("c", missing="row"), pa.array([5, None]), TableRows("c", 10, "managed"))
    assert found.values.tolist() == [int(hash_values(np.array([5]))[0].astype(np.int64)), MISSING_ID]


@pytest.mark.parametrize("missing", ["empty", "row"])
def test_ids_become_bags_of_their_row_and_rows_drawn_from_the_table(missing: Any) -> None:
    values = pa.array([7, None, 7, *range(3000)])
    found = _bags(_ids(IdColumn("c", missing=missing, multi_hot=4), values, TableRows("c", 50)))
    single = _bags(_ids(IdColumn("c", missing=missing), values, TableRows("c", 50)))
    assert [bag[:1] for bag in found] == single
    assert {len(bag) for bag in found} == ({0, 4} if missing == "empty" else {4})
    assert found[0] == found[2]
    assert all(0 <= row < 50 for bag in found for row in bag)
    many = _bags(_ids(IdColumn("c", multi_hot=3), pa.array(range(3000)), TableRows("c", 3000, "rows")))
    spread = np.bincount([row for bag in many for row in bag[1:]], minlength=3000)
    assert abs(spread.var() - 2) < 0.3  # Poisson with mean 2


def test_bags_of_one_size_are_for_single_ids_with_fixed_rows() -> None:
    wrong: list[dict[str, Any]] = [
        {"kind": "list", "multi_hot": 2},
        {"boundaries": (1.0,), "multi_hot": 2},
        {"multi_hot": 0},
    ]
    for settings in wrong:
        with pytest.raises(ConfigError, match="got multi_hot="):
            IdColumn("c", **settings)
    with pytest.raises(ConfigError, match="got multi_hot=2 and the managed table 'c'"):
        _ids(IdColumn("c", multi_hot=2), [1], TableRows("c", 10, "managed"))


def test_unsigned_ids_keep_their_bits() -> None:
    values = pa.array([2**64 - 1], pa.uint64())
    assert _ids(IdColumn("c"), values, TableRows("c", 99)).values.tolist() == hash_rows(np.array([-1]), 99).tolist()
    with pytest.raises(InputError, match=r"expected row numbers of table 'c' in \[0, 99\)"):
        _ids(IdColumn("c"), values, TableRows("c", 99, "rows"))


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_row_numbers_outside_of_the_table_are_named(bad: int) -> None:
    table = TableRows("c", 10, "rows")
    message = rf"row group 3: id column 'c': got id {bad} in row 1; expected row numbers of table 'c' in \[0, 10\)"
    with pytest.raises(InputError, match=message):
        _ids(IdColumn("c"), [9, bad], table)
    with pytest.raises(InputError, match=message):
        _ids(IdColumn("c", kind="list"), [[0, 9], [3, bad]], table)


@pytest.mark.parametrize(
    ("missing", "single", "listed"),
    [("empty", [[4], [], [5]], [[4], [], [], [5]]), ("row", [[4], [0], [5]], [[4, 0], [0], [], [5]])],
)
def test_missing_ids_have_no_bag_or_a_row_of_their_own(
    missing: Any, single: list[list[int]], listed: list[list[int]]
) -> None:
    table = TableRows("c", 10, "rows")
    assert _bags(_ids(IdColumn("c", missing=missing), pa.array([4, None, 5]), table)) == single
    lists = pa.array([[4, None], None, [], [5]])
    assert _bags(_ids(IdColumn("c", kind="list", missing=missing), lists, table)) == listed


def test_missing_ids_are_an_error_by_default() -> None:
    for values, text in (
        ([[1], None], "got 1 missing values,"),
        ([[1], [], [2, None]], "1 missing values inside of lists, the first in row 2;"),
    ):
        with pytest.raises(InputError, match=rf"id column 'c': .*{text}.*Set missing='empty'"):
            _ids(IdColumn("c", kind="list"), pa.array(values), TableRows("c", 10))


def test_a_row_for_missing_ids_is_no_row_of_others() -> None:
    found = _ids(IdColumn("c", missing="row"), pa.array([*range(200), None]), TableRows("c", 20))
    assert found.values[-1] == 0
    assert set(found.values[:-1].tolist()) == set(range(1, 20))


@given(lists=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=8), most=st.integers(1, 5))
def test_sequences_keep_their_latest_ids(lists: list[list[int]], most: int) -> None:
    column = IdColumn("c", kind="sequence", max_length=most, weights="w")
    weights = pa.array([[float(n) for n in one] for one in lists], pa.list_(pa.float64()))
    found = _ids(column, pa.array(lists, pa.list_(pa.int64())), TableRows("c", 10, "rows"), w=weights)
    assert _bags(found) == [one[-most:] for one in lists]
    assert found.weights is not None
    assert found.weights.tolist() == [float(n) for one in lists for n in one[-most:]]


def test_weights_must_match_their_lists() -> None:
    column = IdColumn("c", kind="list", weights="w")
    for weights in ([[1.0], [1.0]], [[1.0], None]):
        with pytest.raises(InputError, match=r"weight column 'w': got a list of another length .* in row 1"):
            _ids(column, [[1], [2, 3]], TableRows("c", 10), w=pa.array(weights))
    with pytest.raises(InputError, match=r"'w': got 1 missing values inside of lists"):
        _ids(column, [[1], [2, 3]], TableRows("c", 10), w=pa.array([[1.0], [2.0, None]]))


def test_numbers_become_buckets() -> None:
    column = IdColumn("c", boundaries=(0.0, 10.0), missing="row")
    found = _ids(column, pa.array([-5.0, 0.0, 9.9, 10.0, None, math.nan]))
    assert found.values.tolist() == [1, 2, 2, 3, 0, 0]
    assert _ids(IdColumn("c", boundaries=(0.0, 10.0)), [-1, 10]).values.tolist() == [0, 2]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint32(), pa.uint64(), pa.bool_()], ids=str)
@pytest.mark.parametrize("missing", ["error", "row", "empty"])
def test_ids_that_are_hashed_later_are_those_that_are_hashed_at_once(kind: pa.DataType, missing: Any) -> None:
    numbers = [True, False, True] if kind == pa.bool_() else [0, 7, 2**7 - 1]
    numbers += {pa.int8(): [-1], pa.int64(): [-(2**63)], pa.uint64(): [2**64 - 1]}.get(kind, [])
    column = IdColumn("c", missing=missing)
    columns = Columns(ids=(column,), tables=(TableRows("c", 50),))
    for values in ([], numbers, numbers if missing == "error" else [*numbers, None]):
        read = _read(c=pa.array(values, kind))
        later, now = read_ids_unhashed(columns, column, read, WHERE), read_ids(columns, column, read, WHERE)
        assert (later.row_hash is None) == (None in values)
        first = int(missing == "row")
        ids = np.array([value % 2**64 for value in values if value is not None], np.uint64).view(np.int64)
        rows = hash_rows(ids, 50, first_row=first).tolist()
        rest = [] if None not in values else [[0]] if missing == "row" else [[]]
        assert _bags(later.with_rows()) == _bags(now) == [[row] for row in rows] + rest
