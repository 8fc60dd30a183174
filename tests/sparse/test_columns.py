"""Names and widths of a keyed tensor's blocks."""

from __future__ import annotations

import pickle

import pytest

from tilerec.errors import InputError
from tilerec.sparse.columns import Columns
from tilerec.sparse.keys import UnknownKeyError


def test_spans_are_running_sums_of_widths() -> None:
    columns = Columns(["x", "y", "z"], [2, 0, 3])
    assert columns.offsets == (0, 2, 2, 5)
    assert [columns.span(key) for key in columns.keys] == [(0, 2), (2, 2), (2, 5)]


def test_equality_and_hash_follow_names_and_widths() -> None:
    columns = Columns(["x", "y"], [2, 3])
    assert columns == Columns(("x", "y"), (2, 3))
    assert hash(columns) == hash(Columns(["x", "y"], [2, 3]))
    assert columns != Columns(["x", "y"], [3, 2])
    assert columns != Columns(["x", "z"], [2, 3])
    assert pickle.loads(pickle.dumps(columns)) == columns
    assert repr(columns) == "Columns(['x', 'y'], [2, 3])"


def test_widths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="got 1 widths; expected 2"):
        Columns(["x", "y"], [2])
    with pytest.raises(InputError, match=r"got widths \[2, -1\]; expected none below 0"):
        Columns(["x", "y"], [2, -1])
    with pytest.raises(InputError, match="got 'x' at positions"):
        Columns(["x", "x"], [1, 1])
    with pytest.raises(UnknownKeyError, match="'q'"):
        Columns(["x"], [1]).span("q")
