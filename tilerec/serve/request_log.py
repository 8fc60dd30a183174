"""`RequestLog`: the bodies of answered requests as files that `tilerec parity` reads.

request-PID-0.json, request-PID-1.safetensors, …, one file each; the oldest are replaced
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError, FileError

_LOG = logging.getLogger("tilerec.serve")
_MOST_WAITING = 64


@dataclass(frozen=True)
class LogOptions:
    """Settings of a log of requests.

    Attributes:
        folder: of the files; "" for no log.
        every: one of so many requests is written; the first one is.
        keep: files of each worker.
    """

    folder: str = ""
    every: int = 100
    keep: int = 1000

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ConfigError(f"serve: got {self}; expected every and keep from 1. Correct them.")


@final
class RequestLog:
    """Writes requests in a thread of its own. Requests that come faster than the disk writes are left out.

    Args:
        written: called for each file.
    """

    def __init__(self, options: LogOptions, written: Callable[[], object] = lambda: None) -> None:
        self._options, self._written = options, written
        self._seen = 0
        self._waiting: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="request-log", daemon=True)
        if options.folder:
            self._thread.start()

    def add(self, body: bytes, ending: str) -> None:
        """Write this request if its turn has come; ending: of the file's name. Never waits, never raises."""
        if not self._options.folder:
            return
        mine, self._seen = self._seen, self._seen + 1
        if mine % self._options.every == 0:
            name = f"request-{os.getpid()}-{mine // self._options.every % self._options.keep}"
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait((f"{name}.{ending}", body))

    def close(self) -> None:
        """Write the requests that wait."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        folder = Path(self._options.folder)
        while (one := self._waiting.get()) is not None:
            name, body = one
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_file(folder / name, body, "Request log")
                for other in ("json", "safetensors"):  # of an earlier request with the same number
                    if not name.endswith(other):
                        (folder / name).with_suffix(f".{other}").unlink(missing_ok=True)
            except (FileError, OSError) as error:
                _LOG.error("%s. This worker logs no further requests.", error)
                self._options = LogOptions()
                while self._waiting.get() is not None:
                    pass
                return
            self._written()
