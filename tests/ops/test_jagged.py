"""The jagged ops against loops over bags, and as torch programs (opcheck, derivatives)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from tilerec.errors import InputError
from tilerec.ops.jagged import definition as jagged
from tilerec.ops.jagged.checks import CHECKS
from tilerec.ops.runtime.library import LIBRARY

OPS = torch.ops.tilerec
LENGTHS = st.lists(st.integers(0, 4), max_size=9)
INTEGERS = st.sampled_from([torch.int32, torch.int64])


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _bags(values: Tensor, lengths: list[int]) -> list[Tensor]:
    return list(values.split(lengths)) if lengths else []


def _both(name: str, *arguments: Any) -> Any:
    """The op's result, after checking that the reference gives the same."""
    result = getattr(OPS, name)(*arguments)
    expected = LIBRARY.references[name](*arguments)
    results, expecteds = (result, expected) if isinstance(result, tuple) else ((result,), (expected,))
    for one, other in zip(results, expecteds, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    return result


@given(LENGTHS, INTEGERS)
def test_offsets_are_running_sums_in_int64(lengths: list[int], dtype: torch.dtype) -> None:
    offsets = _both("offsets_from_lengths", torch.tensor(lengths, dtype=dtype))
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [sum(lengths[:s]) for s in range(len(lengths) + 1)]


def test_offsets_of_int32_lengths_pass_two_billion() -> None:
    lengths = torch.tensor([2**31 - 1, 2**31 - 1], dtype=torch.int32)
    assert _both("offsets_from_lengths", lengths).tolist() == [0, 2**31 - 1, 2**32 - 2]


@given(LENGTHS)
def test_segment_ids_name_every_items_segment(lengths: list[int]) -> None:
    ids = _both("segment_ids", _offsets(lengths), sum(lengths))
    assert ids.tolist() == [s for s, length in enumerate(lengths) for _ in range(length)]


@given(LENGTHS.filter(bool), st.data(), st.sampled_from([(), (1,), (3,), (2, 2)]))
def test_selected_segments_are_the_bags_in_order(
    lengths: list[int], data: st.DataObject, item: tuple[int, ...]
) -> None:
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=9))
    values = torch.rand(sum(lengths), *item)
    chosen = [lengths[s] for s in order]
    out = _both(
        "select_segments",
        values,
        _offsets(lengths),
        torch.tensor(order, dtype=torch.int64),
        _offsets(chosen),
        sum(chosen),
    )
    bags = _bags(values, lengths)
    assert torch.equal(out, torch.cat([bags[s] for s in order]) if order else values[:0])


@given(LENGTHS.filter(bool), st.data())
def test_the_backward_of_a_selection_is_its_transpose(lengths: list[int], data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=9)), dtype=torch.int64)
    offsets, out_offsets = _offsets(lengths), _offsets([lengths[s] for s in order.tolist()])
    x = torch.randint(-9, 9, (sum(lengths), 3)).double()
    y = torch.randint(-9, 9, (int(out_offsets[-1]), 3)).double()
    forward = OPS.select_segments(x, offsets, order, out_offsets, y.shape[0])
    backward = _both("select_segments_backward", y, offsets, order, out_offsets, x.shape[0])
    assert (forward * y).sum() == (x * backward).sum()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """2048 + 1 is 2048 in fp16 and 256 + 1 is 256 in bf16; fp32 sums keep the ones."""
    big = 2048.0 if dtype == torch.float16 else 256.0
    items = torch.tensor([big, 1.0, 1.0, 1.0, 1.0], dtype=dtype)
    offsets = torch.tensor([0, 5])
    expected = torch.tensor([big + 4], dtype=dtype)
    assert torch.equal(_both("segment_sum", items, offsets), expected)
    order, starts = torch.zeros(5, dtype=torch.int64), torch.arange(6)
    assert torch.equal(_both("select_segments_backward", items, torch.tensor([0, 1]), order, starts, 1), expected)


