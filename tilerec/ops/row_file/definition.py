"""Rows of a file, read into lines of a tensor and written from them, at their own places.

    file    row 0 | row 1 | row 2 | …       without gaps; byte `row * bytes of a line` is the first of a row
    lines   uint8 or any other dtype `[L, ...]`, contiguous, on the CPU

Legend: L lines, M rows that move.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.library import LIBRARY


def check_row_file(lines: Tensor, at: Tensor, rows: Tensor, file: int) -> None:
    """Raise `ConfigError` for arguments that do not fit."""
    if at.dtype != torch.int64 or rows.dtype != torch.int64 or at.shape != rows.shape or at.dim() != 1:
        raise ConfigError(
            f"read_rows_: got lines {at.dtype} {list(at.shape)} and rows {rows.dtype} {list(rows.shape)}; expected "
            "int64 [M] for both. Convert them."
        )
    if not lines.is_contiguous() or lines.dim() < 1 or lines.device.type not in ("cpu", "meta"):
        raise ConfigError(
            f"read_rows_: got lines {list(lines.shape)} with strides {lines.stride()} on {lines.device}; expected "
            "contiguous lines on the CPU. Copy them there."
        )
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < lines.shape[0]:
        raise ConfigError(
            f"read_rows_: got lines {int(at.min())} to {int(at.max())}; expected 0 to {lines.shape[0] - 1}. Correct "
            "them."
        )


@LIBRARY.op(
    "read_rows_(Tensor(a!) lines, Tensor at, Tensor rows, int file) -> ()", check=check_row_file, check_fake=False
)
def read_rows_reference_(lines: Tensor, at: Tensor, rows: Tensor, file: int) -> None:
    """Run `lines[at] = file[rows]`.

    Args:
        at: int64 [M], different lines.
        rows: int64 [M]; reads are fastest if they ascend.
        file: descriptor of the file.

    Raises:
        OSError: a read failed; some lines may be changed.

    A file of the rows (1, 2), (3, 4), (5, 6), rows (0, 2), lines (1, 0): line 1 is then (1, 2), and line 0 (5, 6).
    """
    _each_row(lines, at, rows, lambda memory, start: os.preadv(file, [memory], start))


@LIBRARY.op("write_rows_(Tensor lines, Tensor at, Tensor rows, int file) -> ()", check=check_row_file, check_fake=False)
def write_rows_reference_(lines: Tensor, at: Tensor, rows: Tensor, file: int) -> None:
    """Run `file[rows] = lines[at]`; rows are different. See `read_rows_reference_`."""
    _each_row(lines, at, rows, lambda memory, start: os.pwritev(file, [memory], start))


def _each_row(lines: Tensor, at: Tensor, rows: Tensor, move: Callable[[memoryview, int], int]) -> None:
    size = lines[:1].nbytes
    first = lines.data_ptr()
    for line, row in zip(at.tolist(), rows.tolist(), strict=True):
        memory = memoryview((ctypes.c_char * size).from_address(first + line * size)).cast("B")
        done = 0
        while done < size:
            count = move(memory[done:], row * size + done)
            if not count:
                raise OSError(errno.EIO, "the file is too short")
            done += count
