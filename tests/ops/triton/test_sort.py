"""Occurrences by key: which there are, in which order, and what their gradients are scaled by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.triton.interpreter import quick
from tilerec.ops.runtime.triton import library
from tilerec.ops.update.triton import sort
from tilerec.ops.update.triton.sort import (
    PER_TABLE,
    Record,
    key_type,
    power_of_two,
    programs_of,
    sort_occurrences,
    steps_of,
)

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def tables_of(rows: list[int], dim: int) -> Tensor:
    numbers = torch.zeros(len(rows), PER_TABLE, dtype=torch.int64)
    numbers[1:, 0] = torch.tensor(rows[:-1]).cumsum(0) if len(rows) > 1 else 0
    numbers[:, 1] = dim
    return numbers


def record_of(
    ids: Tensor, offsets: Tensor, rows: list[int], bags: list[tuple[int, int]], total: int, mean: bool = False,
    weights: Tensor | None = None,
) -> Record:  # fmt: skip
    """Feature f reads table f; its bags are `bags[f]` (first, count); gradient rows have 2 columns."""
    firsts = torch.tensor([0, *rows]).cumsum(0).tolist()
    features = [
        [firsts[f], rows[f], start, count, 100 * f, 2, int(mean), max(count - 1, 1).bit_length() - 1]
        for f, (start, count) in enumerate(bags)
    ]
    numbers = torch.tensor(features).reshape(-1)
    return Record(torch.zeros(1000), ids, offsets, weights, numbers, len(bags), mean, total, 1)


def test_keys_are_as_narrow_as_the_rows_allow() -> None:
    assert [key_type(bits) for bits in (1, 15, 16, 31, 32, 60)] == [
        torch.int16, torch.int16, torch.int32, torch.int32, torch.int64, torch.int64,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "dtype"), [([5, 7], torch.int16), ([5, 2**20], torch.int32), ([2**33, 2**40], torch.int64)]
)
def test_occurrences_are_ordered_by_table_row_feature_position(rows: list[int], dtype: torch.dtype) -> None:
    """Feature 0 reads bags 2 and 3, feature 1 bags 0 and 1; the last id of all is no row."""
    ids = torch.tensor([4, 1, 4, 0, 2, rows[0]])
    offsets = torch.tensor([0, 1, 3, 3, 6])
    got = sort_occurrences(record_of(ids, offsets, rows, [(2, 2), (0, 2)], 6), tables_of(rows, 2), 2, sum(rows), [2, 2])
    assert got.keys.dtype == dtype
    first = rows[0]
    assert got.keys.tolist() == [0, 2, first + 1, first + 4, first + 4, sum(rows)]
    # by keys: occurrences 0, 1 and 2 of feature 0 are positions 3-5; 0, 1 and 2 of feature 1 are positions 0-2
    assert got.places[:5].tolist() == [2, 2, 102, 100, 102]


def test_what_no_feature_reads_sorts_last() -> None:
    ids, offsets = torch.tensor([1, 2, 0, 0]), torch.tensor([0, 1, 2, 4])
    got = sort_occurrences(record_of(ids, offsets, [5], [(1, 1)], 4), tables_of([5], 2), 1, 5, [2])
    assert got.keys.tolist() == [2, 5, 5, 5]


def test_scales_are_weights_over_lengths() -> None:
    ids, offsets = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 3, 3, 4])
    weights = torch.tensor([1.0, 2.0, 3.0, 5.0])
    got = sort_occurrences(record_of(ids, offsets, [5], [(0, 3)], 4, True, weights), tables_of([5], 2), 1, 5, [2])
    assert got.scales is not None
    assert got.scales.tolist() == (weights / torch.tensor([3.0, 3.0, 3.0, 1.0])).tolist()


@pytest.mark.parametrize("lengths", [[1] * 9, [0, 0, 9, 0], [700, 0, 1], [0] * 70 + [1], [3] * 257], ids=len)
def test_every_position_finds_its_bag(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.zeros(int(offsets[-1]), dtype=torch.int32)
    got = sort_occurrences(record_of(ids, offsets, [1], [(0, len(lengths))], ids.numel()), tables_of([1], 2), 1, 1, [2])
    bags = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert got.places.tolist() == (2 * bags).tolist()


def test_whole_chunks_are_summed_and_others_are_not() -> None:
    """Counted from the run's first occurrence, which is number 5; sums go by the block that a chunk begins in."""
    n = 3 * sort.CHUNK
    ids = torch.ones(n, dtype=torch.int64)
    ids[:5] = 0
    record = record_of(ids, torch.tensor([0, n]), [3], [(0, 1)], n)
    record.grad[:2] = torch.tensor([1.0, 2.0])
    got = sort_occurrences(record, tables_of([3], 2), 1, 3, [2])
    assert got.levels == 1
    assert got.partials[:, :2].isnan().all(dim=1).tolist() == [False, False, True]  # the last is not written
    assert got.partials[:2, :2].tolist() == [[sort.CHUNK, 2 * sort.CHUNK]] * 2


def test_powers_of_two_and_steps() -> None:
    assert power_of_two([12, 40], 16) == 4
    assert power_of_two([], 8) == 8
    assert power_of_two([0, 6], 8) == 2
    assert [steps_of(tables) for tables in (1, 2, 3, 4, 5, 26)] == [0, 1, 2, 2, 3, 5]


def test_any_number_of_features_fits_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid's second axis ends at 65,535 and its first at 2^31 - 1."""
    assert programs_of(2_600_000, 26) == 158
    assert programs_of(10, 26) == 1
    assert programs_of(2**33, 70_000) == 1
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: args[4].zero_()

    def record(features: int) -> Record:
        numbers: Any = torch.zeros(0)  # which nothing reads
        total = 2 * sort.CHUNK - 1
        return Record(torch.zeros(4), torch.zeros(700), None, None, numbers, features, False, total, 1)

    monkeypatch.setattr(sort, "occurrence_keys", Kernel())
    for features in (1, 26, 70_000):
        sort_occurrences(record(features), tables_of([5], 2), 1, 5, [2])
    assert grids == [(2,), (27,), (70_001,)]
