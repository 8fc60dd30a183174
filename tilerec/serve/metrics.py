"""Metrics of a server for Prometheus; those of several worker processes are added up."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2, 0.5, 1, 2)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
FOLDER = "PROMETHEUS_MULTIPROC_DIR"


@contextmanager
def worker_metrics() -> Iterator[None]:
    """Share the counters of processes that are forked in the block."""
    from prometheus_client import values

    before = values.ValueClass
    with tempfile.TemporaryDirectory(prefix="tilerec-metrics-") as folder:
        os.environ[FOLDER] = folder
        # The package chooses this class when it is imported: too early, and if another module did that, counters of
        # workers would be lost.
        values.ValueClass = values.get_value_class()
        try:
            yield
        finally:
            values.ValueClass = before
            del os.environ[FOLDER]


def forget_worker(pid: int) -> None:
    """Drop the gauges of a worker that has ended; its counters remain in the sums."""
    for path in Path(os.environ[FOLDER]).glob(f"gauge_live*_{pid}.db"):
        path.unlink(missing_ok=True)


@final
class ServerMetrics:
    """Counters of one process."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess

        own = CollectorRegistry()
        self.requests = Counter("tilerec_requests", "Requests by status code.", ["status"], registry=own)
        self.seconds = Histogram("tilerec_request_seconds", "Seconds of a request.", buckets=_SECONDS, registry=own)
        self.batch_samples = Histogram("tilerec_batch_samples", "Samples of a batch.", buckets=_SAMPLES, registry=own)
        self.batch_seconds = Histogram("tilerec_batch_seconds", "Seconds of a batch.", buckets=_SECONDS, registry=own)
        self.events = Counter("tilerec_model_events", "Packages and deltas, by event.", ["event"], registry=own)
        self.logged = Counter("tilerec_logged_requests", "Requests written to the log.", registry=own)
        self.sequence = Gauge(
            "tilerec_delta_sequence", "Number of the published state that serves.", registry=own,
            multiprocess_mode="livemin",
        )  # fmt: skip
        self._registry = own
        if FOLDER in os.environ:
            self._registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(self._registry)

    def text(self) -> tuple[bytes, str]:
        """Return the metrics of all processes, and their content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST
