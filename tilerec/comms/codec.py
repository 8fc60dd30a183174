"""Wire codecs: encodings of float rows in fewer bytes.

Glossary
    segment     (rows, width): that many rows of that many elements, one after the other
    flat        segments one after the other, 1-D: sum of rows * width elements
    wire        the same segments encoded, 1-D, in the same order: sum of rows * `row_elements(width)` elements

The wire's size follows from the segments alone, so both ranks compute it without a message.

Error of each codec for a value x of a row
    fp32    none, whatever the dtype of the rows: float64 rows are sent as float64
    fp16    |error| <= 2^-11 |x| from 6.2e-5 to 65,504, 2^-25 below; from 65,520 on x becomes infinite
    bf16    |error| <= 2^-8 |x| over fp32's normal range (from 1.2e-38)
    int8    |error| <= max|row| / 254 (+ 1e-6 max|row| for rounding); a row whose largest value is below 1e-36 becomes 0
    fp8     e4m3fn with a scale per row: |error| <= |x| / 17 from max|row| / 28,672, max|row| / 458,752 below (+ 1e-6 of
            either for rounding); a row whose largest value is below 1e-36 becomes 0

Non-finite values stay visible: fp16 and bf16 preserve NaN and infinity, and int8 and fp8 decode a row that has one as
NaNs. An overflow in fp16 becomes infinite, as in `tensor.half()`, and is not saturated. So a loss scaler or the check
of gradients detects it; a saturated value would go undetected.

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
from tilerec.spec.parameter_sharding import CODECS as WIRE_FORMATS

Segments = Sequence[tuple[int, int]]


class Codec(ABC):
    """Encoding of rows for sending.

    name: its name in plans.
    wire_dtype: dtype of the encoded tensor; None: that of the rows.
    """

    name: str
    wire_dtype: torch.dtype | None

    @abstractmethod
    def encode(self, flat: Tensor, segments: Segments) -> Tensor:
        """Encode rows, 1-D fp32, as a 1-D tensor of `wire_dtype`."""

    @abstractmethod
    def decode(self, wire: Tensor, segments: Segments) -> Tensor:
        """Decode a wire tensor into its rows, 1-D fp32."""

    def row_elements(self, width: int) -> int:
        """Return the number of wire elements per row of that width."""
        return width

    def row_bytes(self, width: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the number of wire bytes per row of that width and dtype."""
        return self.row_elements(width) * (self.wire_dtype or dtype).itemsize


@final
class _Fp32Codec(Codec):
    """Codec that returns the rows unchanged, without a copy."""

    name = "fp32"
    wire_dtype = None

    def encode(self, flat: Tensor, segments: Segments) -> Tensor:
        return flat

    def decode(self, wire: Tensor, segments: Segments) -> Tensor:
        return wire


@final
class _CastCodec(Codec):
    """Codec that rounds each value to the nearest value of a smaller float type."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.wire_dtype = dtype
        self._dtype = dtype

    def encode(self, flat: Tensor, segments: Segments) -> Tensor:
        return reused_empty(flat.numel(), self._dtype, flat.device).copy_(flat)

    def decode(self, wire: Tensor, segments: Segments) -> Tensor:
        return reused_empty(wire.numel(), torch.float32, wire.device).copy_(wire)


@final
class _PackedCodec(Codec):
    """Codec of one fp32 scale, then one byte per value, for each row: 4 + width bytes (`ops/quantize`)."""

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
        """Return row counts and widths of the segments; adjacent segments of one width are merged."""
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
                f"segments of these rows."
            )
        return counts, widths


_CODECS: dict[str, Codec] = {
    "fp32": _Fp32Codec(),
    "fp16": _CastCodec("fp16", torch.float16),
    "bf16": _CastCodec("bf16", torch.bfloat16),
    "int8": _PackedCodec("int8"),
    "fp8": _PackedCodec("fp8"),
}
CODECS: Mapping[str, Codec] = MappingProxyType(_CODECS)
"""Codecs by name, registered ones included."""


def codec(name: str) -> Codec:
    """Return the codec of that name. Raises `ConfigError` for an unknown name."""
    found = CODECS.get(name)
    if found is None:
        raise ConfigError(f"Wire codec {name!r} does not exist; use one of {', '.join(CODECS)}.")
    return found


def register_codec(made: Codec) -> None:
    """Add a wire format under `made.name`: plans, `Wire` and `QCommsConfig` then accept the name.

    Register it in every process that shards or reads a plan with it, before it does: messages carry no names.

    Raises:
        ConfigError: `made` is no codec, its name is taken or is no lower-case identifier, or rows that it encodes and
            decodes have other sizes than `row_elements` and the segments give.
    """
    where = f"register_codec({type(made).__name__})"
    if not isinstance(made, Codec):
        raise ConfigError(f"{where}: got {made!r:.80}; expected an object of a subclass of tilerec.comms.Codec.")
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise ConfigError(f"{where}: got name={name!r}; expected a lower-case identifier such as 'int4'.")
    if name in _CODECS:
        raise ConfigError(f"{where}: got name={name!r}, which is taken; expected none of {', '.join(_CODECS)}.")
    segments = ((2, 3), (0, 4), (1, 5))
    flat = torch.arange(11, dtype=torch.float32)
    wire = made.encode(flat, segments)
    size = sum(rows * made.row_elements(width) for rows, width in segments)
    if (wire.dtype, tuple(wire.shape)) != (made.wire_dtype or torch.float32, (size,)):
        raise ConfigError(
            f"{where}: encode returned {wire.dtype} {list(wire.shape)} for the segments {segments}; expected "
            f"{made.wire_dtype or torch.float32} [{size}], the sum of rows * row_elements(width)."
        )
    rows = made.decode(wire, segments)
    if (rows.dtype, rows.shape) != (flat.dtype, flat.shape):
        raise ConfigError(
            f"{where}: decode returned {rows.dtype} {list(rows.shape)}; expected {flat.dtype} {list(flat.shape)}."
        )
    _CODECS[name] = made
    WIRE_FORMATS.append(name)
