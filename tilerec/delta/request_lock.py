"""`RequestLock`: held by a request. Rows that a follower writes meanwhile are written between two requests.

    request    [ reads ......... w][ reads ......... w]          [ reads ......... w]
    follower   posts its writes                         [w][w][w]

A request that ends does the next posted write (w) itself, because it has the lock, the processor and Python's global
lock. To hand all three to the follower's thread and back takes two wake-ups, 100 to 200 microseconds: as long as a
request of one sample. If no request runs, the follower writes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import final

_POLL_S = 0.001
"""Seconds until a follower looks again whether a request still runs."""


@final
class RequestLock:
    """A lock with two sides: `with lock:` for requests, in any number of threads; `write` for one follower.

    No request waits for more than one write.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entry = threading.Lock()  # locked while a request waits for `_lock`, so that it is the next holder
        self._writes = deque[Callable[[], object]]()
        self._written = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        with self._entry:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        try:
            if self._writes:
                self._write_next()
        finally:
            self._lock.release()

    def write(self, writes: Iterable[Callable[[], object]]) -> None:
        """Do writes in their order, each between two requests, in this thread or in those of requests.

        Returns after the last one. If one raises, those after it are not done, and its error is raised here.
        """
        posted = list(writes)
        if not posted:
            return
        self._error = None
        self._written.clear()
        self._writes.extend(posted)
        try:
            while not self._written.is_set():
                if not self._entry.locked() and self._lock.acquire(blocking=False):
                    self.__exit__()
                else:
                    self._written.wait(_POLL_S)
        finally:
            self._writes.clear()  # after an interrupt
        if self._error is not None:
            raise self._error

    def _write_next(self) -> None:
        """Do one write. Called while the lock is held."""
        try:
            self._writes.popleft()()
        except BaseException as error:
            self._error = error
            self._writes.clear()
            if not isinstance(error, Exception):  # an interrupt of this thread
                raise
        finally:
            if not self._writes:
                self._written.set()
