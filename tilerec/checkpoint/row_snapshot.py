"""`RowSnapshot`: the rows of a leaf and their slots as they were at one moment, read while training goes on.

    training   rows that an update is about to write  ->  copied once, before the write
    writer     a block of rows, read from live memory, some of them new by now  ->  the copied rows put in their place

A row is copied before it is written, and the writer looks at the copies after it has read the block. So each row that
the read could have seen in part or anew is among the copies. Neither side waits for the other's reads and writes.
Memory: the rows that were written meanwhile, and a mark of one byte per row. Before a write that does not name its
rows, everything that is not read yet is copied.

Legend: N rows of an update, U rows of the snapshot, C copied rows.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilerec.checkpoint.job_tables import versions_of
from tilerec.errors import ConfigError
from tilerec.storage.file_rows import select_rows
from tilerec.storage.row_file import clone, fetch, file_of, release
from tilerec.storage.table_rows import TableRows

Bytes = npt.NDArray[np.uint8]


class _Copies(NamedTuple):
    """Rows with their values of each tensor, uint8 `[C, bytes]`; ready: on a GPU, when they are complete."""

    rows_C: Tensor
    values: list[Tensor]
    ready: torch.cuda.Event | None


class RowSnapshot:
    """A snapshot of a leaf's rows, an observer of them until `close`.

    Args:
        table: the rows. Cached rows have been written back, and no replica sync is in flight.
        rows_U: the rows to keep, int64, ascending, on the CPU; None: all.
    """

    def __init__(self, table: TableRows, rows_U: Tensor | None) -> None:
        self.tensors = [tensor.detach() for tensor in table.host()]
        self.rows_U = rows_U
        count = self.tensors[0].shape[0]
        self._count = count if rows_U is None else rows_U.numel()
        device = self.tensors[0].device
        # The writer's reads follow the work of the stream that trains.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._wanted = torch.ones(count, dtype=torch.bool, device=device)
        if rows_U is not None:
            self._wanted.zero_()
            self._wanted[rows_U.to(device)] = True
        self._lock = threading.Lock()
        self._copies: list[_Copies] = []
        self._read = [0] * len(self.tensors)  # rows that have been read, per tensor
        self._rest: list[tuple[int, Tensor]] | None = None  # first row and copy of what was unread at some moment
        # Version counters after the last announced write; None while one is in progress.
        self._versions: object = versions_of(table)
        self._unannounced = False
        self._table: TableRows | None = table
        table.observers.append(self)

    # ------------------------------------------------------------------------------------------------ training

    @torch.no_grad()
    def before_write(self, table: TableRows, rows_N: Tensor | None) -> None:
        with self._lock:  # several threads may train
            if self._rest is not None:
                return
            self._unannounced |= self._versions is not None and self._versions != versions_of(table)
            if rows_N is None:
                self._rest = [(first, clone(self._at(k, first, self._count))) for k, first in enumerate(self._read)]
                return
            self._versions = None
            if rows_N.numel():
                self._copy(rows_N.to(self._wanted.device).long().clamp(0, len(self._wanted) - 1))

    def _copy(self, near_N: Tensor) -> None:
        """Copy the rows that are wanted and not copied yet."""
        fresh_C = near_N[self._wanted[near_N]].unique()
        if not fresh_C.numel():
            return
        values = [select_rows(row_bytes(tensor), fresh_C) for tensor in self.tensors]
        self._wanted[fresh_C] = False
        ready = None
        if fresh_C.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        self._copies.append(_Copies(fresh_C, values, ready))

    def after_write(self, table: TableRows) -> None:
        with self._lock:
            self._versions = versions_of(table)

    # ------------------------------------------------------------------------------------------------ the writer

    @property
    def copied_bytes(self) -> int:
        """Bytes of copied rows and their numbers."""
        parts = [tensor for copies in list(self._copies) for tensor in (copies.rows_C, *copies.values)]
        return sum(part.nbytes for part in [*parts, *(copy for _, copy in self._rest or ())])

    def check(self) -> None:
        """Raise `ConfigError` if rows were written without an announcement, so what was read may be of another moment.

        Another thread may be writing: what it has announced is no error.
        """
        table = self._table
        assert table is not None
        before = self._versions
        written = before is not None and before != versions_of(table)
        with self._lock:
            # Otherwise an announcement has come in between, and the numbers are its own.
            written = written and self._versions is before and self._rest is None
            written = written or self._unannounced
        if written:
            raise ConfigError(
                f"Table '{table.name}': got a write by hand while a save was in progress; expected one that is "
                "announced. Call tilerec.checkpoint.announce_write(module) before it, or save with asynchronous=False."
            )

    def read(self, k: int, first: int, count: int) -> memoryview:
        """Return the bytes of rows number `first` to `first + count` of the snapshot.

        Args:
            k: 0 the weights, or 1 and more the slots, in the order of the optimizer's. Blocks of one tensor are read
                once, in ascending order.
        """
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            block = None if self._rest is not None else self._live(k, first, count)
            with self._lock:
                self._read[k] = first + count
                copies, rest = list(self._copies), self._rest
            if rest is not None:  # live rows may be others by now
                start, values = rest[k]
                block = _on_host(values[first - start : first - start + count])
            assert block is not None
            self._put_copies(k, block, first, count, copies)
        return block.reshape(-1).data

    def close(self) -> None:
        """End the observation, and free the copies."""
        if self._table is not None and self in self._table.observers:
            self._table.observers.remove(self)
        self._table, self._copies, self._rest, self.tensors = None, [], None, []

    def _at(self, k: int, first: int, last: int) -> Tensor:
        """Return the bytes of some rows in live memory, a view if the snapshot has all rows."""
        live = row_bytes(self.tensors[k])
        if self.rows_U is None:
            return live[first:last]
        return select_rows(live, self.rows_U[first:last].to(live.device))

    def _live(self, k: int, first: int, count: int) -> Bytes:
        """Return a copy of rows in live memory."""
        if self.tensors[k].device.type != "cpu":
            return _on_host(self._at(k, first, first + count))
        # NumPy copies in this thread; torch would start a pool of threads for it, beside that of training.
        tensor = self.tensors[k]
        live = row_bytes(tensor).numpy()
        if self.rows_U is None:
            fetch(tensor[first : first + count])
            block: Bytes = live[first : first + count].copy()
            release(tensor[first : first + count])
            return block
        if file_of(tensor) is not None:
            return self._at(k, first, first + count).numpy()
        return live.take(self.rows_U[first : first + count].numpy(), axis=0)

    def _put_copies(self, k: int, block: Bytes, first: int, count: int, copies: list[_Copies]) -> None:
        """Write the copied rows over those of the block."""
        if not count:
            return
        if self.rows_U is None:
            numbers: npt.NDArray[np.int64] = np.arange(first, first + count)
        else:
            numbers = self.rows_U[first : first + count].numpy()
        for rows_C, values, ready in copies:
            if ready is not None:
                ready.synchronize()
            rows = rows_C.cpu().numpy()
            low, high = np.searchsorted(rows, [numbers[0], numbers[-1] + 1])
            if low < high:
                at = rows[low:high] - first if self.rows_U is None else np.searchsorted(numbers, rows[low:high])
                block[at] = values[k][int(low) : int(high)].cpu().numpy()


def row_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of each row, uint8 `[rows, bytes]`, a view."""
    return (tensor.unsqueeze(1) if tensor.dim() == 1 else tensor.flatten(1)).view(torch.uint8)


def _on_host(values: Tensor) -> Bytes:
    """Return a copy in memory of the host."""
    copy = values.cpu().numpy()
    return copy.copy() if values.device.type == "cpu" else copy
