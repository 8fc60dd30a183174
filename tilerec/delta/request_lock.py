"""`RequestLock`: held by a request. A follower writes some rows at a time between two requests.

    request    enter [ reads ] leave   enter waits [ reads ] leave
    follower   fetches rows, waits ... [ writes ]  fetches the next rows

Both sides wait in a loop of the native library (native/row_gate.h), without Python's global lock. To put a thread to
sleep and wake it takes 50 to 100 microseconds; to write 512 rows of 68 bytes takes 5. Without the library a
`threading.Lock` keeps the sides apart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from tilerec.ops.backends import row_gate


@final
class RequestLock:
    """A lock with two sides: `with lock:` for requests, in any number of threads; `writing` for one follower.

    Attributes:
        gate: of the native library; None without it.

    Requests may run beside each other. No request waits for more than one write.
    """

    def __init__(self) -> None:
        self.gate = row_gate()
        self._plain = threading.Lock()

    def __enter__(self) -> None:
        if self.gate is None:
            self._plain.acquire()
        else:
            self.gate.enter()

    def __exit__(self, *_: object) -> None:
        if self.gate is None:
            self._plain.release()
        else:
            self.gate.leave()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep requests out for the block, which begins when none runs."""
        if self.gate is None:
            with self._plain:
                yield
            return
        self.gate.close()
        try:
            yield
        finally:
            self.gate.open()
