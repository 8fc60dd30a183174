"""`StopSignals`: ends a process on SIGTERM and at the end of its launcher, whatever its main thread waits for.

before `begin`   the process ends at once: it has no files to clean up, and a rendezvous may wait for minutes
after `begin`    the main thread raises KeyboardInterrupt, closes its files and removes temporary ones
grace time over  the process ends: its main thread is in a call of C code, where no Python handler runs

Within `deferred`, the first SIGTERM or SIGINT (Ctrl-C) is a request, and so is SIGUSR1: the main thread saves its work
and raises `RunStopped`. There is no grace time then, because a save may take long. A second SIGTERM or SIGINT ends the
process at once.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType
from typing import Any, final

_AGAIN_S = 0.05
"""Seconds between two signals to a main thread that has not run its handler."""
_REPEAT_S = 2.0
"""Seconds in which a further signal is the same request, sent by the scheduler and again by a launcher."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM has ended; of one that defers the signal, after its work was saved."""
UNSAVED = 128 + 9
"""Exit code of a process that a second signal has ended before its work was saved: that of SIGKILL, which follows."""


class RunStopped(SystemExit):
    """End of a run that has saved its work because a signal requested it; the exit code is 143, or 130 for SIGINT.

    Attributes:
        step: number of steps that the saved run has made; 0 in a process that has only launched the ranks.
        exit_code: 143 or 130.

    Args:
        number: of the signal; 0 if another rank got it.
    """

    def __init__(self, step: int = 0, number: int = 0) -> None:
        self.exit_code = 128 + number if number else STOPPED
        super().__init__(self.exit_code)
        self.step = step


