"""SIGKILL of ranks, and errors of their system calls: at the n-th of some calls, or at a random moment from outside."""

from __future__ import annotations

import io
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tilerec.checkpoint import folder
from tilerec.checkpoint.blocks import BlockReader
from tilerec.comms.process import ProcessGroupComms
from tilerec.testing.ranks import RankError, Ranks

Functions = Sequence[tuple[Any, str]]
COLLECTIVES: Functions = [
    (ProcessGroupComms, name)
    for name in ("begin", "all_to_all", "exchange", "swap", "all_reduce_", "all_gather_object")
]
WRITE = (Path, "open")
"""Each write(2) of a new file counts."""
SAVE: Functions = [WRITE, *((os, name) for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"))]
READ = (BlockReader, "_fill")
LOAD: Functions = [
    READ, (folder._LocalFolder, "read_manifest"), (nn.Module, "load_state_dict"),
    (ProcessGroupComms, "all_gather_object"),
]  # fmt: skip


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at(functions: Functions, at: int) -> AbstractContextManager[list[int]]:
    """Kill this process at call number `at` of the functions, from 0; -1 only counts. Yields the count in a list.

    A write of data leaves half of its bytes.
    """
    return _acts_at(functions, at, _kill)


def fails_at(functions: Functions, at: int, code: int) -> AbstractContextManager[list[int]]:
    """Raise `OSError` with a code of `errno` at call number `at`; else as `dies_at`."""

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return _acts_at(functions, at, fail)


@contextmanager
def _acts_at(functions: Functions, at: int, act: Callable[[], None]) -> Iterator[list[int]]:
    count = [0]
    numbers = itertools.count()  # calls come from several threads

    def due() -> bool:
        number = next(numbers)
        count[0] = number + 1
        return number == at

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            if due():
                act()
            return function(*args, **settings)

        return call

    class CountedFile(io.FileIO):
        def write(self, data: Any) -> int:
            if due():
                super().write(memoryview(data)[: len(data) // 2])
                act()
            return super().write(data)

    def open_file(path: Path, mode: str = "r", *args: Any, **settings: Any) -> Any:
        new = mode == "xb"
        return io.BufferedWriter(CountedFile(path, mode)) if new else real_open(path, mode, *args, **settings)

    real_open = Path.open
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in functions:
            patch.setattr(owner, name, open_file if (owner, name) == WRITE else counted(getattr(owner, name)))
        yield count


def killed(pool: Ranks, *args: Any) -> bool:
    """Run a function whose ranks may die; return True if one did."""
    try:
        pool.run(*args)
    except RankError as error:
        if "SIGKILL" not in str(error):
            raise
        return True
    return False


def _ready() -> None:
    return None


def ends(pool: Ranks, function: Callable[..., Any], *args: Any, delay: float, victims: Sequence[int]) -> bool:
    """Run a function on all ranks and kill some of them after a time; return True if it ended before that."""
    pool.run(_ready)  # starts the processes, whose start does not belong to the time
    processes = [pool._processes[rank] for rank in victims]
    struck = threading.Event()

    def strike() -> None:
        struck.set()
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    timer = threading.Timer(delay, strike)
    timer.start()
    try:
        pool.run(function, *args)
    except Exception:
        timer.join()
        if not struck.is_set():
            raise
        return False
    else:
        return True
    finally:
        timer.cancel()
        timer.join()
        if struck.is_set():
            pool.close()
