"""Initial values on the native library: `random_fill_` and `random_rows_` on CPU.

Random words and uniform values equal those of `definition.py` bit for bit. Normal values use the library's own
logarithm, sine and cosine in float64, with the same bits on every machine. After rounding to fp32 they equal the
reference's, except where the two lie on different sides of a rounding boundary (about once in a million values).

The reference fills tiles in fp64 and other tiles that the library cannot read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tilerec.ops.random.definition import FillCall, fill_reference_
from tilerec.ops.runtime.cpu.library import DTYPES

_KINDS = {"uniform": 0, "normal": 1}


def _fill(library: ctypes.CDLL) -> Callable[[FillCall], None]:
    pointer, size, word, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float
    of_tile, of_rows = library.tr_random_fill, library.tr_random_rows
    of_tile.restype = of_rows.restype = None
    of_tile.argtypes = [pointer, *[size] * 3, *[word] * 2, *[size] * 3, *[number] * 2, size]
    of_rows.argtypes = [pointer, size, pointer, *[size] * 2, *[word] * 2, *[size] * 2, *[number] * 2, size]

    def fill_(call: FillCall) -> None:
        out, rows_R, key, row_offset, column_offset, kind, a, b = call
        rows_fit = rows_R is None or rows_R.is_contiguous()
        if out.dtype not in DTYPES or not out.is_contiguous() or not rows_fit:
            fill_reference_(call)
            return
        words = key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF
        values = column_offset, _KINDS[kind], a, b, torch.get_num_threads()
        if rows_R is None:
            of_tile(out.data_ptr(), DTYPES[out.dtype], *out.shape, *words, row_offset, *values)
        else:
            of_rows(out.data_ptr(), DTYPES[out.dtype], rows_R.data_ptr(), *out.shape, *words, *values)

    return fill_


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    fill_ = _fill(library)
    return {"random_fill_": fill_, "random_rows_": fill_}