@given(LENGTHS, st.lists(st.integers(0, 30), min_size=2, max_size=25).map(sorted), st.data(), INTEGERS, INTEGERS)
def test_buckets_hold_each_id_once_in_order(
    lengths: list[int], cuts: list[int], data: st.DataObject, id_dtype: torch.dtype, length_dtype: torch.dtype
) -> None:
    total = sum(lengths)
    ids = data.draw(st.lists(st.integers(-3, 33), min_size=total, max_size=total))
    out_lengths, local, positions = _both(
        "bucketize_by_cuts",
        torch.tensor(ids, dtype=id_dtype),
        torch.tensor(lengths, dtype=length_dtype),
        torch.tensor(cuts),
    )
    assert out_lengths.dtype == length_dtype
    assert local.dtype == id_dtype
    buckets = len(cuts) - 1
    expected_lengths, expected_local, expected_positions = [], [], []
    for bucket in range(buckets):
        position = 0
        for length in lengths:
            count = 0
            for _ in range(length):
                # Ids below the first cut belong to the first bucket, those beyond the last to the last.
                if sum(ids[position] >= cut for cut in cuts[1:-1]) == bucket:
                    count += 1
                    expected_local.append(ids[position] - cuts[bucket])
                    expected_positions.append(position)
                position += 1
            expected_lengths.append(count)
    assert out_lengths.tolist() == expected_lengths
    assert local.tolist() == expected_local
    assert positions.tolist() == expected_positions


@given(LENGTHS, st.lists(st.integers(0, 30), min_size=2, max_size=5).map(sorted), st.data())
def test_merging_buckets_gives_the_ids_back(lengths: list[int], cuts: list[int], data: st.DataObject) -> None:
    total = sum(lengths)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 29), min_size=total, max_size=total)), dtype=torch.int64)
    weights = torch.rand(total, requires_grad=True)
    dealt = jagged.bucketize_by_cuts(ids, torch.tensor(lengths, dtype=torch.int64), torch.tensor(cuts), weights)
    assert dealt.weights_N is not None
    bucket_lengths = dealt.lengths_CS.view(len(cuts) - 1, len(lengths))
    assert torch.equal(bucket_lengths.sum(0), torch.tensor(lengths, dtype=torch.int64))
    first_row = torch.tensor(cuts[:-1]).repeat_interleave(bucket_lengths.sum(1))
    merged = torch.empty_like(ids)
    merged[dealt.positions_N] = dealt.local_ids_N + first_row
    assert torch.equal(merged, ids)
    dealt.weights_N.backward(torch.arange(total).float())
    assert torch.equal(weights.grad[dealt.positions_N], torch.arange(total).float())  # type: ignore[index]


def test_bucketize_needs_a_list_of_cuts() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(InputError, match=r"cuts have shape \[1\]; expected one ascending list with at least 2"):
        jagged.bucketize_by_cuts(empty, empty, torch.tensor([0]))


@given(LENGTHS, st.integers(0, 6), st.sampled_from([(), (1,), (3,)]), st.booleans())
def test_padded_rows_hold_the_bags(lengths: list[int], width: int, item: tuple[int, ...], integer: bool) -> None:
    values = torch.randint(1, 99, (sum(lengths), *item))
    values = values if integer else values.float()
    padded = _both("jagged_to_padded", values, _offsets(lengths), width, -7.0)
    assert padded.shape == (len(lengths), width, *item)
    for row, bag in zip(padded, _bags(values, lengths), strict=True):
        assert torch.equal(row[: len(bag)], bag[:width])
        assert (row[len(bag) :] == -7).all()


@given(LENGTHS, st.integers(0, 6))
def test_padding_and_back_keeps_what_fits(lengths: list[int], width: int) -> None:
    values = torch.rand(sum(lengths), 2)
    padded = jagged.jagged_to_padded(values, _offsets(lengths), width, float("nan"))
    back = _both("padded_to_jagged", padded, _offsets(lengths), sum(lengths))
    for bag, original in zip(_bags(back, lengths), _bags(values, lengths), strict=True):
        assert torch.equal(bag[:width], original[:width])
        assert (bag[width:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.int16])
@pytest.mark.parametrize("item", [(), (1,), (3,), (257,), (0,)])
def test_segment_sums_add_each_bag(dtype: torch.dtype, item: tuple[int, ...]) -> None:
    lengths = [3, 0, 1, 70, 0]
    values = torch.randint(-9, 9, (sum(lengths), *item)).to(dtype)
    sums = _both("segment_sum", values, _offsets(lengths))
    assert sums.dtype == dtype
    for total, bag in zip(sums, _bags(values, lengths), strict=True):
        assert torch.equal(total.double(), bag.double().sum(0).to(dtype).double())


