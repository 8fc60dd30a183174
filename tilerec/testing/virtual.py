"""`run_virtual_ranks`: run a function on W ranks that are threads of this process.

Supports up to some 64 ranks. No processes are started and nothing is pickled: closures and breakpoints work, and
mismatched calls raise at once (`comms/threads.py`). CPU tensors only; no `torch.distributed`, so no DTensor and no
distributed checkpoint.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tilerec.comms.threads import ThreadGroup, ThreadWorld
from tilerec.errors import CommsError
from tilerec.testing.ranks import RankError


def run_virtual_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run `fn(group, *args)` on `world_size` threads, each with its rank's group; return results in order of ranks.

    During the run torch computes with one thread per rank. Several ranks draw from torch's global generator in no fixed
    order: give each rank its own generator.

    Raises the exception of the rank that failed first; exceptions caused by a peer's failure come last. Its cause is a
    `RankError` that names the rank. Raises `RankError` with every stack if a rank has not finished within `timeout_s`
    seconds. Its thread cannot be killed, but every later call of it raises.
    """
    world = ThreadWorld(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []

    def run_rank(group: ThreadGroup) -> None:
        try:
            results[group.rank] = fn(group, *args)
        except BaseException as error:
            failures.append((group.rank, error))
            group.abort(error)
        finally:
            world.leave(group.rank)

    threads = [
        threading.Thread(target=run_rank, args=(world.group(rank),), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    # Waits of ranks end at the time-out, so join the threads until a little later.
    deadline = time.monotonic() + timeout_s + min(1.0, timeout_s / 10)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        torch.set_num_threads(threads_before)
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    own = [failure for failure in failures if not isinstance(failure[1], CommsError)]
    if own:
        _reraise(own[0], failures, world_size)
    if hung:
        stacks = "\n".join(_stack(rank, threads[rank]) for rank in hung[:4])
        error = RankError(f"Ranks {hung} of {world_size} were not done after {timeout_s:g} s.\n{stacks}")
        world.group(hung[0]).abort(error)
        raise error
    if failures:
        _reraise(failures[0], failures, world_size)
    return results


def _reraise(first: tuple[int, BaseException], failures: list[tuple[int, BaseException]], size: int) -> None:
    rank, error = first
    others = "".join(f"\nrank {other}: {type(cause).__name__}: {cause}" for other, cause in failures if other != rank)
    # Keep the exception's own cause, if it has one.
    summary = RankError(f"Rank {rank} of {size}: {type(error).__name__}: {error}{others}")
    summary.__cause__ = error.__cause__
    raise error from summary


def _stack(rank: int, thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"rank {rank}:\n{''.join(traceback.format_stack(frame))}" if frame is not None else f"rank {rank}"
