"""`ReadAhead`: an iterator that a background thread runs ahead of its consumer, within a number of bytes.

Errors of the thread are raised in the consumer, in their place of the order. `close` ends the thread and closes the
iterator; the end of a `with` block calls it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar, final

import numpy.typing as npt

_I = TypeVar("_I")
Arrays = tuple[npt.NDArray[Any], ...]

READ_AHEAD_BYTES = 64 << 20
"""Bytes of batches of text files that wait for training, as by default in `TableDataset`."""


@final
class ReadAhead(Generic[_I]):
    """Items of an iterator, made by a thread.

    Args:
        items: the iterator; only the thread uses it.
        size_of: returns the bytes of an item.
        max_bytes: the thread waits while items of this many bytes or more wait for the consumer. So there is always
            room for one item.
    """

    def __init__(self, items: Iterator[_I], size_of: Callable[[_I], int], max_bytes: int) -> None:
        self._items, self._size_of, self._max_bytes = items, size_of, max_bytes
        self._ready: deque[_I] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._done = self._closed = False
        self._error: BaseException | None = None
        # A daemon: a process whose main thread has ended does not wait for a read.
        self._thread = threading.Thread(target=self._run, name="tilerec-read-ahead", daemon=True)
        self._thread.start()

    def __enter__(self) -> ReadAhead[_I]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[_I]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._done)
                if not self._ready:
                    break
                item = self._ready.popleft()
                self._bytes -= self._size_of(item)
                self._changed.notify_all()
            yield item
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop the thread, and wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def _run(self) -> None:
        try:
            for item in self._items:
                size = self._size_of(item)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._bytes < self._max_bytes)
                    if self._closed:
                        break
                    self._ready.append(item)
                    self._bytes += size
                    self._changed.notify_all()
                del item
        except BaseException as error:
            self._error = error
        finally:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()
            with self._changed:
                self._done = True
                self._changed.notify_all()


def arrays_ahead(items: Iterator[Arrays]) -> ReadAhead[Arrays]:
    """Return items that are tuples of arrays, made by a thread within the default number of bytes."""
    return ReadAhead(items, lambda arrays: sum(one.nbytes for one in arrays), READ_AHEAD_BYTES)
