"""The native jagged kernels against the reference: same bits, for any number of threads, and no trust in offsets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilerec.errors import InputError
from tilerec.ops.jagged.checks import CHECKS
from tilerec.ops.jagged.cpu import kernels
from tilerec.ops.runtime.cpu.library import library
from tilerec.ops.runtime.library import LIBRARY as OPS

LIBRARY = library()
REFERENCE = {name: OPS.references[name] for name in CHECKS}
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native CPU library is not built")


@pytest.fixture(scope="module")
def native() -> dict[str, Callable[..., Any]]:
    assert LIBRARY is not None
    return OPS.taking_arguments(kernels(LIBRARY))


def _batch(seed: int, item: tuple[int, ...] = ()) -> dict[str, tuple[Any, ...]]:
    """Arguments big enough for two threads, with empty, short and very long bags."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (9000,), generator=generator)
    lengths[4321] = 20_000
    lengths[-3:] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    values = torch.randn(total, *item, generator=generator)
    order = torch.randint(0, 9000, (7000,), generator=generator)
    out_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[order].cumsum(0)])
    ids = torch.randint(-50, 10**6 + 50, (total,), generator=generator)
    cuts = torch.tensor([0, 10, 10, 333_333, 10**6])
    return {
        "offsets_from_lengths": (lengths.int(),),
        "segment_ids": (offsets, total),
        "select_segments": (values, offsets, order, out_offsets, int(out_offsets[-1])),
        "select_segments_backward": (values[offsets[4321] :], offsets, *_copies(offsets, 4321), total),
        "bucketize_by_cuts": (ids, lengths.int(), cuts),
        "jagged_to_padded": (values, offsets.int(), 5, float("-inf")),
        "padded_to_jagged": (torch.randn(9000, 5, *item, generator=generator), offsets, total),
        "segment_sum": (values, offsets),
        "repeat_segments": (torch.randn(9000, *item, generator=generator), offsets, total),
    }


