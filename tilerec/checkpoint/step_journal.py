"""`StepJournal`: undo log of the last steps of a job's tables.

    begin(7)   writes of step 8   begin(8)   writes of step 9   begin(9)   some writes of step 10   <- a peer dies
                                                                           undo to 9, to 8 or to 7

Before rows are written, their bytes and those of their slots are appended to the log. Undone in reverse order, the log
gives the bits of the beginning of a step, also in the middle of another step. Rows are not sorted or made unique: in a
reverse order, the oldest copy of a row is the last one that is put back.

A write that names no rows, or was not announced, cannot be undone. It is lost only for the steps before it.

Legend: N rows of a write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.job_tables import known_rows, versions_of
from tilerec.checkpoint.row_snapshot import row_bytes
from tilerec.ops.runtime.upload import capturing
from tilerec.storage.table_rows import TableRows


class Write(NamedTuple):
    """Rows before a write.

    Args:
        table: its number in the journal.
        rows_N: int64, row numbers of the leaf.
        values: bytes of these rows, uint8 `[N, bytes of a row]`: of the leaf, then of each slot.
    """

    table: int
    rows_N: Tensor
    values: list[Tensor]


@dataclass
class LoggedStep:
    """The writes since the beginning of a step. `lost`: why they cannot be undone; "" if they can be."""

    step: int
    writes: list[Write] = field(default_factory=list)
    lost: str = ""


class StepJournal:
    """Undo log of the last steps, an observer of all tables until `close`.

    Args:
        parts: of the job. Tables are found in those that are modules; those whose writes are not known are left out.
        steps: number of steps to keep, the running one included.
    """

    def __init__(self, parts: Mapping[str, Any], steps: int) -> None:
        self.tables = list(known_rows(parts))
        self._number = {id(table): number for number, table in enumerate(self.tables)}
        self._steps: deque[LoggedStep] = deque(maxlen=steps)
        self._versions = [versions_of(table) for table in self.tables]
        for table in self.tables:
            table.observers.append(self)

    def begin(self, step: int) -> None:
        """Begin the log of the step after this many steps."""
        for number, table in enumerate(self.tables):
            self._check_announced(number, table)
        self._steps.append(LoggedStep(step))

    @torch.no_grad()
    def before_write(self, table: TableRows, rows_N: Tensor | None) -> None:
        if not self._steps:
            return
        number = self._number[id(table)]
        self._check_announced(number, table)
        log = self._steps[-1]
        if rows_N is None or table.cache is not None or capturing():
            why = "a write names no rows" if rows_N is None else "its rows are cached, or written by a CUDA graph"
            log.lost = log.lost or f"table '{table.name}': {why}"
        elif rows_N.numel() and not log.lost:
            tensors = table.host()
            near_N = rows_N.to(tensors[0].device).clamp(0, tensors[0].shape[0] - 1).long()  # a copy: of the batch's ids
            log.writes.append(Write(number, near_N, [row_bytes(each).index_select(0, near_N) for each in tensors]))

    def after_write(self, table: TableRows) -> None:
        number = self._number[id(table)]
        self._versions[number] = versions_of(table)

    def undoable(self) -> list[LoggedStep]:
        """Return the steps whose beginnings can be reached, newest first, each with the writes since its beginning."""
        found = []
        for log in reversed(self._steps):
            if log.lost:
                break
            found.append(log)
        return found

    @property
    def lost(self) -> str:
        """Why the beginning of the running step cannot be reached; "" if it can be."""
        return self._steps[-1].lost if self._steps else "no step has begun"

    @property
    def bytes(self) -> int:
        """Bytes of the log."""
        return sum(part.nbytes for log in self._steps for write in log.writes for part in (write.rows_N, *write.values))

    def close(self) -> None:
        """End the observation, and free the log."""
        for table in self.tables:
            if self in table.observers:
                table.observers.remove(self)
        self._steps.clear()

    def _check_announced(self, number: int, table: TableRows) -> None:
        """Give the running step up if the table was written without an announcement."""
        now = versions_of(table)
        if now != self._versions[number]:
            self._versions[number] = now
            if self._steps:
                self._steps[-1].lost = f"table '{table.name}': it was written without an announcement"


@torch.no_grad()
def undo(tables: Sequence[Sequence[Tensor]], writes: Iterable[Write]) -> None:
    """Put the rows back that were there before some writes.

    Args:
        tables: the leaf and the slots of each table, in the journal's order; changed in place.
        writes: in the order in which they were made.
    """
    for number, rows_N, values in reversed(list(writes)):
        for tensor, bytes_N in zip(tables[number], values, strict=True):
            row_bytes(tensor)[rows_N] = bytes_N
