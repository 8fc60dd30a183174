"""Jagged ops, exchange ops and packed rows on a GPU: the CPU's bits, at once or told later, without a wait."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.sizes import SIMULATED, real, size, some
from tilerec.errors import InputError
from tilerec.ops.exchange import definition as exchange_reference
from tilerec.ops.jagged.definition import offsets_from_lengths
from tilerec.ops.quantize import definition as quant_reference
from tilerec.ops.runtime.library import LIBRARY

pytest.importorskip("triton")

from tilerec.ops.exchange.triton import backend as exchange
from tilerec.ops.jagged.triton import backend as jagged
from tilerec.ops.jagged.triton import item_copies as jagged_copy
from tilerec.ops.quantize import triton as quant
from tilerec.ops.runtime.triton import reports

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda", 0)
JAGGED = LIBRARY.taking_arguments(jagged.KERNELS)
BAGS = size(20_000, 60)


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Whatever waits for the device is an error."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def there(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in arguments)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def alike(result: Any, expected: Any) -> None:
    results, expecteds = (result, expected) if isinstance(result, tuple) else ((result,), (expected,))
    for one, other in zip(results, expecteds, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(bits(one), bits(other))


def jagged_arguments(item: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Empty, short and very long bags; some chosen many times."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 9, (BAGS,), generator=generator)
    lengths[43], lengths[-3:] = size(70_000 if not item else 7000, 150), 0
    offsets = offsets_from_lengths(lengths)
    total = int(offsets[-1])

    def numbers(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, *item, generator=generator) * 100
        return drawn.to(dtype)

    order = torch.randint(0, BAGS // 5, (BAGS * 3 // 4,), generator=generator)
    order[::3] = 7
    out_offsets = offsets_from_lengths(lengths[order])
    chosen = int(out_offsets[-1])
    ids = torch.randint(-50, 10**6 + 50, (total,), generator=generator)
    cuts = torch.tensor([0, 10, 10, 333_333, 10**6])
    return {
        "segment_ids": (offsets, total),
        "select_segments": (numbers(total), offsets, order, out_offsets, chosen),
        "select_segments_backward": (numbers(chosen), offsets, order, out_offsets, total),
        "bucketize_by_cuts": (ids, lengths.int(), cuts),
        "jagged_to_padded": (
            numbers(total),
            offsets.int(),
            5,
            float("-inf") if dtype.is_floating_point else 3.0,
        ),
        "padded_to_jagged": (numbers(BAGS, 5), offsets, total),
        "segment_sum": (numbers(total), offsets),
        "repeat_segments": (numbers(BAGS), offsets, total),
    }


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int64]
    if SIMULATED
    else [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32],
    ids=str,
)
@pytest.mark.parametrize("item", [(), (3,), (257,)] if SIMULATED else [(), (3,), (64,), (257,)], ids=str)
@pytest.mark.parametrize("name", list(JAGGED))
def test_jagged_ops_have_the_bits_of_the_cpu_and_never_wait(
    name: str, item: tuple[int, ...], dtype: torch.dtype
) -> None:
    arguments = jagged_arguments(item, dtype)[name]
    on_device = there(arguments)
    JAGGED[name](*on_device)  # compiled
    with without_waiting():
        result = JAGGED[name](*on_device)
    alike(result, LIBRARY.references[name](*arguments))
    with without_waiting():
        again = JAGGED[name](*on_device)
    alike(again, tuple(r.cpu() for r in result) if isinstance(result, tuple) else result.cpu())
    reports.raise_all(DEVICE)


@pytest.mark.parametrize("buckets", [1, 2, 17, 300])
def test_many_buckets_have_the_bits_of_the_cpu(buckets: int) -> None:
    lengths = torch.randint(0, 9, (size(4000, 60),))
    ids = torch.randint(-5, 1005, (int(lengths.sum()),), dtype=torch.int32)
    arguments = (ids, lengths, torch.randint(0, 1000, (buckets + 1,)).sort().values)
    alike(JAGGED["bucketize_by_cuts"](*there(arguments)), LIBRARY.references["bucketize_by_cuts"](*arguments))


def test_what_is_wrong_is_told_later_with_the_cpus_message_and_the_process_goes_on() -> None:
    lies = {
        "segment_ids": (torch.tensor([0, 2**62, 2, 3]), 3),
        "segment_sum": (torch.rand(3), torch.tensor([0, 2, 5])),
        "select_segments": (torch.rand(3), torch.tensor([0, 3]), torch.tensor([9]), torch.tensor([0, 3]), 3),
        "jagged_to_padded": (torch.rand(3), torch.tensor([0, 9, 3]), 2, 0.0),
        "bucketize_by_cuts": (torch.arange(3), torch.tensor([2, 2]), torch.tensor([0, 9])),
    }
    for name, arguments in lies.items():
        JAGGED[name](*there(arguments))
        with pytest.raises(InputError, match=f"{name}: "):
            reports.raise_all(DEVICE)
    reports.raise_all(DEVICE)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_ops_can_be_captured_and_replayed() -> None:
    arguments = there(jagged_arguments((64,), torch.float32)["select_segments"])
    wanted = JAGGED["select_segments"](*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = JAGGED["select_segments"](*arguments)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, wanted)


@real
def test_a_new_number_of_items_compiles_nothing() -> None:
    def launch(total: int) -> None:
        offsets = torch.tensor([0, total // 3, total], device=DEVICE)
        JAGGED["repeat_segments"](torch.randn(2, 64, device=DEVICE), offsets, total)

    launch(1000)
    kernel = jagged_copy.copy_items
    known = sum(len(cache[0]) for cache in kernel.device_caches.values())
    for total in (1, 16, 17, 4096, 100_003):
        launch(total)
    assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == known


@real
def test_items_beyond_two_to_the_31st_are_reached() -> None:
    items = 2**31 // 64 + 5
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * items * 64 * 2:
        pytest.skip("needs 14 GB of device memory")
    values = torch.zeros(items, 64, dtype=torch.float16, device=DEVICE)
    values[-3:] = torch.arange(1, 4, device=DEVICE)[:, None].half()
    offsets = torch.tensor([0, items - 3, items], device=DEVICE)
    out = JAGGED["select_segments"](
        values,
        offsets,
        torch.tensor([1, 0], device=DEVICE),
        torch.tensor([0, 3, items], device=DEVICE),
        items,
    )
    assert out[:3, 0].tolist() == [1, 2, 3]
    assert not out[3:].any()
    assert JAGGED["segment_sum"](values, offsets)[1].tolist() == [6.0] * 64


# ---------------------------------------------------------------------------------------------------- exchange


def route_arguments(each_id: bool, variable: bool) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(5)
    features, batch, rows = 7, size(512, 12), 100_000
    sizes = [batch + 3 * k for k in range(features)] if variable else [batch]
    lengths = torch.randint(0, 12, (sum(sizes) if variable else features * batch,), generator=generator)
    lengths[30] = size(3000, 100)
    ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    keys = [6, 0, 1, 2, 2, 3, 4]  # one key is read by two routes, one by none
    ranges = [1, 8, 2, 3, 1, 300, 1]
    cuts = [c for n in ranges for c in [rows * i // n for i in range(n + 1)]]
    wire = torch.randperm(sum(ranges), generator=generator)
    order = [-1 if place == 3 else int(place) - int(place > 3) for place in wire]
    names = ",".join(f"f{k}@t" for k in keys)
    return (ids, offsets_from_lengths(lengths), keys, sizes, cuts, ranges, order, each_id, torch.int32, names)


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("each_id", [False, True])
def test_routing_has_the_results_of_the_cpu(each_id: bool, variable: bool) -> None:
    arguments = route_arguments(each_id, variable)
    wanted = exchange_reference._route_ids_reference(*arguments)
    given = there(arguments)
    exchange.route_ids(*given)
    for _ in range(2):
        with without_waiting():
            told, lengths, local, slots, positions = exchange.route_ids(*given)
        present, moved = (int(told[first::2].sum()) for first in (1, 2))
        alike((told, lengths[:present], local[:moved], slots[:present], positions[:moved]), wanted)


def test_routing_tells_the_cpus_first_fault() -> None:
    arguments = list(route_arguments(False, False))
    arguments[0] = arguments[0].clone()
    arguments[0][some([5000, 20_000, 9000], [50, 200, 90])] = 10**9
    with pytest.raises(InputError) as expected:
        exchange_reference._route_ids_reference(*arguments)
    ids, offsets, _, _, cuts, ranges, *_, names = given = there(tuple(arguments))
    fault = int(exchange.route_ids(*given)[0][0])
    with pytest.raises(InputError) as told:
        exchange_reference.raise_fault(fault, ids, offsets, cuts, ranges, names)
    assert str(told.value) == str(expected.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("width", [3, 64, 257])
def test_rows_are_placed_added_and_picked_with_the_cpus_bits(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    bags, features, owners = size(900, 30), 5, 4
    moves: list[list[int]] = [[], [], [], [], [], []]
    slots = []
    for feature in range(features):
        for _ in range(owners if feature % 2 else 1):
            own = torch.randperm(bags, generator=generator)[: int(torch.randint(0, bags, (1,), generator=generator))]
            start = -1 if feature == 2 else sum(s.numel() for s in slots)
            for column, value in zip(
                moves,
                [own.numel(), width, start, feature * width, features * width, feature % 2],
                strict=True,
            ):
                column.append(value)
            if start >= 0:
                slots.append(own.sort().values.int())
    all_slots = torch.cat(slots)
    rows = (torch.randn(sum(c * w for c, w in zip(moves[0], moves[1], strict=True)), generator=generator) * 9).to(dtype)
    wanted = torch.ones(bags * features * width).to(dtype)
    got = wanted.to(DEVICE)
    exchange_reference._place_rows_reference_(wanted, rows, all_slots, *moves)
    on_device = there((rows, all_slots))
    exchange.place_rows_(got.clone(), *on_device, *moves)
    with without_waiting():
        exchange.place_rows_(got, *on_device, *moves)
        picked = exchange.pick_rows(got, on_device[1], *moves[:-1])
    alike(got, wanted)
    alike(picked, exchange_reference._pick_rows_reference(wanted, all_slots, *moves[:-1]))
    reports.raise_all(DEVICE)


def test_a_slot_that_is_not_there_is_told_and_not_followed() -> None:
    out, slots = torch.zeros(9, device=DEVICE), torch.tensor([0, 3000], dtype=torch.int32, device=DEVICE)
    exchange.place_rows_(out, torch.ones(4, device=DEVICE), slots, [2], [2], [0], [1], [3], [0])
    with pytest.raises(AssertionError, match="segment 0 has places outside"):
        reports.raise_all(DEVICE)


# ---------------------------------------------------------------------------------------------------- packed rows


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("widths", [[64, 64, 128], [3, 16, 257, 3], [1000, 4]], ids=str)
def test_packed_rows_have_the_cpus_bytes(widths: list[int], format: str) -> None:
    counts = [size(1000, 10) + 7 * i for i in range(len(widths))]
    pieces = [
        torch.randn(count, width) * 10 ** (12 * torch.rand(count, 1) - 6)
        for count, width in zip(counts, widths, strict=True)
    ]
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    wanted = quant_reference.pack_segments_reference(flat, counts, widths, format)
    on_device = flat.to(DEVICE)
    quant.pack_segments(on_device, counts, widths, format)
    with without_waiting():
        packed = quant.pack_segments(on_device, counts, widths, format)
    alike(packed, wanted)
    alike(
        quant.unpack_segments(packed, counts, widths, format, torch.float32),
        quant_reference.unpack_segments_reference(wanted, counts, widths, format, torch.float32),
    )


def test_every_e4m3_step_is_rounded_as_torch_does() -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    around = [torch.nextafter(middles, torch.tensor(sign * torch.inf)) for sign in (-1, 1)]
    numbers = torch.cat([codes, middles, *around, torch.tensor([448.0])])
    wanted = quant_reference.pack_segments_reference(numbers, [1], [numbers.numel()], "fp8")
    alike(quant.pack_segments(numbers.to(DEVICE), [1], [numbers.numel()], "fp8"), wanted)


# ---------------------------------------------------------------------------------------------------- as ops


@pytest.fixture
def served() -> Iterator[None]:
    library = torch.library.Library("tilerec", "IMPL")
    made: dict[str, Callable[..., Any]] = {**JAGGED, **exchange.KERNELS, **quant.KERNELS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once per process that a kernel is replaced
        for name, kernel in made.items():
            library.impl(name, kernel, "CUDA", allow_override=True)
    yield
    library._destroy()


@pytest.mark.usefixtures("served")
def test_selections_are_differentiated_without_waiting() -> None:
    values, offsets, order, out_offsets, total = there(jagged_arguments((64,), torch.float32)["select_segments"])
    values.requires_grad_()
    op = torch.ops.tilerec.select_segments
    op(values, offsets, order, out_offsets, total).sum().backward()
    values.grad = None
    with without_waiting():
        op(values, offsets, order, out_offsets, total).sum().backward()
    copies = torch.zeros(values.shape[0], dtype=torch.int64)
    segment = LIBRARY.references["select_segments"](
        torch.arange(values.shape[0]), offsets.cpu(), order.cpu(), out_offsets.cpu(), total
    )
    copies.index_add_(0, segment, torch.ones_like(segment))
    assert values.grad is not None
    assert torch.equal(values.grad[:, 0].cpu(), copies.float())


@pytest.mark.usefixtures("served")
def test_ops_pass_opcheck() -> None:
    offsets, order = torch.tensor([0, 2, 3], device=DEVICE), torch.tensor([1, 0], device=DEVICE)
    values = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    ops = torch.ops.tilerec
    torch.library.opcheck(
        ops.select_segments.default, (values, offsets, order, torch.tensor([0, 1, 3], device=DEVICE), 3)
    )
    torch.library.opcheck(ops.segment_sum.default, (values, offsets))
    torch.library.opcheck(ops.jagged_to_padded.default, (values, offsets, 2, 0.0))
    torch.library.opcheck(ops.pack_segments.default, (torch.randn(12, device=DEVICE), [3], [4], "int8"))
