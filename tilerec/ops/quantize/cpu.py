"""Packed rows on the native library (native/quantize.cpp): fp32 rows, unpacked to fp32 or fp64; else the reference."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.quantize.definition import (
    PACKED_TYPE,
    SCALE_BYTES,
    check_segments,
    pack_segments_reference,
    unpack_segments_reference,
)
from tilerec.ops.runtime.cpu.memory import reused_empty
from tilerec.ops.runtime.cpu.records import PackingRecord

_UNPACKED = (torch.float32, torch.float64)


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    pack, unpack = library.tr_pack_rows, library.tr_unpack_rows
    pack.argtypes = unpack.argtypes = [ctypes.c_void_p]
    pack.restype = unpack.restype = None

    def call(
        function: Any, rows: Tensor, packed: Tensor, counts: Sequence[int], widths: Sequence[int], format: str
    ) -> None:
        lists = array("q", [*counts, *widths])
        record = PackingRecord(
            lists.buffer_info()[0], len(counts), rows.data_ptr(), packed.data_ptr(), format == "fp8",
            rows.dtype == torch.float64, torch.get_num_threads(),
        )  # fmt: skip
        function(ctypes.byref(record))

    def pack_segments(flat: Tensor, counts: Sequence[int], widths: Sequence[int], format: str) -> Tensor:
        if flat.dtype != torch.float32 or not flat.is_contiguous():
            return pack_segments_reference(flat, counts, widths, format)
        check_segments("pack_segments", flat, counts, widths, 0, format)
        packed = reused_empty(flat.numel() + SCALE_BYTES * sum(counts), PACKED_TYPE[format])
        call(pack, flat, packed, counts, widths, format)
        return packed

    def unpack_segments(
        packed: Tensor, counts: Sequence[int], widths: Sequence[int], format: str, dtype: torch.dtype
    ) -> Tensor:
        if dtype not in _UNPACKED or not packed.is_contiguous():
            return unpack_segments_reference(packed, counts, widths, format, dtype)
        check_segments("unpack_segments", packed, counts, widths, SCALE_BYTES, format)
        flat = reused_empty(packed.numel() - SCALE_BYTES * sum(counts), dtype)
        call(unpack, flat, packed, counts, widths, format)
        return flat

    return {"pack_segments": pack_segments, "unpack_segments": unpack_segments}
