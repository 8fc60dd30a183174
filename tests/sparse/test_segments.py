"""Lengths, offsets and what follows from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import InputError
from tilerec.sparse.segments import Segments, checked_segments

LENGTHS = st.lists(st.integers(0, 4), max_size=9)
INTEGERS = st.sampled_from([torch.int32, torch.int64])


@given(LENGTHS, INTEGERS)
def test_lengths_and_offsets_follow_from_each_other(lengths: list[int], dtype: torch.dtype) -> None:
    given_lengths = Segments(torch.tensor(lengths, dtype=dtype), None)
    offsets = given_lengths.offsets()
    assert offsets.dtype == torch.int64
    given_offsets = Segments(None, offsets.to(dtype))
    assert given_offsets.lengths().dtype == dtype
    assert given_offsets.lengths().tolist() == lengths
    assert given_lengths.count() == given_offsets.count() == len(lengths)


def test_what_was_derived_is_remembered_and_announced() -> None:
    segments = Segments(torch.tensor([2, 0, 1]), None)
    assert segments.offsets_or_none() is None
    assert segments.offsets() is segments.offsets()
    assert segments.offsets_or_none() is segments.offsets()
    backwards = Segments(None, torch.tensor([0, 2, 2, 3]))
    assert backwards.offsets_or_none() is backwards.given_offsets
    assert backwards.lengths_or_none() is None
    assert backwards.lengths() is backwards.lengths_or_none()


def test_a_row_of_a_table_stands_for_the_offsets() -> None:
    table = torch.tensor([[0, 1], [0, 5]])
    segments = Segments(torch.tensor([5]), None, (table, 1))
    assert segments.offsets_or_none() is segments.offsets()
    assert segments.offsets().tolist() == [0, 5]


def test_copying_forgets_what_was_derived_before() -> None:
    for given_lengths, given_offsets in ((torch.tensor([2, 0, 1]), None), (None, torch.tensor([0, 2, 2, 3]))):
        segments = Segments(given_lengths, given_offsets)
        assert segments.offsets().tolist() == [0, 2, 2, 3]
        assert segments.lengths().tolist() == [2, 0, 1]
        segments.copy_(Segments(torch.tensor([1, 1, 1]), None))
        assert segments.offsets().tolist() == [0, 1, 2, 3]
        assert segments.lengths().tolist() == [1, 1, 1]


def test_a_table_of_lengths_reads_flat_and_stays_a_table() -> None:
    table = torch.tensor([[2, 0, 1], [0, 1, 1]])
    segments = checked_segments("X", table, None, rows=2)
    assert segments.given_lengths is table
    assert segments.lengths().tolist() == [2, 0, 1, 0, 1, 1]
    assert segments.lengths_or_none() is segments.lengths()
    assert segments.offsets().tolist() == [0, 2, 2, 3, 3, 4, 5]
    assert segments.count() == 6
    moved = segments.map(torch.Tensor.int)
    assert moved.lengths().tolist() == [2, 0, 1, 0, 1, 1]
    assert segments.tensors() == [table, segments.offsets()]
    segments.copy_(Segments(torch.ones(6, dtype=torch.int64), None))
    assert segments.offsets().tolist() == list(range(7))
    assert table.tolist() == [[1, 1, 1], [1, 1, 1]]
    for lengths, rows in ((table, 3), (table, None), (table[None], 1)):
        assert checked_segments("X", lengths, None, rows).lengths_or_none().dim() == 1
    assert checked_segments("X", table[:, :0], None, 2).offsets().tolist() == [0]


def test_tensors_lists_what_is_held() -> None:
    segments = Segments(torch.tensor([2, 0, 1]), None)
    assert len(segments.tensors()) == 1
    segments.offsets()
    assert len(segments.tensors()) == 2
    assert [part.dtype for part in segments.map(torch.Tensor.int).tensors()] == [torch.int32]


def test_two_dimensional_lengths_are_flattened() -> None:
    assert checked_segments("it", torch.tensor([[1, 2], [3, 4]]), None).lengths().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("lengths", "offsets", "message"),
    [
        (None, None, "got neither lengths nor offsets; expected one"),
        (
            torch.tensor([1.0]),
            None,
            r"got lengths of torch\.float32; expected torch\.int32 or torch\.int64",
        ),
        (None, torch.tensor([0], dtype=torch.uint8), r"got offsets of torch\.uint8"),
        (None, torch.zeros(0, dtype=torch.int64), r"got offsets of shape \[0\]"),
        (None, torch.zeros(2, 2, dtype=torch.int64), r"got offsets of shape \[2, 2\]"),
        (
            torch.tensor([1, 2]),
            torch.tensor([0, 3]),
            "2 lengths and 2 offsets; expected one offset more than lengths",
        ),
    ],
)
def test_shapes_and_types_that_do_not_fit_are_refused(
    lengths: torch.Tensor | None, offsets: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(InputError, match=f"^it: .*{message}"):
        checked_segments("it", lengths, offsets)
