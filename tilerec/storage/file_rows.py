"""`FileRows`: the rows of one tensor in a file, read and written at their places, in ascending order."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from tilerec.ops.cache.definition import indexable
from tilerec.storage.host_rows import HostRows
from tilerec.storage.row_file import RowFile, failed_file, file_of, release

OPS = torch.ops.tilerec


@final
class FileRows:
    """Rows of a tensor in a file, copied to and from lines on a device; in the place of `HostRows`.

    Args:
        tensor: `[rows, D]` or `[rows]`, in `file`.
        device: of the lines.
    """

    here = None
    """No device has access to the file's rows."""

    def __init__(self, tensor: Tensor, file: RowFile, device: torch.device) -> None:
        self.tensor, self.device, self._file = tensor, device, file

    def read_into(self, lines: Tensor, at: Tensor, rows: Tensor) -> None:
        """Copy table rows to lines: `lines[at] = tensor[rows]`. Raises FileError."""
        release(self.tensor)  # a reader of the whole table has done so by now
        rows, order = rows.cpu().sort()
        if lines.device.type == "cpu":
            self._move(lines, at[order], rows)
            return
        found = torch.empty((rows.numel(), *lines.shape[1:]), dtype=lines.dtype, pin_memory=True)
        self._move(found, torch.arange(rows.numel()), rows)
        indexable(lines).index_copy_(0, at[order.to(at.device)], indexable(found).to(self.device, non_blocking=True))

    def write_from(self, lines: Tensor, at: Tensor, rows: Tensor) -> None:
        """Copy lines to table rows: `tensor[rows] = lines[at]`. Raises FileError."""
        rows, order = rows.cpu().sort()
        if lines.device.type == "cpu":
            self._move(lines, at[order], rows, writes=True)
            return
        values = indexable(lines).index_select(0, at[order.to(at.device)]).cpu()
        self._move(values, torch.arange(rows.numel()), rows, writes=True)

    def _move(self, lines: Tensor, at: Tensor, rows: Tensor, *, writes: bool = False) -> None:
        if not rows.numel():
            return
        try:
            (OPS.write_rows_ if writes else OPS.read_rows_)(lines, at, rows, self._file.descriptor)
        except OSError as error:
            size = rows.numel() * lines[:1].nbytes if writes else 0
            raise failed_file(error, self._file.folder, self._file.table, size) from error


def select_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return `tensor[rows]` (int64, in any order), read at their places if the tensor begins a file."""
    file = file_of(tensor)
    if file is None or tensor.storage_offset() or not tensor.is_contiguous():
        return tensor.index_select(0, rows)
    found = tensor.new_empty((rows.numel(), *tensor.shape[1:]))
    rows, order = rows.sort()
    try:
        OPS.read_rows_(found, order, rows, file.descriptor)
    except OSError as error:
        raise failed_file(error, file.folder, file.table, 0) from error
    return found


def home_rows(tensor: Tensor, device: torch.device) -> HostRows | FileRows:
    """Return the rows of a tensor in host memory or in a file, as a device reads and writes them."""
    file = file_of(tensor)
    return HostRows(tensor, device) if file is None else FileRows(tensor, file, device)
