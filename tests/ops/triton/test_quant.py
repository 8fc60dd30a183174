"""Packed rows in Triton against the reference: the same bytes, and the same numbers from them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.triton.gates import Gate, compiled, nightly
from tests.ops.triton.interpreter import quick
from tilerec.comms.codec import codec
from tilerec.ops.quantize import definition as reference

pytest.importorskip("triton")

from tilerec.ops.quantize import triton as quant
from tilerec.ops.runtime.triton import library

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels are compiled here: tests/cuda")

FORMATS = ["int8", "fp8"]


@pytest.fixture(autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with quick():
        yield


SEGMENTS = [
    [],
    [(0, 3)],
    [(3, 0), (2, 4)],
    [(1, 1)],
    [(5, 3)],
    [(40, 16)],
    [(2, 3), (0, 5), (1, 257), (4, 1), (3, 3)],
    [(9, 128), (0, 4), (3, 12), (2, 700)],
]


def rows_of(segments: list[tuple[int, int]], seed: int = 0) -> Tensor:
    """Rows of normal values, each row on a scale of its own from 1e-6 to 1e6, some values far smaller than others."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randn(count, width, generator=generator)
        * 10 ** (12 * torch.rand(count, 1, generator=generator) - 6)
        * 10 ** (-6 * torch.rand(count, width, generator=generator).square())
        for count, width in segments
    ]
    return torch.cat([row.reshape(-1) for row in rows]) if rows else torch.empty(0)


