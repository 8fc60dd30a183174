"""Distinct ids of a batch: listed in the order of their first item, with rows and gradients of all items."""

from __future__ import annotations

from collections.abc import Sequence

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
    ids, offsets, inverse, counts = op(
        torch.tensor([7, 3, 7, 5, 6]), torch.tensor([0, 1, 1, 2, 5]), [3, 1], [9, 9], [100, 100], False
    )
    assert ids.tolist() == [7, 3, 7, 5, 6]
    assert offsets.tolist() == [0, 1, 2, 5]
    assert inverse[:3].tolist() == [0, -1, 1]
    assert counts.tolist() == [2, -1]


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
        results = both("distinct_ids", ids, offsets, batches, [50, 50, 50], percent, each_id)
        (*_, counts) = results[3]
        sizes = [sum(lengths) if each_id else len(lengths)] * 3
        for place, (got, want) in enumerate(results):
            if place == 2:  # items of other keys may have any number
                parts = zip(got.split(sizes), want.split(sizes), counts.tolist(), strict=True)
                assert all(torch.equal(one, other) for one, other, count in parts if count >= 0)
            else:
                assert torch.equal(got, want)
                assert got.dtype == want.dtype


@pytest.mark.parametrize(("bad", "rows"), [(50, 50), (-1, 50), (2**40, 50), (3, 0)])
def test_a_key_with_a_bad_id_or_no_table_is_left_as_it_is(bad: int, rows: int) -> None:
    ids = torch.tensor([3, 3, 3, bad, 3, 3])
    for (got, _), own in zip(
        both("distinct_ids", ids, torch.tensor([0, 2, 4, 6]), [1, 1, 1], [50, rows, 50], [100] * 3, True),
        [[3, 3, bad, 3], [0, 1, 3, 4], None, [1, -1 - bool(rows), 1]],
        strict=True,
    ):
        assert own is None or got.tolist() == own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("items", [0, 5, 3000])
def test_rows_and_sums_have_the_reference_s_bits(items: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(items)
    counts, widths = [1 + items // 3, items, 1 + items // 2], [64, 3, 1]
    inverse = torch.randint(-1, 1 + items // 3, (2 * items,), generator=generator, dtype=torch.int32)
    total = sum(widths)
    slots = (counts, [items] * 3, widths, [0, -1, items], [0, 64, 67], [total] * 3)
    rows = torch.randn(sum(c * w for c, w in zip(counts, widths, strict=True)), generator=generator, dtype=dtype)
    ((got, want),) = both("expand_rows", rows, inverse, *slots, items * total)
    assert torch.equal(got, want)
    grads = torch.randn(items * total, generator=generator, dtype=dtype)
    ((got, want),) = both("sum_rows", grads, inverse, *slots)
    assert torch.equal(got, want)


def test_sums_are_the_transpose_of_copies() -> None:
    inverse = torch.tensor([0, 2, 2, -1, 0], dtype=torch.int32)
    slots = ([3], [5], [2], [0], [0], [2])
    matrix = torch.stack([OPS.expand_rows(unit, inverse, *slots, 10) for unit in torch.eye(6)])
    transpose = torch.stack([OPS.sum_rows(unit, inverse, *slots) for unit in torch.eye(10)])
    assert torch.equal(matrix, transpose.T)


@pytest.mark.parametrize(
    ("offsets", "batches"), [([0, 2], [1, 1]), ([0, 3], [1]), ([1, 2], [1])], ids=["bags", "end", "start"]
)
def test_arguments_that_do_not_fit_are_refused(offsets: list[int], batches: list[int]) -> None:
    keys = len(batches)
    with pytest.raises(ConfigError, match="distinct_ids: got"):
        OPS.distinct_ids(torch.tensor([1, 2]), torch.tensor(offsets), batches, [9] * keys, [100] * keys, True)
