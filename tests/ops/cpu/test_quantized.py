"""Native lookups in quantized rows against the reference: all types, dims, vector levels, and hostile input."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops import backends
from tilerec.ops.quantized.definition import quantized_pooled_lookup
from tilerec.ops.quantized.row_format import BITS, dequantize_rows, quantize_rows, row_bytes
from tilerec.ops.quantized.served_tables import ServedTables
from tilerec.ops.runtime.cpu import library as native
from tilerec.ops.runtime.library import LIBRARY

pytestmark = pytest.mark.skipif(not backends.NATIVE_CPU, reason="the native library is not built")

ops = torch.ops.tilerec
POOLED = LIBRARY.references["quantized_pooled_lookup"]
SEQUENCE = LIBRARY.references["quantized_sequence_lookup"]
DIMS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 100, 200, 333]


@pytest.fixture(params=range(3), ids=native.ISAS)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    lib = native.library()
    assert lib is not None
    before = lib.tr_isa()
    if lib.tr_isa_choose(request.param) != request.param:
        pytest.skip("this machine has no such instructions")
    yield
    lib.tr_isa_choose(before)


def tables(dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dim)
    floats = torch.randn(4, 50, dim, generator=generator) * 0.3
    return [*(quantize_rows(rows, bits) for rows, bits in zip(floats, BITS, strict=False)), floats[3].half()]


def same_bits(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16, torch.float16])
def test_all_row_types_have_the_references_bits(output: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    offsets, starts = torch.tensor([0, 3, 3, 10, 20, 25, 30, 41, 60]), torch.tensor([0, 20, 30, 41, 60])
    for dim in DIMS:
        for index, weighted in ((torch.int32, False), (torch.int64, True)):
            ids = torch.randint(0, 50, (60,), generator=generator, dtype=index)
            weights = torch.rand(60, generator=generator) if weighted else None
            common = (tables(dim), [dim] * 4, [*BITS, 0], ids)
            for batches in ([2], [2, 2, 1, 3]):
                layout = ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 1], batches)
                call = (*common, offsets, weights, *layout, output, "a@a,b@b,c@c,d@d")
                assert same_bits(ops.quantized_pooled_lookup(*call), POOLED(*call)), dim
            sequence = (*common, starts, [0, 1, 2, 3], output, "a@a,b@b,c@c,d@d")
            assert same_bits(ops.quantized_sequence_lookup(*sequence), SEQUENCE(*sequence)), dim


def test_bits_do_not_depend_on_threads() -> None:
    rows = quantize_rows(torch.randn(500, 65), 8)
    ids = torch.randint(0, 500, (40_000,))
    call = ([rows], [65], [8], ids, torch.arange(0, 40_001, 20), None, [0], [0], [0], [2000], torch.float32, "f@t")
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(ops.quantized_pooled_lookup(*call))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("bits", BITS)
def test_nothing_behind_the_last_row_is_read(bits: int) -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(place + page), ctypes.c_size_t(page), 0) == 0  # a read there is a crash
    for dim in DIMS:
        size = 3 * row_bytes(dim, bits)
        rows = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=page - size).view(3, -1)
        floats = torch.randn(3, dim)
        quantize_rows(floats, bits, rows)
        ids, offsets = torch.tensor([2, 2]), torch.tensor([0, 2])
        out = ops.quantized_pooled_lookup(
            [rows], [dim], [bits], ids, offsets, None, [0], [0], [0], [1], torch.float32, "f@t"
        )
        row = dequantize_rows(rows, dim, bits)[2]
        assert torch.equal(out[0], row + row)
        each = ops.quantized_sequence_lookup([rows], [dim], [bits], ids, offsets, [0], torch.float32, "f@t")
        assert torch.equal(each[1], row)


def test_quantized_rows_have_no_gradients_of_sample_weights() -> None:
    lib = native.library()
    assert lib is not None
    from tilerec.ops.lookup.cpu import LookupLayout
    from tilerec.ops.runtime.cpu.records import LookupRecord

    rows, grads = quantize_rows(torch.randn(3, 8), 8), torch.zeros(1)
    layout = LookupLayout.of([0], [0], [0], [3], [8], [3])
    data, sizes = layout.pointers(rows.data_ptr()), native.int64_array([1])
    ids, offsets, grad = torch.tensor([0]), torch.tensor([0, 1]), torch.ones(1, 8)
    record = LookupRecord(
        *layout.head, ctypes.addressof(data), 1, ctypes.addressof(sizes), ids.data_ptr(), 1, 1, offsets.data_ptr(), 2,
        None, grad.data_ptr(), 0, grads.data_ptr(), 1,
    )  # fmt: skip
    lib.tr_sample_weight_grad.restype = ctypes.c_int64
    assert lib.tr_sample_weight_grad(ctypes.byref(record)) == native.BAD_ARGUMENT
    assert record.report.value == 6


def test_served_tables_follow_their_tensors_to_other_memory() -> None:
    first, second = torch.randn(5, 8), torch.randn(9, 8)
    rows = quantize_rows(first, 8)
    served = ServedTables([rows])
    rest = (torch.tensor([0]), torch.tensor([0, 1]), None, (0,), (0,), (0,), [1], torch.float32, "f@t")

    def out() -> Tensor:
        return quantized_pooled_lookup(served, (8,), (8,), *rest)[0]

    assert torch.equal(out(), dequantize_rows(rows, 8, 8)[0])
    assert len(served.layouts) == 1
    rows.data = quantize_rows(second, 8)
    assert torch.equal(out(), dequantize_rows(rows, 8, 8)[0])
    assert torch.equal(out(), dequantize_rows(quantize_rows(second, 8), 8, 8)[0])
    with pytest.raises(InputError, match="id 9 of"):
        quantized_pooled_lookup(served, (8,), (8,), torch.tensor([9]), *rest[1:])


def test_a_profiler_records_the_op() -> None:
    served = ServedTables([quantize_rows(torch.randn(5, 8), 8)])
    with torch.profiler.profile() as seen:
        quantized_pooled_lookup(
            served,
            (8,),
            (8,),
            torch.tensor([0]),
            torch.tensor([0, 1]),
            None,
            (0,),
            (0,),
            (0,),
            [1],
            torch.float32,
            "f@t",
        )
    assert "tilerec::quantized_pooled_lookup" in {event.key for event in seen.key_averages()}
