"""`DeltaNotes`: what has changed in a model since its last published state.

state                                   how a change is found
rows of tables with known writes        marks, one bit per row (checkpoint/row_changes.py)
all other tensors: ids, dense weights   a copy of what was published
neither (a new writer, another tiling)  what was published is read from the log

The last way needs no memory of the earlier process, so a log goes on after a crash, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.checkpoint.chain import Chain, Wanted, open_chain
from tilerec.checkpoint.folder import CheckpointFolder
from tilerec.checkpoint.job_tables import known_rows
from tilerec.checkpoint.pieces import Box, Piece, pieces_of
from tilerec.checkpoint.planned_save import Changed, Leaves, Place
from tilerec.checkpoint.row_changes import JobChanges
from tilerec.checkpoint.row_snapshot import row_bytes
from tilerec.comms.agreement import on_all_ranks
from tilerec.comms.group import Group
from tilerec.delta.budget import Budget
from tilerec.storage.table_rows import TableRows

_BLOCK_BYTES = 1 << 24  # that are compared at a time

Boxes = Sequence[tuple[str, Box]]


class DeltaNotes:
    """Notes of one writer, for its incremental saves.

    Args:
        model: whose tables are observed.
        budget: chooses the rows that are published; None: all that have changed.
    """

    def __init__(self, model: nn.Module, budget: Budget | None) -> None:
        self._model, self.budget = model, budget
        self._tables = JobChanges()
        self._copies: dict[tuple[str, Box], Tensor] = {}
        self._next: Boxes | None = None
        self._boxes: Boxes | None = None  # of the last published state; None: what it has is not known here
        self.published: CheckpointFolder | None = None
        self._chain: Chain | None = None

    def close(self) -> None:
        """End the observation of the tables."""
        self._tables.close()
        self._copies.clear()

    def begin_anew(
        self, parts: Mapping[str, Any], tensors: Mapping[str, Tensor], boxes: Boxes, ranks: Group
    ) -> Changed:  # fmt: skip
        """Return what has changed since the last published state, and begin anew. Collective.

        Args:
            parts: not used; the tables are those of the model.
            tensors, boxes, ranks: of the save.
        """
        tables = list(known_rows({"model": self._model}))
        marked = self._tables.begin_tables(tables)
        with on_all_ranks(ranks, "the delta log", "comparing with its newest state"):
            if boxes != self._boxes:
                marked = {}
                self._copies.clear()
                if self.budget is not None:
                    self.budget.forget()
            found = self._compare(tables, marked, tensors, boxes)
        self._chain = None
        self._next, self._boxes = boxes, None  # until the save is complete
        if self.budget is not None:
            found = self.budget.choose(found, ranks)
        return found

    def complete(self, folder: CheckpointFolder) -> None:
        """Take note that the save was written, and where."""
        self.published, self._boxes = folder, self._next

    # ------------------------------------------------------------------------------------------------------ compare

    def _compare(
        self, tables: Sequence[TableRows], marked: Mapping[TableRows, Tensor], tensors: Mapping[str, Tensor],
        boxes: Boxes,
    ) -> Changed:  # fmt: skip
        leaves = Leaves(tables)
        rows: dict[TableRows, list[Tensor]] = {}  # of tables that this rank writes
        listed: dict[tuple[str, Box], Tensor] = {}
        for name, box in boxes:
            memory = next(piece.memory for piece in pieces_of(name, tensors[name]) if piece.box == box)
            place = leaves.take(memory) if box.cells else None
            if place is not None and place.table in marked:
                rows[place.table] = [marked[place.table]]
            elif place is not None:
                rows.setdefault(place.table, []).append(self._unmarked(name, tensors[name], box, memory, place))
            elif memory.dim() and box.cells:
                rows_U = self._unlisted(name, tensors[name], box, memory)
                if rows_U is not None and 2 * rows_U.numel() <= memory.shape[0]:
                    listed[name, box] = rows_U
        united = {table: parts[0] if len(parts) == 1 else torch.cat(parts).unique() for table, parts in rows.items()}
        return Changed(tables, united, listed)

    def _unmarked(self, name: str, whole: Tensor, box: Box, memory: Tensor, place: Place) -> Tensor:
        """Return the changed rows of the leaf that a box belongs to, by a look into the log."""
        if not self._has(name, whole):
            return torch.arange(place.first, place.first + box.sizes[0])
        changed: list[Tensor] = []
        for first, held in self._read(name, box, memory):
            at = first - box.offsets[0]
            changed.append(place.first + at + _unequal(held, memory[at:]))
            if self.budget is not None:
                self.budget.note(place.table, place.first + at, held)
        return torch.cat(changed)

    def _unlisted(self, name: str, whole: Tensor, box: Box, memory: Tensor) -> Tensor | None:
        """Return the changed rows of a box of another tensor, and copy it; None: all."""
        copy = self._copies.get((name, box))
        if copy is None and self._has(name, whole):
            copy = torch.cat([held for _, held in self._read(name, box, memory)]).to(memory.device)
        now = memory.detach().clone()
        self._copies[name, box] = now
        return None if copy is None else box.offsets[0] + _unequal(copy, now).cpu()

    def _has(self, name: str, whole: Tensor) -> bool:
        """Return True if the newest published state has a tensor of this name, dtype and shape."""
        if self._chain is None and self.published is not None:
            self._chain = open_chain(self.published)
        saved = self._chain.tensors.get(name) if self._chain is not None else None
        return saved is not None and (saved.dtype, saved.shape) == (whole.dtype, tuple(whole.shape))

    def _read(self, name: str, box: Box, memory: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the published values of a box in blocks of whole rows, each with the number of its first row."""
        assert self._chain is not None
        step = max(1, _BLOCK_BYTES // max(1, memory.nbytes // memory.shape[0]))
        for first in range(box.offsets[0], box.offsets[0] + box.sizes[0], step):
            count = min(step, box.offsets[0] + box.sizes[0] - first)
            part = Box((first, *box.offsets[1:]), (count, *box.sizes[1:]))
            held = torch.empty(part.sizes, dtype=memory.dtype)
            self._chain.read([Wanted(Piece(part, held), name)])
            yield first, held


def _unequal(held: Tensor, memory: Tensor) -> Tensor:
    """Return the rows of some values whose bits differ from those of the first rows of some memory, int64 [U]."""
    now = memory[: held.shape[0]].detach().to(held.device).contiguous()
    return (row_bytes(held.contiguous()) != row_bytes(now)).any(1).nonzero()[:, 0]
