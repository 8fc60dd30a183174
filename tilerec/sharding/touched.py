"""`Touched`: which rows of a tile have changed since its replicas last agreed on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tilerec.ops.runtime.fetch import fetch

WEIGHTS, SLOTS = 1, 2
"""Marks of a row: replicas have different weights; and different optimizer state."""


class Touched:
    """A byte per row.

    Args:
        rows: of the tile.
        device: where its rows are.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.marks = torch.zeros(rows, dtype=torch.uint8, device="cpu" if device.type == "meta" else device)
        # Backward passes since weights, and since weights and state, were agreed on (a rule's own count may be loaded).
        self.updates = 0
        self.state_updates = 0
        # Ends an agreement that is on its way; it reads and writes the rows.
        self.pending: Callable[[], None] | None = None

    def mark(self, rows_N: Tensor) -> None:
        """These rows have changed here; a row may be named again."""
        if self.marks.device != rows_N.device:
            self.marks = self.marks.to(rows_N.device)
        self.marks[rows_N.long()] = WEIGHTS | SLOTS

    def count(self) -> None:
        """A backward pass has come."""
        self.updates += 1
        self.state_updates += 1

    def agreed(self, marks: int) -> None:
        """Replicas are alike in what these marks stand for."""
        self.marks &= ~marks & 0xFF
        if marks & WEIGHTS:
            self.updates = 0
        if marks & SLOTS:
            self.state_updates = 0

    def count_rows(self, marks: int) -> Tensor:
        """How many rows have any of these marks: 0-d, where the rows are."""
        return (self.marks & marks).count_nonzero()

    def rows(self, marks: int = WEIGHTS | SLOTS, count: int | None = None) -> Tensor:
        """The rows that have any of these marks, int64 `[U]`, ascending.

        Args:
            count: how many they are, if that is known: nobody waits for a device then.
        """
        if self.marks.device.type == "cpu":  # NumPy's takes a fifth of the time
            return torch.from_numpy(np.flatnonzero((self.marks.numpy() & marks) != 0))
        marked = self.marks & marks
        return (marked.nonzero() if count is None else torch.nonzero_static(marked, size=count))[:, 0]

    def settle(self) -> None:
        """End an agreement that is on its way."""
        if self.pending is not None:
            self.pending()


def rows_of_all(
    several: Sequence[Touched], marks: int, beside: Sequence[Tensor] = ()
) -> tuple[list[Tensor], list[int]]:
    """Per tile the rows that have any of these marks, and other numbers that are read with their counts: one wait.

    Args:
        beside: integers, 0-d, on any device.
    """
    counted = [own for own in several if own.marks.device.type != "cpu"]  # others are there without asking
    numbers = fetch([*beside, *(own.count_rows(marks) for own in counted)])
    counts = dict(zip(map(id, counted), numbers[len(beside) :], strict=True))
    return [own.rows(marks, counts.get(id(own))) for own in several], numbers[: len(beside)]
