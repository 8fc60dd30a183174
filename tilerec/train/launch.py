"""Starting ranks: processes on this machine, or those that torchrun has started.

    launch(2, function, argument)      two processes, function(group, argument) in each
    with joined("cpu") as group:       in a process that torchrun started (it sets RANK and WORLD_SIZE)

A rank that fails ends its process. Its peers notice, by its last words (`Group.abort`) or its closed connections, and
end too; whoever does not is killed. What is told is the failure that came first, not those it caused.

How ranks meet: the launching process holds the store, on a port that the system picks, so nothing is fixed, and the
last words of a rank outlive it. It listens on the loopback interface: whoever reaches a store can end the run.
"""

from __future__ import annotations

import _thread
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch
import torch.distributed as dist

from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import CommsError, ConfigError, TilerecError

_LOOPBACK = "127.0.0.1"
# After the first failure: how long the other ranks have to notice.
_GRACE_S = 10.0
# Torch's words for "a peer is gone", in calls that are not ours.
_PEERS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL error")


class RankFailed(TilerecError):
    """A rank of a launched run failed: its number, and what it said.

    trace: where, for an error that is not the caller's to put right; "" for one that is.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


def under_torchrun(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher has made this process a rank: RANK and WORLD_SIZE are set."""
    given = os.environ if environ is None else environ
    return "RANK" in given and "WORLD_SIZE" in given


