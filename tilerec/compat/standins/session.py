"""`install`: the stand-ins of a process, until it ends or `uninstall` is called."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path

from tilerec.compat.standins.fbgemm_ops import register_operators
from tilerec.compat.standins.finder import StandInFinder, check_no_other
from tilerec.compat.standins.name_table import ROOTS
from tilerec.compat.standins.patches import Patches
from tilerec.compat.standins.report import Report

PATH = str(Path(__file__).parent / "path")
"""Folder of two modules that install the stand-ins: processes that the program starts import them by name."""


class Session:
    """Installed stand-ins."""

    def __init__(self) -> None:
        self.report = Report()
        self._finder = StandInFinder(self.report)
        self._patches = Patches()
        self._path_before = os.environ.get("PYTHONPATH")

    def start(self) -> None:
        """Install the import hook, the operators and the attributes that TorchRec's objects have.

        Raises:
            ImportError: the process has imported TorchRec or FBGEMM.
        """
        check_no_other()
        sys.meta_path.insert(0, self._finder)
        sys.path.insert(1, PATH)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (PATH, self._path_before)))
        register_operators(self.report)
        self._patches.apply()
        self.report.watch_warnings()

    def stop(self) -> None:
        """Undo `start`. Operators stay registered: torch cannot remove them."""
        self.report.stop_watching()
        self._patches.undo()
        sys.meta_path.remove(self._finder)
        sys.path.remove(PATH)
        if self._path_before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = self._path_before
        for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
            del sys.modules[name]


_installed: Session | None = None


def install(at_exit: bool = True) -> Session:
    """Install the stand-ins once in this process; later calls return the same session.

    Args:
        at_exit: print the report to stderr when the process ends, on the first rank of a launcher, and not in
            processes that the program starts.
    """
    global _installed
    if _installed is None:
        session = Session()
        session.start()
        _installed = session
        if at_exit and os.environ.get("RANK", "0") == "0" and parent_process() is None:
            atexit.register(lambda: session.report.print(sys.stderr))
    return _installed


@contextmanager
def installed() -> Iterator[Session]:
    """Stand-ins inside a block, without a report at the end."""
    global _installed
    before, _installed = _installed, None
    session = install(at_exit=False)
    try:
        yield session
    finally:
        session.stop()
        _installed = before
