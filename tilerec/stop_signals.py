"""`StopSignals`: ends a rank's process on SIGTERM and at the end of its launcher, whatever its main thread waits for.

before `begin`   the process ends at once: it has no files to clean up, and a rendezvous may wait for minutes
after `begin`    the main thread raises KeyboardInterrupt, closes its files and removes temporary ones
grace time over  the process ends: its main thread is in a call of C code, where no Python handler runs
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType
from typing import Any, final

_AGAIN_S = 0.05
"""Seconds between two signals to a main thread that has not run its handler."""


@final
class StopSignals:
    """Handler of SIGTERM and watcher of the launcher's pipe, as a context of the main thread.

    A handler that the process has for SIGTERM already stays, and so does a setting that ignores the signal.

    Args:
        launcher: pipe to the launching process, which closes it to stop this one; None without a launcher.
        grace_s: seconds that the main thread has to end after a signal.
    """

    def __init__(self, launcher: Connection | None, grace_s: float) -> None:
        self._launcher, self._grace_s = launcher, grace_s
        self._begun = threading.Event()
        self._ending = threading.Event()
        self._handles = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and hasattr(signal, "pthread_kill")
        self._wakes, self._writes = socket.socketpair()
        self._fd_before = -1
        self._raised = False  # the main thread has been interrupted

    def __enter__(self) -> StopSignals:
        if self._handles:
            # C code writes the number of each signal to the socket, also while the main thread runs no Python code.
            self._writes.setblocking(False)
            self._fd_before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, self._raise)
            _mask("SIG_UNBLOCK", {signal.SIGTERM})
            # A worker that this process forks would write its own signals to the same socket.
            os.register_at_fork(after_in_child=self._restore)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def begin(self) -> None:
        """Note that the process has work to clean up from now on."""
        self._begun.set()

    def end(self) -> None:
        """Note that the main thread is about to end the process, so it needs no interrupt."""
        self._ending.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._restore()
        with contextlib.suppress(OSError):
            self._writes.close()  # ends the watcher

    def _restore(self) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(self._fd_before)
            self._handles = False

    def _watch(self) -> None:
        """Wait for the end of the launcher or for SIGTERM; then end this process."""
        sources: list[Any] = [self._wakes] if self._launcher is None else [self._wakes, self._launcher]
        signalled = False
        while True:
            ready = wait(sources)
            if self._launcher in ready:
                break
            numbers = self._wakes.recv(256)
            if not numbers:  # the context has ended
                if self._launcher is None:
                    return
                sources.remove(self._wakes)
            elif signal.SIGTERM in numbers:
                signalled = True
                break
        if not self._begun.is_set():
            os._exit(128 + signal.SIGTERM)
        if not signalled and not self._handles and not self._ending.is_set():
            _thread.interrupt_main()
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline:
            self._wake_main()
            time.sleep(min(_AGAIN_S, self._grace_s))
        os._exit(128 + signal.SIGTERM)

    def _wake_main(self) -> None:
        """Send SIGTERM to the main thread until its handler has run.

        A real signal ends waits for locks, which `interrupt_main` does not. A process in the background ignores SIGINT.
        A signal that comes just before such a wait does not end it, so one signal is not enough.
        """
        main = threading.main_thread().ident
        if self._handles and not self._raised and not self._ending.is_set() and main is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._raised:  # a second signal must not interrupt the cleaning up
            self._raised = True
            raise KeyboardInterrupt(signal.Signals(number).name)


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back during the block; processes that it starts inherit the mask."""
    before = hold_signals()
    try:
        yield
    finally:
        _mask("SIG_SETMASK", before)


def hold_signals() -> set[Any]:
    """Hold SIGINT and SIGTERM back in this thread; return the mask before."""
    return _mask("SIG_BLOCK", {signal.SIGINT, signal.SIGTERM})


def release_signals() -> None:
    """Deliver SIGINT and SIGTERM in this thread again."""
    _mask("SIG_UNBLOCK", {signal.SIGINT, signal.SIGTERM})


def _mask(how: str, numbers: set[Any]) -> set[Any]:
    """Change this thread's mask, and return the earlier one; no effect on systems without masks."""
    if not hasattr(signal, "pthread_sigmask"):
        return set()
    return signal.pthread_sigmask(getattr(signal, how), numbers)
