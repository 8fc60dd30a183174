"""Records of a file, read into lines of tensors and written from them, at their own places.

    file    record 0 | record 1 | …      of `size` bytes each; a record is the fields of one row, one after the other
    lines   one tensor `[L, ...]` per field, of any dtype, contiguous, on the CPU, in the order of the record

Example: `size` 12, a row of two float32 and a number of its state. Byte 12 * r is the first of row r, byte 12 * r + 8
the first of its state. Lines `[L, 2]` and `[L]` with `start` 0 move both, lines `[L]` with `start` 8 the state alone.

Legend: L lines, M rows that move.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.library import LIBRARY

MAX_FIELDS = 64


def check_row_file(lines: Sequence[Tensor], at: Tensor, rows: Tensor, file: int, size: int, start: int) -> None:
    """Raise `ConfigError` for arguments that do not fit."""
    if at.dtype != torch.int64 or rows.dtype != torch.int64 or at.shape != rows.shape or at.dim() != 1:
        raise ConfigError(
            f"read_rows_: got lines {at.dtype} {list(at.shape)} and rows {rows.dtype} {list(rows.shape)}; expected "
            "int64 [M] for both. Convert them."
        )
    if not 0 < len(lines) <= MAX_FIELDS or start < 0 or start + sum(own[:1].nbytes for own in lines) > size:
        raise ConfigError(
            f"read_rows_: got {len(lines)} fields of {[own[:1].nbytes for own in lines]} bytes from byte {start} of a "
            f"record of {size}; expected 1 to {MAX_FIELDS} fields within the record. Correct them."
        )
    for own in lines:
        if not own.is_contiguous() or own.dim() < 1 or own.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"read_rows_: got lines {list(own.shape)} with strides {own.stride()} on {own.device}; expected "
                "contiguous lines on the CPU. Copy them there."
            )
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < min(own.shape[0] for own in lines):
        raise ConfigError(
            f"read_rows_: got lines {int(at.min())} to {int(at.max())}; expected 0 to "
            f"{min(own.shape[0] for own in lines) - 1}. Correct them."
        )


@LIBRARY.op(
    "read_rows_(Tensor(a!)[] lines, Tensor at, Tensor rows, int file, int size, int start) -> ()",
    check=check_row_file,
    check_fake=False,
)
def read_rows_reference_(lines: Sequence[Tensor], at: Tensor, rows: Tensor, file: int, size: int, start: int) -> None:
    """Run `lines[k][at] = file[rows]` for each field k.

    Args:
        at: int64 [M], different lines.
        rows: int64 [M]; reads are fastest if they ascend.
        file: descriptor of the file.
        size: bytes of a record.
        start: of the record, the first byte of the first field.

    Raises:
        OSError: a read failed; some lines may be changed.

    A file of the rows (1, 2), (3, 4), (5, 6), rows (0, 2), lines (1, 0): line 1 is then (1, 2), and line 0 (5, 6).
    """
    _each_row(lines, at, rows, size, start, lambda memory, place: os.preadv(file, [memory], place))


@LIBRARY.op(
    "write_rows_(Tensor[] lines, Tensor at, Tensor rows, int file, int size, int start) -> ()",
    check=check_row_file,
    check_fake=False,
)
def write_rows_reference_(lines: Sequence[Tensor], at: Tensor, rows: Tensor, file: int, size: int, start: int) -> None:
    """Run `file[rows] = lines[k][at]` for each field k; rows are different. See `read_rows_reference_`."""
    _each_row(lines, at, rows, size, start, lambda memory, place: os.pwritev(file, [memory], place))


def _each_row(
    lines: Sequence[Tensor], at: Tensor, rows: Tensor, size: int, start: int, move: Callable[[memoryview, int], int]
) -> None:
    for line, row in zip(at.tolist(), rows.tolist(), strict=True):
        place = row * size + start
        for own in lines:
            width = own[:1].nbytes
            memory = memoryview((ctypes.c_char * width).from_address(own.data_ptr() + line * width)).cast("B")
            done = 0
            while done < width:
                count = move(memory[done:], place + done)
                if not count:
                    raise OSError(errno.EIO, "the file is too short")
                done += count
            place += width
