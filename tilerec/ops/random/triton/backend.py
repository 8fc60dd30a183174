"""Random words and stochastic rounding on the GPU: the words of `definition.py`, bit for bit.

Nouns
  key      two 32-bit words per table; counter, stream: as in `definition.py`
  word j   of the four of a counter belongs to column 4 * (column // 4) + j, so one run of Philox serves four
           neighbouring columns. If tiles begin at a multiple of 4 columns, a program joins the four results in
           registers; otherwise it runs Philox for every column and selects the column's word

  bf16   keeps 7 mantissa bits and drops 16 of fp32's bits
  fp16   keeps 10, drops 13; below 2^-14 the steps are 2^-24
  e4m3   keeps 3, drops 20; below 2^-6 the steps are 2^-9; values above 448 become 448

Example: word 0x00008000 rounds 1.0 + 2^-9 (a quarter of a step of bf16 above 1.0) down: 0x4000 + 0x8000 does not carry
into the kept bits; 0x0000c000 rounds it up.

Legend: R rows, C columns.
"""

# ruff: noqa: RET505, SIM300 - the compiler evaluates these branches of kernels

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tilerec.ops.random.definition import FillCall, fill_reference_
from tilerec.ops.runtime.triton.launch import GRID_Y, launch
from tilerec.ops.runtime.triton.rows import reads

