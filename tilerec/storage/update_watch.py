"""A warning about tables that backward passes update more often than the program steps its optimizer.

Such a program accumulates gradients of its dense part over several backward passes, and expects the same of its tables.
A table with an attached optimizer has no gradient to accumulate: each pass is an update.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

_steps = 0
"""Steps of torch's optimizers in this process, outside of compiled programs."""


def count_step() -> None:
    """Count a step of an optimizer of the process."""
    global _steps
    _steps += 1


class _Updates(NamedTuple):
    """The updates of one table: optimizer steps at the last one, whether cycles were seen, and repeated updates."""

    at: int = 0
    cycles: bool = False
    repeats: int = 0


class UpdateWatch:
    """The updates of tables that were attached together, between steps of any optimizer.

    It warns once, at the second repeated update of a table after a first whole cycle of update, step, update. So
    programs without other optimizers never see the warning, nor do programs that skip a step now and then
    (`GradScaler`).
    """

    def __init__(self) -> None:
        self._tables: dict[int, _Updates] = {}
        self._warned = False

    def updated(self, handle: int, name: str) -> None:
        """Record an update of the table with this handle and name."""
        if self._warned or not _steps:
            return
        before = self._tables.get(handle, _Updates())
        if before.at != _steps:
            self._tables[handle] = _Updates(_steps, before.cycles or before.at > 0, before.repeats)
        elif before.cycles:
            self._tables[handle] = before._replace(repeats=before.repeats + 1)
            self._warned = before.repeats > 0
            if self._warned:
                warnings.warn(
                    f"Table '{name}': its attached optimizer updates it in every backward pass, and several passes run "
                    "between two optimizer.step(), so its gradients are not accumulated. Pass accumulate=k to the "
                    "train pipeline, or call backward() once on the sum of the losses.",
                    stacklevel=2,
                )
