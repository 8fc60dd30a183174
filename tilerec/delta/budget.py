"""`Budget`: the rows that a delta of limited size publishes: those that have changed most.

    change of a row    the largest difference of one of its cells from what was published last
    rows of all tables and ranks, by falling change  ->  as many as fit  ->  published
    the others         stay changed; the largest change among them is the bound of the delta's record

A copy of the published rows is kept in host memory. Tables with managed ids are published as a whole: a row may belong
to another id by now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilerec.checkpoint.planned_save import Changed
from tilerec.comms.group import Group
from tilerec.delta.record import LeftOut
from tilerec.errors import ConfigError
from tilerec.storage.table_rows import TableRows

_NUMBER_BYTES = 8


class Budget:
    """A number of bytes for the rows of each delta, on all ranks together.

    Args:
        bytes: of rows and their numbers.
        managed: names of the tables with managed ids.

    Raises:
        ConfigError: the number is negative.
    """

    def __init__(self, bytes: int, managed: Collection[str]) -> None:
        if bytes < 0:
            raise ConfigError(f"DeltaWriter: got max_bytes={bytes}; expected a number from 0. Correct it.")
        self.bytes = bytes
        self._managed = frozenset(managed)
        self._published: dict[TableRows, Tensor] = {}  # on the host
        self._waiting: dict[TableRows, Tensor] = {}  # changed rows that were left out
        self.left_out: dict[str, LeftOut] = {}  # of the last choice, by table, on all ranks
        self.lifted = False  # True: everything is published

    def forget(self) -> None:
        """Begin anew: all rows that differ from the log are changed."""
        self._published.clear()
        self._waiting.clear()

    def note(self, table: TableRows, first: int, published: Tensor) -> None:
        """Take note of published values of some rows of a leaf, from row `first` on."""
        if table not in self._published:
            self._published[table] = table.host()[0].detach().cpu().clone()
        self._published[table][first : first + published.shape[0]] = published

    def choose(self, found: Changed, ranks: Group) -> Changed:
        """Return the changes that are published. Collective.

        Args:
            found: all changes.
        """
        rows = {table: self._with_waiting(table, rows_U) for table, rows_U in found.rows.items()}
        limited = [table for table in rows if table.name not in self._managed]
        changes: dict[TableRows, Tensor] = {}
        for table in limited:
            change_U = self._changes(table, rows[table])
            rows[table], changes[table] = rows[table][change_U > 0], change_U[change_U > 0]
        sizes = {table: _NUMBER_BYTES + table.leaf.nbytes // max(1, table.leaf.shape[0]) for table in limited}
        least = self._least(changes, sizes, ranks)
        left: dict[str, tuple[int, float]] = {}
        for table in limited:
            chosen = changes[table] >= least
            other = changes[table][~chosen]
            if other.numel():
                count, largest = left.get(table.name, (0, 0.0))
                left[table.name] = count + other.numel(), max(largest, float(other.max()))
            self._waiting[table] = rows[table][~chosen]
            rows[table] = rows[table][chosen]
            self._keep(table, rows[table])
        self.left_out = _merged(ranks.all_gather_object(left))
        return Changed(found.tables, rows, found.boxes)

    def _with_waiting(self, table: TableRows, rows_U: Tensor) -> Tensor:
        waiting = self._waiting.get(table)
        return rows_U if waiting is None or not waiting.numel() else torch.cat([rows_U, waiting]).unique()

    def _changes(self, table: TableRows, rows_U: Tensor) -> Tensor:
        """Return the change of each row, float32 [U]; infinite for rows whose published values are not known."""
        published = self._published.get(table)
        if published is None or published.shape != table.leaf.shape:
            return torch.full((rows_U.numel(),), torch.inf)
        now = _rows(table, rows_U)
        return (now.float() - published[rows_U].float()).abs().amax(1).nan_to_num(torch.inf, torch.inf)

    def _keep(self, table: TableRows, rows_U: Tensor) -> None:
        """Copy rows that are about to be published."""
        published = self._published.get(table)
        if published is None or published.shape != table.leaf.shape:
            self._published[table] = table.host()[0].detach().cpu().clone()
        else:
            published[rows_U] = _rows(table, rows_U)

    def _least(self, changes: Mapping[TableRows, Tensor], sizes: Mapping[TableRows, int], ranks: Group) -> float:
        """Return the least change that is published; the same on all ranks."""
        if self.lifted:
            return -1.0
        own = [(sizes[table], changes[table].numpy()) for table in changes]
        gathered: Sequence[Any] = ranks.all_gather_object(own)
        every = [one for rank in gathered for one in rank]
        if not every:
            return -1.0
        values = np.concatenate([change for _, change in every])
        costs = np.concatenate([np.full(change.shape, size, dtype=np.int64) for size, change in every])
        order = np.argsort(-values, kind="stable")
        fits = int(np.searchsorted(np.cumsum(costs[order]), self.bytes, side="right"))
        if fits == len(values):
            return -1.0
        # Rows with the change of the first one that does not fit stay out, so no order among equal ones is needed.
        return float(np.nextafter(values[order[fits]], np.float32(np.inf), dtype=np.float32))


def _rows(table: TableRows, rows_U: Tensor) -> Tensor:
    weight = table.host()[0].detach()
    return weight.index_select(0, rows_U.to(weight.device)).cpu()


def _merged(every: Sequence[Any]) -> dict[str, LeftOut]:
    merged: dict[str, LeftOut] = {}
    for own in every:  # a dict of each rank
        for name, (count, largest) in own.items():
            before = merged.get(name, LeftOut(0, 0.0))
            merged[name] = LeftOut(before.rows + count, max(before.largest, largest))
    return merged
