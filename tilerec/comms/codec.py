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
    fp8     e4m3fn with a scale per row: |error| <= |x| / 17 from max|row| / 28,672, max|row| / 458,752 below (+ 1e-6 of
            either for rounding); a row whose largest value is below 1e-36 becomes 0

Nothing hides: NaN and infinity stay what they are in fp16 and bf16, and a row that holds one arrives as NaNs through
int8 and fp8. An overflow in fp16 is infinite, as in `tensor.half()`, and not saturated: a loss scaler or the check of
gradients then sees it, where a saturated value would train on.

"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.backends import reused_empty
from tilerec.ops.quantize.definition import PACKED_TYPE, SCALE_BYTES, pack_segments, unpack_segments

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


@final
class _Packed(Codec):
    """Each row as one fp32 scale and a byte per value (`ops/quantize`): width + 4 bytes, the scale's first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wire_dtype = PACKED_TYPE[name]

    def row_elements(self, width: int) -> int:
        return width + SCALE_BYTES

    def encode(self, flat: Tensor, segments: Segments) -> Tensor:
        counts, widths = self._runs(flat, segments, 0)
        return pack_segments(flat, counts, widths, self.name)

    def decode(self, wire: Tensor, segments: Segments) -> Tensor:
        counts, widths = self._runs(wire, segments, SCALE_BYTES)
        return unpack_segments(wire, counts, widths, self.name)

    def _runs(self, flat: Tensor, segments: Segments, extra: int) -> tuple[list[int], list[int]]:
        """Counts and widths of the segments, neighbours of one width as one."""
        counts: list[int] = []
        widths: list[int] = []
        size = 0
        for rows, width in segments:
            size += rows * (width + extra)
            if widths and widths[-1] == width:
                counts[-1] += rows
            else:
                counts.append(rows)
                widths.append(width)
        if size != flat.numel():
            raise ConfigError(
                f"Wire codec {self.name}: the segments hold {size} elements, the tensor {flat.numel()}; pass the "
                f"segments that the rows were laid out by."
            )
        return counts, widths


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "fp32": _AsIs(),
        "fp16": _Cast("fp16", torch.float16),
        "bf16": _Cast("bf16", torch.bfloat16),
        "int8": _Packed("int8"),
        "fp8": _Packed("fp8"),
    }
)


def codec(name: str) -> Codec:
    """The codec of that name. Raises `ConfigError` for a name there is none of."""
    found = CODECS.get(name)
    if found is None:
        raise ConfigError(f"Wire codec {name!r} does not exist; use one of {', '.join(CODECS)}.")
    return found
