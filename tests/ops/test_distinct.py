"""Distinct ids of a batch: listed in the order of their first item, with rows and gradients of all items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops import backends as backends
from tilerec.ops.runtime.library import LIBRARY

OPS = torch.ops.tilerec


def both(name: str, *arguments: object) -> list[tuple[Tensor, Tensor]]:
    """Return the results of the kernel, each beside the reference's."""
    got, want = getattr(OPS, name)(*arguments), LIBRARY.references[name](*arguments)
    return [(got, want)] if isinstance(got, Tensor) else list(zip(got, want, strict=True))


def some_batch(lengths: Sequence[int], dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = (torch.rand(sum(lengths), generator=generator) ** 3 * rows).to(dtype)
    return ids, torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("reference", [True, False])
def test_it_gives_the_worked_example(reference: bool) -> None:
    op = LIBRARY.references["distinct_ids"] if reference else OPS.distinct_ids
    found = op(torch.tensor([7, 3, 7, 5, 6]), torch.tensor([0, 1, 1, 2, 3, 5]), [4, 1], [9, 9], [100, 100], False)
    assert [own.tolist() for own in found] == [[7, 3, 5, 6], [0, 1, 2, 4], [0, 3, 2], [0, 2, 3], [2, -1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("each_id", [True, False])
@pytest.mark.parametrize(
    "lengths",
    [[], [0], [3, 0, 2], [1] * 400, [1, 0] * 200, [0] * 7 + [1, 1], [40] * 1000],
    ids=["none", "empty", "few", "ones", "gaps", "one", "many"],
)
def test_keys_have_the_reference_s_ids(lengths: list[int], each_id: bool, dtype: torch.dtype) -> None:
    ids, offsets = some_batch(lengths * 3, dtype, 50)
    batches = [len(lengths)] * 3
    for percent in ([100, 100, 100], [0, 40, 100]):
        for got, want in both("distinct_ids", ids, offsets, batches, [50, 50, 50], percent, each_id):
            assert torch.equal(got, want)
            assert got.dtype == want.dtype


@pytest.mark.parametrize(("bad", "rows"), [(50, 50), (-1, 50), (2**40, 50), (3, 0)])
def test_a_key_with_a_bad_id_or_no_table_is_left_as_it_is(bad: int, rows: int) -> None:
    ids = torch.tensor([3, 3, 3, bad, 3, 3])
    for (got, want), own in zip(
        both("distinct_ids", ids, torch.tensor([0, 2, 4, 6]), [1, 1, 1], [50, rows, 50], [100] * 3, True),
        [[3, 3, bad, 3], [0, 1, 3, 4], [0, 1, 0, 1], [0, 2, 4], [1, -1 - bool(rows), 1]],
        strict=True,
    ):
        assert got.tolist() == want.tolist() == own


class Case:
    """Two features of a batch: one with repeats on two owners by rows, one without, whose two parts are added."""

    def __init__(self, items: int, dtype: torch.dtype, width: int) -> None:
        generator = torch.Generator().manual_seed(items)
        ids = (torch.rand(items, generator=generator) ** 2 * items / 2).long()
        found = OPS.distinct_ids(ids, torch.arange(items + 1), [items], [items + 1], [100], False)
        distinct = int(found[-1])
        first = distinct // 3
        self.items, self.starts = found[2], found[3]
        self.slots = torch.cat([torch.arange(first, distinct), torch.arange(0, items, 2)]).int()
        half = (items + 1) // 2
        counts, widths = [first, distinct - first, items, half], [width, width, 3, 2]
        places, strides = [0, 0, width, width + 1], [width + 3] * 4
        self.segments = [counts, widths, [-1, 0, -1, distinct - first], places, strides]
        self.adds, self.firsts, self.features = [1, 1, 0, 1], [0, 0, -1, -1], [0, 0, 1, 1]
        self.size = items * (width + 3)
        total = sum(count * own for count, own in zip(counts, widths, strict=True))
        self.rows = torch.randn(total, generator=generator, dtype=dtype)
        self.grad = torch.randn(self.size, generator=generator, dtype=dtype)

    def expanded(self, op: Callable[..., None], rows: Tensor, *, fresh: bool = False) -> Tensor:
        out = torch.full((self.size,), 7.0, dtype=rows.dtype)
        op(out, rows, self.slots, *self.segments, self.adds, fresh, self.items, self.starts, self.firsts, self.features)
        return out

    def summed(self, op: Callable[..., None], grad: Tensor) -> Tensor:
        out = torch.empty_like(self.rows)
        op(out, grad, self.slots, *self.segments, self.items, self.starts, self.firsts)
        return out


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("items", "width"), [(0, 4), (5, 1), (301, 61), (4000, 253), (9000, 125)])
def test_rows_and_sums_have_the_reference_s_bits(items: int, width: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    case = Case(items, dtype, width)
    for fresh in (False, True):
        got = case.expanded(OPS.expand_rows_, case.rows, fresh=fresh)
        assert torch.equal(got, case.expanded(LIBRARY.references["expand_rows_"], case.rows, fresh=fresh))
    got = case.summed(OPS.sum_rows_, case.grad)
    assert torch.equal(got, case.summed(LIBRARY.references["sum_rows_"], case.grad))


def test_sums_are_the_transpose_of_copies() -> None:
    case = Case(5, torch.float64, 2)
    matrix = torch.stack(
        [case.expanded(OPS.expand_rows_, u, fresh=True) for u in torch.eye(case.rows.numel()).double()]
    )
    transpose = torch.stack([case.summed(OPS.sum_rows_, unit) for unit in torch.eye(case.size).double()])
    assert torch.equal(matrix, transpose.T)


@pytest.mark.parametrize("fault", ["slot", "item", "place", "rows"])
@pytest.mark.parametrize("op", ["expand_rows_", "sum_rows_"])
def test_segments_that_leave_their_tensors_are_refused(op: str, fault: str) -> None:
    case = Case(5, torch.float32, 2)
    if fault == "slot":
        case.slots[0] = 9
    elif fault == "item":
        case.items[-1] = 5
    elif fault == "place":
        case.segments[3][2] = case.size
    else:
        case.segments[0][0] = 100
    run: Any = case.expanded if op == "expand_rows_" else case.summed
    given = case.rows if op == "expand_rows_" else case.grad
    with pytest.raises(AssertionError, match=f"{op}: segment"):
        run(getattr(OPS, op), given)


@pytest.mark.parametrize(
    ("offsets", "batches"), [([0, 2], [1, 1]), ([0, 3], [1]), ([1, 2], [1])], ids=["bags", "end", "start"]
)
def test_arguments_that_do_not_fit_are_refused(offsets: list[int], batches: list[int]) -> None:
    keys = len(batches)
    with pytest.raises(ConfigError, match="distinct_ids: got"):
        OPS.distinct_ids(torch.tensor([1, 2]), torch.tensor(offsets), batches, [9] * keys, [100] * keys, True)
