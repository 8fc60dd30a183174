"""Records laid end to end: the sums of all lookups, whatever their forms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tilerec.ops.gradient.concatenate import ALIGNED, joined
from tilerec.ops.gradient.definition import features_of, pooled_blocks, sum_rows
from tilerec.ops.gradient.record import GradientRecord

ROWS = 6


def pooled(
    sinks: Sequence[int], dims: Sequence[int], batch: int, *, weighted: bool = False, means: Sequence[int] = (),
    dtype: torch.dtype = torch.float32, index: torch.dtype = torch.int64, uniform: bool = True,
) -> GradientRecord:  # fmt: skip
    """Feature f reads key f."""
    lengths = torch.randint(0, 4, (batch * len(sinks),))
    offsets = torch.tensor([0, *lengths.cumsum(0).tolist()])
    count = int(offsets[-1])
    bags = [batch] * len(sinks)
    places, strides = pooled_blocks(dims, bags, uniform)
    return GradientRecord(
        0, torch.randn(batch * sum(dims)).to(dtype), torch.randint(0, ROWS, (count,)).to(index), offsets.to(index),
        torch.rand(count) if weighted else None, tuple(sinks), tuple(dims),
        tuple(f * batch for f in range(len(sinks))), tuple(bags), tuple(places), tuple(strides),
        tuple(means or [0] * len(sinks)),
    )  # fmt: skip


def sequence(sinks: Sequence[int], dim: int, counts: Sequence[int]) -> GradientRecord:
    """Every id is its own bag."""
    first = list(itertools.accumulate(counts, initial=0))
    return GradientRecord(
        0, torch.randn(first[-1], dim), torch.randint(0, ROWS, (first[-1],)), None, None, tuple(sinks),
        (dim,) * len(sinks), tuple(first[:-1]), tuple(counts), tuple(n * dim for n in first[:-1]), (dim,) * len(sinks),
        (0,) * len(sinks),
    )  # fmt: skip


def sums_of(records: Sequence[GradientRecord], sink: int, dim: int) -> torch.Tensor:
    """Dense sums of a table's gradients over these records."""
    out = torch.zeros(ROWS, dim, dtype=torch.float64)
    for record in records:
        for features in features_of(record, [sink]).values():
            rows, grads = sum_rows(record.only(features))
            out[rows] += grads.double()
    return out


CASES = {
    "two batches": lambda: [pooled([1, 2], [3, 8], 4), pooled([2, 1], [8, 3], 3)],
    "one with weights and means": lambda: [
        pooled([1, 2], [3, 8], 4),
        pooled([1, 2], [3, 8], 2, weighted=True, means=[1, 0]),
    ],
    "a pooled one and a sequence": lambda: [pooled([1], [3], 5, means=[1]), sequence([1, 1], 3, [4, 2])],
    "sequences": lambda: [sequence([1, 2], 3, [4, 0]), sequence([2], 3, [5])],
    "several types": lambda: [
        pooled([1], [3], 4, dtype=torch.bfloat16, index=torch.int32),
        pooled([1], [3], 4),
        sequence([1], 3, [2]),
    ],
    "variable batches": lambda: [pooled([1, 2], [3, 8], 2, uniform=False), pooled([1], [3], 1)],
    "one feature of many": lambda: [pooled(range(9), [3] * 9, 4).only([2, 5]), pooled([2, 5], [3, 3], 2)],
    "no ids": lambda: [sequence([1], 3, [0]), pooled([1], [3], 0), pooled([1], [3], 2)],
}


@pytest.mark.parametrize("case", CASES)
def test_joined_records_have_the_sums_of_all(case: str) -> None:
    records = CASES[case]()
    together = joined(records)
    assert together.sinks == tuple(sink for record in records for sink in record.sinks)
    for sink in set(together.sinks):
        dim = together.dims[together.sinks.index(sink)]
        torch.testing.assert_close(sums_of([together], sink, dim), sums_of(records, sink, dim), rtol=1e-5, atol=1e-5)


def test_the_sum_is_in_the_order_of_the_lookups() -> None:
    """1e8 + 1 - 1e8 is 0 in fp32, 1e8 - 1e8 + 1 is 1."""
    first, second = sequence([1], 1, [1]), sequence([1], 1, [2])
    for record in (first, second):
        record.ids.fill_(3)
    first.grad[0] = 1e8
    second.grad.copy_(torch.tensor([[1.0], [-1e8]]))
    assert sums_of([joined([first, second])], 1, 1)[3].item() == 0.0
    second.grad.copy_(torch.tensor([[-1e8], [1.0]]))
    assert sums_of([joined([first, second])], 1, 1)[3].item() == 1.0


def test_blocks_begin_where_gpus_read_well() -> None:
    """Gradients of 3 elements; the second block begins at 8."""
    together = joined([sequence([1], 3, [1]), sequence([1], 3, [2])])
    assert together.grad_starts == (0, ALIGNED)
    assert together.grad.numel() == 2 * ALIGNED


def test_of_one_feature_among_many_only_its_gradients_are_copied() -> None:
    wide = pooled(range(10), [8] * 10, 4)
    together = joined([wide.only([3]), wide.only([4])])
    assert together.grad.numel() == 2 * 4 * 8
    assert together.grad_strides == (8, 8)


def test_ids_beyond_int32_are_counted_in_int64() -> None:
    """Of records that exist by their shapes only: 2^30 + 2^30 ids."""
    many = torch.empty(1 << 30, dtype=torch.int32, device="meta")
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    grad = torch.empty(1, 4, device="meta")
    record = GradientRecord(0, grad, many, offsets, None, (1,), (4,), (0,), (1,), (0,), (4,), (0,))
    together = joined([record, record])
    assert together.offsets is not None
    assert (together.offsets.dtype, together.ids.dtype) == (torch.int64, torch.int32)


def test_ranks_that_have_other_features_add_lookups_in_one_order() -> None:
    """A table's place in the sum over ranks: its lookup first, then its place there, whatever else a rank looks up."""
    from dataclasses import replace

    here = [replace(sequence([1, 2], 3, [1, 1]), order=(5, 7)), replace(sequence([1], 3, [1]), order=(4,))]
    there = [replace(sequence([3], 3, [1]), order=(9,)), *here]
    assert joined(here).order == (5, 7, (1 << 32) + 4)
    assert joined(there).order == (9, *joined(here).order)


def test_each_feature_keeps_what_is_known_of_its_rows() -> None:
    known = replace(sequence([1, 2], 3, [4, 1]), distinct=(True, False))
    unknown = sequence([2], 3, [5])
    assert joined([known, unknown]).distinct == (True, False, False)
    assert joined([unknown, known]).distinct == (False, True, False)
    assert joined([unknown, unknown]).distinct == ()
