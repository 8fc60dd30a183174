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
from tilerec.checkpoint.row_snapshot import row_bytes
from tilerec.comms.agreement import on_all_ranks
from tilerec.comms.group import Group
from tilerec.delta.record import LeftOut
from tilerec.errors import ConfigError
from tilerec.storage.file_rows import select_rows
from tilerec.storage.row_file import clone
from tilerec.storage.table_rows import TableRows

_NUMBER_BYTES = 8
_SMALLEST = 2.0**-149  # of float32, above 0


class Budget:
    """A number of bytes for the rows of each delta, on all ranks together.

    Args:
        bytes: of rows and their numbers.
        managed: names of the tables with managed ids.
        row_bytes: of the published rows of tables that are published in another type, by name.

    Raises:
        ConfigError: the number is negative.
    """

    def __init__(self, bytes: int, managed: Collection[str], row_bytes: Mapping[str, int]) -> None:
        if bytes < 0:
            raise ConfigError(f"DeltaWriter: got max_bytes={bytes}; expected a number from 0. Correct it.")
        self.bytes = bytes
        self._managed, self._row_bytes = frozenset(managed), row_bytes
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
            self._published[table] = clone(table.host()[0].detach().cpu())
        self._published[table][first : first + published.shape[0]] = published

    def choose(self, found: Changed, ranks: Group) -> Changed:
        """Return the changes that are published. Collective.

        Args:
            found: all changes.
        """
        with on_all_ranks(ranks, "the delta log", "the changes of rows"):
            rows = {table: self._with_waiting(table, rows_U) for table, rows_U in found.rows.items()}
            limited = [table for table in rows if table.name not in self._managed]
            changes: dict[TableRows, Tensor] = {}
            for table in limited:
                change_U = self._changes(table, rows[table])
                rows[table], changes[table] = rows[table][change_U > 0], change_U[change_U > 0]
        chosen = self._chosen(changes, ranks)
        left: dict[str, tuple[int, float]] = {}
        with on_all_ranks(ranks, "the delta log", "the copies of published rows"):
            for table in limited:
                chosen_U = chosen[table]
                other = changes[table][~chosen_U]
                if other.numel():
                    count, largest = left.get(table.name, (0, 0.0))
                    left[table.name] = count + other.numel(), max(largest, float(other.max()))
                self._waiting[table] = rows[table][~chosen_U]
                rows[table] = rows[table][chosen_U]
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
        if not rows_U.numel():
            return torch.empty(0)
        now, before = _rows(table, rows_U), published[rows_U]
        change_U = (now.float() - before.float()).abs().amax(1).nan_to_num(torch.inf, torch.inf)
        other_U = (row_bytes(now) != row_bytes(before)).any(1)  # 0 and -0 have no difference
        return torch.where(other_U, change_U.clamp(min=_SMALLEST), 0.0)

    def _keep(self, table: TableRows, rows_U: Tensor) -> None:
        """Copy rows that are about to be published."""
        published = self._published.get(table)
        if published is None or published.shape != table.leaf.shape:
            self._published[table] = clone(table.host()[0].detach().cpu())
        else:
            published[rows_U] = _rows(table, rows_U)

    def _chosen(self, changes: Mapping[TableRows, Tensor], ranks: Group) -> dict[TableRows, Tensor]:
        """Return which rows of each table are published, bool [U]: the largest changes of all ranks, as many as fit."""
        own = [(self._bytes_of(table), table in self._published, changes[table].numpy()) for table in changes]
        gathered: Sequence[Any] = ranks.all_gather_object(own)
        every = [one for rank in gathered for one in rank]
        known = [change if is_known else np.zeros(0, np.float32) for _, is_known, change in every]
        values = np.concatenate([*known, np.zeros(0, np.float32)])
        costs = np.concatenate(
            [np.full(change.shape, size, np.int64) for (size, *_), change in zip(every, known, strict=True)]
            or [np.zeros(0, np.int64)]
        )
        order = np.argsort(-values, kind="stable")  # equal changes: in the order of the ranks
        fits = len(values) if self.lifted else int(np.searchsorted(np.cumsum(costs[order]), self.bytes, side="right"))
        chosen = np.zeros(len(values), dtype=bool)
        chosen[order[:fits]] = True
        at = sum(len(change) for change in known[: sum(map(len, gathered[: ranks.rank]))])
        found: dict[TableRows, Tensor] = {}
        for table, (_, is_known, change) in zip(changes, own, strict=True):
            if is_known:
                found[table] = torch.from_numpy(chosen[at : at + len(change)])
                at += len(change)
            else:  # a table without published rows is published as a whole
                found[table] = torch.ones(len(change), dtype=torch.bool)
        return found

    def _bytes_of(self, table: TableRows) -> int:
        """Return the bytes of a published row with its number."""
        return _NUMBER_BYTES + self._row_bytes.get(table.name, table.leaf.nbytes // max(1, table.leaf.shape[0]))


def _rows(table: TableRows, rows_U: Tensor) -> Tensor:
    weight = table.host()[0].detach()
    return select_rows(weight, rows_U.to(weight.device)).cpu()


def _merged(every: Sequence[Any]) -> dict[str, LeftOut]:
    merged: dict[str, LeftOut] = {}
    for own in every:  # a dict of each rank
        for name, (count, largest) in own.items():
            before = merged.get(name, LeftOut(0, 0.0))
            merged[name] = LeftOut(before.rows + count, max(before.largest, largest))
    return merged