_M0 = tl.constexpr(0xD2511F53)
_M1 = tl.constexpr(0xCD9E8D57)
_W0 = tl.constexpr(0x9E3779B9)
_W1 = tl.constexpr(0xBB67AE85)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Run ten rounds of Philox4x32 on uint32 tensors; each 32 x 32 bit product becomes one `mul.wide`."""
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * tl.full((), _M0, tl.uint64)
        p1 = c2.to(tl.uint64) * tl.full((), _M1, tl.uint64)
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + tl.full((), _W0, tl.uint64)).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + tl.full((), _W1, tl.uint64)).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words(rows_R1, first_R1, stream_R1, k0_R1, k1_R1, R: tl.constexpr, C: tl.constexpr, ALIGNED: tl.constexpr):
    """Return words uint32 [R, C] for global rows (int64) and global columns `first + (0 … C - 1)`.

    ALIGNED: `first` is a multiple of 4. stream int64, keys int64 that hold 32 bits.
    """
    low = rows_R1.to(tl.uint32)
    high = (rows_R1 >> 32).to(tl.uint32)
    stream = stream_R1.to(tl.uint32)
    k0 = k0_R1.to(tl.uint32)
    k1 = k1_R1.to(tl.uint32)
    if ALIGNED:
        column = ((first_R1 // 4) + tl.arange(0, C // 4)[None, :]).to(tl.uint32)
        zero = tl.zeros((R, C // 4), tl.uint32)
        a, b, c, d = philox(low + zero, high + zero, column + zero, stream + zero, k0 + zero, k1 + zero)
        # join adds a last axis: [.., i, j] is word 2 i + j
        return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (R, C))
    else:
        column = first_R1 + tl.arange(0, C)[None, :]
        zero = tl.zeros((R, C), tl.uint32)
        a, b, c, d = philox(
            low + zero, high + zero, (column // 4).to(tl.uint32) + zero, stream + zero, k0 + zero, k1 + zero
        )
        word = column % 4
        return tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))


@triton.jit
def _e4m3(values):
    """Cast numbers that e4m3 represents exactly; clamp to [-448, 448], keep NaN."""
    within = tl.where(values > 448.0, 448.0, tl.where(values < -448.0, -448.0, values)).to(tl.float8e4nv)
    if _INTERPRETED:  # the interpreter's cast does not support NaN
        bits = tl.where(values == values, within.to(tl.uint8, bitcast=True), 0x7F).to(tl.uint8)
        return bits.to(tl.float8e4nv, bitcast=True)
    else:
        return within


@triton.jit
def round_at_random(values, random, TYPE: tl.constexpr):
    """Round fp32 up or down by 32-bit words, to the row's type: `ops.random.stochastic_round`."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = tl.abs(values)
    finite = magnitude < float("inf")
    if TYPE == tl.bfloat16:
        kept = ((bits + (random & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(finite, kept, values).to(tl.bfloat16)
    elif TYPE == tl.float16:
        noise = random & 0x1FFF
        normal = ((bits + noise) & 0xFFFFE000).to(tl.float32, bitcast=True)
        steps = tl.floor(magnitude * 16777216.0 + noise.to(tl.float32) * 0.0001220703125)
        small = steps * 5.9604644775390625e-08
        small = tl.where(values < 0, -small, small)
        kept = tl.where(magnitude >= 6.103515625e-05, normal, small)
        return tl.where(finite, kept, values).to(tl.float16)
    elif TYPE == tl.float8e4nv:
        noise = random & 0xFFFFF
        normal = ((bits + noise) & 0xFFF00000).to(tl.float32, bitcast=True)
        steps = tl.floor(magnitude * 512.0 + noise.to(tl.float32) * 9.5367431640625e-07)
        small = steps * 0.001953125
        small = tl.where(values < 0, -small, small)
        kept = tl.where(magnitude >= 0.015625, normal, small)
        return _e4m3(tl.where(finite, kept, values))
    else:
        return values


@triton.jit
def round_to_nearest(values, TYPE: tl.constexpr):
    """Round fp32 to the row's type as `Tensor.to` does; values beyond e4m3's 448 become 448."""
    if _INTERPRETED:  # the interpreter's own casts to bf16 and e4m3 do not round to nearest
        bits = values.to(tl.uint32, bitcast=True)
        magnitude = tl.abs(values)
        if TYPE == tl.bfloat16:
            even = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
            values = tl.where(magnitude < float("inf"), even, values)
        if TYPE == tl.float8e4nv:
            even = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
            small = (values * 512.0 + 12582912.0) - 12582912.0
            even = tl.where(magnitude < 0.015625, small * 0.001953125, even)
            values = tl.where(magnitude < 448.0, even, values)
    if TYPE == tl.float8e4nv:
        return _e4m3(values)
    else:
        return values.to(TYPE)


@triton.jit(do_not_specialize=["rows", "width", "row_offset", "k0", "k1"])
def _fill(
    out, places, rows, width, row_offset, column_offset, k0, k1, a, b,
    PLACED: tl.constexpr, NORMAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a tile [ROWS, COLUMNS] of initial values, of rows from `row_offset` on or, if PLACED, of rows `places`.

    Columns begin at a multiple of 4 of the whole table, so a program has both words of a normal pair.
    """
    shift = column_offset % 4
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :] - shift
    inside = (row < rows) & (column >= 0) & (column < width)
    first = (column_offset - shift + tl.program_id(1).to(tl.int64) * COLUMNS) + tl.zeros((ROWS, 1), tl.int64)
    zero = tl.zeros((ROWS, 1), tl.int64)
    place = row + row_offset
    if PLACED:
        place = tl.load(places + row, mask=row < rows, other=0)
    random = words(place, first, zero, zero + k0, zero + k1, ROWS, COLUMNS, True)
    u = (random >> 8).to(tl.int32)
    if NORMAL:
        radius, angle = tl.split(tl.reshape(u, (ROWS, COLUMNS // 2, 2)))
        length = tl.sqrt(-2.0 * tl.log((radius.to(tl.float64) + 1.0) * 5.9604644775390625e-08))
        turn = angle.to(tl.float64) * tl.full((), 3.7450702829239286e-07, tl.float64)
        pair = tl.join(length * tl.cos(turn), length * tl.sin(turn))
        values = a + b * tl.reshape(pair, (ROWS, COLUMNS)).to(tl.float32)
    else:
        values = a + (b - a) * (u.to(tl.float32) * 5.9604644775390625e-08)
    tl.store(out + row * width + column, round_to_nearest(values, out.dtype.element_ty), mask=inside)


def fill_(call: FillCall) -> None:
    """See `definition.py`: uniform values bit for bit, normal ones through the GPU's float64 functions."""
    out, rows_R, key, row_offset, column_offset, kind, a, b = call
    rows, width = out.shape
    # The grid's limits: rows on the first axis, blocks of 256 columns on the second.
    fits = rows < 1 << 31 and width < GRID_Y * 256
    if not (fits and reads(out.dtype, out.device) and out.is_contiguous()):
        fill_reference_(call)
    elif out.numel():
        places = None if rows_R is None else rows_R.contiguous()
        span = width + column_offset % 4
        columns = min(max(triton.next_power_of_2(span), 4), 256)
        block = 1024 // columns
        launch(_fill, (triton.cdiv(rows, block), triton.cdiv(span, columns)),
            out, places, rows, width, row_offset, column_offset, key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF, float(a),
            float(b), PLACED=places is not None, NORMAL=kind == "normal", ROWS=block, COLUMNS=columns, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip


KERNELS: dict[str, Callable[..., Any]] = {"random_fill_": fill_, "random_rows_": fill_}
"""Kernels by op name."""
