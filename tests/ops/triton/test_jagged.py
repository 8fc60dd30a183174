"""The jagged ops in Triton against their references: the same bits, whatever the segments; lies are told."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.triton.gates import Compiled, Gate, compiled
from tests.ops.triton.interpreter import quick
from tilerec.errors import InputError
from tilerec.ops.jagged.definition import offsets_from_lengths
from tilerec.ops.runtime.library import LIBRARY
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

pytest.importorskip("triton")

from tilerec.ops.jagged.triton import backend as jagged
from tilerec.ops.jagged.triton import item_copies as jagged_copy
from tilerec.ops.runtime.triton import library

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels are compiled here: tests/cuda")

KERNELS: dict[str, Callable[..., Any]] = LIBRARY.taking_arguments(jagged.KERNELS)


@pytest.fixture(autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture
def served() -> Iterator[None]:
    """The ops are these kernels."""
    library = torch.library.Library("tilerec", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once per process that a kernel is replaced
        for name, kernel in KERNELS.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    yield
    library._destroy()


LENGTHS = {
    "none": [],
    "all empty": [0, 0, 0],
    "one": [1],
    "short": [2, 0, 1, 3, 0, 0, 5, 1, 0],
    "one long among many": [1, 0, 700, 2] + [1, 0, 3] * 120,
}
ITEMS = [(), (3,), (257,)]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def same(name: str, *arguments: Any) -> Any:
    """The kernel's result, after checking that the reference gives the same bits."""
    result, expected = KERNELS[name](*arguments), LIBRARY.references[name](*arguments)
    results, expecteds = (result, expected) if isinstance(result, tuple) else ((result,), (expected,))
    for one, other in zip(results, expecteds, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(bits(one), bits(other))
    return result


def near(name: str, *arguments: Any) -> None:
    """As `same`, to one step of bfloat16: the interpreter cuts numbers off where a GPU rounds them."""
    torch.testing.assert_close(KERNELS[name](*arguments), LIBRARY.references[name](*arguments), rtol=2**-7, atol=0.0)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def values_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape) * 100
    if dtype == torch.bool:
        return values > 0
    return values.to(dtype) if dtype.is_floating_point else values.long().to(dtype)


def orders_of(segments: int) -> dict[str, Tensor]:
    """Which segments to take: none, all backwards, one 40 times among others, some not at all."""
    if not segments:
        return {"none": torch.empty(0, dtype=torch.int64)}
    some = torch.randint(0, segments, (min(2 * segments, 300),))
    some[::3] = segments // 2
    return {
        "none": some[:0],
        "backwards": torch.arange(segments - 1, -1, -1),
        "repeats and gaps": torch.cat([some, torch.full((40,), min(2, segments - 1) if segments < 9 else 0)]),
    }


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_segment_ids_equal_the_reference(lengths: list[int]) -> None:
    same("segment_ids", offsets_of(lengths), sum(lengths))
    same("segment_ids", offsets_of(lengths).int(), sum(lengths))


