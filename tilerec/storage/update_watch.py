"""A warning about tables that backward passes update more often than the program steps its optimizer.

Such a program accumulates gradients of its dense part over several backward passes, and expects the same of its tables.
A table with an attached optimizer has no gradient to accumulate: each pass is an update.
"""

from __future__ import annotations

import warnings

_steps = 0
"""Steps of torch's optimizers in this process, outside of compiled programs."""


def count_step() -> None:
    """Count a step of an optimizer of the process."""
    global _steps
    _steps += 1


class UpdateWatch:
    """The updates of one table, between steps of any optimizer.

    It warns once, at the second repeated update after a first whole cycle of update, step, update. So programs without
    other optimizers never see the warning, nor do programs that skip a step now and then (`GradScaler`).
    """

    def __init__(self) -> None:
        self._at = 0  # number of steps at the last update
        self._cycles = False
        self._repeats = 0

    def updated(self, name: str) -> None:
        """Record an update of the table with this name."""
        if self._at != _steps:
            self._cycles |= self._at > 0
            self._at = _steps
        elif self._cycles:
            self._repeats += 1
            if self._repeats == 2:
                warnings.warn(
                    f"Table '{name}': its attached optimizer updates it in every backward pass, and several passes run "
                    "between two optimizer.step(), so its gradients are not accumulated. Pass accumulate=k to the "
                    "train pipeline, or call backward() once on the sum of the losses.",
                    stacklevel=2,
                )
