"""`Trial`: a process that reads a changed file into memory, compares all digests, and runs it once.

A broken file ends no server. The first version serves before its digests are compared: its trial reads its copy.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from typing import final

from tilerec.errors import ConfigError, TilerecError
from tilerec.export.torch_library import set_threads
from tilerec.serve.package_copy import PackageCopy, copy_package, new_memory
from tilerec.serve.served_model import tried
from tilerec.serve.worker import follow_parent

_NICENESS = 10
"""A trial digests the whole file; requests come first."""


@final
class Trial:
    """A running trial. Raises `OSError` if there is no memory for it.

    Args:
        path: of the file.
        first: the copy of the version that serves already, to compare its digests; None: read the file.
    """

    def __init__(self, context: ForkContext, path: str, first: PackageCopy | None = None) -> None:
        self.is_first = first is not None
        self._path, self._fd = path, new_memory() if first is None else first.duplicate().fd
        self._answer, end = context.Pipe(duplex=False)
        self._process = context.Process(target=_try, args=(path, self._fd, end, os.getpid(), self.is_first))
        self._process.start()
        end.close()

    @property
    def sentinel(self) -> int:
        """A descriptor that is ready when the trial has ended."""
        return self._process.sentinel

    @property
    def was_killed(self) -> bool:
        """True if a signal has ended the trial: for want of memory, for example."""
        return (self._process.exitcode or 0) < 0

    def result(self) -> PackageCopy:
        """Return the copy of a file that serves. Waits for the end.

        Raises:
            TilerecError: it does not serve.
        """
        self._process.join()
        text = "" if self._answer.closed else self._received()
        self._answer.close()
        if text or self._process.exitcode:
            os.close(self._fd)
            raise ConfigError(
                text
                or f"Package {self._path}: got code {self._process.exitcode} from a process that tried it; expected 0. "
                "See its error above, and the free memory."
            )
        return PackageCopy(self._fd, self._path)

    def stop(self) -> None:
        """End the trial without a result."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGTERM)
        self._process.join()
        self._answer.close()
        os.close(self._fd)

    def _received(self) -> str:
        try:
            return str(self._answer.recv())
        except EOFError:  # it was killed
            return ""


def _try(path: str, fd: int, answer: Connection, parent: int, is_first: bool) -> None:
    follow_parent(parent)
    os.nice(_NICENESS)
    set_threads(1)
    try:
        copy = PackageCopy(fd, path) if is_first else copy_package(path, fd)
        tried(copy.load(verify=True))
    except (TilerecError, OSError) as error:
        answer.send(str(error))
