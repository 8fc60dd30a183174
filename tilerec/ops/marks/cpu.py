"""`mark_rows_` on the native library (native/marks.cpp): the tables of a call are shared by two threads or more."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.marks.definition import mark_rows_reference_
from tilerec.ops.runtime.cpu.library import INDEX_TYPES


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    mark = library.tr_mark_rows
    mark.argtypes, mark.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None

    def mark_rows_(marks: Sequence[Tensor], rows: Sequence[Tensor], counts: Sequence[int]) -> None:
        if not all(tensor.is_contiguous() for tensor in (*marks, *rows)):
            mark_rows_reference_(marks, rows, counts)
            return
        numbers: list[int] = []
        for words_W, rows_N, count in zip(marks, rows, counts, strict=True):
            numbers += (words_W.data_ptr(), rows_N.data_ptr(), rows_N.numel(), INDEX_TYPES[rows_N.dtype], count)
        calls = (ctypes.c_int64 * len(numbers))(*numbers)
        mark(ctypes.addressof(calls), len(marks), torch.get_num_threads())

    return {"mark_rows_": mark_rows_}
