"""Quantized rows, one byte per number and one scale per row, for exchange between ranks and for serving.

Terms
  packed row  4 bytes of scale (fp32, native byte order), then one byte per number: width + 4 bytes
  code        the byte of a number x:  x is about scale * code

    int8   code = x / scale, rounded to nearest, ties to even;   scale = max|row| / 127
    fp8    the same, rounded to an e4m3fn number;                scale = max|row| / 448 (the largest e4m3fn number)

  int8 has even steps: |error| <= max|row| / 254. fp8 has relative steps: |error| <= |x| / 17 down to
  max|row| / 28,672, and max|row| / 458,752 below. Measured on rows of 64 normal values: the error is 0.6 % (int8) and
  2.5 % (fp8) of their root mean square. If the values of a row differ by orders of magnitude (normal times the
  exponential of twice a normal), int8 rounds 43 % of them to 0 and fp8 0.2 %, with median relative errors of 32 % and
  2.2 %.

A row whose largest magnitude is below 1e-36 becomes zeros, since its scale would lose precision. A row with a NaN or an
infinity is unpacked as NaNs: its scale is not finite, and its codes are finite. Which NaN the scale is, is unspecified.

Example, int8: [1.0, -2.54, 0.01, 0.0] -> scale 0.02, codes [50, -127, 0, 0] (0.01 / 0.02 = 0.5 is rounded to even) ->
[1.0, -2.54, 0.0, 0.0]. fp8: [448.0, 1.1, -0.3] -> scale 1, codes [448, 1.125, -0.3125].

Segments are (count, width): `count` rows of `width` numbers, one segment after the other, 1-D.

Legend: R rows, w their width, k = w + 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.library import LIBRARY

SCALE_BYTES = 4
SMALLEST = 1e-36
LARGEST = {"int8": 127.0, "fp8": 448.0}
PACKED_TYPE = {"int8": torch.int8, "fp8": torch.uint8}
"""The bytes' dtype by format. `LARGEST`: the largest code by format."""


def check_segments(
    op: str, numbers: Tensor, counts: Sequence[int], widths: Sequence[int], extra: int, format: str
) -> None:
    """Assert that the segments cover the tensor exactly; `extra`: bytes per row beside its numbers."""
    assert format in LARGEST, f"{op}: format {format!r}; expected one of {list(LARGEST)}"
    assert numbers.dim() == 1, f"{op}: {numbers.dim()} dimensions; expected 1"
    assert min(counts, default=0) >= 0, f"{op}: a negative number of rows"
    assert min(widths, default=0) >= 0, f"{op}: a negative width"
    held = _numbers(counts, widths, extra)
    assert held == numbers.numel(), f"{op}: the segments hold {held} elements, the tensor {numbers.numel()}"


