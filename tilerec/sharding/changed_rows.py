"""`ChangedRows`: the rows of a tile that have changed since its replicas were last synchronized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tilerec.ops.runtime.fetch import fetch

WEIGHTS, SLOTS = 1, 2
"""Mark bits of a row: replicas may differ in its weights; in its optimizer state."""


class ChangedRows:
    """Change marks of a tile, one byte per row.

    Args:
        rows: number of rows of the tile.
        device: device of its rows.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.marks = torch.zeros(rows, dtype=torch.uint8, device="cpu" if device.type == "meta" else device)
        # Backward passes since the last sync of weights, and of weights and state (a rule's own count may be loaded).
        self.updates = 0
        self.state_updates = 0
        # Finishes a sync that is in flight, which reads and writes the rows.
        self.pending: Callable[[], None] | None = None

    @staticmethod
    def of(marks: Tensor, updates: int, state_updates: int) -> ChangedRows:
        """Return the record of a tile with these marks and counts."""
        made = ChangedRows(0, marks.device)
        made.marks, made.updates, made.state_updates = marks, updates, state_updates
        return made

    def mark(self, rows_N: Tensor) -> None:
        """Mark rows as changed; a row may occur more than once."""
        if self.marks.device != rows_N.device:
            self.marks = self.marks.to(rows_N.device)
        self.marks.index_fill_(0, rows_N.long(), WEIGHTS | SLOTS)  # 0.4 of the time of marks[rows] = ...

    def count(self) -> None:
        """Count a backward pass."""
        self.updates += 1
        self.state_updates += 1

    def agreed(self, marks: int) -> None:
        """Clear these marks after a sync made the replicas equal."""
        self.marks &= ~marks & 0xFF
        if marks & WEIGHTS:
            self.updates = 0
        if marks & SLOTS:
            self.state_updates = 0

    def count_rows(self, marks: int) -> Tensor:
        """Return the number of rows that have any of these marks: 0-d, on the device of the marks."""
        return (self.marks & marks).count_nonzero()

    def rows(self, marks: int = WEIGHTS | SLOTS, count: int | None = None) -> Tensor:
        """Return the rows that have any of these marks, int64 `[U]`, ascending.

        Args:
            count: their number, if known: the host then does not wait for the device.
        """
        if self.marks.device.type == "cpu":  # NumPy takes a fifth of torch's time
            return torch.from_numpy(np.flatnonzero((self.marks.numpy() & marks) != 0))
        marked = self.marks & marks
        return (marked.nonzero() if count is None else torch.nonzero_static(marked, size=count))[:, 0]

    def settle(self) -> None:
        """Finish a sync that is in flight."""
        if self.pending is not None:
            self.pending()


def changed_rows_of(
    several: Sequence[ChangedRows], marks: int, beside: Sequence[Tensor] = ()
) -> tuple[list[Tensor], list[int]]:
    """Return per tile the rows that have any of these marks, and the values of `beside`, with one wait for devices.

    Args:
        beside: integers, 0-d, on any device.
    """
    counted = [own for own in several if own.marks.device.type != "cpu"]  # marks on the CPU need no readback
    numbers = fetch([*beside, *(own.count_rows(marks) for own in counted)])
    counts = dict(zip(map(id, counted), numbers[len(beside) :], strict=True))
    return [own.rows(marks, counts.get(id(own))) for own in several], numbers[: len(beside)]