def test_integer_segment_sums_wrap() -> None:
    values = torch.tensor([2**31 - 1, 1], dtype=torch.int32)
    assert _both("segment_sum", values, torch.tensor([0, 2])).tolist() == [-(2**31)]


@given(LENGTHS)
def test_repeat_is_the_transpose_of_segment_sum(lengths: list[int]) -> None:
    rows = torch.randint(-9, 9, (len(lengths), 3)).double()
    items = torch.randint(-9, 9, (sum(lengths), 3)).double()
    repeated = _both("repeat_segments", rows, _offsets(lengths), sum(lengths))
    assert (repeated * items).sum() == (rows * _both("segment_sum", items, _offsets(lengths))).sum()


def test_nothing_in_nothing_out() -> None:
    none, start = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    assert _both("offsets_from_lengths", none).tolist() == [0]
    assert _both("segment_ids", start, 0).shape == (0,)
    assert _both("select_segments", torch.zeros(0, 3), start, none, start, 0).shape == (0, 3)
    assert _both("select_segments_backward", torch.zeros(0, 3), start, none, start, 0).shape == (0, 3)
    assert [part.shape[0] for part in _both("bucketize_by_cuts", none, none, torch.tensor([0, 5, 9]))] == [
        0,
        0,
        0,
    ]
    assert _both("jagged_to_padded", torch.zeros(0, 3), start, 4, 0.0).shape == (0, 4, 3)
    assert _both("padded_to_jagged", torch.zeros(0, 4, 3), start, 0).shape == (0, 3)
    assert _both("segment_sum", torch.zeros(0, 3), start).shape == (0, 3)
    assert _both("repeat_segments", torch.zeros(0, 3), start, 0).shape == (0, 3)


def test_select_jagged_takes_lengths_values_and_weights_together() -> None:
    selected = jagged.select_jagged(
        torch.tensor([2, 0, 2]),
        torch.tensor([2, 0, 1]),
        torch.tensor([10, 11, 12]),
        torch.tensor([0.0, 0.1, 0.2]),
    )
    assert selected.lengths_P.tolist() == [1, 2, 1]
    assert selected.values_M.tolist() == [12, 10, 11, 12]
    assert selected.weights_M is not None
    assert torch.equal(selected.weights_M, torch.tensor([0.2, 0.0, 0.1, 0.2]))
    assert selected.offsets_P1.tolist() == [0, 1, 3, 4]


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.data(), st.sampled_from([(), (3,)]), INTEGERS)
def test_segments_are_taken_into_memory_of_the_caller(
    sources: list[list[int]], data: st.DataObject, item: tuple[int, ...], dtype: torch.dtype
) -> None:
    lengths = [length for source in sources for length in source]
    order_of = st.lists(st.integers(0, len(lengths) - 1), max_size=9) if lengths else st.just([])
    orders = data.draw(st.lists(order_of, max_size=3))
    room = data.draw(st.integers(0, 60))
    values = [torch.rand(sum(source), *item) for source in sources]
    bags = [bag for own, source in zip(values, sources, strict=True) for bag in _bags(own, source)]
    offsets = [_offsets(source).to(dtype) for source in sources]
    for op in (OPS.take_segments_, LIBRARY.references["take_segments_"]):
        outs = [torch.full((room, *item), 7.0) for _ in orders]
        found = [torch.full((len(order),), -1, dtype=torch.int32) for order in orders]
        op(values, offsets, [torch.tensor(order, dtype=torch.int64) for order in orders], outs, found)
        for order, out, counts in zip(orders, outs, found, strict=True):
            assert counts.tolist() == [lengths[s] for s in order]
            expected = torch.cat([values[0][:0], *(bags[s] for s in order)])[:room]
            assert torch.equal(out[: len(expected)], expected)


