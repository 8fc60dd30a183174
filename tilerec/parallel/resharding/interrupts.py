"""Ctrl-C while ranks do something together: heard where the rank can tell its peers, not between two of their calls."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import final


@final
class Interrupts:
    """Holds Python's own reaction to SIGINT back; a context.

    The first one is raised by the next `check()`, or at the end of the context where there is none; the second one at
    once. Nothing is held back outside the main thread, or where a program has a handler of its own.
    """

    def __init__(self) -> None:
        self._noted = False
        self._held = False

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        self._held = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._held:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise what was held back.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self._noted:
            self._noted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            signal.default_int_handler(number, frame)
        self._noted = True
