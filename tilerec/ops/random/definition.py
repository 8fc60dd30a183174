"""Random numbers that depend on position, not on order: a counter-based generator keyed by table, row and column.

Initial values and stochastic rounding draw from Philox4x32-10 (Salmon, Moraes, Dror & Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). The counter of an element is its global position. So a tile has the same
bits as the slice of the whole table, on any rank, in any order.

  key      (seed word, table word), 32 bits each
  counter  (row low, row high, column // 4, stream); word j of the result belongs to column 4 * (column // 4) + j
  stream   0 for initial values; the table's update count for stochastic rounding

Legend: R rows, C columns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.library import LIBRARY, new_record

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def table_key(seed: int, table: str) -> list[int]:
    """Return a table's Philox key: `[32-bit seed word, CRC-32 of the table's name xor the seed's upper half]`."""
    return [seed & _MASK, zlib.crc32(table.encode()) ^ ((seed >> 32) & _MASK)]


def block_seed(key: Sequence[int], block: int) -> int:
    """Return the seed of torch's generators for one block of a table's rows.

    Lower 32 bits: `word 0 of philox(0, 0, 2^32 - 1, 0) + block`. torch's CPU generator uses only these bits; they
    differ between a table's blocks. Upper 32 bits: word 1.
    """
    zero, last = torch.zeros((), dtype=torch.int64, device="cpu"), torch.tensor(_MASK, device="cpu")
    low, high, _, _ = philox((zero, zero, last, zero), key)
    return (int(low) + block) & _MASK | int(high) << 32


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Return high and low 32 bits of a 32 x 32 bit product, in int64 (which wraps, but keeps the right bits)."""
    product = a * constant
    return (product >> 32) & _MASK, product & _MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Sequence[int]) -> tuple[Tensor, ...]:
    """Apply ten rounds of Philox4x32 to int64 tensors of 32-bit words.

    Example: counter (0, 0, 0, 0) under key (0, 0) gives 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 (the published
    known answer).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key[0] & _MASK, key[1] & _MASK
    for _ in range(10):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def random_words(rows_R: Tensor, width: int, key: Sequence[int], column_offset: int, stream: int) -> Tensor:
    """Return 32-bit words `[R, width]` (int64) of these global rows and columns
    `[column_offset, column_offset + width)`."""
    first, last = column_offset // 4, (column_offset + width + 3) // 4
    blocks = torch.arange(first, last, device=rows_R.device)
    row = rows_R.to(torch.int64)[:, None].expand(-1, blocks.numel())
    column = blocks[None, :].expand_as(row)
    words = philox((row & _MASK, (row >> 32) & _MASK, column, torch.full_like(row, stream & _MASK)), key)
    flat = torch.stack(words, dim=2).reshape(rows_R.numel(), 4 * blocks.numel())
    start = column_offset - 4 * first
    return flat[:, start : start + width]


class FillCall(NamedTuple):
    """One call of `random_fill_`, or of `random_rows_`, which passes the rows in place of their offset."""

    out: Tensor
    rows_R: Tensor | None
    key: Sequence[int]
    row_offset: int
    column_offset: int
    kind: str
    a: float
    b: float

    @staticmethod
    def of_tile(out: Tensor, key: Sequence[int], row_offset: int, *rest: Any) -> FillCall:
        """Return the call from the arguments of `random_fill_`."""
        return new_record(FillCall, (out, None, key, row_offset, *rest))

    @staticmethod
    def of_rows(out: Tensor, rows_R: Tensor, key: Sequence[int], *rest: Any) -> FillCall:
        """Return the call from the arguments of `random_rows_`."""
        return new_record(FillCall, (out, rows_R, key, 0, *rest))


def check_tile(out: Tensor, key: Sequence[int], row_offset: int, column_offset: int, kind: str) -> None:
    """Raise a `ConfigError` for a tile without a valid position in a table, or for an unknown kind of numbers."""
    if out.dim() != 2 or not out.is_floating_point():
        raise ConfigError(
            f"random_fill_: a tile of shape {list(out.shape)} and type {out.dtype}; expected floating [rows, columns]."
        )
    if len(key) != 2:
        raise ConfigError(f"random_fill_: a key of {len(key)} words; expected 2. Make it with table_key().")
    if row_offset < 0 or not 0 <= column_offset < 1 << 34:
        raise ConfigError(
            f"random_fill_: a tile at row {row_offset}, column {column_offset}; expected its position in the table, no "
            "negative number, and fewer than 2^34 columns."
        )
    if kind not in ("uniform", "normal"):
        raise ConfigError(f"random_fill_: kind {kind!r} is not 'uniform' or 'normal'.")


def check_fill(call: FillCall) -> None:
    """Run `check_tile`, and check the rows. The caller guarantees that row numbers are not negative."""
    out, rows_R, key, row_offset, column_offset, kind, _, _ = call
    check_tile(out, key, row_offset, column_offset, kind)
    if rows_R is not None and (rows_R.dtype != torch.int64 or rows_R.shape != out.shape[:1]):
        raise ConfigError(
            f"random_rows_: rows are {rows_R.dtype} {list(rows_R.shape)} for a tile of shape {list(out.shape)}; "
            f"expected int64 [{out.shape[0]}], the position of each row in the table."
        )


