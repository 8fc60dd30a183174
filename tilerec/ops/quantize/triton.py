"""Packing and unpacking of rows on GPUs: `pack_segments` and `unpack_segments`, one launch each.

`definition.py` defines a packed row. Its bytes are those of the reference, on every GPU: quotients are rounded
correctly (`div_rn`; `/` is not). Conversions between numbers and bytes are integer arithmetic, so e4m3 needs no
instruction that only new GPUs have.

Nouns
  tile   `ROWS` neighbouring rows of one segment, read by one program of one warp, 4 KB in flight
  whole  a row fits a tile's columns: the kernel reads it once. It reads longer rows twice, the second time from cache

Memory traffic per row of w fp32 numbers: 5 w + 4 bytes in either direction, the least possible. The reference: about
30 w, in some 12 launches.

Each lane reads 16 bytes of numbers if all widths are multiples of 4. Then a packed row begins at a multiple of 4 bytes,
hardly ever of 16 (w + 4), so the kernel writes its bytes 4 at a time; a warp's writes still fill whole sectors.

Legend: R rows of a tile, C columns at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.quantize.definition import (
    LARGEST,
    PACKED_TYPE,
    SCALE_BYTES,
    SMALLEST,
    check_segments,
    pack_segments_reference,
    unpack_segments_reference,
)
from tilerec.ops.runtime.triton.addresses import upload
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.runtime.triton.reports import raise_due
from tilerec.ops.runtime.triton.search import segment_at

_SCALE = tl.constexpr(SCALE_BYTES)
_SMALLEST = tl.constexpr(SMALLEST)
_INFINITE = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)
# x + _WHOLE is an integer for |x| < 2**22, rounded to nearest, ties to even.
_WHOLE = tl.constexpr(12582912.0)

# Rows of `table`, int64 [5, S].
_TILES = tl.constexpr(0)  # its first tile
_COUNT = tl.constexpr(1)
_NUMBERS = tl.constexpr(2)  # index of its first number
_BYTES = tl.constexpr(3)  # index of its first packed byte
_WIDTH = tl.constexpr(4)


@triton.jit
def _segment(table, segments, ROWS: tl.constexpr, VEC: tl.constexpr, BYTES_VEC: tl.constexpr):
    """Return this program's rows: the starts of their numbers and bytes, a mask of existing rows, and the width."""
    program = tl.program_id(0).to(tl.int64)
    s = table + segment_at(table, segments, program)
    width = tl.multiple_of(tl.load(s + _WIDTH * segments), VEC)
    row = (program - tl.load(s + _TILES * segments)) * ROWS + tl.arange(0, ROWS)
    here = row < tl.load(s + _COUNT * segments)
    numbers = tl.multiple_of(tl.load(s + _NUMBERS * segments), VEC) + row * width
    # width is a multiple of BYTES_VEC, so width + 4 is, too.
    pitch = tl.multiple_of(width + _SCALE, BYTES_VEC)
    bytes_ = tl.multiple_of(tl.load(s + _BYTES * segments), BYTES_VEC) + row * pitch
    return numbers, bytes_, here, width


@triton.jit
def _e4m3_codes(x):
    """Return the bytes (as int32) of the e4m3fn numbers nearest to x, ties to even; |x| < 464.

    1.1 = 2**0 * 1.1: 3 bits after the point -> 1.125: exponent 0 + 7, fraction 001: 0b0_0111_001.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal numbers: keep 3 of the 23 bits of the fraction, move the exponent's bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Numbers below 2**-6 are multiples of 2**-9; the eighth multiple is the first normal number.
    small = (tl.abs(x) * 512.0 + _WHOLE - _WHOLE).to(tl.int32)
    return tl.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _e4m3_numbers(codes):
    """Return the numbers of e4m3fn bytes (as int32); packed rows do not contain the two bytes of NaN."""
    size = codes & 0x7F
    normal = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return (number.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _codes(x, scale, FP8: tl.constexpr):
    """Return the codes of numbers, as bytes; 0 if the row's scale is zero or not finite."""
    bits = x.to(tl.int32, bitcast=True)
    good = (scale > 0) & (scale.to(tl.int32, bitcast=True) < _INFINITE)
    finite = (bits & 0x7FFFFFFF) < _INFINITE
    # A zero keeps the number's sign, like a number divided by infinity.
    zero = tl.where(finite, bits & _SIGN, 0).to(tl.float32, bitcast=True)
    share = tl.div_rn(tl.where(good, x, zero), tl.where(good, scale, 1.0))
    if FP8:
        codes = _e4m3_codes(share).to(tl.uint8)
    else:
        codes = tl.minimum(tl.maximum(share + _WHOLE - _WHOLE, -127.0), 127.0).to(tl.int8)
    return codes


