"""Wire codecs: rows of floats as fewer bytes.

Glossary
    segment     (rows, width): that many rows of that many elements, one after the other
    flat        segments one after the other, 1-D: sum of rows * width elements
    wire        the same segments encoded, 1-D, in the same order: sum of rows * `row_elements(width)` elements

The wire's size follows from the segments alone, so both ends know it without a message.

What a codec does to a value x of a row
    fp32    nothing, whatever the dtype of the rows: float64 rows travel as float64
    fp16    |error| <= 2^-11 |x| from 6.2e-5 to 65,504, 2^-25 below; from 65,520 on x becomes infinite
    bf16    |error| <= 2^-8 |x| over fp32's normal range (from 1.2e-38)
    int8    |error| <= max|row| / 254 (+ 1e-6 max|row| for rounding); a row whose largest value is below 1e-36 becomes 0

Nothing hides: NaN and infinity stay what they are in fp16 and bf16, and a row that holds one arrives as NaNs through
int8. An overflow in fp16 is infinite, as in `tensor.half()`, and not saturated: a loss scaler or the check of
gradients then sees it, where a saturated value would train on.

Legend: R rows of one segment or run, w their width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.backends import reused_empty

Segments = Sequence[tuple[int, int]]


class Codec(ABC):
    """How rows travel.

    name: what plans call it.
    wire_dtype: dtype of the encoded tensor; None: that of the rows.
    """

    name: str
    wire_dtype: torch.dtype | None

    @abstractmethod
    def encode(self, flat: Tensor, segments: Segments) -> Tensor:
        """Rows, 1-D fp32, as the wire carries them, 1-D `wire_dtype`."""

    @abstractmethod
    def decode(self, wire: Tensor, segments: Segments) -> Tensor:
        """The rows of a wire again, 1-D fp32."""

    def row_elements(self, width: int) -> int:
        """Elements of the wire per row of that width."""
        return width

    def row_bytes(self, width: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes on the wire per row of that width, for rows of a dtype."""
        return self.row_elements(width) * (self.wire_dtype or dtype).itemsize


@final
class _AsIs(Codec):
    """The rows themselves: no copy is made."""

    name = "fp32"
    wire_dtype = None

    def encode(self, flat: Tensor, segments: Segments) -> Tensor:
        return flat

    def decode(self, wire: Tensor, segments: Segments) -> Tensor:
        return wire


@final
class _Cast(Codec):
    """Each value rounded to nearest in a smaller float type."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.wire_dtype = dtype
        self._dtype = dtype

    def encode(self, flat: Tensor, segments: Segments) -> Tensor:
        return reused_empty(flat.numel(), self._dtype, flat.device).copy_(flat)

    def decode(self, wire: Tensor, segments: Segments) -> Tensor:
        return reused_empty(wire.numel(), torch.float32, wire.device).copy_(wire)


_SCALE_BYTES = 4
_SMALLEST = 1e-36


@final
class _Int8(Codec):
    """Each row as one fp32 scale and its values as int8: x = scale * q, scale = max|row| / 127, q rounded to nearest.

    A row of 4 values is 8 bytes, the scale's 4 first. [1.0, -2.54, 0.01, 0.0]: scale 0.02, q = [50, -127, 0, 0]
    (0.01 / 0.02 = 0.5 is rounded to even), decoded as [1.0, -2.54, 0.0, 0.0].
    """

    name = "int8"
    wire_dtype = torch.int8

    def row_elements(self, width: int) -> int:
        return width + _SCALE_BYTES

    def encode(self, flat: Tensor, segments: Segments) -> Tensor:
        return _by_width(flat, segments, _Int8._encode_rows, lambda width: width)

    def decode(self, wire: Tensor, segments: Segments) -> Tensor:
        return _by_width(wire, segments, _Int8._decode_rows, self.row_elements)

    @staticmethod
    def _encode_rows(rows_Rw: Tensor) -> Tensor:
        rows_Rw = rows_Rw.float()
        largest_R1 = torch.linalg.vector_norm(rows_Rw, ord=torch.inf, dim=1, keepdim=True)
        # Below, the scale would lose its own digits; a NaN or infinity stays and spoils its row, visibly.
        scale_R1 = torch.where(largest_R1 < _SMALLEST, 0.0, largest_R1 / 127)
        share_Rw = rows_Rw / torch.where((scale_R1 > 0) & scale_R1.isfinite(), scale_R1, torch.inf)
        # What is not finite has no int8; its row's scale is not finite either, and 0 times it is NaN.
        codes_Rw = share_Rw.round_().nan_to_num_(0.0, 0.0, 0.0).clamp_(-127, 127).to(torch.int8)
        return torch.cat([scale_R1.view(torch.int8), codes_Rw], dim=1)

    @staticmethod
    def _decode_rows(wire_Rk: Tensor) -> Tensor:
        # A copy even of a single row: fp32 lies at multiples of 4 bytes, a wire anywhere.
        scale_bytes_R4 = wire_Rk[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        scale_R1 = scale_bytes_R4.view(-1).view(torch.float32)[:, None]
        return wire_Rk[:, _SCALE_BYTES:].float() * scale_R1


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "fp32": _AsIs(),
        "fp16": _Cast("fp16", torch.float16),
        "bf16": _Cast("bf16", torch.bfloat16),
        "int8": _Int8(),
    }
)


def codec(name: str) -> Codec:
    """The codec of that name. Raises `ConfigError` for a name there is none of."""
    found = CODECS.get(name)
    if found is None:
        raise ConfigError(f"Wire codec {name!r} does not exist; use one of {', '.join(CODECS)}.")
    return found


def _by_width(
    flat: Tensor,
    segments: Segments,
    convert: Callable[[Tensor], Tensor],
    row_elements: Callable[[int], int],
) -> Tensor:
    """Apply `convert` to all rows of one width at once, and lay the results in the order of the segments."""
    runs = _runs(segments) or [(0, 1)]
    sizes = [rows * row_elements(width) for rows, width in runs]
    if sum(sizes) != flat.numel():
        raise ConfigError(
            f"Wire codec int8: the segments hold {sum(sizes)} elements, the tensor {flat.numel()}; pass the segments "
            f"that the rows were laid out by."
        )
    widths = list(dict.fromkeys(width for _, width in runs))
    if len(widths) == 1:
        return convert(flat.view(runs[0][0], row_elements(widths[0]))).view(-1)
    pieces = flat.split(sizes)
    done: list[Tensor] = [flat] * len(runs)
    for width in widths:
        members = [index for index, run in enumerate(runs) if run[1] == width]
        counts = [runs[index][0] for index in members]
        rows = torch.cat([pieces[index] for index in members]).view(sum(counts), row_elements(width))
        parts = convert(rows).split(counts)
        for index, part in zip(members, parts, strict=True):
            done[index] = part.reshape(-1)
    return torch.cat(done)


def _runs(segments: Segments) -> list[tuple[int, int]]:
    """Neighbours of one width as one segment."""
    runs: list[tuple[int, int]] = []
    for rows, width in segments:
        if runs and runs[-1][1] == width:
            runs[-1] = (runs[-1][0] + rows, width)
        else:
            runs.append((rows, width))
    return runs
