"""`RowChanges`: the rows of a leaf that have changed since a checkpoint, for a save of only these rows.

Announced writes name their rows (`RowObserver`). Where they do not, all rows count as changed: a loaded state, another
tiling or device. So they do after a write that was not announced, `weight.copy_()` for example, which raises torch's
version counters. As in torch, writes through `weight.data` are not counted: call `TableRows.about_to_write`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tilerec.modules.cached_tables import iter_table_rows
from tilerec.ops.runtime.upload import capturing
from tilerec.sharding.changed_rows import ChangedRows
from tilerec.storage.table_rows import TableRows
from tilerec.torch_private import version_of

Versions = tuple[tuple[int, int], ...]


class RowChanges:
    """Marks of changed rows, an observer of one leaf's rows."""

    def __init__(self, table: TableRows) -> None:
        self._marks = ChangedRows(table.leaf.shape[0], table.leaf.device)
        self._all = False
        self._replayed = False  # a CUDA graph's replays write rows without an announcement
        self._versions = versions_of(table)

    def before_write(self, table: TableRows, rows_N: Tensor | None) -> None:
        self._replayed |= capturing()
        self._all |= rows_N is None or self._replayed or self._versions != versions_of(table)
        if rows_N is not None and rows_N.numel() and not self._all:
            # A number outside of the leaf marks a further row, which does no harm.
            self._marks.mark(rows_N.clamp(0, len(self._marks.marks) - 1))

    def after_write(self, table: TableRows) -> None:
        self._versions = versions_of(table)

    def begin_anew(self, table: TableRows) -> Tensor | None:
        """Return the rows that have changed since the last call, int64 `[U]` on the CPU, ascending; None: any rows."""
        every = self._all or self._versions != versions_of(table) or len(self._marks.marks) != table.leaf.shape[0]
        rows_U = None if every else self._marks.rows().cpu()
        self._marks = ChangedRows(table.leaf.shape[0], self._marks.marks.device)
        self._all, self._versions = self._replayed, versions_of(table)
        return rows_U

    def forget(self) -> None:
        """Count all rows as changed."""
        self._all = True


def versions_of(table: TableRows) -> Versions:
    """Return addresses and version counters of the leaf and its slots; a write that torch notices changes them."""
    if table.cache is not None:
        return ()  # lines that are written back raise the counters, too
    return tuple((tensor.data_ptr(), version_of(tensor)) for tensor in (table.leaf, *table.slots))


class JobChanges:
    """The changes of all tables of a job since its last checkpoint."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[TableRows, RowChanges] = WeakKeyDictionary()

    def begin_anew(self, parts: Mapping[str, Any]) -> dict[TableRows, Tensor]:
        """Return the changed rows of each leaf, and begin anew; leaves of which any row may have changed are left out.

        Args:
            parts: of the job. Tables are found in those that are modules.
        """
        found: dict[TableRows, Tensor] = {}
        for table in tables_of(parts):
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


def tables_of(parts: Mapping[str, Any]) -> Iterator[TableRows]:
    """Yield the rows of all tables of a job, each leaf once."""
    seen: set[int] = set()
    for part in parts.values():
        for _, rows in iter_table_rows(part) if isinstance(part, nn.Module) else ():
            if id(rows) not in seen and rows.leaf.numel() and not rows.leaf.is_meta:
                seen.add(id(rows))
                yield rows


@torch.no_grad()
def announce_write(parts: Mapping[str, Any]) -> None:
    """Announce that any row of a job's tables is about to be written."""
    for table in tables_of(parts):
        table.about_to_write()
