"""`Touched`: which rows of a tile have changed since its replicas last agreed on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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

    def rows(self, marks: int = WEIGHTS | SLOTS) -> Tensor:
        """The rows that have any of these marks, int64 `[U]`, ascending."""
        return (self.marks & marks).nonzero()[:, 0]

    def settle(self) -> None:
        """End an agreement that is on its way."""
        if self.pending is not None:
            self.pending()