@triton.jit(do_not_specialize=["segments"])
def pack(
    packed, flat, table, segments, largest, FP8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, VEC: tl.constexpr, BYTES_VEC: tl.constexpr,
):  # fmt: skip
    """Write one tile of packed rows; `largest`: the largest code."""
    numbers, bytes_, here, width = _segment(table, segments, ROWS, VEC, BYTES_VEC)
    source = flat + numbers[:, None]
    target = packed + bytes_[:, None]
    x = tl.zeros((ROWS, COLUMNS), tl.float32)
    # The bits of absolute values, as integers, have the order of the values; NaNs are the largest.
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    for column in range(0, width, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(source + columns, mask=here[:, None] & (columns < width), other=0.0).to(tl.float32)
        most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = tl.max(most, 1).to(tl.float32, bitcast=True)[:, None]
    scale = tl.where(top < _SMALLEST, 0.0, tl.div_rn(top, tl.zeros_like(top) + largest))
    place = tl.arange(0, _SCALE)[None, :]
    scale_bytes = scale.to(tl.int32, bitcast=True) >> (8 * place)
    tl.store(target + place, scale_bytes.to(packed.dtype.element_ty), mask=here[:, None] & (place < _SCALE))
    for column in range(0, width, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)[None, :]
        inside = here[:, None] & (columns < width)
        if not WHOLE:
            x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + _SCALE + columns, _codes(x, scale, FP8), mask=inside)


@triton.jit(do_not_specialize=["segments"])
def unpack(
    flat, packed, table, segments, FP8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr, BYTES_VEC: tl.constexpr,
):  # fmt: skip
    """Write one tile of rows unpacked from their bytes."""
    numbers, bytes_, here, width = _segment(table, segments, ROWS, VEC, BYTES_VEC)
    source = packed + bytes_[:, None]
    place = tl.arange(0, _SCALE)[None, :]
    scale_bytes = tl.load(source + place, mask=here[:, None] & (place < _SCALE), other=0).to(tl.int32) & 0xFF
    scale = tl.sum(scale_bytes << (8 * place), 1).to(tl.float32, bitcast=True)[:, None]
    for column in range(0, width, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)[None, :]
        inside = here[:, None] & (columns < width)
        codes = tl.load(source + _SCALE + columns, mask=inside, other=0)
        if FP8:
            number = _e4m3_numbers(codes.to(tl.int32)) * scale
        else:
            number = codes.to(tl.float32) * scale
        tl.store(flat + numbers[:, None] + columns, number.to(flat.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------------------------
# host

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def shapes(widest: int) -> tuple[int, int]:
    """Return the rows and columns of a tile: 1,024 numbers, of rows of up to 512 columns at a time."""
    columns = min(max(1 << max(widest - 1, 0).bit_length(), 1), 512)
    return max(1024 // columns, 1), columns


@functools.lru_cache(maxsize=256)
def _unit(widths: tuple[int, ...]) -> int:
    """Return the largest power of two, up to 4, that divides all widths."""
    return math.gcd(4, *widths)


def _launch(
    kernel: Any, into: Tensor, source: Tensor, numbers: Tensor, bytes_: Tensor, counts: Sequence[int],
    widths: Sequence[int], *arguments: Any, **constants: Any,
) -> None:  # fmt: skip
    unit, widest = _unit(tuple(widths)), max(widths, default=0)
    rows, columns = shapes(widest) if unit == 4 else (max(256 // shapes(widest)[1], 1), shapes(widest)[1])
    vec = unit if numbers.data_ptr() % (unit * numbers.element_size()) == 0 else 1
    bytes_vec = 4 if unit == 4 and bytes_.data_ptr() % 4 == 0 else 1
    count_S, width_S = np.array(counts, dtype=np.int64), np.array(widths, dtype=np.int64)
    tiles_S = -(-count_S // rows)
    lists = (tiles_S, count_S * width_S, count_S * (width_S + SCALE_BYTES))
    tile_S, number_S, byte_S = (np.cumsum(sizes) - sizes for sizes in lists)
    programs = int(tiles_S.sum())
    if not programs:
        return
    table = upload(np.concatenate((tile_S, count_S, number_S, byte_S, width_S)), into.device)
    if kernel is pack:
        constants["WHOLE"] = widest <= columns
    launch(kernel, (programs,),
        into, source, table, len(counts), *arguments, ROWS=rows, COLUMNS=columns, VEC=vec, BYTES_VEC=bytes_vec,
        num_warps=1, enable_fp_fusion=False, **constants,
    )  # fmt: skip


def pack_segments(flat: Tensor, counts: Sequence[int], widths: Sequence[int], format: str) -> Tensor:
    check_segments("pack_segments", flat, counts, widths, 0, format)
    if flat.dtype not in _FLOATS:
        return pack_segments_reference(flat, counts, widths, format)
    raise_due(flat.device)
    flat = flat.contiguous()
    size = flat.numel() + SCALE_BYTES * sum(counts)
    packed = torch.empty(size, dtype=PACKED_TYPE[format], device=flat.device)
    _launch(pack, packed, flat, flat, packed, counts, widths, LARGEST[format], FP8=format == "fp8")
    return packed


def unpack_segments(
    packed: Tensor, counts: Sequence[int], widths: Sequence[int], format: str, dtype: torch.dtype
) -> Tensor:
    check_segments("unpack_segments", packed, counts, widths, SCALE_BYTES, format)
    if dtype not in _FLOATS or packed.dtype != PACKED_TYPE[format]:
        return unpack_segments_reference(packed, counts, widths, format, dtype)
    raise_due(packed.device)
    packed = packed.contiguous()
    flat = torch.empty(packed.numel() - SCALE_BYTES * sum(counts), dtype=dtype, device=packed.device)
    _launch(unpack, flat, packed, flat, packed, counts, widths, FP8=format == "fp8")
    return flat


KERNELS: dict[str, Callable[..., Any]] = {"pack_segments": pack_segments, "unpack_segments": unpack_segments}
"""Kernels by op name."""
