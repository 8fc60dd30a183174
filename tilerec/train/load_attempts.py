"""`LoadAttempts`: loads of each checkpoint that did not end, over restarts of a run.

A checkpoint can be whole and still end every process that loads it: it needs more memory than there is, for example. A
run would then restart until its launcher gives up. So rank 0 counts a load in a file before it begins, and removes the
count when the load has ended.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import final

from tilerec.atomic_file import write_file
from tilerec.checkpoint.manager import Found

FILE = "load_attempts.json"
MOST = 2
"""Loads of a checkpoint that do not end before the one before it is loaded."""


@final
class LoadAttempts:
    """Counts of loads by step, in a file of a folder. For one rank."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / FILE

    def begin(self, whole: Sequence[Found]) -> int:
        """Return the step of the checkpoint to load, the newest that has not failed twice, and count the load.

        If all have failed twice, the newest is loaded: memory may be larger now.

        Args:
            whole: checkpoints, newest first; at least one.
        """
        counts = self._read()
        steps = [found.step for found in whole]
        step = next((step for step in steps if counts.get(step, 0) < MOST), steps[0])
        self._write({**counts, step: counts.get(step, 0) + 1})
        return step

    def end(self, step: int) -> None:
        """Remove the count of a load that has ended, or that failed with an error that the user can fix."""
        counts = self._read()
        if counts.pop(step, None) is not None:
            self._write(counts)

    def _read(self) -> dict[int, int]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return {int(step): int(count) for step, count in found.items()}
        except (OSError, ValueError, AttributeError, TypeError):  # a lost count costs another try
            return {}

    def _write(self, counts: dict[int, int]) -> None:
        try:
            if counts:
                write_file(self._path, json.dumps(counts) + "\n", "Load attempts")
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"{error} Loads of checkpoints are not counted.", stacklevel=2)
