"""`StageReports`: a thread that writes the stage of this rank to the group's store, at long intervals.

A rank whose wait for a collective ends at the time-out reads them. So it names the ranks that are missing, and their
last stages, although these ranks can no longer answer: they hang in a read, or their process is stopped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import final

import torch.distributed as dist

from tilerec.comms.deadlock import DeadlockDetector

_INTERVAL_S = 2.0
_REPORTS_PER_S = 50
"""Most reports of all ranks per second: one store serves them all."""


@final
class StageReports:
    """Reports of one rank during a block.

    Args:
        detector: of the group.
        where: returns the stage as a text, such as "step 17, forward". The thread calls it.
        size: number of ranks that report.
        timeout_s: seconds after which peers give up; at least four reports come before.
    """

    def __init__(self, detector: DeadlockDetector, where: Callable[[], str], size: int, timeout_s: float) -> None:
        self._detector, self._where = detector, where
        self._interval_s = min(max(_INTERVAL_S, size / _REPORTS_PER_S), timeout_s / 4)
        self._ended = threading.Event()

    def __enter__(self) -> StageReports:
        threading.Thread(target=self._report, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def _report(self) -> None:
        # A store that died with its host ends the reports; the calls of this rank fail with its error.
        with contextlib.suppress(RuntimeError):
            store: dist.Store | None = None
            while not self._ended.wait(self._interval_s):
                if store is None:  # a client of its own: the main thread may wait in a call of the other one
                    clone = getattr(self._detector.store, "clone", None)
                    store = self._detector.store if clone is None else clone()
                self._detector.report(store, self._where())
