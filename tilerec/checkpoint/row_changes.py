"""`RowChanges`: the rows of a leaf that have changed since a checkpoint, for a save of only these rows.

Announced writes name their rows (`RowObserver`). Where they do not, all rows count as changed: a loaded state, another
tiling or device. So they do after a write that was not announced, `weight.copy_()` for example, which raises torch's
version counters. As in torch, writes through `weight.data` are not counted, nor are those to a cached table by hand:
call `announce_write`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilerec.checkpoint.job_tables import known_rows, versions_of
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.planned_save import Changed
from tilerec.comms.group import Group
from tilerec.ops.marks.definition import empty_marks, marked_rows
from tilerec.storage.table_rows import TableRows


class _Waiting:
    """Announced rows of several tables, which are marked by one call once the first of these writes has ended."""

    def __init__(self) -> None:
        self._marks: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._counts: list[int] = []

    def add(self, words_W: Tensor, rows_N: Tensor, count: int) -> None:
        if self._marks and self._marks[0].device != words_W.device:
            self.mark()
        self._marks.append(words_W)
        self._rows.append(rows_N)
        self._counts.append(count)

    def mark(self) -> None:
        if self._marks:
            marks, rows, counts = self._marks, self._rows, self._counts
            self._marks, self._rows, self._counts = [], [], []
            torch.ops.tilerec.mark_rows_.default(marks, rows, counts)


class RowChanges:
    """Marks of changed rows, one bit per row, an observer of one leaf's rows.

    Args:
        waiting: rows that are not marked yet; shared by tables that are written together.
    """

    def __init__(self, table: TableRows, waiting: _Waiting | None = None) -> None:
        self._waiting = waiting or _Waiting()
        self._begin(table)

    def _begin(self, table: TableRows) -> None:
        self._count = table.leaf.shape[0]
        self._marks = empty_marks(self._count, table.leaf.device)
        self._all, self._versions = False, versions_of(table)

    def before_write(self, table: TableRows, rows_N: Tensor | None) -> None:
        self._all |= rows_N is None or self._versions != versions_of(table)
        if rows_N is not None and not self._all:
            self._waiting.add(self._marks, rows_N.to(self._marks.device), self._count)

    def after_write(self, table: TableRows) -> None:
        self._waiting.mark()
        self._versions = versions_of(table)

    def begin_anew(self, table: TableRows) -> Tensor | None:
        """Return the rows that have changed since the last call, int64 `[U]` on the CPU, ascending; None: any rows."""
        self._waiting.mark()
        every = self._all or self._versions != versions_of(table) or self._count != table.leaf.shape[0]
        rows_U = None if every else marked_rows(self._marks, self._count).cpu()
        self._begin(table)
        return rows_U

    def forget(self) -> None:
        """Count all rows as changed."""
        self._all = True


class JobChanges:
    """The changes of all tables of a job since its last checkpoint."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[TableRows, RowChanges] = WeakKeyDictionary()
        self._waiting = _Waiting()

    def begin_anew(
        self, parts: Mapping[str, Any], tensors: Mapping[str, Tensor], boxes: Sequence[tuple[str, Box]], ranks: Group
    ) -> Changed:  # fmt: skip
        """Return the changed rows of each leaf, and begin anew; leaves of which any row may have changed are left out.

        Args:
            parts: of the job. Tables are found in those that are modules.
            tensors, boxes, ranks: of the save, which writes all but these tables whole.
        """
        tables = list(known_rows(parts))
        return Changed(tables, self.begin_tables(tables), {})

    def begin_tables(self, tables: Iterable[TableRows]) -> dict[TableRows, Tensor]:
        """Return the changed rows of some leaves, and begin anew, as `begin_anew`."""
        found: dict[TableRows, Tensor] = {}
        for table in tables:
            if table not in self._of:
                self._of[table] = RowChanges(table, self._waiting)
                table.observers.append(self._of[table])
                continue
            rows_U = self._of[table].begin_anew(table)
            if rows_U is not None:
                found[table] = rows_U
        return found

    def forget(self) -> None:
        """Count all rows as changed: a save failed."""
        for changes in self._of.values():
            changes.forget()

    def close(self) -> None:
        """End the observation of the tables."""
        for table, changes in self._of.items():
            if changes in table.observers:
                table.observers.remove(changes)
        self._of.clear()
