"""`RowFile`: a tensor whose memory is a file, for tables that are larger than host memory.

The file has no name: it is deleted as soon as it is open. So it ends with the tensor or with the process, however that
ends, and no other run can take it for its own. It is working storage; checkpoints are separate.

    cache lines  <- positioned reads and writes of rows (`file_rows.py`): the process maps no page
    all others   <- the tensor: the system reads the pages of the file that are touched (`RssFile`), and may drop them
                    again. Whole tables are read and written in blocks, between `fetch` and `release`

All space is allocated when the file is made, so a full disk is an error before training starts.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from tilerec.errors import ConfigError, FileError

BLOCK_BYTES = 1 << 25
"""Bytes of the blocks in which whole tables in files are read and written."""

_FETCHED_BYTES = 1 << 17
"""Bytes of one request to the system, which reads no more of a longer one."""


@final
class RowFile(mmap.mmap):
    """A file without a name, mapped into memory; it lives as long as a tensor over it.

    Attributes:
        folder: where it lies.
        table: name of its table, for errors.
        descriptor: of the file, for positioned reads and writes of rows.
    """

    folder: str
    table: str
    descriptor: int


_FILES: weakref.WeakValueDictionary[int, RowFile] = weakref.WeakValueDictionary()
"""Files by the address of their first byte."""


def file_of(tensor: Tensor) -> RowFile | None:
    """Return the file that is the memory of a tensor, or of which the tensor is a part; None: it is in memory."""
    if tensor.device.type != "cpu" or not _FILES:
        return None
    return _FILES.get(tensor.untyped_storage().data_ptr())


def tensor_in_file(folder: str, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor of zeros in a new file; one without elements is in memory.

    Args:
        folder: an existing folder on a local disk.
        name: the table's, for errors.

    Raises:
        FileError: the folder does not exist or cannot be written, or has not enough space.
    """
    size = dtype.itemsize
    for count in shape:
        size *= count
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_made(folder, size, name), dtype=torch.uint8).view(dtype).view(shape)


def into_file(tensor: Tensor, folder: str, name: str) -> Tensor:
    """Return a tensor with these values in a file; itself if it is in one, on meta, or without elements."""
    if tensor.is_meta or not tensor.numel() or file_of(tensor) is not None:
        return tensor
    made = tensor_in_file(folder, tuple(tensor.shape), tensor.dtype, name)
    copy_rows(made, tensor)
    return made


def full_beside(leaf: Tensor, shape: tuple[int, ...], value: float, dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor full of one value, in a file of the same folder if the leaf is in a file, else on its device."""
    file = file_of(leaf)
    if file is None:
        return torch.full(shape, value, dtype=dtype, device=leaf.device)
    made = tensor_in_file(file.folder, shape, dtype, name)
    if value:
        for block in row_blocks(made):
            block.fill_(value)
    return made


@contextlib.contextmanager
def space_held(folder: str, size: int, name: str) -> Iterator[None]:
    """Hold free space on the disk of a folder meanwhile. Raises as `tensor_in_file`."""
    held = _made(folder, size, name) if size else None
    try:
        yield
    finally:
        if held is not None:
            held.close()
            del held


def row_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a tensor: in blocks if it is in a file, whose memory is released behind; else all at once."""
    if file_of(tensor) is None:
        yield tensor
        return
    step = max(1, BLOCK_BYTES // max(1, tensor[:1].nbytes))
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
    step = max(1, BLOCK_BYTES // max(1, target[:1].nbytes))
    for first in range(0, target.shape[0], step):
        here, there = target[first : first + step], source[first : first + step]
        fetch(here)
        fetch(there)
        here.copy_(there)
        release(here)
        release(there)


def clone(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, in another file of the same folder if it is in a file."""
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
