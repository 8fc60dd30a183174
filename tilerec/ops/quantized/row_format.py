"""Quantized rows of tables for serving: 8, 4 or 2 bits per number, with a scale and a bias per row.

Terms
  row     uint8: 2 bytes of scale, 2 bytes of bias (fp16, native byte order), the codes, and zeros up to a multiple of 4
          bytes; `row_bytes(dim, bits)` bytes in all
  code    a whole number in [0, 2**bits): column c is in byte 4 + c * bits // 8, the first column in the lowest bits
  number  scale * code + bias, in fp32: the product is rounded, then the sum. No kernel fuses the two

The bias is the row's minimum, rounded down to fp16. The scale is the row's range over the largest code, rounded up to
fp16. So no number lies outside of the codes, and every number is within half a step:

  |error| <= scale / 2,   scale about (max - min) / (2**bits - 1)

With fp16 the head of a row is 4 bytes, so a row of 64 columns has 68, 36 or 20 bytes, 0.266, 0.141 or 0.078 of fp32.
With an fp32 head it would have 72, 40 or 24. The error is the same within 0.1 % (normal rows; docs/quantized.md).

Example, 4 bits: [1.0, -2.0, 0.5, 5.5] -> bias -2, scale 0.5, codes [6, 0, 5, 15] -> bytes 00 38 00 c0 06 f5 00 00.

Legend: R rows, D columns, k = row_bytes(D, bits).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.spec.quantized_row import HEAD_BYTES, row_bytes

BITS = (8, 4, 2)
LARGEST = torch.finfo(torch.float16).max
"""Largest magnitude of a number that can be quantized: scale and bias are fp16."""

# Numbers quantized at a time: temporaries are small beside a table. torch runs operations on so few numbers in one
# thread. Each of 20 operations on a larger chunk may wait for a second thread: 5 to 90 times as long as the work on a
# busy machine.
_CPU_CHUNK, _GPU_CHUNK = 1 << 14, 1 << 22

_WHOLE = 1.5 * 2**23  # fp32 numbers of this size have steps of 1


def check_quantizable(rows_RD: Tensor, name: str, first_row: int = 0) -> None:
    """Raise an `InputError` for rows that cannot be quantized: NaN, infinite, or beyond the range of fp16.

    Args:
        name: of the table, for the error.
        first_row: number of `rows_RD[0]` in the table.
    """
    for start, part_rD in _chunks(rows_RD):
        # A NaN makes a maximum NaN, and a comparison with it False.
        if part_rD.numel() and not bool(part_rD.float().abs().max() <= LARGEST):
            bad_r = ~(part_rD.float().abs() <= LARGEST).all(1)
            row = int(bad_r.nonzero()[0, 0])
            worst = part_rD[row][~(part_rD[row].float().abs() <= LARGEST)][0]
            raise InputError(
                f"Table '{name}': got {float(worst)} in row {first_row + start + row}; expected numbers in "
                f"[-{LARGEST:.0f}, {LARGEST:.0f}], as scales are fp16. Mend the row, or keep this table in fp32."
            )


def quantize_rows(rows_RD: Tensor, bits: int, out_Rk: Tensor | None = None) -> Tensor:
    """Quantize a table's rows.

    Args:
        rows_RD: any float dtype; finite, of magnitudes up to 65,504 (`check_quantizable`).
        bits: 8, 4 or 2.
        out_Rk: uint8, contiguous; written and returned if given.

    Returns:
        uint8 `[R, row_bytes(D, bits)]`.

    Raises:
        ConfigError: other bits, or rows that are not a matrix of floats.
    """
    check_bits("quantize_rows", bits)
    if rows_RD.dim() != 2 or not rows_RD.is_floating_point():
        raise ConfigError(
            f"quantize_rows: got {rows_RD.dtype} of shape {list(rows_RD.shape)}; expected a matrix of floats. Pass one "
            "row per line."
        )
    R, D = rows_RD.shape
    if out_Rk is None:
        out_Rk = torch.empty((R, row_bytes(D, bits)), dtype=torch.uint8, device=rows_RD.device)
    for start, part_rD in _chunks(rows_RD):
        _quantize_chunk(part_rD.float(), bits, out_Rk[start : start + part_rD.shape[0]])
    return out_Rk


def dequantize_rows(rows_Rk: Tensor, dim: int, bits: int) -> Tensor:
    """Return the numbers of quantized rows as fp32 `[R, dim]`. Raises `ConfigError` for other bytes."""
    check_bits("dequantize_rows", bits)
    if rows_Rk.dtype != torch.uint8 or rows_Rk.dim() != 2 or rows_Rk.shape[1] != row_bytes(dim, bits):
        raise ConfigError(
            f"dequantize_rows: got {rows_Rk.dtype} of shape {list(rows_Rk.shape)}; expected uint8 of "
            f"[rows, {row_bytes(dim, bits)}] for {dim} columns of {bits} bits. Pass rows of quantize_rows."
        )
    head_R2 = rows_Rk[:, :HEAD_BYTES].contiguous().view(torch.float16).float()
    bytes_Rn = rows_Rk[:, HEAD_BYTES:]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=rows_Rk.device)
    codes_RD = ((bytes_Rn[:, :, None] >> shifts) & (2**bits - 1)).flatten(1)[:, :dim].float()
    return codes_RD * head_R2[:, :1] + head_R2[:, 1:]


def check_bits(what: str, bits: int) -> None:
    """Raise a `ConfigError` for numbers of bits other than 8, 4 and 2."""
    if bits not in BITS:
        raise ConfigError(f"{what}: got bits={bits!r}; expected one of {list(BITS)}. Use one of these.")


def _chunks(rows_RD: Tensor) -> list[tuple[int, Tensor]]:
    """Return the rows in chunks, each with the number of its first row."""
    if not rows_RD.shape[0]:
        return []
    numbers = _CPU_CHUNK if rows_RD.device.type == "cpu" else _GPU_CHUNK
    parts = rows_RD.detach().split(max(1, numbers // max(rows_RD.shape[1], 1)))
    return [(i * parts[0].shape[0], part) for i, part in enumerate(parts)]


def _round(x: Tensor, up: bool) -> Tensor:
    """Return fp32 numbers as the nearest fp16 that is not smaller (`up`) or not larger."""
    half = x.half()
    wrong = half.float() < x if up else half.float() > x
    # fp16 numbers in their order are whole numbers in their order. (`torch.nextafter` has no fp16 on GPUs.)
    bits = half.view(torch.int16).int()
    place = torch.where(bits < 0, -(bits & 0x7FFF), bits) + wrong * (1 if up else -1)
    return torch.where(place < 0, -place - 0x8000, place).to(torch.int16).view(torch.float16)


def _quantize_chunk(rows_RD: Tensor, bits: int, out_Rk: Tensor) -> None:
    R, D = rows_RD.shape
    largest = 2**bits - 1
    low_R1 = rows_RD.amin(1, keepdim=True) if D else rows_RD.new_zeros(R, 1)
    high_R1 = rows_RD.amax(1, keepdim=True) if D else low_R1
    bias_R1 = _round(low_R1, up=False)
    above_RD = rows_RD - bias_R1.float()
    scale_R1 = _round((high_R1 - bias_R1.float()) / largest, up=True)
    # A row of one fp16 number has a range of 0: all codes are 0.
    divisor_R1 = torch.where(scale_R1 > 0, scale_R1.float(), torch.inf)
    # Rounded to nearest, ties to even. `round_` does the same, with a second thread from 2,048 numbers on.
    codes_RD = (above_RD / divisor_R1).add_(_WHOLE).sub_(_WHOLE).clamp_(0, largest).to(torch.uint8)
    out_Rk[:, :HEAD_BYTES] = torch.cat([scale_R1, bias_R1], 1).view(torch.uint8)
    per_byte = 8 // bits
    padded_Rn = codes_RD.new_zeros(R, (out_Rk.shape[1] - HEAD_BYTES) * per_byte)
    padded_Rn[:, :D] = codes_RD
    several_Rnp = padded_Rn.view(R, -1, per_byte)
    packed_Rn = several_Rnp[:, :, 0].clone()
    for i in range(1, per_byte):
        packed_Rn |= several_Rnp[:, :, i] << (i * bits)
    out_Rk[:, HEAD_BYTES:] = packed_Rn
