"""`Workers`: the worker processes of a server, and the version that they serve.

    parent    the copy of the version that serves  --fork-->  workers
              file changed: a trial reads and runs it
                  it serves   -> all workers get its copy, and so does every later worker
                  it does not -> all workers get the reason, and serve on
    The first version has a trial while it serves; the server ends if it fails.

A worker that dies is started again on the parent's copy, whatever has become of the file.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from typing import TYPE_CHECKING, NamedTuple, final

from tilerec.errors import ConfigError, TilerecError
from tilerec.phase import timed
from tilerec.serve.metrics import forget_worker
from tilerec.serve.package_copy import PackageCopy
from tilerec.serve.package_source import FileWatch
from tilerec.serve.server_options import ServerOptions
from tilerec.serve.trial import Trial
from tilerec.serve.worker import MOST_BYTES, READY, new_channel, send_copy, send_text, serve_in_worker

if TYPE_CHECKING:
    from rich.console import Console

_LOG = logging.getLogger("tilerec.serve")
_TOO_SOON_S, _MOST_DEATHS = 5.0, 3


class _Worker(NamedTuple):
    process: ForkProcess
    channel: socket.socket
    began: float


@final
class Workers:
    """The processes of a server. One thread makes and runs them: a fork copies no other thread's locks.

    Args:
        copy: of the version to start with; `run` closes it, or the one that has taken its place.
        watch: of the file, begun before it was copied.
    """

    def __init__(self, options: ServerOptions, listener: socket.socket, copy: PackageCopy, watch: FileWatch) -> None:
        self._options, self._listener, self._copy, self._watch = options, listener, copy, watch
        self._context: ForkContext = multiprocessing.get_context("fork")
        self._running: list[_Worker] = []
        self._trial: Trial | None = None
        self._reason = ""
        self._deaths = self._comparisons = 0
        self._stops = False

    def run(self, ready: Callable[[], object], console: Console | None = None) -> None:
        """Keep the workers running until SIGTERM or SIGINT.

        Args:
            ready: called once, when the first worker takes requests.
            console: for the time until then; None prints none.

        Raises:
            ConfigError: the version cannot serve, its weights are not those of its manifest, or workers die as soon as
                they start.
        """
        before = {name: signal.signal(name, self._stop) for name in (signal.SIGTERM, signal.SIGINT)}
        gc.freeze()  # a collection would write to pages that parent and workers share
        try:
            with timed("start the workers", console):
                for _ in range(self._options.workers):
                    self._start()
                self._await_first()
            if not self._stops:
                ready()
                self._compare_digests()
            due = time.monotonic() + self._options.every
            while self._running:
                rest = max(0.0, due - time.monotonic()) if self._options.every else 1.0
                wait([*(worker.process.sentinel for worker in self._running), *self._trials()], timeout=rest)
                self._restart_dead()
                self._end_trial()
                if self._options.every and time.monotonic() >= due:
                    due = time.monotonic() + self._options.every
                    self._look()
        finally:
            self._stop()
            if self._trial is not None:
                self._trial.stop()
            for worker in self._running:
                worker.process.join()
                worker.channel.close()
            self._copy.close()
            gc.unfreeze()
            for name, handler in before.items():
                signal.signal(name, handler)

    # ------------------------------------------------------------------------------------------------------ processes

    def _start(self) -> None:
        own, other = new_channel()
        args = (self._options, self._listener, self._copy, other, os.getpid())
        process = self._context.Process(target=serve_in_worker, args=args)
        process.start()
        other.close()
        worker = _Worker(process, own, time.monotonic())
        self._running.append(worker)
        if self._reason:
            self._send(worker, self._reason)
        if self._stops:  # a signal came before it was in the list
            _end(worker)

    def _await_first(self) -> None:
        """Wait until a worker takes requests. Raises `ConfigError` with its reason if it cannot."""
        while not self._stops:
            for channel in wait([worker.channel for worker in self._running], timeout=1.0):
                assert isinstance(channel, socket.socket)
                text = channel.recv(MOST_BYTES).decode(errors="replace")
                if text == READY:
                    return
                if text:
                    raise ConfigError(text)
            self._restart_dead()

    def _restart_dead(self) -> None:
        for worker in [worker for worker in self._running if not worker.process.is_alive()]:
            self._running.remove(worker)
            process = worker.process
            process.join()
            text = _message(worker.channel)
            worker.channel.close()
            forget_worker(process.pid or 0)
            if self._stops:
                continue
            self._deaths = self._deaths + 1 if time.monotonic() - worker.began < _TOO_SOON_S else 0
            if self._deaths >= _MOST_DEATHS:
                raise ConfigError(
                    f"serve: got {self._deaths} workers that ended right after their start, the last with code "
                    f"{process.exitcode}; expected them to serve. {text or 'See their errors above.'}"
                )
            _LOG.error("worker %s ended with code %s; another one starts. %s", process.pid, process.exitcode, text)
            self._start()

    def _stop(self, *_: object) -> None:
        self._stops = True
        for worker in self._running:
            _end(worker)

    # ------------------------------------------------------------------------------------------------------- versions

    def _look(self) -> None:
        """Begin the trial of a file that has changed."""
        if self._trial is None and not self._stops and self._watch.changed():
            try:
                self._trial = Trial(self._context, self._options.path)
            except OSError as error:
                self._refuse(f"Package {self._options.path}: got '{error}'; expected memory for it. Free some.")

    def _compare_digests(self) -> None:
        """Begin the trial of the first version."""
        self._comparisons += 1
        self._trial = Trial(self._context, self._options.path, self._copy)

    def _trials(self) -> list[int]:
        return [] if self._trial is None else [self._trial.sentinel]

    def _end_trial(self) -> None:
        if self._trial is None or not wait([self._trial.sentinel], timeout=0):
            return
        trial, self._trial = self._trial, None
        try:
            copy = trial.result()
        except TilerecError as error:
            if not trial.is_first:
                self._refuse(str(error))
            elif trial.was_killed and self._comparisons < _MOST_DEATHS:
                _LOG.error("%s Another one starts.", error)
                self._compare_digests()
            else:
                raise
            return
        self._copy.close()
        self._copy = copy
        if trial.is_first:
            return
        self._reason = ""
        for worker in self._running:
            self._send(worker, "")

    def _refuse(self, reason: str) -> None:
        self._reason = reason
        for worker in self._running:
            self._send(worker, reason)

    def _send(self, worker: _Worker, reason: str) -> None:
        with contextlib.suppress(OSError):  # it has ended: its successor gets the copy
            if reason:
                send_text(worker.channel, reason)
            else:
                send_copy(worker.channel, self._copy)


def _end(worker: _Worker) -> None:
    if worker.process.pid is not None and worker.process.is_alive():
        os.kill(worker.process.pid, signal.SIGTERM)


def _message(channel: socket.socket) -> str:
    """Return the reason that a worker has left; "" if there is none."""
    try:
        text = channel.recv(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "" if text == READY else text
