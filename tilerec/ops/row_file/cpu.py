"""`read_rows_` and `write_rows_` on the native library (native/row_file.cpp)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name; none on a system without such calls."""
    if not hasattr(library, "tr_read_rows"):
        return {}
    number, address = ctypes.c_int64, ctypes.c_void_p

    def kernel(name: str) -> Callable[[Tensor, Tensor, Tensor, int], None]:
        move = getattr(library, name)
        move.argtypes, move.restype = [ctypes.c_int32, number, address, address, number, address], ctypes.c_int32

        def run(lines: Tensor, at: Tensor, rows: Tensor, file: int) -> None:
            at, rows = at.contiguous(), rows.contiguous()
            size = lines[:1].nbytes
            error = move(file, size, rows.data_ptr(), at.data_ptr(), rows.numel(), lines.data_ptr())
            if error:
                raise OSError(error, os.strerror(error))

        return run

    return {"read_rows_": kernel("tr_read_rows"), "write_rows_": kernel("tr_write_rows")}