def _pack_rows(rows_Rw: Tensor, format: str) -> Tensor:
    rows_Rw = rows_Rw.float()
    if not rows_Rw.shape[1]:
        return torch.zeros(rows_Rw.shape[0], SCALE_BYTES, dtype=PACKED_TYPE[format], device=rows_Rw.device)
    largest_R1 = torch.linalg.vector_norm(rows_Rw, ord=torch.inf, dim=1, keepdim=True)
    # The scale of smaller rows would lose precision; a NaN or infinity is kept and turns its row into NaNs.
    scale_R1 = torch.where(largest_R1 < SMALLEST, 0.0, largest_R1 / LARGEST[format])
    share_Rw = rows_Rw / torch.where((scale_R1 > 0) & scale_R1.isfinite(), scale_R1, torch.inf)
    # A non-finite number has no code. Its row's scale is not finite either, and 0 times it is NaN.
    if format == "int8":
        codes_Rw = share_Rw.round_().nan_to_num_(0.0, 0.0, 0.0).clamp_(-127, 127).to(torch.int8)
    else:
        codes_Rw = share_Rw.nan_to_num_(0.0, 0.0, 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([scale_R1.view(PACKED_TYPE[format]), codes_Rw], dim=1)


def _unpack_rows(packed_Rk: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    # Copy even a single row: fp32 needs 4-byte alignment, and the received bytes have none.
    scale_bytes_R4 = packed_Rk[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format)
    scale_R1 = scale_bytes_R4.view(-1).view(torch.float32)[:, None]
    codes_Rw = packed_Rk[:, SCALE_BYTES:]
    if format == "fp8":
        codes_Rw = codes_Rw.view(torch.float8_e4m3fn)
    return (codes_Rw.float() * scale_R1).to(dtype)


def _by_width(
    flat: Tensor,
    counts: Sequence[int],
    widths: Sequence[int],
    extra: int,
    convert: Callable[[Tensor], Tensor],
) -> Tensor:
    """Apply `convert` to all rows of one width at once, and restore the order of the segments."""
    distinct = list(dict.fromkeys(widths))
    if not distinct:
        return convert(flat.view(0, 1 + extra)).view(-1)
    if len(distinct) == 1:
        return convert(flat.view(sum(counts), distinct[0] + extra)).view(-1)
    pieces = flat.split([count * (width + extra) for count, width in zip(counts, widths, strict=True)])
    done: list[Tensor] = [flat] * len(counts)
    for width in distinct:
        members = [index for index, own in enumerate(widths) if own == width]
        own_counts = [counts[index] for index in members]
        rows = torch.cat([pieces[index] for index in members]).view(sum(own_counts), width + extra)
        for index, part in zip(members, convert(rows).split(own_counts), strict=True):
            done[index] = part.reshape(-1)
    return torch.cat(done)


def _numbers(counts: Sequence[int], widths: Sequence[int], extra: int = 0) -> int:
    return sum([count * (width + extra) for count, width in zip(counts, widths, strict=True)])


@LIBRARY.op(
    "pack_segments(Tensor flat, SymInt[] counts, SymInt[] widths, str format) -> Tensor",
    lambda flat, counts, widths, format: flat.new_empty(
        _numbers(counts, widths, SCALE_BYTES), dtype=PACKED_TYPE[format]
    ),
)
def pack_segments_reference(flat: Tensor, counts: Sequence[int], widths: Sequence[int], format: str) -> Tensor:
    """Pack rows of floats (any float dtype, 1-D) into int8 or uint8 `[sum of counts * (widths + 4)]`."""
    check_segments("pack_segments", flat, counts, widths, 0, format)
    return _by_width(flat, counts, widths, 0, lambda rows_Rw: _pack_rows(rows_Rw, format))


@LIBRARY.op(
    "unpack_segments(Tensor packed, SymInt[] counts, SymInt[] widths, str format, ScalarType dtype) -> Tensor",
    lambda packed, counts, widths, format, dtype: packed.new_empty(_numbers(counts, widths), dtype=dtype),
)
def unpack_segments_reference(
    packed: Tensor, counts: Sequence[int], widths: Sequence[int], format: str, dtype: torch.dtype
) -> Tensor:
    """Unpack the rows of `pack_segments`: code * scale in fp32, rounded to `dtype`."""
    check_segments("unpack_segments", packed, counts, widths, SCALE_BYTES, format)
    return _by_width(packed, counts, widths, SCALE_BYTES, lambda rows_Rk: _unpack_rows(rows_Rk, format, dtype))


def pack_segments(flat: Tensor, counts: Sequence[int], widths: Sequence[int], format: str) -> Tensor:
    """Pack segments of rows, concatenated, 1-D."""
    packed: Tensor = torch.ops.tilerec.pack_segments.default(flat, counts, widths, format)
    return packed


def unpack_segments(
    packed: Tensor,
    counts: Sequence[int],
    widths: Sequence[int],
    format: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Unpack the segments of `pack_segments`, 1-D."""
    flat: Tensor = torch.ops.tilerec.unpack_segments.default(packed, counts, widths, format, dtype)
    return flat


def pack_rows(rows_RD: Tensor, format: str) -> Tensor:
    """Pack a table's rows for serving: bytes `[R, D + 4]`, int8 or uint8.

    Args:
        rows_RD: any float dtype.
        format: "int8" or "fp8".

    Raises:
        ConfigError: another format, or rows that are not a matrix of floats.
    """
    _check_matrix("pack_rows", rows_RD, format, rows_RD.is_floating_point(), "floats")
    count, width = rows_RD.shape
    return pack_segments(rows_RD.reshape(-1), [count], [width], format).view(count, width + SCALE_BYTES)


def unpack_rows(packed_Rk: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack the rows of `pack_rows`, `[R, D]`. Raises `ConfigError` for bytes that are not packed rows."""
    fits = format in LARGEST and packed_Rk.dtype == PACKED_TYPE[format]
    _check_matrix("unpack_rows", packed_Rk, format, fits and packed_Rk.shape[-1:] >= (SCALE_BYTES,), "packed rows")
    count, width = packed_Rk.shape[0], packed_Rk.shape[1] - SCALE_BYTES
    return unpack_segments(packed_Rk.reshape(-1), [count], [width], format, dtype).view(count, width)


def _check_matrix(op: str, rows: Tensor, format: str, fits: bool, wanted: str) -> None:
    if format not in LARGEST:
        raise ConfigError(f"{op}: got format={format!r}; expected one of {list(LARGEST)}.")
    if rows.dim() != 2 or not fits:
        raise ConfigError(
            f"{op}: got {rows.dtype} of shape {list(rows.shape)}; expected a matrix of {wanted} ({format}), "
            f"one row per line."
        )