@pytest.mark.parametrize("item", ITEMS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_selections_and_their_transpose_equal_the_reference(lengths: list[int], item: tuple[int, ...]) -> None:
    if item == (257,) and len(lengths) > 9:
        lengths = [1, 0, 12, 2]
    offsets, values = offsets_of(lengths), values_of((sum(lengths), *item))
    for order in orders_of(len(lengths)).values():
        out_offsets = offsets_from_lengths(offsets.diff().index_select(0, order))
        total = int(out_offsets[-1])
        if total > 3000:
            continue
        same("select_segments", values, offsets, order, out_offsets, total)
        same("select_segments_backward", values_of((total, *item)), offsets, order, out_offsets, sum(lengths))


@pytest.mark.parametrize(
    "dtype",
    [torch.int32, torch.int64, torch.int16, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float64,
     torch.float8_e4m3fn, torch.complex64],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("item", [(), (2, 3)], ids=str)
def test_items_of_any_type_are_moved_with_their_bits(dtype: torch.dtype, item: tuple[int, ...]) -> None:
    lengths = LENGTHS["short"]
    offsets, values = offsets_of(lengths), values_of((sum(lengths), *item), dtype)
    order = torch.tensor([6, 0, 3, 3, 8])
    out_offsets = offsets_from_lengths(offsets.diff()[order])
    total = int(out_offsets[-1])
    same("select_segments", values, offsets, order, out_offsets, total)
    same("repeat_segments", values_of((len(lengths), *item), dtype), offsets, sum(lengths))
    same("jagged_to_padded", values, offsets, 3, 1.0)
    same("padded_to_jagged", values_of((len(lengths), 3, *item), dtype), offsets, sum(lengths))
    if dtype not in (torch.bool, torch.float8_e4m3fn, torch.complex64):
        sums = near if dtype == torch.bfloat16 else same
        sums("segment_sum", values, offsets)
        sums(
            "select_segments_backward",
            values_of((total, *item), dtype),
            offsets,
            order,
            out_offsets,
            sum(lengths),
        )


def test_a_copys_transpose_is_what_autograd_gives() -> None:
    lengths = LENGTHS["short"]
    offsets, order = offsets_of(lengths), torch.tensor([6, 0, 3, 3, 8, 6])
    out_offsets = offsets_from_lengths(offsets.diff()[order])
    values = torch.randint(-9, 9, (sum(lengths), 3)).double().requires_grad_()
    bags = values.split(lengths)
    grad = torch.randint(-9, 9, (int(out_offsets[-1]), 3)).double()
    (wanted,) = torch.autograd.grad(torch.cat([bags[s] for s in order.tolist()]), values, grad)
    got = KERNELS["select_segments_backward"](grad, offsets, order, out_offsets, sum(lengths))
    assert torch.equal(got, wanted)


@pytest.mark.usefixtures("served")
def test_the_other_transposes_are_what_autograd_gives() -> None:
    """Through the dispatcher, so forward and backward are both the kernels."""
    lengths = torch.tensor(LENGTHS["short"])
    offsets, total = offsets_of(lengths.tolist()), int(lengths.sum())
    inside = torch.arange(4) < lengths[:, None]
    values = torch.randn(total, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    padded = torch.randn(9, 4, 3, dtype=torch.float64, requires_grad=True)
    kept = torch.cat([torch.arange(length) < 4 for length in lengths.tolist()])
    pairs = {
        "jagged_to_padded": ((values, offsets, 4, 0.0), values, lambda: padded_by_hand(values, kept, inside)),
        "segment_sum": (
            (values, offsets), values, lambda: torch.stack([bag.sum(0) for bag in values.split(lengths.tolist())])
        ),
        "repeat_segments": ((rows, offsets, total), rows, lambda: rows.repeat_interleave(lengths, 0)),
        "padded_to_jagged": (
            (padded, offsets, total), padded, lambda: torch.zeros(total, 3).double().index_put((kept,), padded[inside])
        ),
    }  # fmt: skip
    for name, (arguments, leaf, by_hand) in pairs.items():
        out, expected = getattr(torch.ops.tilerec, name)(*arguments), by_hand()
        torch.testing.assert_close(out, expected)
        grad = torch.randn_like(out)
        (got,) = torch.autograd.grad(out, leaf, grad)
        (wanted,) = torch.autograd.grad(expected, leaf, grad)
        torch.testing.assert_close(got, wanted)


def padded_by_hand(values: Tensor, kept: Tensor, inside: Tensor) -> Tensor:
    return torch.zeros(*inside.shape, 3).double().index_put((inside,), values[kept])


@pytest.mark.usefixtures("served")
def test_jagged_tensors_are_permuted_padded_and_differentiated_by_the_kernels() -> None:
    lengths = torch.tensor([2, 0, 1, 1, 3, 0], dtype=torch.int32)
    weights = torch.rand(7, requires_grad=True)
    features = KeyedJaggedTensor(["a", "b", "c"], torch.arange(7), weights, lengths)
    permuted = features.permute([2, 0, 2])
    assert permuted.values().tolist() == [4, 5, 6, 0, 1, 4, 5, 6]
    permuted.weights().sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [1, 1, 0, 0, 2, 2, 2]
    bags = JaggedTensor(torch.arange(1, 4), lengths=torch.tensor([2, 0, 1]))
    assert bags.to_padded_dense(2).tolist() == [[1, 2], [0, 0], [3, 0]]


@pytest.mark.parametrize("item", ITEMS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_padding_and_its_transpose_equal_the_reference(lengths: list[int], item: tuple[int, ...]) -> None:
    if len(lengths) > 9:
        lengths = lengths[1:9] if item != (257,) else [1, 0, 40, 2]
    offsets, values = offsets_of(lengths), values_of((sum(lengths), *item))
    for length in (0, 1, 4):
        same("jagged_to_padded", values, offsets, length, float("-inf"))
        same("padded_to_jagged", values_of((len(lengths), length, *item)), offsets, sum(lengths))


@pytest.mark.parametrize("item", ITEMS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_segment_sums_and_repeated_rows_equal_the_reference(lengths: list[int], item: tuple[int, ...]) -> None:
    if item and len(lengths) > 9:
        lengths = [1, 0, 700 // max(item[0], 9), 2]
    offsets = offsets_of(lengths)
    same("segment_sum", values_of((sum(lengths), *item)), offsets)
    same("repeat_segments", values_of((len(lengths), *item)), offsets, sum(lengths))


def test_halves_are_summed_in_fp32() -> None:
    for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        items = torch.tensor([big, 1.0, 1.0, 1.0, 1.0], dtype=dtype)
        assert same("segment_sum", items, torch.tensor([0, 5])).item() == big + 4
        order, starts = torch.zeros(5, dtype=torch.int64), torch.arange(6)
        assert same("select_segments_backward", items, torch.tensor([0, 1]), order, starts, 1).item() == big + 4


def test_integer_sums_wrap_like_torchs() -> None:
    items = torch.tensor([2**31 - 1, 5, -7], dtype=torch.int32)
    same("segment_sum", items, torch.tensor([0, 2, 3]))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("buckets", [1, 2, 17, 300])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_buckets_equal_the_reference(lengths: list[int], buckets: int, ids: torch.dtype) -> None:
    if buckets in (2, 300) and len(lengths) > 9:
        lengths = lengths[:40]
    total = sum(lengths)
    ids_N = torch.randint(-50, 1050, (total,), dtype=ids)
    ids_N[: total // 2] = 7
    cuts = torch.randint(0, 1000, (buckets + 1,)).sort().values
    cuts[buckets // 2] = cuts[buckets // 2 + 1]
    other = torch.int64 if ids == torch.int32 else torch.int32
    same("bucketize_by_cuts", ids_N, torch.tensor(lengths, dtype=other), cuts)


def test_strided_arguments_are_read_as_they_are() -> None:
    values = torch.rand(6, 4).T[:, ::2]
    offsets = torch.tensor([0, 9, 3, 9, 4])[::2]
    same("segment_sum", values, offsets)
    same("select_segments", values, offsets, torch.tensor([1, 9, 0])[::2], torch.tensor([0, 1, 4]), 4)
    strided = (torch.arange(20)[1::4], torch.tensor([2, 9, 3])[::2], torch.tensor([0, 4, 7, 7, 9])[::2])
    got = KERNELS["bucketize_by_cuts"](*strided)
    wanted = LIBRARY.references["bucketize_by_cuts"](*(tensor.contiguous() for tensor in strided))
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_items_of_one_number_in_a_row_are_moved_and_summed() -> None:
    lengths = LENGTHS["short"]
    offsets, values = offsets_of(lengths), values_of((sum(lengths), 1))
    same("segment_sum", values, offsets)
    same("select_segments", values, offsets, torch.tensor([3, 0]), torch.tensor([0, 3, 5]), 5)


def test_items_that_begin_anywhere_are_moved_in_words_that_fit() -> None:
    """Rows of 8 bytes that begin at an odd address."""
    values = torch.arange(49, dtype=torch.uint8)[1:].view(6, 8)
    same("select_segments", values, torch.tensor([0, 2, 6]), torch.tensor([1, 0]), torch.tensor([0, 4, 6]), 6)
    halves = torch.arange(25).half()[1:].view(6, 4)
    same("repeat_segments", halves, torch.arange(7), 6)


BAD = [
    ("segment_ids", (torch.tensor([0, 2, 1, 3]), 3)),
    ("segment_ids", (torch.tensor([0, 2, 2, 3]), 4)),
    ("segment_ids", (torch.tensor([1, 2, 2, 3]), 3)),
    ("segment_ids", (torch.tensor([0, 2**62, 2, 3]), 3)),
    ("segment_ids", (torch.tensor([0]), 3)),
    ("segment_sum", (torch.rand(3), torch.tensor([0, 2, 5]))),
    ("segment_sum", (torch.rand(3), torch.tensor([-1, 2, 3]))),
    ("segment_sum", (torch.rand(3), torch.tensor([4]))),
    ("segment_sum", (torch.rand(3, 0), torch.tensor([0, 4]))),
    ("repeat_segments", (torch.rand(2), torch.tensor([0, 5, 3]), 3)),
    ("jagged_to_padded", (torch.rand(3), torch.tensor([0, 9, 3]), 2, 0.0)),
    ("jagged_to_padded", (torch.rand(3), torch.tensor([-5, 2, 3]), 2, 0.0)),
    ("padded_to_jagged", (torch.rand(2, 2), torch.tensor([0, 1, 3]), 2)),
    ("bucketize_by_cuts", (torch.arange(3), torch.tensor([2, -1, 2]), torch.tensor([0, 9]))),
    ("bucketize_by_cuts", (torch.arange(3), torch.tensor([2, 2]), torch.tensor([0, 9]))),
    ("select_segments", (torch.rand(3), torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([0, 3]), 3)),
    ("select_segments", (torch.rand(3), torch.tensor([0, 3]), torch.tensor([-1]), torch.tensor([0, 3]), 3)),
    ("select_segments", (torch.rand(3), torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([0, 4]), 4)),
    ("select_segments", (torch.rand(3), torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([0, 3]), 4)),
    ("select_segments", (torch.rand(3, 0), torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([0, 3]), 4)),
    (
        "select_segments_backward",
        (torch.rand(3), torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([0, 3]), 3),
    ),
    (
        "select_segments_backward",
        (torch.rand(3), torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([0, 2]), 3),
    ),
]


@pytest.mark.parametrize(("name", "arguments"), BAD)
def test_offsets_that_lie_are_told_with_the_cpus_message(name: str, arguments: tuple[Any, ...]) -> None:
    wanted = rf"{name}: (offset -?\d+ after segment \d+ descends|order\[0\] is segment -?\d, which does not exist)"
    with pytest.raises(InputError, match=wanted):
        KERNELS[name](*arguments)


def test_the_selected_segment_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"select_segments: order\[1\] is segment 7, which does not exist"):
        KERNELS["select_segments"](
            torch.rand(3), torch.tensor([0, 1, 3]), torch.tensor([0, 7]), torch.tensor([0, 1, 2]), 2
        )


def test_shapes_that_do_not_fit_are_refused_as_everywhere() -> None:
    with pytest.raises(InputError, match="segment_sum: offsets have shape"):
        KERNELS["segment_sum"](torch.rand(3), torch.empty(0, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------------- as compiled


def copy_gate(name: str, mode: int, word: str, width: int) -> Gate:
    tile, group, columns = jagged_copy.tiles(width, {"*i64": 8, "*i32": 4}[word])
    pointers = {"out": word, "values": word, "offsets": "*i64", "order": "*i64", "out_offsets": "*i64"}
    sizes = dict.fromkeys(["items", "segments", "selected", "total", "length", "padding"], "i32")
    constants = {"MODE": mode, "W": width, "TILE": tile, "GROUP": group, "COLUMNS": columns}
    options = {"num_warps": 4 if width == 1 else 1}
    return Gate(
        name,
        "tilerec.ops.jagged.triton.item_copies:copy_items",
        pointers | {"report": "*i64"} | sizes,
        constants,
        options=options,
    )


def sum_gate(name: str, number: str, width: int) -> Gate:
    lanes = 512 // {"*fp32": 4, "*bf16": 2}[number]
    constants = {
        "W": width,
        "SUM": "triton.language:float32",
        "GROUP": lanes // width,
        "COLUMNS": width,
        "AHEAD": 8,
    }
    signature = {
        "out": number,
        "values": number,
        "offsets": "*i64",
        "report": "*i64",
        "items": "i32",
        "segments": "i32",
    }
    return Gate(name, "tilerec.ops.jagged.triton.sum:sum_segments", signature, constants)


def transpose_gate(name: str, number: str, width: int) -> Gate:
    tile, group, columns = jagged_copy.tiles(width, 4)
    pointers = dict.fromkeys(["offsets", "order", "out_offsets", "first_copy", "copies", "report"], "*i64")
    sizes = dict.fromkeys(["items", "segments", "selected", "total"], "i32")
    constants = {
        "W": width,
        "SUM": "triton.language:float32",
        "TILE": tile,
        "GROUP": group,
        "COLUMNS": columns,
    }
    signature = {"out": number, "grads": number} | pointers | sizes
    return Gate(name, "tilerec.ops.jagged.triton.sum:sum_copies", signature, constants)


@pytest.fixture(scope="module")
def gates() -> dict[str, Compiled]:
    always = [
        copy_gate("select ids", jagged_copy.SELECT.value, "*i64", 1),
        copy_gate("pad rows", jagged_copy.PAD.value, "*i32", 128),
        sum_gate("sums of halves", "*bf16", 64),
        transpose_gate("copies", "*fp32", 64),
    ]
    more = [
        copy_gate("select rows", jagged_copy.SELECT.value, "*i32", 64),
        copy_gate("unpad rows", jagged_copy.UNPAD.value, "*i32", 300),
        sum_gate("sums", "*fp32", 128),
    ]
    return compiled(always + (more if os.environ.get("TILEREC_NIGHTLY") == "1" else []))


@pytest.mark.timeout(120)
def test_rows_move_16_bytes_a_lane_in_registers(gates: dict[str, Compiled]) -> None:
    for name, gate in gates.items():
        assert gate.spilled == 0, name
        assert gate.registers <= 128, name
        assert gate.shared <= 512, name
        if name != "select ids":
            assert gate.count("ld.global.v4.b32") >= 8, name
            assert gate.count("ld.global.b32", "ld.global.b16", "ld.global.v2.b32") == 0, name
        if name.endswith("rows"):
            assert gate.count("st.global.v4.b32") == 8, name
