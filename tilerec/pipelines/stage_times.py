"""`StageTimes`: the time that a loop spends in each of its named stages.

    times = StageTimes()
    for batch in batches:
        with times.span("forward"):
            loss = model(batch)
        with times.span("backward"):
            loss.backward()
    times.take()                    {"forward": 1.2, "backward": 2.9}

Every pipeline has one (`pipeline.times`). The times are the host's: on a GPU, a stage that launches work and does not
wait for it takes the time of its launches. A span costs less than 1 us.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import final


@final
class StageTimes:
    """Time by stage since the last `take`. A stage inside of another one counts in both."""

    def __init__(self) -> None:
        self._ns: dict[str, int] = {}

    def span(self, stage: str) -> _Span:
        """Return a context that adds its time to a stage, also if it raises."""
        return _Span(self._ns, stage)

    def take(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call, by name in the order of their first spans."""
        taken = {stage: ns / 1e9 for stage, ns in self._ns.items()}
        self._ns.clear()
        return taken


class _Span:
    """One block of a stage. A class of its own, as a generator's context takes three times as long."""

    __slots__ = ("_ns", "_stage", "_start")

    def __init__(self, ns: dict[str, int], stage: str) -> None:
        self._ns, self._stage, self._start = ns, stage, 0

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ns[self._stage] = self._ns.get(self._stage, 0) + time.perf_counter_ns() - self._start
