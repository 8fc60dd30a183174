"""`RowGate`: keeps requests and a follower's writes apart. `RowWrite`: rows to copy. Both are native/row_gate.h.

Legend: M rows that are written, N rows of a tensor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

from torch import Tensor

from tilerec.ops.runtime.cpu.library import library

_NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


@final
class RowGate:
    """A gate that requests enter and one follower closes.

    Attributes:
        place: of its memory.
    """

    def __init__(self, native: ctypes.CDLL) -> None:
        self._memory = (_NUMBER * 4)()
        self.place = ctypes.addressof(self._memory)
        # Calls that never wait keep Python's global lock: to give it up and take it again costs more than they do.
        brief = ctypes.PyDLL(native._name)
        self._enter_now, self._leave = brief.tr_gate_try, brief.tr_gate_leave
        self._enter, self._close, self._open = native.tr_gate_enter, native.tr_gate_close, native.tr_gate_open
        for function in (self._enter_now, self._leave, self._enter, self._close, self._open):
            function.argtypes, function.restype = [_ADDRESS], None
        self._enter_now.restype = ctypes.c_int32

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a write."""
        return self._memory[1]

    @contextmanager
    def other_core(self) -> Iterator[None]:
        """Keep the calling thread off the core that ran the newest request, for the block.

        The system does not: a thread that wakes up often stays on the core where another one runs, while another core
        is idle. In a virtual machine an idle core even looks like one that was taken away.
        """
        core = self._memory[3] - 1
        if core < 0 or not hasattr(os, "sched_setaffinity"):
            yield
            return
        cores = os.sched_getaffinity(0)
        others = cores - {core}
        if others:
            os.sched_setaffinity(0, others)
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)

    def enter(self) -> None:
        """Let a request in; it waits for one write at most."""
        if not self._enter_now(self.place):
            self._enter(self.place)

    def leave(self) -> None:
        """End a request."""
        self._leave(self.place)

    def close(self) -> None:
        """Wait until no request runs, and keep others out."""
        self._close(self.place)

    def open(self) -> None:
        """Let requests in again; return once those that waited are in."""
        self._open(self.place)


def row_gate() -> RowGate | None:
    """Return a new gate; None without the native library."""
    native = library()
    return None if native is None else RowGate(native)


class RowWrite(NamedTuple):
    """Rows to write into a tensor.

    Args:
        place: `[N, ...]`.
        rows_M: int64, their numbers in `place`; None: all rows, N is M.
        values: `[M, ...]`, of the dtype and the device of `place`.
    """

    place: Tensor
    rows_M: Tensor | None
    values: Tensor

    @property
    def native(self) -> ctypes.CDLL | None:
        """The native library, if it can copy these rows."""
        if self.place.device.type != "cpu" or not all(_whole_rows(rows) for rows in (self.place, self.values)):
            return None
        return library()

    def parts(self, size: int) -> Iterator[RowWrite]:
        """Return writes of at most `size` rows."""
        for first in range(0, len(self.values), size):
            values = self.values[first : first + size]
            if self.rows_M is None:
                yield RowWrite(self.place[first : first + size], None, values)
            else:
                yield RowWrite(self.place, self.rows_M[first : first + size], values)

    def own_pages(self) -> None:
        """Write a byte of each cache line as it is.

        The first write to a page of a file that is mapped privately copies it, in 1 to 2 microseconds. So this happens
        before a lock is taken, not while it is held. Readers see no change.
        """
        native = self.native
        if native is not None:
            native.tr_own_rows(*self._target(), self._row_bytes(), _NUMBER(len(self.values)))

    def run(self) -> None:
        """Write the rows."""
        native = self.native
        if native is not None:
            self._copy(native, None, len(self.values))
        elif self.rows_M is None:
            self.place.copy_(self.values)
        else:
            self.place.index_copy_(0, self.rows_M, self.values)

    def run_between_requests(self, native: ctypes.CDLL, gate: RowGate, hold: int, row_ns: int = 0) -> None:
        """Write the rows, at most `hold` of them each time that the gate is closed.

        row_ns: least nanoseconds for a row; the thread sleeps between two writes, with the gate open.
        """
        self._copy(native, gate.place, hold, row_ns)

    def _copy(self, native: ctypes.CDLL, gate: int | None, hold: int, row_ns: int = 0) -> None:
        source = _ADDRESS(self.values.data_ptr()), _NUMBER(self.values.stride(0) * self.values.itemsize)
        counts = self._row_bytes(), _NUMBER(len(self.values)), _NUMBER(hold), _NUMBER(row_ns)
        native.tr_gate_write_rows(_ADDRESS(gate), *self._target(), *source, *counts)

    def _target(self) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]:
        rows = None if self.rows_M is None else self.rows_M.data_ptr()
        return _ADDRESS(self.place.data_ptr()), _NUMBER(self.place.stride(0) * self.place.itemsize), _ADDRESS(rows)

    def _row_bytes(self) -> ctypes.c_int64:
        return _NUMBER(self.values[0].nbytes)


def _whole_rows(rows: Tensor) -> bool:
    """Return True if there are rows, and the bytes of each lie side by side."""
    return rows.numel() > 0 and rows[0].is_contiguous()
