"""Arrow columns as NumPy arrays: every layout of a list gives the same values, lengths and missing masks."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from tilerec.data.arrow_values import Values, kind_of, read_values
from tilerec.data.rows import hash_values

LIST_TYPES = [
    pa.list_(pa.int64()),
    pa.large_list(pa.int32()),
    pa.list_view(pa.int64()),
    pa.large_list_view(pa.int64()),
]
ROWS = st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 99)), max_size=4)), max_size=12)


def _python(values: Values) -> list[Any]:
    """The rows as Python lists, None for what is missing."""
    assert values.offsets is not None
    flat = [
        None if values.missing is not None and values.missing[at] else int(value)
        for at, value in enumerate(values.values)
    ]
    rows: list[Any] = []
    start = 0
    for row, length in enumerate(np.diff(values.offsets).tolist()):
        rows.append(flat[start : start + length])
        start += length
        if values.missing_lists is not None and values.missing_lists[row]:
            rows[-1] = None
    return rows


@pytest.mark.parametrize("kind", LIST_TYPES, ids=str)
@given(rows=ROWS, low=st.integers(0, 5), more=ROWS)
def test_slices_and_chunks_of_lists_keep_their_rows(
    kind: pa.DataType, rows: list[Any], low: int, more: list[Any]
) -> None:
    first = pa.array(rows, kind)[low : len(rows) - 1 if len(rows) > low else None]
    column = pa.chunked_array([first, pa.array(more, kind)], kind)
    assert _python(read_values(column)) == column.to_pylist()


def test_null_lists_of_a_fixed_size_have_no_values() -> None:
    column = pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2))
    assert _python(read_values(column)) == [[1, 2], None, [3, None]]
    assert _python(read_values(column[1:])) == [None, [3, None]]


def test_contents_behind_a_null_list_are_left_out() -> None:
    column = pa.ListArray.from_arrays(
        pa.array([0, 2, 4], pa.int32()), pa.array([1, 2, 3, 4]), mask=pa.array([True, False])
    )
    assert _python(read_values(column)) == [None, [3, 4]]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary()], ids=str)
def test_texts_of_every_type_have_the_same_hashes(kind: pa.DataType) -> None:
    column = pa.array(["a", "bc", "a"], kind)
    found = read_values(column)
    assert found.hashed
    assert found.values.tolist() == hash_values(pa.array([b"a", b"bc", b"a"])).tolist()
    if kind not in (pa.string_view(),):
        assert read_values(column.dictionary_encode()).values.tolist() == found.values.tolist()


def test_a_dictionary_marks_nulls_of_indices_and_of_words() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, None, 1, 0]), pa.array(["x", None]))
    found = read_values(column)
    assert found.missing is not None
    assert found.missing.tolist() == [False, True, True, False]
    empty = pa.DictionaryArray.from_arrays(pa.array([None], pa.int32()), pa.array([], pa.string()))
    assert read_values(empty).missing is not None


def test_no_chunks_are_no_rows() -> None:
    assert len(read_values(pa.chunked_array([], pa.list_(pa.int64()))).values) == 0
    assert read_values(pa.chunked_array([], pa.float32())).offsets is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.int8(), "integer"),
        (pa.bool_(), "boolean"),
        (pa.float16(), "number"),
        (pa.decimal128(5, 2), "number"),
        (pa.dictionary(pa.int32(), pa.string()), "text"),
        (pa.large_list(pa.string_view()), "list of text"),
        (pa.list_(pa.list_(pa.int64())), "list of list of integer"),
        (pa.timestamp("s"), "timestamp[s]"),
    ],
    ids=str,
)
def test_classes_of_types(kind: pa.DataType, name: str) -> None:
    assert kind_of(kind) == name


def test_decimals_and_booleans_are_numbers() -> None:
    assert read_values(pa.array([True, False])).values.tolist() == [1, 0]
    decimals = pa.array(["1.50", None]).cast(pa.decimal128(5, 2))
    found = read_values(decimals)
    assert found.values.dtype == np.float64
    assert found.values[0] == 1.5
