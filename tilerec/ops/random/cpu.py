"""Initial values on the native library: `random_fill_` and `random_rows_` on CPU.

Random words and uniform values equal those of `definition.py` bit for bit. Normal values use the library's own
logarithm, sine and cosine in float64, with the same bits on every machine. After rounding to fp32 they equal the
reference's, except where the two lie on different sides of a rounding boundary (about once in a million values).

The reference fills tiles in fp64 and other tiles that the library cannot read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilerec.ops.random.definition import (
    check_fill,
    check_rows,
    random_fill_reference_,
    random_rows_reference_,
)
from tilerec.ops.runtime.cpu.library import DTYPES
from tilerec.ops.runtime.library import LIBRARY

_KINDS = {"uniform": 0, "normal": 1}


def _random_fill(function: Callable[..., None]) -> Callable[..., None]:
    def random_fill_(
        out: Tensor, key: Sequence[int], row_offset: int, column_offset: int, kind: str, a: float, b: float
    ) -> None:
        check_fill(out, key, row_offset, column_offset, kind)
        if out.dtype not in DTYPES or not out.is_contiguous():
            random_fill_reference_(out, key, row_offset, column_offset, kind, a, b)
            return
        rows, width = out.shape
        function(
            out.data_ptr(), DTYPES[out.dtype], rows, width, key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF, row_offset,
            column_offset, _KINDS[kind], a, b, torch.get_num_threads(),
        )  # fmt: skip

    return random_fill_


def _random_rows(function: Callable[..., None]) -> Callable[..., None]:
    def random_rows_(
        out: Tensor, rows_R: Tensor, key: Sequence[int], column_offset: int, kind: str, a: float, b: float
    ) -> None:
        check_rows(out, rows_R, key, column_offset, kind)
        if out.dtype not in DTYPES or not out.is_contiguous() or not rows_R.is_contiguous():
            random_rows_reference_(out, rows_R, key, column_offset, kind, a, b)
            return
        rows, width = out.shape
        function(
            out.data_ptr(), DTYPES[out.dtype], rows_R.data_ptr(), rows, width, key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF,
            column_offset, _KINDS[kind], a, b, torch.get_num_threads(),
        )  # fmt: skip

    return random_rows_


def register(library: ctypes.CDLL) -> None:
    """Register the native `random_fill_` and `random_rows_` for CPU tensors."""
    function = library.tr_random_fill
    function.restype = None
    function.argtypes = [
        ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_uint32] * 2, *[ctypes.c_int64] * 3, *[ctypes.c_float] * 2,
        ctypes.c_int64,
    ]  # fmt: skip
    LIBRARY.impl("random_fill_", _random_fill(function), "CPU", allow_override=True)
    of_rows = library.tr_random_rows
    of_rows.restype = None
    of_rows.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_uint32] * 2,
        *[ctypes.c_int64] * 2, *[ctypes.c_float] * 2, ctypes.c_int64,
    ]  # fmt: skip
    LIBRARY.impl("random_rows_", _random_rows(of_rows), "CPU", allow_override=True)