def _copies(offsets: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An order whose segments are as long as those from `first` on, all read from the long bag: every copy overlaps."""
    segments = offsets.shape[0] - 1 - first
    return torch.full((segments,), first), offsets[first:] - offsets[first]


def _equal(result: Any, expected: Any) -> None:
    results, expecteds = (result, expected) if isinstance(result, tuple) else ((result,), (expected,))
    for one, other in zip(results, expecteds, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("item", [(), (3,)])
@pytest.mark.parametrize("name", list(_batch(0)))
def test_native_equals_reference_bit_for_bit(
    native: dict[str, Callable[..., Any]], name: str, item: tuple[int, ...], threads: int
) -> None:
    arguments = _batch(3, item)[name]
    expected = REFERENCE[name](*arguments)
    torch.set_num_threads(threads)
    _equal(native[name](*arguments), expected)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [torch.int32, torch.int64])
@pytest.mark.parametrize("buckets", [1, 2, 16, 17, 100])
def test_bucketize_equals_reference_for_both_integers_and_many_buckets(
    native: dict[str, Callable[..., Any]], ids: torch.dtype, lengths: torch.dtype, buckets: int
) -> None:
    generator = torch.Generator().manual_seed(buckets)
    lengths_S = torch.randint(0, 9, (4000,), generator=generator)
    ids_N = torch.randint(-5, 1005, (int(lengths_S.sum()),), generator=generator)
    cuts = torch.randint(0, 1000, (buckets + 1,), generator=generator).sort().values
    arguments = (ids_N.to(ids), lengths_S.to(lengths), cuts)
    _equal(native["bucketize_by_cuts"](*arguments), REFERENCE["bucketize_by_cuts"](*arguments))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex128],
)
def test_items_of_any_type_are_moved(native: dict[str, Callable[..., Any]], dtype: torch.dtype) -> None:
    values = torch.tensor([1, 0, 3, 1, 5]).to(dtype)
    offsets, order, starts = torch.tensor([0, 2, 2, 5]), torch.tensor([2, 0]), torch.tensor([0, 3, 5])
    for name, arguments in {
        "select_segments": (values, offsets, order, starts, 5),
        "jagged_to_padded": (values, offsets, 2, 1.0),
        "padded_to_jagged": (values.repeat(6).view(3, 10), offsets, 5),
        "repeat_segments": (values[:3], offsets, 5),
    }.items():
        _equal(native[name](*arguments), REFERENCE[name](*arguments))


def test_strided_arguments_are_read_as_they_are(native: dict[str, Callable[..., Any]]) -> None:
    values = torch.rand(6, 4).T[:, ::2]
    offsets = torch.tensor([0, 9, 3, 9, 4])[::2]
    _equal(native["segment_sum"](values, offsets), REFERENCE["segment_sum"](values, offsets.contiguous()))
    lengths = torch.tensor([2, 7, 0, 7, 1])[::2]
    _equal(native["offsets_from_lengths"](lengths), torch.tensor([0, 2, 2, 3]))


def test_a_fresh_thread_gets_the_same_result(native: dict[str, Callable[..., Any]]) -> None:
    arguments = _batch(5)["bucketize_by_cuts"]
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(native["bucketize_by_cuts"](*arguments)))
    thread.start()
    thread.join()
    _equal(results[0], REFERENCE["bucketize_by_cuts"](*arguments))


def _taken(offsets: torch.Tensor, order: torch.Tensor, room: int = 3) -> tuple[Any, ...]:
    return [torch.rand(3)], [offsets], [order], [torch.rand(room)], [torch.zeros(len(order), dtype=torch.int32)]


BAD = [
    ("segment_ids", (torch.tensor([0, 2, 1, 3]), 3)),
    ("segment_ids", (torch.tensor([0, 2, 2, 3]), 4)),
    ("segment_ids", (torch.tensor([1, 2, 2, 3]), 3)),
    ("segment_sum", (torch.rand(3), torch.tensor([0, 2, 5]))),
    ("segment_sum", (torch.rand(3), torch.tensor([-1, 2, 3]))),
    ("segment_sum", (torch.rand(3), torch.tensor([4]))),
    ("repeat_segments", (torch.rand(2), torch.tensor([0, 5, 3]), 3)),
    ("jagged_to_padded", (torch.rand(3), torch.tensor([0, 9, 3]), 2, 0.0)),
    ("padded_to_jagged", (torch.rand(2, 2), torch.tensor([0, 1, 3]), 2)),
    ("bucketize_by_cuts", (torch.arange(3), torch.tensor([2, -1, 2]), torch.tensor([0, 9]))),
    ("bucketize_by_cuts", (torch.arange(3), torch.tensor([2, 2]), torch.tensor([0, 9]))),
    ("select_segments", (torch.rand(3), torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([0, 3]), 3)),
    ("take_segments_", _taken(torch.tensor([0, 3]), torch.tensor([1]))),
    ("take_segments_", _taken(torch.tensor([0, 3]), torch.tensor([-1]))),
    ("take_segments_", _taken(torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0]))),
    ("take_segments_", _taken(torch.tensor([2, 1]), torch.tensor([0]))),
    ("take_segments_", _taken(torch.tensor([-1, 1]), torch.tensor([0]))),
    # Behind the last offset: its place holds enough items, but is where the last segment ends.
    ("select_segments", (torch.rand(3), torch.tensor([0, 2]), torch.tensor([1]), torch.tensor([0, 1]), 1)),
    (
        "select_segments_backward",
        (torch.rand(1), torch.tensor([0, 2]), torch.tensor([1]), torch.tensor([0, 1]), 3),
    ),
    ("select_segments", (torch.rand(3), torch.tensor([0, 3]), torch.tensor([-1]), torch.tensor([0, 3]), 3)),
    ("select_segments", (torch.rand(3), torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([0, 4]), 4)),
    ("select_segments", (torch.rand(3), torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([0, 3]), 4)),
    (
        "select_segments_backward",
        (torch.rand(3), torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([0, 3]), 3),
    ),
    (
        "select_segments_backward",
        (torch.rand(3), torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([0, 3]), 2),
    ),
]


@pytest.mark.parametrize(("name", "arguments"), BAD)
def test_offsets_that_lie_are_refused_and_memory_stays_whole(
    native: dict[str, Callable[..., Any]], name: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(InputError, match=name):
        native[name](*arguments)


def longs(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


SHAPES = {
    "lengths in two dimensions": ("offsets_from_lengths", (torch.ones(2, 2, dtype=torch.int64),), "lengths have shape"),
    "lengths that are no integers": ("offsets_from_lengths", (torch.ones(2),), "are torch.float32; expected integers"),
    "offsets that are none": ("segment_ids", (longs(), 0), r"offsets have shape \[0\]; .* of 1 or more"),
    "offsets of no dimension": ("segment_ids", (torch.tensor(0), 0), r"offsets have shape \[\]"),
    "offsets in two dimensions": ("segment_sum", (torch.rand(3), torch.tensor([[0], [3]])), r"shape \[2, 1\]"),
    "a total below 0": ("segment_ids", (longs(0, 0), -1), "total is -1; expected 0 or more"),
    "values of no dimension": ("segment_sum", (torch.tensor(1.0), longs(0, 1)), r"values have shape \[\]"),
    "no offsets to sum by": ("segment_sum", (torch.rand(3), longs()), "offsets have shape"),
    "no offsets to select from": ("select_segments", (torch.rand(3), longs(), longs(0), longs(0, 3), 3), "offsets"),
    "no offsets to select to": ("select_segments", (torch.rand(3), longs(0, 3), longs(), longs(), 0), "out offsets"),
    "out offsets too few": (
        "select_segments", (torch.rand(3), longs(0, 1, 3), longs(0, 1), longs(0, 3), 3),
        "2 offsets for 2 selected segments; expected 3",
    ),
    "out offsets too many": (
        "select_segments", (torch.rand(3), longs(0, 3), longs(0), longs(0, 3, 3), 3), "3 offsets for 1 selected segm",
    ),
    "an order that is no integer": (
        "select_segments", (torch.rand(3), longs(0, 3), torch.zeros(1), longs(0, 3), 3), "order are torch.float32",
    ),
    "backward's out offsets too few": (
        "select_segments_backward", (torch.rand(3), longs(0, 1, 3), longs(0, 1), longs(0, 3), 3), "expected 3",
    ),
    "backward's total below 0": (
        "select_segments_backward", (torch.rand(0), longs(0), longs(), longs(0), -1), "total is -1",
    ),
    "offsets to take by of no dimension": ("take_segments_", _taken(torch.tensor(0), longs(0)), "offsets have shape"),
    "an order of 32 bits": ("take_segments_", _taken(longs(0, 3), longs(0).int()), "got order .* of torch.int32"),
    "lengths for other segments": (
        "take_segments_", (*_taken(longs(0, 3), longs(0, 0))[:4], [torch.zeros(1, dtype=torch.int32)]), "as many",
    ),
    "memory of another type": (
        "take_segments_", ([torch.rand(3).double()], *_taken(longs(0, 3), longs(0))[1:]), "got out .* of torch.float32",
    ),
    "no source": ("take_segments_", ([], [], [], [], []), "got 0 lists of values"),
    "sources of two types": (
        "take_segments_", ([torch.rand(3), torch.ones(3).long()], [longs(0, 3)] * 2, [], [], []), "one type and shape",
    ),
    "fewer outs than orders": (
        "take_segments_", ([torch.rand(3)], [longs(0, 3)], [longs(0)], [], []), "got 1 orders, 0 outs and 0 lengths",
    ),
    "cuts too few": ("bucketize_by_cuts", (longs(1), longs(1), longs(0)), r"cuts have shape \[1\]; .* of 2 or more"),
    "ids in two dimensions": ("bucketize_by_cuts", (torch.ones(1, 2).long(), longs(2), longs(0, 9)), "ids have shape"),
    "ids that are no integers": ("bucketize_by_cuts", (torch.rand(2), longs(2), longs(0, 9)), "ids are torch.float32"),
    "lengths of no dimension": ("bucketize_by_cuts", (longs(1), torch.tensor(1), longs(0, 9)), "lengths have shape"),
    "no offsets to pad by": ("jagged_to_padded", (torch.rand(3), longs(), 2, 0.0), "offsets have shape"),
    "a length below 0": ("jagged_to_padded", (torch.rand(3), longs(0, 3), -2, 0.0), "length is -2"),
    "offsets for fewer bags": ("padded_to_jagged", (torch.rand(3, 2), longs(0, 2), 2), "2 offsets for 3 bags"),
    "offsets for more bags": ("padded_to_jagged", (torch.rand(1, 2), longs(0, 1, 2), 2), "3 offsets for 1 bags"),
    "padded in one dimension": ("padded_to_jagged", (torch.rand(3), longs(0, 1, 2, 3), 3), "2 or more dimensions"),
    "rows for fewer segments": ("repeat_segments", (torch.rand(1), longs(0, 1, 2), 2), "3 offsets for 1 rows"),
    "rows for more segments": ("repeat_segments", (torch.rand(3), longs(0, 2), 2), "2 offsets for 3 rows; expected 4"),
}  # fmt: skip


@pytest.mark.parametrize("through", ["native", "dispatcher", "reference"])
@pytest.mark.parametrize("lie", SHAPES)
def test_shapes_that_do_not_fit_are_refused_by_every_kernel(
    native: dict[str, Callable[..., Any]], lie: str, through: str
) -> None:
    name, arguments, message = SHAPES[lie]
    kernel = {
        "native": native[name],
        "dispatcher": getattr(torch.ops.tilerec, name),
        "reference": REFERENCE[name],
    }[through]
    with pytest.raises(InputError, match=rf"{name}: .*{message}"):
        kernel(*arguments)


def test_small_integers_are_offsets_and_lengths_too(native: dict[str, Callable[..., Any]]) -> None:
    values = torch.rand(3)
    assert native["offsets_from_lengths"](torch.tensor([2, 1], dtype=torch.int16)).tolist() == [0, 2, 3]
    offsets = torch.tensor([0, 2, 3], dtype=torch.uint8)
    _equal(native["segment_sum"](values, offsets), native["segment_sum"](values, offsets.long()))
