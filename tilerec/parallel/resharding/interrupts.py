"""Deferred Ctrl-C: raise KeyboardInterrupt only where a rank can still notify its peers, not amid a collective."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import final


@final
class Interrupts:
    """Context manager that defers Python's default reaction to SIGINT.

    The next `check()` raises the first SIGINT, or else the end of the context does. A second SIGINT raises at once.
    Nothing is deferred outside the main thread, or if the program has its own handler.
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
        """Raise a deferred KeyboardInterrupt.

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
