"""Marks of rows: one bit each, for rows in the table, by every backend alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tilerec.errors import ConfigError
from tilerec.ops import backends as backends
from tilerec.ops.marks.definition import empty_marks, marked_rows
from tilerec.ops.runtime.library import LIBRARY

OPS = torch.ops.tilerec


def marked(counts: list[int], rows: list[Tensor], reference: bool = False) -> list[Tensor]:
    marks = [empty_marks(count, "cpu") for count in counts]
    (LIBRARY.references["mark_rows_"] if reference else OPS.mark_rows_)(marks, rows, counts)
    return marks


def test_it_gives_the_worked_example() -> None:
    (words,) = marked([40], [torch.tensor([3, 33, -1, 3, 40])])
    assert words.tolist() == [8, 2]
    assert marked_rows(words, 40).tolist() == [3, 33]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("entries", [0, 1, 300, 40_000])
def test_tables_of_any_size_have_the_reference_s_bits(entries: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(entries)
    counts = [0, 1, 31, 32, 33, 1000]
    rows = [torch.randint(-2, count + 2, (entries,), generator=generator, dtype=dtype) for count in counts]
    for got, want, own, count in zip(marked(counts, rows), marked(counts, rows, True), rows, counts, strict=True):
        assert torch.equal(got, want)
        assert marked_rows(got, count).tolist() == sorted({row for row in own.tolist() if 0 <= row < count})


def test_marks_stay_and_rows_need_not_be_contiguous() -> None:
    marks = empty_marks(64, "cpu")
    OPS.mark_rows_([marks], [torch.arange(64)[::8]], [64])
    OPS.mark_rows_([marks], [torch.tensor([63])], [64])
    assert marked_rows(marks, 64).tolist() == [*range(0, 64, 8), 63]


@pytest.mark.parametrize(
    ("marks", "rows", "counts"),
    [
        ([torch.zeros(2, dtype=torch.int32)], [torch.tensor([1])], [32]),
        ([torch.zeros(1, dtype=torch.int64)], [torch.tensor([1])], [32]),
        ([torch.zeros(1, dtype=torch.int32)], [torch.tensor([1.0])], [32]),
        ([torch.zeros(1, dtype=torch.int32)], [], [32]),
    ],
)
def test_what_does_not_fit_is_refused(marks: list[Tensor], rows: list[Tensor], counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="mark_rows_: got"):
        OPS.mark_rows_(marks, rows, counts)


def test_it_passes_opcheck() -> None:
    opcheck(OPS.mark_rows_.default, ([empty_marks(40, "cpu")], [torch.tensor([3, 33])], [40]))
