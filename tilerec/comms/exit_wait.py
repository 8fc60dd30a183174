"""`MessagesInFlight`: lets a process exit only when gloo has finished with its messages.

gloo's thread holds a message's tensors until it has arrived, and needs Python's interpreter lock to release them. If
the interpreter has begun to end by then, Python (before 3.14) ends that thread, and C++ ends the process: "terminate
called without an active exception", SIGABRT. A training loop that stops after a number of steps leaves such messages,
as a pipeline sends the ids of later batches ahead. So the exit waits for them, one second at most: a rank that has
failed must not keep the others waiting.

Each message is sent through aliases of its tensors that nothing else refers to. They are alive as long as gloo, or a
handle without a `wait`, holds the message.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

_MOST_SECONDS = 1.0


class Releasable(Protocol):
    """A handle that holds a message."""

    def is_done(self) -> bool: ...

    def release(self) -> None:
        """Drop the message. Its result is not read any more."""


class MessagesInFlight:
    """The messages that gloo holds."""

    def __init__(self) -> None:
        self._aliases: deque[weakref.ref[Tensor]] = deque()
        self._handles: deque[weakref.ref[Releasable]] = deque()
        atexit.register(self.wait)

    def add(self, handle: Releasable, aliases: Sequence[Tensor]) -> None:
        """Note a message that was sent."""
        for known in (self._aliases, self._handles):
            while known and known[0]() is None:
                known.popleft()
        self._aliases.extend(map(weakref.ref, aliases))
        self._handles.append(weakref.ref(handle))

    def wait(self) -> bool:
        """Wait until gloo has released every message, or for a second; return False after a second."""
        end = time.monotonic() + _MOST_SECONDS
        while time.monotonic() < end:
            for known in self._handles:
                handle = known()
                if handle is not None and handle.is_done():
                    handle.release()
            if all(alias() is None for alias in self._aliases):
                return True
            time.sleep(0.001)
        return False
