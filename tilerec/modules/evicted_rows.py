"""Evicted rows of a table, collected until they are reset."""

from __future__ import annotations

import torch
from torch import Tensor


class EvictedRows:
    """Rows that live ids lost since the last `take`, as tensors of row numbers; -1 is no row."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def keep(self, rows_M: Tensor, rows: int, *, compact: bool) -> None:
        """Add rows of a table with `rows` rows.

        Args:
            compact: the tensors hold no -1. Otherwise most entries are -1, so above twice the table's rows each evicted
                row is stored once: this bounds the memory if `take` is never called.
        """
        if rows_M.numel():
            self._parts.append(rows_M)
        if not compact and sum(part.numel() for part in self._parts) > 2 * rows + rows_M.numel():
            lost_E = torch.zeros(rows + 1, dtype=torch.bool, device=rows_M.device)
            lost_E.index_fill_(0, torch.cat(self._parts) % (rows + 1), True)
            every_E = torch.arange(rows, device=rows_M.device)
            self._parts = [torch.where(lost_E[:rows], every_E, -1)]

    def take(self) -> Tensor | None:
        """Return all rows and forget them, without waiting for a device; None: there are no entries."""
        if not self._parts:
            return None
        rows_M, self._parts = torch.cat(self._parts), []
        return rows_M

    def clear(self) -> None:
        """Forget all rows."""
        self._parts.clear()
