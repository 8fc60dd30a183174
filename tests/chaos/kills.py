"""SIGKILL of ranks: at a random moment from outside, or by themselves at the n-th call of some functions."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tilerec.checkpoint import folder
from tilerec.checkpoint.blocks import BlockReader, BlockWriter
from tilerec.comms.process import ProcessGroupComms
from tilerec.testing.ranks import Ranks

Functions = Sequence[tuple[Any, str]]
COLLECTIVES: Functions = [
    (ProcessGroupComms, name)
    for name in ("begin", "all_to_all", "exchange", "swap", "all_reduce_", "all_gather_object")
]
SAVE: Functions = [(os, "fsync"), (os, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (BlockWriter, "write")]
LOAD: Functions = [
    (folder._LocalFolder, "read_manifest"), (BlockReader, "_fill"), (nn.Module, "load_state_dict"),
    (ProcessGroupComms, "all_gather_object"),
]  # fmt: skip


@contextmanager
def dies_at(functions: Functions, at: int) -> Iterator[list[int]]:
    """Kill this process at call number `at` of the functions, from 0; -1 only counts. Yields the count in a list.

    A write of data leaves half of its bytes.
    """
    count = [0]

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            now = count[0] == at
            count[0] += 1
            if now:
                if name == "write":
                    function(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **settings)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in functions:
            patch.setattr(owner, name, counted(name, getattr(owner, name)))
        yield count


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
