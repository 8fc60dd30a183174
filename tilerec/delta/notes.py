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

from tilerec.checkpoint.chain import Chain, open_chain
from tilerec.checkpoint.folder import CheckpointFolder
from tilerec.checkpoint.job_tables import known_rows
from tilerec.checkpoint.pieces import Box, pieces_of
from tilerec.checkpoint.planned_save import Changed, Leaves, Place
from tilerec.checkpoint.row_changes import JobChanges
from tilerec.checkpoint.row_encoding import RowEncoding
from tilerec.comms.agreement import on_all_ranks
from tilerec.comms.group import Group
from tilerec.delta.budget import Budget
from tilerec.delta.compare import published_blocks, unequal_rows
from tilerec.storage.table_rows import TableRows

Boxes = Sequence[tuple[str, Box]]


class DeltaNotes:
    """Notes of one writer, for its incremental saves.

    Args:
        model: whose tables are observed.
        budget: chooses the rows that are published; None: all that have changed.
        encodings: of tensors that are published in another form, by name.
    """

    def __init__(self, model: nn.Module, budget: Budget | None, encodings: Mapping[str, RowEncoding]) -> None:
        self._model, self.budget, self._encodings = model, budget, encodings
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
        before, self._boxes = self._boxes, None  # until the save is complete: marks are gone now
        marked = self._tables.begin_tables(tables)
        with on_all_ranks(ranks, "the delta log", "comparing with its newest state"):
            if boxes != before:
                marked = {}
                self._copies.clear()
                if self.budget is not None:
                    self.budget.forget()
            found = self._compare(tables, marked, tensors, boxes)
        self._chain = None
        self._next = boxes
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
        shift = place.first - box.offsets[0]
        if not self._has(name, whole):
            return torch.arange(place.first, place.first + box.sizes[0])
        changed: list[Tensor] = []
        for first, held, rows_U in self._differences(name, box, memory):
            changed.append(first + shift + rows_U)
            if self.budget is not None:
                encoding = self._encodings.get(name)
                self.budget.note(place.table, first + shift, held if encoding is None else encoding.decode(held))
        return torch.cat(changed)

    def _unlisted(self, name: str, whole: Tensor, box: Box, memory: Tensor) -> Tensor | None:
        """Return the changed rows of a box of another tensor, and copy it; None: all."""
        copy, now = self._copies.get((name, box)), memory.detach().clone()
        self._copies[name, box] = now
        if copy is not None:
            return box.offsets[0] + unequal_rows(copy, now).cpu()
        if not self._has(name, whole):
            return None
        return torch.cat([first + rows_U for first, _, rows_U in self._differences(name, box, now)])

    def _has(self, name: str, whole: Tensor) -> bool:
        """Return True if the newest published state has a tensor of this name, dtype and shape."""
        if self._chain is None and self.published is not None:
            self._chain = open_chain(self.published)
        saved = self._chain.tensors.get(name) if self._chain is not None else None
        form = whole.dtype, tuple(whole.shape)
        encoding = self._encodings.get(name)
        return saved is not None and (saved.dtype, saved.shape) == (form if encoding is None else encoding.form(form))

    def _differences(self, name: str, box: Box, memory: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield blocks of published rows: the number of the first, the rows, and which of them differ, int64 [U]."""
        assert self._chain is not None
        encoding = self._encodings.get(name)
        for first, held in published_blocks(self._chain, name, box if encoding is None else encoding.box(box)):
            own = memory[first - box.offsets[0] :][: held.shape[0]].detach()
            yield first, held, unequal_rows(held, own if encoding is None else encoding.encode(own.cpu()))
