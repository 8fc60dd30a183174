"""`read_rows_` and `write_rows_` on the native library (native/row_file.cpp)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name; none on a system without such calls."""
    if not hasattr(library, "tr_read_rows"):
        return {}
    short, number, address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p

    def kernel(name: str) -> Callable[[Sequence[Tensor], Tensor, Tensor, int, int, int], None]:
        move = getattr(library, name)
        move.argtypes = [short, number, number, address, address, number, address, address, short]
        move.restype = short

        def run(lines: Sequence[Tensor], at: Tensor, rows: Tensor, file: int, size: int, start: int) -> None:
            at, rows, fields = at.contiguous(), rows.contiguous(), len(lines)
            first = (address * fields)(*[own.data_ptr() for own in lines])
            widths = (number * fields)(*[own[:1].nbytes for own in lines])
            error = move(file, size, start, rows.data_ptr(), at.data_ptr(), rows.numel(), first, widths, fields)
            if error:
                raise OSError(error, os.strerror(error))

        return run

    return {"read_rows_": kernel("tr_read_rows"), "write_rows_": kernel("tr_write_rows")}
