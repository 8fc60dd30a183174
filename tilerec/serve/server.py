"""`run_server`: one or several worker processes that serve a package on one socket.

    parent   imports torch, checks the package, binds the socket
      |  fork, so a worker starts in a fraction of a second and shares the parent's pages
    workers  each maps the package's weights, takes connections from the socket, and batches its own requests

A worker that dies is started again. Workers end with their parent. SIGTERM and SIGINT end the server once the running
requests are answered.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from tilerec.errors import ConfigError
from tilerec.export.package_file import check_weights, open_package
from tilerec.serve.batcher import Batching
from tilerec.serve.metrics import ServerMetrics, forget_worker, worker_metrics
from tilerec.serve.request_log import LogOptions
from tilerec.serve.served_model import Mark, ServedModel, mark_of

_LOG = logging.getLogger("tilerec.serve")
_TOO_SOON_S, _MOST_DEATHS = 5.0, 3
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ServerOptions:
    """Settings of a server.

    Attributes:
        path: of the package; replace the file to serve another version.
        deltas: folder of a log of published states that the weights follow; "" for none.
        host, port: to listen on; port 0: a free one.
        workers: processes. Each batches its own requests.
        threads: of torch in each worker. One is best for the latency of small requests.
        every: seconds between two looks at the file and the log; 0 for none.
        grace: seconds that running requests have at the end.
        log: of requests.
    """

    path: str
    deltas: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 1
    every: float = 1.0
    grace: int = 30
    batching: Batching = field(default_factory=Batching)
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16 or self.workers < 1 or self.threads < 1 or self.every < 0 or self.grace < 0:
            raise ConfigError(
                f"serve: got {self}; expected a port from 0 to 65535, workers and threads from 1, every and grace from "
                "0. Correct them."
            )


def run_server(options: ServerOptions, ready: Callable[[str], object] = lambda address: None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        ready: called with the address, `http://127.0.0.1:8000`, once the socket takes connections.

    Raises:
        FileError, ConfigError: the package cannot be served. OSError: the port is in use.
    """
    checked = mark_of(options.path)
    check_weights(open_package(Path(options.path)), f"Package {options.path}")
    with socket.create_server((options.host, options.port), backlog=2048) as listener:
        host, port = listener.getsockname()[:2]
        if options.workers == 1:
            _work(options, listener, checked, lambda: ready(f"http://{host}:{port}"))
            return
        with worker_metrics():
            _Workers(options, listener, checked).run(lambda: ready(f"http://{host}:{port}"))


def _work(
    options: ServerOptions, listener: socket.socket, checked: Mark | None, ready: Callable[[], object] = lambda: None
) -> None:  # fmt: skip
    """Serve in this process."""
    import uvicorn

    from tilerec.serve.app import make_app

    torch.set_num_threads(options.threads)
    metrics = ServerMetrics()
    model = ServedModel(
        options.path, deltas=options.deltas or None, every=options.every, checked=checked,
        noted=lambda event: metrics.events.labels(event).inc(),
    )  # fmt: skip
    config = uvicorn.Config(
        make_app(model, options.batching, metrics, options.log), log_level="warning",
        timeout_graceful_shutdown=options.grace, access_log=False, lifespan="on",
    )  # fmt: skip
    ready()
    uvicorn.Server(config).run(sockets=[listener])


class _Workers:
    """The worker processes of a server."""

    def __init__(self, options: ServerOptions, listener: socket.socket, checked: Mark | None) -> None:
        self._options, self._listener, self._checked = options, listener, checked
        self._context: Any = multiprocessing.get_context("fork")
        self._running: dict[ForkProcess, float] = {}
        self._stops = False

    def run(self, ready: Callable[[], object]) -> None:
        """Keep the workers running until a signal; raise `ConfigError` if they die as soon as they start."""
        before = {name: signal.signal(name, self._stop) for name in (signal.SIGTERM, signal.SIGINT)}
        deaths = 0
        try:
            for _ in range(self._options.workers):
                self._start()
            ready()
            while self._running:
                wait([process.sentinel for process in self._running], timeout=1.0)
                for process in [process for process in self._running if not process.is_alive()]:
                    began = self._running.pop(process)
                    process.join()
                    forget_worker(process.pid or 0)
                    if self._stops:
                        continue
                    deaths = deaths + 1 if time.monotonic() - began < _TOO_SOON_S else 0
                    if deaths >= _MOST_DEATHS:
                        raise ConfigError(
                            f"serve: got {deaths} workers that ended right after their start, the last with code "
                            f"{process.exitcode}; expected them to serve. See their errors above."
                        )
                    _LOG.error("worker %s ended with code %s; another one starts", process.pid, process.exitcode)
                    self._start()
        finally:
            self._stop()
            for process in self._running:
                process.join()
            for name, handler in before.items():
                signal.signal(name, handler)

    def _start(self) -> None:
        args = (self._options, self._listener, self._checked, os.getpid())
        process = self._context.Process(target=_work_in_child, args=args)
        process.start()
        self._running[process] = time.monotonic()

    def _stop(self, *_: object) -> None:
        self._stops = True
        for process in self._running:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGTERM)


def _work_in_child(options: ServerOptions, listener: socket.socket, checked: Mark | None, parent: int) -> None:
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
    _end_with(parent)
    _work(options, listener, checked)


def _end_with(parent: int) -> None:
    """Let the system send SIGTERM to this process when its parent ends, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal.SIGTERM)
