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

from torch import Tensor

from tilerec.checkpoint.job_tables import known_rows, versions_of
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.planned_save import Changed
from tilerec.comms.group import Group
from tilerec.sharding.changed_rows import ChangedRows
from tilerec.storage.table_rows import TableRows


class RowChanges:
    """Marks of changed rows, an observer of one leaf's rows."""

    def __init__(self, table: TableRows) -> None:
        self._marks = ChangedRows(table.leaf.shape[0], table.leaf.device)
        self._all = False
        self._versions = versions_of(table)

    def before_write(self, table: TableRows, rows_N: Tensor | None) -> None:
        self._all |= rows_N is None or self._versions != versions_of(table)
        if rows_N is not None and rows_N.numel() and not self._all:
            # A number outside of the leaf marks a further row, which does no harm.
            self._marks.mark(rows_N.long().clamp(0, len(self._marks.marks) - 1))

    def after_write(self, table: TableRows) -> None:
        self._versions = versions_of(table)

    def begin_anew(self, table: TableRows) -> Tensor | None:
        """Return the rows that have changed since the last call, int64 `[U]` on the CPU, ascending; None: any rows."""
        every = self._all or self._versions != versions_of(table) or len(self._marks.marks) != table.leaf.shape[0]
        rows_U = None if every else self._marks.rows().cpu()
        self._marks = ChangedRows(table.leaf.shape[0], self._marks.marks.device)
        self._all, self._versions = False, versions_of(table)
        return rows_U

    def forget(self) -> None:
        """Count all rows as changed."""
        self._all = True


class JobChanges:
    """The changes of all tables of a job since its last checkpoint."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[TableRows, RowChanges] = WeakKeyDictionary()

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
                self._of[table] = RowChanges(table)
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
