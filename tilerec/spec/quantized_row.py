"""`row_bytes`: the size of a quantized row (the format is in tilerec/ops/quantized/row_format.py)."""

from __future__ import annotations

HEAD_BYTES = 4
"""Bytes of a row's scale and bias."""


def row_bytes(dim: int, bits: int) -> int:
    """Return the bytes of a quantized row. Example: 64 columns of 4 bits -> 36; 3 columns of 2 bits -> 8."""
    return HEAD_BYTES + (-(-dim * bits // 8) + 3) // 4 * 4
