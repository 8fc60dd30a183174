"""`RowFile`: tensors whose memory is a file, for tables that are larger than host memory.

The file has no name: it is deleted as soon as it is open. So it ends with its tensors or with the process, however that
ends, and no other run can take it for its own. It is working storage; checkpoints are separate.

Nouns
  record  a row and all of its optimizer's state, side by side, so that a row that misses the cache is one read
  field   one tensor's part of each record. The tensor `[rows, ...]` is a view with the stride of a record

    cache lines  <- positioned reads and writes of records (`file_rows.py`): the process maps no page
    all others   <- the tensors: the system reads the pages of the file that are touched (`RssFile`), and may drop them
                    again. Whole tables are read and written in blocks, between `fetch` and `release`

Example: a row of 3 bfloat16 and a float32 of state. Bytes 0 to 3 of a record are the state, 4 to 9 the row, 10 and 11
padding: fields lie by falling size of their items, and a record ends where the next one's items are aligned.

All space is allocated when the file is made, so a full disk is an error before training starts.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from tilerec.errors import ConfigError, FileError

BLOCK_BYTES = 1 << 25
"""Bytes of the blocks in which whole tables in files are read and written."""

_FETCHED_BYTES = 1 << 17
"""Bytes of one request to the system, which reads no more of a longer one."""


class RowField(NamedTuple):
    """A tensor's part of each record: the shape of one of its rows, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> RowField:
        """Return the field of a tensor `[rows, ...]`."""
        return RowField(tuple(tensor.shape[1:]), tensor.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@final
class RowFile(mmap.mmap):
    """A file without a name, mapped into memory; it lives as long as a tensor over it.

    Attributes:
        folder: where it lies.
        table: name of its table, for errors.
        descriptor: of the file, for positioned reads and writes of records.
        fields: of its records.
        rows: number of records.
        unused: fields behind the first are zeros, and no tensor is over them.
    """

    folder: str
    table: str
    descriptor: int
    fields: tuple[RowField, ...]
    rows: int
    unused: bool

    def tensors(self) -> list[Tensor]:
        """Return the tensor of each field, with a version counter of its own."""
        size, starts = record_of(self.fields)
        found = []
        for (shape, dtype), start in zip(self.fields, starts, strict=True):
            whole = torch.frombuffer(self, dtype=torch.uint8).view(dtype)
            inner = torch.empty(shape, device="meta").stride()
            strides = (size // dtype.itemsize, *inner)
            found.append(whole.as_strided((self.rows, *shape), strides, start // dtype.itemsize))
        return found


_FILES: weakref.WeakValueDictionary[int, RowFile] = weakref.WeakValueDictionary()
"""Files by the address of their first byte."""


def record_of(fields: Sequence[RowField]) -> tuple[int, list[int]]:
    """Return the bytes of a record, and the first byte of each field in it."""
    starts, end = [0] * len(fields), 0
    for k in sorted(range(len(fields)), key=lambda k: -fields[k].dtype.itemsize):
        starts[k], end = end, end + fields[k].bytes
    unit = max(field.dtype.itemsize for field in fields)
    return -(-end // unit) * unit, starts


def file_of(tensor: Tensor) -> RowFile | None:
    """Return the file that is the memory of a tensor, or of which the tensor is a part; None: it is in memory."""
    if tensor.device.type != "cpu" or not _FILES:
        return None
    return _FILES.get(tensor.untyped_storage().data_ptr())


def tensors_in_file(folder: str, rows: int, fields: Sequence[RowField], name: str) -> list[Tensor]:
    """Return tensors of zeros `[rows, ...]` in the records of a new file; those without elements are in memory.

    Args:
        folder: an existing folder on a local disk.
        fields: one per tensor.
        name: the table's, for errors.

    Raises:
        FileError: the folder does not exist or cannot be written, or has not enough space.
    """
    size, _ = record_of(fields)
    if not rows * size:
        return [torch.empty((rows, *field.shape), dtype=field.dtype) for field in fields]
    file = _made(folder, rows * size, name)
    file.fields, file.rows, file.unused = tuple(fields), rows, False
    return file.tensors()


def rows_in_file(folder: str, rows: int, fields: Sequence[RowField], name: str) -> Tensor:
    """Return the tensor of the first field; `in_records` makes those of the others. See `tensors_in_file`."""
    tensor = tensors_in_file(folder, rows, fields, name)[0]
    file = file_of(tensor)
    if file is not None:
        file.unused = True
    return tensor


def tensor_in_file(folder: str, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor of zeros that has a new file for itself. See `tensors_in_file`."""
    return tensors_in_file(folder, shape[0], [RowField(shape[1:], dtype)], name)[0]


@torch.no_grad()
def in_records(tensors: Sequence[Tensor], initial: Sequence[float], folder: str, name: str) -> list[Tensor]:
    """Return tensors with these values in the records of one file.

    They are the fields of the first one's file if these are the same, else those of a new file. Tensors that are in
    their place are returned as they are.

    Args:
        tensors: the rows, with elements, then each tensor of their state. State on meta gets its initial value.
        initial: of each tensor of the state.
        folder, name: see `tensors_in_file`.

    Raises:
        FileError: as `tensors_in_file`. No tensor has changed.
    """
    fields, file = tuple(map(RowField.of, tensors)), file_of(tensors[0])
    if file is not None and file.fields == fields and _same_memory(file.tensors()[0], tensors[0]):
        made, zeros, file.unused = file.tensors(), file.unused, False
    else:
        made, zeros = tensors_in_file(folder, tensors[0].shape[0], fields, name), True
    for k, (new, old) in enumerate(zip(made, tensors, strict=True)):
        if old.is_meta and (initial[k - 1] or not zeros):
            for block in row_blocks(new):
                block.fill_(initial[k - 1])
        elif not old.is_meta and _same_memory(new, old):
            made[k] = old
        elif not old.is_meta:
            copy_rows(new, old)
    return made


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return (first.data_ptr(), first.shape, first.stride()) == (second.data_ptr(), second.shape, second.stride())


def bytes_between_rows(tensor: Tensor) -> int:
    """Return the bytes from one row of a tensor in a file to the next; of other tensors, the bytes of a row."""
    row = tensor[:1].nbytes
    return row if file_of(tensor) is None else max(row, tensor.stride(0) * tensor.itemsize)


def row_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a tensor: in blocks if it is in a file, whose memory is released behind; else all at once."""
    if file_of(tensor) is None:
        yield tensor
        return
    step = max(1, BLOCK_BYTES // bytes_between_rows(tensor))
    for first in range(0, tensor.shape[0], step):
        block = tensor[first : first + step]
        fetch(block)
        yield block
        release(block)


def copy_rows(target: Tensor, source: Tensor) -> None:
    """Copy all rows, in blocks if one of them is in a file."""
    if not target.dim() or (file_of(target) is None and file_of(source) is None):
        target.copy_(source)
        return
    step = max(1, BLOCK_BYTES // max(1, bytes_between_rows(target), bytes_between_rows(source)))
    for first in range(0, target.shape[0], step):
        here, there = target[first : first + step], source[first : first + step]
        fetch(here)
        fetch(there)
        here.copy_(there)
        release(here)
        release(there)


def clone(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, in a file of its own in the same folder if it is in a file."""
    file = file_of(tensor)
    if file is None:
        return tensor.clone()
    made = tensor_in_file(file.folder, tuple(tensor.shape), tensor.dtype, file.table)
    copy_rows(made, tensor)
    return made


def release(tensor: Tensor) -> None:
    """Have the process hold no memory for a tensor in a file; its values stay in the file. Other tensors: nothing."""
    file = file_of(tensor)
    if file is not None and tensor.numel():
        first, end = _range_of(tensor)
        file.madvise(mmap.MADV_DONTNEED, first, end - first)


def drop(tensor: Tensor) -> None:
    """Write a tensor in a file to the disk, and have the system drop its pages, so that the next reads are cold."""
    file = file_of(tensor)
    if file is not None:
        release(tensor)
        os.fdatasync(file.descriptor)
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def in_use() -> bool:
    """Return True if a tensor is in a file."""
    return bool(_FILES)


def fetch(tensor: Tensor) -> None:
    """Have the system read a tensor in a file into its page cache, without waiting. Other tensors: nothing.

    Pages that are read this way are single ones. Reading ahead of a map's own makes large pages, and a write of a row
    to one of these takes 15 to 20 us in place of 1 to 3 (ext4, Linux 6.18).
    """
    file = file_of(tensor)
    if file is not None and tensor.numel():
        first, end = _range_of(tensor)
        for start in range(first, end, _FETCHED_BYTES):
            os.posix_fadvise(file.descriptor, start, min(_FETCHED_BYTES, end - start), os.POSIX_FADV_WILLNEED)


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """Return the range of bytes of a file that a tensor with elements lies in, from the beginning of a page."""
    first = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) * tensor.itemsize
    return first // mmap.PAGESIZE * mmap.PAGESIZE, first + last + tensor.itemsize


def failed_file(error: OSError, folder: str, name: str, size: int) -> FileError:
    """Return the error of a file of rows.

    Args:
        size: bytes that were wanted; 0 for a read.
    """
    number = f"{size:,} bytes" if size else "a read"
    room = ""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        room = f" ({found.f_bavail * found.f_frsize:,} bytes free)"
    return FileError(
        f"Table '{name}': got '{error.strerror or error}' for {number} of rows in folder {folder}{room}; expected an "
        "existing folder on a local disk with room for the rows and their optimizer's state. Free space, choose "
        "another folder (KeyValueParams), or spread the table over more hosts; a job continues from its checkpoint.",
        error.errno,
    )


def _made(folder: str, size: int, name: str) -> RowFile:
    if not hasattr(os, "posix_fallocate") or not hasattr(mmap, "MADV_DONTNEED"):
        raise ConfigError(
            f"Table '{name}': got a folder for its rows on {sys.platform}; expected Linux. Leave the table in memory."
        )
    try:
        if not Path(folder).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "no such folder")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as opened:
            os.posix_fallocate(opened.fileno(), 0, size)
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file = RowFile(opened.fileno(), size)
            file.descriptor = os.dup(opened.fileno())
    except (OSError, ValueError, OverflowError) as error:
        known = error if isinstance(error, OSError) else OSError(errno.EFBIG, str(error))
        raise failed_file(known, folder, name, size) from error
    weakref.finalize(file, os.close, file.descriptor)
    file.folder, file.table = folder, name
    _FILES[_address(file)] = file
    return file


def _address(file: RowFile) -> int:
    return torch.frombuffer(file, dtype=torch.uint8, count=1).data_ptr()