@final
class StopSignals:
    """Handler of SIGTERM and watcher of the launcher's pipe, as a context of the main thread.

    A handler that the process has for SIGTERM already stays, and so does a setting that ignores the signal.

    Args:
        launcher: pipe to the launching process, which closes it to stop this one; None without a launcher.
        grace_s: seconds that the main thread has to end after a signal.
        repeat_s: seconds after a request in which another signal is the same request.
        on_request: called with the number of the signal of a request, in a thread.
    """

    def __init__(
        self,
        launcher: Connection | None,
        grace_s: float,
        repeat_s: float = _REPEAT_S,
        on_request: Callable[[int], None] | None = None,
    ) -> None:
        self._launcher, self._grace_s, self._repeat_s = launcher, grace_s, repeat_s
        self._on_request = on_request
        self._begun = threading.Event()
        self._ending = threading.Event()
        self._handles = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and hasattr(signal, "pthread_kill")
        self._wakes, self._writes = socket.socketpair()
        self._fd_before = -1
        self._raised = False  # the main thread has been interrupted
        self._interrupts = False  # the watcher ends the process, so the handler raises
        self._exited = False
        self._deferring = False
        self._requested_at: float | None = None  # first SIGTERM or SIGINT
        self._request = 0
        self._requests: tuple[int, ...] = ()  # signals that are requests; those with a handler of the caller's are not

    def __enter__(self) -> StopSignals:
        if self._handles:
            # C code writes the number of each signal to the socket, also while the main thread runs no Python code.
            self._writes.setblocking(False)
            self._fd_before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, self._raise)
            _mask("SIG_UNBLOCK", {signal.SIGTERM})
            # A worker that this process forks would write its own signals to the same socket.
            os.register_at_fork(after_in_child=self._restore)
        # Signals belong to the main thread: one that another thread takes cannot be held back by `blocked_signals`.
        with blocked_signals():
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def begin(self) -> None:
        """Note that the process has work to clean up from now on."""
        self._begun.set()

    def end(self) -> None:
        """Note that the main thread is about to end the process, so it needs no interrupt."""
        self._ending.set()

    @property
    def requested(self) -> bool:
        """True if a signal has requested an end within `deferred`."""
        return bool(self._request)

    @property
    def interrupted(self) -> bool:
        """True if SIGTERM has raised KeyboardInterrupt in the main thread."""
        return self._raised

    def take(self) -> int:
        """Return the signal of a request, SIGTERM or SIGINT, or 0. The caller acts on it, so `deferred` does not."""
        request, self._request = self._request, 0
        return request

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Note the first SIGTERM, SIGINT or SIGUSR1 as a request; a second SIGTERM or SIGINT ends the process.

        For the main thread. A handler that the process has for SIGINT or SIGUSR1 stays.

        Raises:
            RunStopped: the block ended without an error and without `take`, in spite of a request.
        """
        before: dict[int, Any] = {}
        if self._handles:
            usual = {int(signal.SIGINT): signal.default_int_handler, int(signal.SIGUSR1): signal.SIG_DFL}
            before = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}
        self._requests = (signal.SIGTERM, *before)
        self._requested_at, self._request = None, 0
        self._deferring = True
        try:
            for number in before:
                signal.signal(number, _nothing)  # with a handler of Python, the watcher gets the signal's number
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._deferring = False
        if number := self.take():
            raise RunStopped(number=number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._restore()
        self._exited = True
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
            elif self._deferring and not self._raised:
                self._note(numbers)
            elif signal.SIGTERM in numbers:
                signalled = True
                break
        if not self._begun.is_set():
            os._exit(STOPPED)
        self._interrupts = True
        if not signalled and not self._handles and not self._ending.is_set():
            _thread.interrupt_main()
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline:
            self._wake_main()
            time.sleep(min(_AGAIN_S, self._grace_s))
            if self._exited and self._launcher is None:
                return
        os._exit(STOPPED)

    def _note(self, numbers: bytes) -> None:
        """Note a request; end the process at a second SIGTERM or SIGINT."""
        now = time.monotonic()
        found = [number for number in numbers if number in self._requests]
        ends = [number for number in found if number in (signal.SIGTERM, signal.SIGINT)]
        if ends:
            if self._requested_at is not None and now - self._requested_at > self._repeat_s:
                os._exit(UNSAVED)
            self._requested_at = self._requested_at or now
        if found:
            first = not self._request
            self._request = self._request or (ends or [int(signal.SIGTERM)])[0]  # SIGUSR1 announces SIGTERM
            if first and self._on_request is not None:
                self._on_request(found[0])

    def _wake_main(self) -> None:
        """Send SIGTERM to the main thread until its handler has run.

        A real signal ends waits for locks, which `interrupt_main` does not. A process in the background ignores SIGINT.
        A signal that comes just before such a wait does not end it, so one signal is not enough.
        """
        main = threading.main_thread().ident
        if self._handles and not self._raised and not self._ending.is_set() and main is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._deferring and not self._interrupts:  # the watcher notes it
            return
        if not self._raised:  # a second signal must not interrupt the cleaning up
            self._raised = True
            raise KeyboardInterrupt(signal.Signals(number).name)


@contextlib.contextmanager
def stop_request() -> Iterator[StopSignals | None]:
    """Yield the `StopSignals` that note requests during the block: those of the process, or new ones.

    None is yielded, and nothing changes, outside of the main thread and in a process whose SIGTERM is ignored or has a
    handler of the caller.

    Raises `RunStopped` as `StopSignals.deferred` does.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
    owner = getattr(handler, "__self__", None)
    if isinstance(owner, StopSignals):
        with owner.deferred():
            yield owner
    elif handler is signal.SIG_DFL:
        with StopSignals(None, math.inf) as own:
            own.begin()
            with own.deferred():
                yield own
    else:
        yield None


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


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handler of a signal whose number the watcher reads."""


def _mask(how: str, numbers: set[Any]) -> set[Any]:
    """Change this thread's mask, and return the earlier one; no effect on systems without masks."""
    if not hasattr(signal, "pthread_sigmask"):
        return set()
    return signal.pthread_sigmask(getattr(signal, how), numbers)
