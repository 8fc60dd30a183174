"""`Trace`: start and duration of each stage, as a file for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The times are the host's. Work that a stage launches on a GPU may run later.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, final

from tilerec.atomic_file import write_file
from tilerec.comms.group import Group
from tilerec.pipelines.batch_in_flight import Origin

MAX_SPANS = 200_000
"""Number of spans that a trace keeps; the newest stay. A step of the longest pipeline has seven."""


@final
class Trace:
    """Spans of the stages of this rank.

    Args:
        rank: number of this rank in the file.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._spans: deque[tuple[str, float, float, Origin | None]] = deque(maxlen=MAX_SPANS)
        # Wall time at the zero of the performance counter: spans of several processes share one time axis.
        self._zero_us = time.time_ns() / 1e3 - time.perf_counter_ns() / 1e3

    @contextlib.contextmanager
    def span(self, stage: str, origin: Origin | None = None) -> Iterator[None]:
        """Record the time of a block, also if it raises."""
        start = time.perf_counter_ns() / 1e3
        try:
            yield
        finally:
            self._spans.append((stage, start, time.perf_counter_ns() / 1e3 - start, origin))

    def events(self) -> list[dict[str, Any]]:
        """Return the spans as Chrome trace events; times in microseconds."""
        lanes = {name: lane for lane, name in enumerate(dict.fromkeys(span[0] for span in self._spans))}
        named: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        ]
        named += [
            {"ph": "M", "name": "thread_name", "pid": self.rank, "tid": lane, "args": {"name": name}}
            for name, lane in lanes.items()
        ]
        for name, start, duration, origin in self._spans:
            args = {} if origin is None else {"iterator": origin.iterator, "batch": origin.batch}
            event = {"ph": "X", "cat": "stage", "name": name, "pid": self.rank, "tid": lanes[name]}
            named.append({**event, "ts": self._zero_us + start, "dur": duration, "args": args})
        return named

    def write(self, path: str | Path, group: Group | None = None) -> None:
        """Write the spans to a file, as a whole or not at all.

        Args:
            path: of the file; a file of that name is replaced.
            group: the ranks whose spans the file holds; rank 0 writes it. Collective. None: this rank alone writes.
        """
        own = self.events()
        if group is not None and group.size > 1:
            parts = cast("list[list[dict[str, Any]]]", group.all_gather_object(own))
            if group.rank:
                return
            own = [event for part in parts for event in part]
        text = json.dumps({"traceEvents": own, "displayTimeUnit": "ms"})
        write_file(path, text, "Trace")