@contextlib.contextmanager
def joined(device: str = "cpu", store: dist.Store | None = None) -> Iterator[ProcessGroupComms]:
    """The group of the ranks that a launcher started; it is closed again after the block, unless that fails.

    Args:
        device: of the run. A "cuda" with a GPU for every rank of the host speaks NCCL there, everything else gloo.
        store: where ranks meet; None is as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say. Without those the group
            has this process alone.
    """
    if under_torchrun():
        rank, size = (_number(name) for name in ("RANK", "WORLD_SIZE"))
        dist.init_process_group(_backend(device), store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    group = ProcessGroupComms()
    try:
        yield group
        # Closing waits for calls that have begun, so it is for ranks that are all through.
        dist.barrier()
    except BaseException:
        if group.size > 1:
            raise
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def launch(count: int, function: Callable[..., object], *args: Any, device: str = "cpu") -> None:
    """`function(group, *args)` in `count` processes of this machine; returns when all have ended.

    Each has an equal part of the cores for torch's threads, unless OMP_NUM_THREADS is set.

    Args:
        count: ranks, at least 1.
        function: at the top of a module, as the arguments' types: the processes find them by name.
        device: see `joined`.

    Raises:
        RankFailed: a rank failed or died; KeyboardInterrupt once all have ended.
    """
    if count < 1:
        raise ConfigError(f"launch: {count} ranks; wanted at least 1.")
    store = _local_store()
    work = pickle.dumps((function, args))
    context = _context()
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(count):
            place = _Place(rank, count, store.port, device, _environment(rank, count))
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(place, work, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        failures = _collect(pipes, processes)
    finally:
        # Ranks that still live see their pipe close, and end.
        for pipe in pipes:
            pipe.close()
        deadline = time.monotonic() + _GRACE_S
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        raise _told(failures, count)


@dataclass(frozen=True)
class _Place:
    """What a process needs to become a rank."""

    rank: int
    size: int
    port: int
    device: str
    environment: Mapping[str, str]


@final
@dataclass(frozen=True)
class _Failure:
    """How a rank failed. Severity: 0 an error of its own, 1 died, 2 an error that a peer caused, 3 stopped."""

    rank: int
    severity: int
    text: str
    trace: str = ""


def _environment(rank: int, count: int) -> dict[str, str]:
    """As torchrun sets it on one host."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
    }
    # All ranks are here; the machine's name need not resolve.
    interface = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    return {**interface, **os.environ, **{name: str(number) for name, number in numbers.items()}}


def _local_store() -> dist.TCPStore:
    """A store that other machines cannot reach: torch's own socket would listen on all interfaces."""
    with socket.create_server((_LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        # The store closes its descriptor itself.
        return dist.TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )


def _context() -> Any:
    """Processes forked from a server that has torch imported and no threads; `spawn` where there is no fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The last is what torch.optim imports when its first optimizer is made.
    context.set_forkserver_preload(["tilerec.train.launch", "tilerec.train.loop", "torch._dynamo"])
    return context


# In the rank's process --------------------------------------------------------------------------------------------


def _live(place: _Place, work: bytes, pipe: Connection) -> None:
    """The life of one rank."""
    os.environ.clear()
    os.environ.update(place.environment)
    # Said to torch: the server that this process was forked from has read the variable long ago.
    torch.set_num_threads(_number("OMP_NUM_THREADS", max(1, cores() // place.size)) or 1)
    leaving = threading.Event()
    threading.Thread(target=_end_with_launcher, args=(pipe, leaving), daemon=True).start()
    failure: _Failure | None = None
    try:
        function, args = pickle.loads(work)
        store = dist.TCPStore(_LOOPBACK, place.port, is_master=False)
        with joined(place.device, store) as group:
            function(group, *args)
    except BaseException as error:
        failure = _failure(place.rank, error)
    leaving.set()
    with contextlib.suppress(OSError):
        pipe.send(failure)
    end(0 if failure is None else 1)


def _failure(rank: int, error: BaseException) -> _Failure:
    if isinstance(error, KeyboardInterrupt):
        return _Failure(rank, 3, "stopped")
    if isinstance(error, CommsError) or any(words in str(error) for words in _PEERS):
        return _Failure(rank, 2, str(error))
    if isinstance(error, TilerecError):
        return _Failure(rank, 0, str(error))
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return _Failure(rank, 0, f"{type(error).__name__}: {error}", trace)


def _end_with_launcher(pipe: Connection, leaving: threading.Event) -> None:
    """No rank outlives the process that launched it: the pipe closes with it."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    if not leaving.is_set():
        _thread.interrupt_main()
    # Logs are closed meanwhile; a main thread that waits in C never gets to it.
    time.sleep(_GRACE_S / 2)
    os._exit(1)


def end(code: int) -> None:
    """Leave the process at once: tearing down a group waits for calls that will never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# In the launching process -----------------------------------------------------------------------------------------


def _collect(pipes: Mapping[Connection, int], processes: list[BaseProcess]) -> list[_Failure]:
    """The failures, in the order in which they were told."""
    waiting = dict(pipes)
    failures: list[_Failure] = []
    deadline: float | None = None
    while waiting:
        ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            # They did not notice: killed with the launch.
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failure = pipe.recv()
            except (EOFError, OSError):
                failure = _Failure(rank, 1, _death(processes[rank]))
            if failure is not None:
                failures.append(failure)
                deadline = deadline or time.monotonic() + _GRACE_S
    return failures


def _death(process: BaseProcess) -> str:
    process.join(_GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        hint = "; is there enough memory?" if -code == signal.SIGKILL else ""
        return f"was killed by signal {signal.Signals(-code).name}{hint}"
    return f"ended with exit code {code}"


def _told(failures: list[_Failure], count: int) -> RankFailed:
    """The failure to show: one of a rank's own before those it caused in others."""
    first = min(failures, key=lambda failure: failure.severity)
    if len({failure.text for failure in failures}) == 1 and len(failures) == count:
        # All said the same: it is the run's error, not a rank's.
        return RankFailed(first.text, first.trace)
    link = " " if first.severity == 1 else ": "
    return RankFailed(f"rank {first.rank} of {count}{link}{first.text}", first.trace)


def _backend(device: str) -> str:
    local = _number("LOCAL_WORLD_SIZE", 1)
    alone = (
        device.startswith("cuda") if local == 1 else device == "cuda" and local <= torch.cuda.device_count()
    )
    return "cpu:gloo,cuda:nccl" if alone and dist.is_nccl_available() else "gloo"


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r} in the environment; wanted a number.")
    return int(text)