@LIBRARY.op(
    "random_rows_(Tensor(a!) out, Tensor rows_R, int[] key, int column_offset, str kind, float a, float b) -> ()",
    unpack=FillCall.of_rows,
    check=check_fill,
)
@LIBRARY.op(
    "random_fill_(Tensor(a!) out, int[] key, int row_offset, int column_offset, str kind, float a, float b) -> ()",
    unpack=FillCall.of_tile,
    check=check_fill,
)
def fill_reference_(call: FillCall) -> None:
    """Fill a tile `[R, width]` with the values that the whole table has at its position, or in these rows.

    kind "uniform": `a + (b - a) * u` with u = (word >> 8) / 2^24, in fp32. kind "normal": mean a, standard deviation b,
    by Box-Muller on neighbouring words: `r = sqrt(-2 ln(((w0 >> 8) + 1) / 2^24))`, columns get `r cos`, `r sin`.

    Example: a [10, 4] tile at row_offset 5 equals rows 5 to 14 of the whole table; rows [7, 2] equal its rows 7 and 2.
    """
    out, rows_R, key, row_offset, column_offset, kind, a, b = call
    rows, width = out.shape
    if not out.numel():
        return
    block = max(1, (1 << 22) // width)
    for start in range(0, rows, block):
        stop = min(rows, start + block)
        if rows_R is None:
            own_R = torch.arange(row_offset + start, row_offset + stop, device=out.device)
        else:
            own_R = rows_R[start:stop]
        out[start:stop] = random_rows(own_R, width, key, column_offset, kind, a, b, out.dtype)


def random_rows(
    rows_R: Tensor, width: int, key: Sequence[int], column_offset: int, kind: str, a: float, b: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return `random_fill_`'s values `[R, width]` of any global rows; `a` and `b` as there."""
    if kind == "uniform":
        words = random_words(rows_R, width, key, column_offset, 0)
        u = (words >> 8).to(torch.float32) * 2.0**-24
        low, high = (torch.tensor(x, dtype=torch.float32, device=u.device) for x in (a, b))
        return (low + (high - low) * u).to(dtype)
    start = column_offset - column_offset % 2
    stop = column_offset + width + (column_offset + width) % 2
    words = random_words(rows_R, stop - start, key, start, 0)
    first, second = (words[:, 0::2] >> 8).double(), (words[:, 1::2] >> 8).double()
    radius = torch.sqrt(-2.0 * torch.log((first + 1) * 2.0**-24))
    angle = second * (2.0 * math.pi * 2.0**-24)
    z = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=2).reshape(rows_R.numel(), stop - start)
    z = z[:, column_offset - start : column_offset - start + width].to(torch.float32)
    mean, deviation = (torch.tensor(x, dtype=torch.float32, device=z.device) for x in (a, b))
    return (mean + deviation * z).to(dtype)


ROUNDED = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Dtypes of rows that support stochastic rounding."""


def stochastic_round(values_RC: Tensor, words_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to bf16, fp16 or fp8 (e4m3), up or down with probabilities that make the mean exact.

    Random bits are added to the discarded mantissa bits, and the sum is truncated. Example, bf16: 1.0 + 2^-9 lies a
    quarter of the way from 1.0 to the next bf16 (1.0078125), and one word in four rounds it up.

    e4m3 has no infinity: values beyond 448, its largest number, become 448.
    """
    if dtype not in ROUNDED:
        return values_RC.to(dtype)
    values = values_RC.to(torch.float32)
    bits = values.contiguous().view(torch.int32).to(torch.int64) & _MASK
    finite = torch.isfinite(values)
    if dtype is torch.bfloat16:
        kept = _from_bits((bits + (words_RC & 0xFFFF)) & 0xFFFF0000)
        return torch.where(finite, kept, values).to(torch.bfloat16)
    # dropped: mantissa bits; 2^normal: smallest normal number; 2^step: distance of subnormal numbers
    dropped, normal, step = (13, -14, -24) if dtype is torch.float16 else (20, -6, -9)
    noise = words_RC & ((1 << dropped) - 1)
    kept = _from_bits((bits + noise) & (_MASK << dropped & _MASK))
    magnitude = values.abs()
    steps = torch.floor(magnitude * 2.0**-step + noise.to(torch.float32) * 2.0**-dropped)
    small = torch.copysign(steps * 2.0**step, values)
    rounded = torch.where(magnitude >= 2.0**normal, kept, small)
    if dtype is torch.float8_e4m3fn:
        return torch.where(finite, rounded, values).clamp(-448.0, 448.0).to(dtype)
    return torch.where(finite, rounded, values).to(torch.float16)


def _from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)  # the low 32 bits