def test_long_and_many_segments_are_taken_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 40, (500,), generator=generator)
    lengths[7] = 3000
    values, order = torch.arange(int(lengths.sum())), torch.randint(0, 500, (900,), generator=generator)
    bags = values.split(lengths.tolist())
    expected = torch.cat([bags[s] for s in order.tolist()])
    halves = [torch.cat(bags[:300]), torch.cat(bags[300:])]
    offsets = [_offsets(lengths[:300].tolist()).int(), _offsets(lengths[300:].tolist())]
    for room in (len(expected), len(expected) + 1, len(expected) + 100, len(expected) - 1, 5):
        memory, counts = torch.full((room + 8,), -7), torch.zeros(900, dtype=torch.int32)
        OPS.take_segments_(halves, offsets, [order], [memory[:room]], [counts])
        assert torch.equal(memory[: min(room, len(expected))], expected[:room])
        assert (memory[room:] == -7).all()
        assert torch.equal(counts.long(), lengths[order])


def _arguments() -> dict[str, tuple[Any, ...]]:
    offsets, order, out_offsets = (
        torch.tensor([0, 2, 2, 3]),
        torch.tensor([2, 0, 2]),
        torch.tensor([0, 1, 3, 4]),
    )
    return {
        "offsets_from_lengths": (torch.tensor([2, 0, 1], dtype=torch.int32),),
        "segment_ids": (offsets, 3),
        "select_segments": (torch.rand(3, 2, dtype=torch.float64), offsets, order, out_offsets, 4),
        "select_segments_backward": (torch.rand(4, 2, dtype=torch.float64), offsets, order, out_offsets, 3),
        "unbacked_rows": (torch.tensor([2, 0, 1, 4]), 2),
        "take_segments_": (
            [torch.rand(2, 2), torch.rand(1, 2)],
            [torch.tensor([0, 2, 2]), torch.tensor([0, 1])],
            [order],
            [torch.zeros(5, 2)],
            [torch.zeros(3, dtype=torch.int32)],
        ),
        "bucketize_by_cuts": (torch.tensor([7, 1, 4]), torch.tensor([2, 0, 1]), torch.tensor([0, 4, 10])),
        "jagged_to_padded": (torch.rand(3, 2, dtype=torch.float64), offsets, 1, 0.5),
        "padded_to_jagged": (torch.rand(3, 1, 2, dtype=torch.float64), offsets, 3),
        "segment_sum": (torch.rand(3, 2, dtype=torch.float64), offsets),
        "repeat_segments": (torch.rand(3, 2, dtype=torch.float64), offsets, 3),
    }


DIFFERENTIABLE = [
    name for name, arguments in _arguments().items() if getattr(arguments[0], "dtype", None) == torch.float64
]


@pytest.mark.parametrize("name", list(_arguments()))
def test_ops_pass_torchs_own_checks(name: str) -> None:
    first, *rest = _arguments()[name]
    opcheck(getattr(OPS, name).default, (first.requires_grad_() if name in DIFFERENTIABLE else first, *rest))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivatives_equal_finite_differences(name: str) -> None:
    first, *rest = _arguments()[name]
    op = getattr(OPS, name)
    assert torch.autograd.gradcheck(lambda x: op(x, *rest), (first.requires_grad_(),))
    assert torch.autograd.gradgradcheck(lambda x: op(x, *rest), (first,))


class _NoWaiting(TorchDispatchMode):
    """Refuses what reads a value off the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        assert func not in waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(_arguments()))
def test_no_reference_waits_for_the_device_or_leaves_it(name: str) -> None:
    arguments = _arguments()[name]
    expected = LIBRARY.references[name](*arguments)
    # A tensor made without saying where would be on "meta" and could not meet the arguments.
    with torch.device("meta"), _NoWaiting():
        result = LIBRARY.references[name](*arguments)
    results, expecteds = (result, expected) if isinstance(result, tuple) else ((result,), (expected,))
    for one, other in zip(results, expecteds, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_every_op_has_a_test_of_torchs_checks() -> None:
    assert set(_arguments()) == set(CHECKS)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float16])
def test_lengths_that_are_no_integers_are_refused_by_their_type(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"lengths are {dtype}; expected integers\. Convert them with .long\(\)"):
        torch.ops.tilerec.offsets_from_lengths(torch.ones(3, dtype=dtype))