def lists_of(segments: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [count for count, _ in segments], [width for _, width in segments]


def packed_alike(flat: Tensor, segments: list[tuple[int, int]], format: str) -> Tensor:
    lists = lists_of(segments)
    packed = quant.pack_segments(flat, *lists, format)
    wanted = reference.pack_segments_reference(flat, *lists, format)
    assert packed.dtype == wanted.dtype
    assert torch.equal(packed, wanted)
    return packed


def unpacked_alike(packed: Tensor, segments: list[tuple[int, int]], format: str) -> Tensor:
    lists = lists_of(segments)
    flat = quant.unpack_segments(packed, *lists, format, torch.float32)
    wanted = reference.unpack_segments_reference(packed, *lists, format, torch.float32)
    assert torch.equal(flat.view(torch.int32), wanted.view(torch.int32))
    return flat


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_bytes_and_numbers_are_the_references(segments: list[tuple[int, int]], format: str) -> None:
    unpacked_alike(packed_alike(rows_of(segments), segments, format), segments, format)


@pytest.mark.parametrize("format", FORMATS)
def test_every_step_and_every_tie_is_rounded_alike(format: str) -> None:
    """All codes, the numbers halfway between neighbours, and what lies next to those; the scale is 1."""
    if format == "int8":
        codes = torch.arange(-127, 128).float()
    else:
        codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
        codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    around = [torch.nextafter(middles, torch.tensor(sign * torch.inf)) for sign in (-1, 1)]
    numbers = torch.cat([codes, middles, *around, torch.zeros(1), -torch.zeros(1)])
    numbers = torch.cat([numbers, torch.zeros(-numbers.numel() % 31)]).view(-1, 31)
    row = torch.cat([numbers, torch.full((numbers.shape[0], 1), codes.max())], dim=1)
    segments = [(row.shape[0], 32)]
    unpacked_alike(packed_alike(row.view(-1), segments, format), segments, format)


@pytest.mark.parametrize("format", FORMATS)
def test_all_bytes_are_numbers_alike(format: str) -> None:
    codes = torch.arange(256).to(torch.uint8)
    if format == "fp8":
        codes = codes[(codes & 0x7F) != 0x7F]
    scale = torch.tensor([0.37]).view(torch.uint8)
    packed = torch.cat([scale, codes]).view(reference.PACKED_TYPE[format])
    unpacked_alike(packed, [(1, codes.numel())], format)


@pytest.mark.parametrize("format", FORMATS)
def test_tiny_huge_and_zero_rows_are_alike(format: str) -> None:
    rows = torch.tensor(
        [
            [9e-37, -1e-38, 1e-45, -0.0],
            [2e-36, -1e-36, 1e-40, 0.0],
            [1.0000001e-36, -9e-37, 0.0, -0.0],
            [3.4e38, -1e38, 1.0, -1e-30],
            [0.0, -0.0, 0.0, -0.0],
        ]
    )
    unpacked_alike(packed_alike(rows.view(-1), [(5, 4)], format), [(5, 4)], format)


# Infinity times 0 is NaN, as it should be; numpy, which the interpreter computes with, finds that remarkable.
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_own_row_only(bad: float, format: str) -> None:
    flat = torch.tensor([1.0, -2.0, 3.0, bad, -5.0, 6.0])
    packed = quant.pack_segments(flat, [3], [2], format)
    wanted = reference.pack_segments_reference(flat, [3], [2], format)
    assert torch.equal(packed[[0, 1, 2, 3, 4, 5, 10, 11]], wanted[[0, 1, 2, 3, 4, 5, 10, 11]])
    rows = quant.unpack_segments(packed, [3], [2], format, torch.float32).view(3, 2)
    assert rows[1].isnan().all()
    assert rows[[0, 2]].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_rows_of_other_floats_are_packed_alike(dtype: torch.dtype, format: str) -> None:
    segments = [(3, 8), (2, 5)]
    flat = (rows_of([(34, 1)]).clamp(-1e4, 1e4)).to(dtype)
    packed = packed_alike(flat, segments, format)
    got = quant.unpack_segments(packed, *lists_of(segments), format, dtype)
    wanted = reference.unpack_segments_reference(packed, *lists_of(segments), format, dtype)
    assert got.dtype == dtype
    # The interpreter cuts bfloat16 off where a GPU rounds it.
    torch.testing.assert_close(got, wanted, rtol=2**-7 if dtype == torch.bfloat16 else 0.0, atol=0.0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_packed_rows_may_begin_anywhere_in_memory(shift: int, format: str) -> None:
    segments = [(3, 8), (1, 4)]
    packed = packed_alike(rows_of(segments), segments, format)
    moved = torch.cat([packed[:shift], packed])[shift:]
    unpacked_alike(moved, segments, format)
    shifted = torch.cat([torch.ones(shift), rows_of(segments)])[shift:]
    packed_alike(shifted, segments, format)
    packed_alike(rows_of([(2 * 28, 1)])[::2], segments, format)


def test_segments_that_do_not_hold_the_rows_are_refused() -> None:
    with pytest.raises(AssertionError, match="pack_segments: the segments hold 4 elements, the tensor 5"):
        quant.pack_segments(torch.zeros(5), [2], [2], "int8")
    with pytest.raises(AssertionError, match="unpack_segments: the segments hold 12 elements, the tensor 4"):
        quant.unpack_segments(torch.zeros(4, dtype=torch.int8), [2], [2], "int8", torch.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_the_wire_is_packed_by_the_kernels(format: str) -> None:
    segments = [(2, 8), (3, 8), (1, 5)]
    flat, own = rows_of(segments), codec(format)
    wanted = own.encode(flat, segments)
    served = torch.library.Library("tilerec", "IMPL")
    called = []

    def pack_segments(*arguments: object) -> Tensor:
        called.append(arguments)
        return quant.pack_segments(*arguments)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once per process that a kernel is replaced
        served.impl("pack_segments", pack_segments, "CPU", allow_override=True)
        served.impl("unpack_segments", quant.unpack_segments, "CPU", allow_override=True)
    wire = own.encode(flat, segments)
    assert called
    assert torch.equal(wire, wanted)
    there = own.decode(wire, segments)
    served._destroy()
    assert torch.equal(there, own.decode(wanted, segments))


def gate(kernel: str, fp8: bool, width: int, number: str = "*fp32") -> Gate:
    rows, columns = quant.shapes(width)
    signature = {"packed": "*u8" if fp8 else "*i8", "flat": number, "table": "*i64", "segments": "i32"}
    constants = {"FP8": fp8, "ROWS": rows, "COLUMNS": columns, "VEC": 4, "BYTES_VEC": 4}
    if kernel == "pack":
        signature["largest"] = "fp32"
        constants["WHOLE"] = width <= columns
    return Gate(f"{kernel} {fp8} {width} {number}", f"tilerec.ops.quantize.triton:{kernel}", signature, constants)


@nightly
@pytest.mark.timeout(120)
def test_numbers_are_read_16_bytes_a_lane_and_bytes_4_at_a_time() -> None:
    for name, result in compiled(
        [gate("pack", False, 64), gate("pack", True, 128), gate("pack", True, 700), gate("unpack", False, 64),
         gate("unpack", True, 128)]
    ).items():  # fmt: skip
        assert result.spilled == 0, name
        assert result.registers <= 168, name
        assert result.shared <= 256, name
        wide = (result.count("ld.global.v4.b32"), result.count("st.global.v4.b32"))
        assert wide == ((0, 8) if name.startswith("unpack") else (16 if "700" in name else 8, 0)), name
        narrow = (
            result.count("st.global.b8", "st.global.b16"),
            result.count("ld.global.b8", "ld.global.b16"),
        )
        assert narrow == ((0, 1) if name.startswith("unpack") else (1, 0)), name  # the scale, by several lanes
