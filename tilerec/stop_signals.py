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
        self._handles = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        self._wakes, self._writes = socket.socketpair()
        self._fd_before = -1

    def __enter__(self) -> StopSignals:
        if self._handles:
            # C code writes the number of each signal to the socket, also while the main thread runs no Python code.
            self._writes.setblocking(False)
            self._fd_before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, _interrupt)
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
        if not signalled and not self._ending.is_set():
            self._interrupt_main()
        time.sleep(self._grace_s)
        os._exit(128 + signal.SIGTERM)

    def _interrupt_main(self) -> None:
        """Raise KeyboardInterrupt in the main thread."""
        main = threading.main_thread().ident
        # By SIGTERM, as a process in the background ignores SIGINT. A real signal also ends waits for locks and sleeps.
        if self._handles and main is not None and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main, signal.SIGTERM)
        else:
            _thread.interrupt_main()


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back during the block; processes that it starts inherit the mask."""
    before = _mask("SIG_BLOCK", {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        _mask("SIG_SETMASK", before)


def _mask(how: str, numbers: set[Any]) -> set[Any]:
    """Change this thread's mask, and return the earlier one; no effect on systems without masks."""
    if not hasattr(signal, "pthread_sigmask"):
        return set()
    return signal.pthread_sigmask(getattr(signal, how), numbers)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
