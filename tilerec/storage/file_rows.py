"""`FileRows`: the rows of a file and their state, read and written record by record, in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from tilerec.ops.cache.definition import indexable
from tilerec.storage.host_rows import HostRows
from tilerec.storage.row_file import RowFile, bytes_between_rows, failed_file, file_of, release

OPS = torch.ops.tilerec


@final
class FileRows:
    """Rows of tensors in a file, copied to and from lines on a device; in the place of `HostRows`.

    Args:
        tensors: `[rows, ...]`, the fields of `file`: all of them, or one.
        device: of the lines.
    """

    here = None
    """No device has access to the file's rows."""

    def __init__(self, tensors: Sequence[Tensor], file: RowFile, device: torch.device) -> None:
        self.tensors, self.device, self._file = list(tensors), device, file
        starts = [_place_of(tensor)[1] for tensor in tensors]
        self._start = min(starts)
        self._order = sorted(range(len(tensors)), key=starts.__getitem__)
        ends = [starts[k] + tensors[k][:1].nbytes for k in self._order]
        assert ends[:-1] == sorted(starts)[1:], "fields lie side by side"

    def read_into(self, lines: Sequence[Tensor], at: Tensor, rows: Tensor) -> None:
        """Copy table rows to lines: `lines[k][at] = tensors[k][rows]`. Raises FileError."""
        release(self.tensors[0])  # a reader of the whole table has done so by now
        rows, order = rows.cpu().sort()
        if self.device.type == "cpu":
            self._move(lines, at[order], rows)
            return
        found = [torch.empty((rows.numel(), *own.shape[1:]), dtype=own.dtype, pin_memory=True) for own in lines]
        self._move(found, torch.arange(rows.numel()), rows)
        at = at[order.to(at.device)]
        for own, values in zip(lines, found, strict=True):
            indexable(own).index_copy_(0, at, indexable(values).to(self.device, non_blocking=True))

    def write_from(self, lines: Sequence[Tensor], at: Tensor, rows: Tensor) -> None:
        """Copy lines to table rows: `tensors[k][rows] = lines[k][at]`. Raises FileError."""
        rows, order = rows.cpu().sort()
        at = at[order.to(at.device)]
        if self.device.type != "cpu":
            lines = [indexable(own).index_select(0, at).cpu() for own in lines]
            at = torch.arange(rows.numel())
        self._move(lines, at, rows, writes=True)

    def _move(self, lines: Sequence[Tensor], at: Tensor, rows: Tensor, *, writes: bool = False) -> None:
        if not rows.numel():
            return
        move, size = (OPS.write_rows_ if writes else OPS.read_rows_), bytes_between_rows(self.tensors[0])
        try:
            move([lines[k] for k in self._order], at, rows, self._file.descriptor, size, self._start)
        except OSError as error:
            wanted = rows.numel() * size if writes else 0
            raise failed_file(error, self._file.folder, self._file.table, wanted) from error


def select_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return `tensor[rows]` (int64, in any order), read at their places if the tensor is in a file."""
    file = file_of(tensor)
    if file is None or tensor.shape[0] < 2 or not tensor[0].is_contiguous():
        return tensor.index_select(0, rows)
    found = tensor.new_empty((rows.numel(), *tensor.shape[1:]))
    first, start = _place_of(tensor)
    rows, order = rows.sort()
    try:
        OPS.read_rows_([found], order, rows + first, file.descriptor, bytes_between_rows(tensor), start)
    except OSError as error:
        raise failed_file(error, file.folder, file.table, 0) from error
    return found


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """Return the record that is the first row of a tensor in a file, and the row's first byte in it."""
    first = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return divmod(first, bytes_between_rows(tensor))


def home_rows(tensors: Sequence[Tensor], device: torch.device) -> HostRows | FileRows:
    """Return the rows of tensors in host memory or in one file, as a device reads and writes them."""
    file = file_of(tensors[0])
    assert all(file_of(tensor) is file for tensor in tensors), "a row and its state are in one place"
    return HostRows(tensors, device) if file is None else FileRows(tensors, file, device)
