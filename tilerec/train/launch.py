"""Launch of ranks: new processes on this machine, or processes that another launcher has started.

    launch(2, function, argument)      two processes, function(group, argument) in each
    with joined("cpu") as group:       in a process that torchrun or srun started (see `Placement`)

A rank that fails ends its process. Its peers detect the failure, by its message (`Group.abort`) or its closed
connections, and end too. Ranks that do not end are killed. The reported failure is the original one, not a failure that
it caused.

Rendezvous: the launching process hosts the store, on a port that the system chooses, so no port is fixed, and a rank's
last message survives the rank. The store listens on the loopback interface only, because any process that can reach a
store can end the run.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch
import torch.distributed as dist

from tilerec.checkpoint.memory_file import bytes_in, memory_folder
from tilerec.command_policy import SPIN_COUNT, wait_briefly
from tilerec.comms.deadlock import LOST_RANK
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError, TilerecError
from tilerec.stop_signals import STOPPED, RunStopped, StopSignals, blocked_signals, hold_signals, stop_request
from tilerec.train.device import resolved_device
from tilerec.train.lost_peers import ATTEMPT, FOLDER, is_lost_peer
from tilerec.train.placement import Placement, number
from tilerec.train.start_store import start_store

_LOOPBACK = "127.0.0.1"
# Seconds that the other ranks have to end after the first failure.
GRACE_S = 10.0
# Seconds that a rank waits for the others in a collective, unless a run sets another time.
TIMEOUT_S = 1800.0
# A signal that comes just before a wait does not end it; its handler runs after this time.
_POLL_S = 0.5


class RankFailed(TilerecError):
    """Failure of a rank of a launched run: the rank's number and its error message.

    Attributes:
        trace: traceback of an unexpected error; "" for an error that the caller can fix.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@contextlib.contextmanager
def joined(
    device: str = "cpu", store: dist.Store | None = None, timeout_s: float = TIMEOUT_S
) -> Iterator[ProcessGroupComms]:
    """Yield the group of the ranks that a launcher started; close it after the block, unless the block fails.

    Args:
        device: of the run. "cuda" with a GPU for every rank of the host uses NCCL for CUDA tensors; everything else
            uses gloo.
        store: rendezvous of the ranks; None uses the environment (see `Placement`). Without a launcher, the group
            contains only this process.
        timeout_s: seconds that a rank waits for the others in a collective.
    """
    place, timeout = Placement.of(os.environ), timedelta(seconds=timeout_s)
    if place is not None:
        place.export(os.environ)
        store = store or start_store(place, os.environ, timeout)
        dist.init_process_group(_backend(device), store=store, rank=place.rank, world_size=place.size, timeout=timeout)
    else:
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    group = ProcessGroupComms()
    try:
        yield group
        # Closing waits for pending calls, so close only after all ranks have finished.
        dist.barrier()
    except BaseException:
        if group.size > 1:
            raise
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def launch(
    count: int,
    function: Callable[..., object],
    *args: Any,
    device: str = "cpu",
    saves: bool = False,
    timeout_s: float = TIMEOUT_S,
    replace: int = 0,
) -> None:
    """Run `function(group, *args)` in `count` processes of this machine; return when all have ended.

    Each process gets an equal part of the cores for torch's threads, unless OMP_NUM_THREADS is set.

    Args:
        count: ranks, at least 1.
        function: defined at the top level of a module, as must be the arguments' types, because pickle imports them by
            name.
        device: see `joined`.
        saves: ranks save their work when SIGTERM stops them. The first SIGTERM or SIGINT is passed on to them, and they
            have any time; a second one ends this process, and so the ranks.
        timeout_s: see `joined`.
        replace: number of killed ranks to replace (`run_memory.py`): all ranks are started again, and find the memory
            that the others have left.

    Raises:
        RankFailed: a rank failed or died.
        RunStopped: all ranks have saved their work and stopped.
        KeyboardInterrupt, SystemExit: a signal has stopped ranks that had nothing to save; raised after all have ended.
    """
    if count < 1:
        raise ConfigError(f"launch: got {count} ranks; expected at least 1.")
    work = pickle.dumps((function, args))
    if not replace:
        _end_with(_run_once(count, work, device, saves, timeout_s), count)
        return
    folder = memory_folder()
    try:
        left = replace
        for attempt in itertools.count():
            added = {FOLDER: folder, ATTEMPT: str(attempt)}
            ended = _run_once(count, work, device, saves, timeout_s, added)
            killed = _replaceable(ended, count)
            left -= len(killed)
            if not killed or left < 0:
                _end_with(ended, count)
                return
            for one in killed:
                warnings.warn(f"rank {one.rank} of {count} {one.text} It is replaced.", stacklevel=2)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replaceable(ended: _Ended, count: int) -> list[_Failure]:
    """Return the killed ranks, if all others have ended because of them; else none."""
    killed = [failure for failure in ended.failures if failure.severity == _DIED and failure.killed]
    others = [failure for failure in ended.failures if failure.severity == _BY_PEER]
    return killed if len(killed) + len(others) == count and not ended.requested else []


def _end_with(ended: _Ended, count: int) -> None:
    """Raise the error of the ranks, if there is one."""
    if ended.failures:
        worst = min(failure.severity for failure in ended.failures)
        if worst == _SAVED:
            raise RunStopped(number=ended.requested)
        if ended.requested and worst > _DIED:
            raise SystemExit(128 + ended.requested)  # before the first step, or after the last one
        raise _rank_failed(ended.failures, count)


def _run_once(
    count: int, work: bytes, device: str, saves: bool, timeout_s: float, added: Mapping[str, str] | None = None
) -> _Ended:
    """Run the ranks until all have ended.

    Args:
        work: pickled function and arguments.
        added: further environment variables of the ranks.
    """
    store = _local_store()
    context = _context()
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(count):
            own = {**_environment(rank, count), **(added or {})}
            spec = _RankSpec(rank, count, store.port, device, timeout_s, own)
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(spec, work, theirs), name=f"rank {rank}")
            # Listed before the start, which takes seconds and may be interrupted: the fork server imports torch.
            processes.append(process)
            pipes[ours] = rank
            process.start()
            theirs.close()
        with stop_request() if saves else contextlib.nullcontext() as request:
            folder = None if added is None else added[FOLDER]
            failures = _collect_failures(pipes, processes, request, store, folder)
            requested = 0 if request is None else request.take()
    finally:
        started = [process for process in processes if process.pid is not None]
        try:
            _end_ranks(pipes, started)
        finally:
            if len(started) < len(processes):
                _end_fork_server()
    return _Ended(failures, requested)


@dataclass(frozen=True)
class _RankSpec:
    """Arguments with which a process becomes a rank."""

    rank: int
    size: int
    port: int
    device: str
    timeout_s: float
    environment: Mapping[str, str]


_OWN, _DIED, _BY_PEER, _INTERRUPTED, _SAVED = range(5)
"""Severities: an error of the rank's own, no message, an error that a peer caused, stopped, stopped after a save."""


@final
@dataclass(frozen=True)
class _Failure:
    """End of a rank before its function has returned."""

    rank: int
    severity: int
    text: str
    trace: str = ""
    killed: bool = False


@final
@dataclass(frozen=True)
class _Ended:
    """End of all ranks: those that failed, and the signal that has requested the end, or 0."""

    failures: list[_Failure]
    requested: int


def _end_fork_server() -> None:
    """End the fork server after an interrupted start: it may import torch for seconds, and would fork the rank then."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # the next launch starts a new one


def _end_ranks(pipes: Mapping[Connection, int], processes: list[BaseProcess]) -> None:
    """End the ranks that still run; kill those that do not end in time, or at once if a second signal arrives."""
    try:
        for pipe in pipes:
            pipe.close()  # ranks detect it
        deadline = time.monotonic() + GRACE_S
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _environment(rank: int, count: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets on one host."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
    }
    # All ranks run on this machine, so its host name need not resolve.
    interface = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    environment = {**interface, **os.environ, **{name: str(number) for name, number in numbers.items()}}
    wait_briefly(environment)
    return environment


def _local_store() -> dist.TCPStore:
    """Return a store that other machines cannot reach; torch's own socket would listen on all interfaces."""
    with socket.create_server((_LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        # The store closes the duplicated descriptor.
        return dist.TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )


# torch.optim imports the last module when the first optimizer is created.
_PRELOADED = ["tilerec.train.fork_server", "tilerec.train.launch", "tilerec.train.loop", "torch._dynamo"]


def _context() -> Any:
    """Return a context that forks from a server with torch imported and no threads; `spawn` if fork is unavailable."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # libgomp reads its spin count when the server imports torch, so the server needs it before it starts.
    before = os.environ.get(SPIN_COUNT)
    wait_briefly(os.environ)
    try:
        resource_tracker.ensure_running()  # its first start would lift the mask
        # The server inherits the mask: signals to the whole process group reach the launcher, which ends the ranks.
        with blocked_signals():
            forkserver.ensure_running()
    except BaseException:  # a signal that was held back
        _end_fork_server()
        raise
    finally:
        if before is None:
            os.environ.pop(SPIN_COUNT, None)
    return context


# In the rank's process --------------------------------------------------------------------------------------------


def _run_rank(spec: _RankSpec, work: bytes, pipe: Connection) -> None:
    """Run one rank: set up its environment, call the function, send the outcome, end the process."""
    hold_signals()  # until `StopSignals` handles them
    os.environ.clear()
    os.environ.update(spec.environment)
    # Set explicitly: torch read the variable in the fork server, before this process set it.
    torch.set_num_threads(number(os.environ, "OMP_NUM_THREADS", max(1, cores() // spec.size)) or 1)
    failure: _Failure | None = None
    # The main thread closes logs in half of the time that the launcher waits.
    with StopSignals(pipe, GRACE_S / 2) as stop:
        try:
            function, args = pickle.loads(work)
            store = dist.TCPStore(_LOOPBACK, spec.port, is_master=False)
            with joined(spec.device, store, spec.timeout_s) as group:
                stop.begin()
                function(group, *args)
        except BaseException as error:
            failure = _failure(spec.rank, error)
        stop.end()
        with contextlib.suppress(OSError):
            pipe.send(failure)
        end(0 if failure is None else 1)


def _failure(rank: int, error: BaseException) -> _Failure:
    if isinstance(error, RunStopped):
        return _Failure(rank, _SAVED, "saved and stopped")
    if isinstance(error, KeyboardInterrupt):
        return _Failure(rank, _INTERRUPTED, "stopped")
    if is_lost_peer(error):
        return _Failure(rank, _BY_PEER, str(error))
    if isinstance(error, TilerecError):
        return _Failure(rank, _OWN, str(error))
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return _Failure(rank, _OWN, f"{type(error).__name__}: {error}", trace)


def end(code: int) -> None:
    """Exit the process immediately, because the teardown of a group waits for calls that may never finish."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# In the launching process -----------------------------------------------------------------------------------------


def _collect_failures(
    pipes: Mapping[Connection, int], processes: list[BaseProcess], request: StopSignals | None, store: dist.Store,
    folder: str | None,
) -> list[_Failure]:  # fmt: skip
    """Return the failures, in the order in which they arrived; pass a request to stop on to the ranks.

    Args:
        store: of the ranks. A rank that was killed left no message there, and some waits are for messages only.
        folder: of files in memory; ranks have any time to write them, while they grow.
    """
    waiting = dict(pipes)
    passed_on = False
    failures: list[_Failure] = []
    deadline: float | None = None
    written = 0
    while waiting:
        if request is not None and request.requested and not passed_on:
            passed_on = True
            for rank in waiting.values():
                processes[rank].terminate()
        left = _POLL_S if deadline is None else deadline - time.monotonic()
        ready = wait(list(waiting), max(0.0, min(_POLL_S, left)))
        if folder is not None and deadline is not None and (size := bytes_in(folder)) != written:
            deadline, written = time.monotonic() + GRACE_S, size
        elif not ready and left <= 0:
            # These ranks did not end in time; `launch` kills them.
            late = waiting.values() if folder is not None else ()
            return [*failures, *(_Failure(rank, _BY_PEER, "did not end in time") for rank in late)]
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failure = pipe.recv()
            except (EOFError, OSError):
                failure = _died(rank, processes[rank])
                store.set(LOST_RANK, f"rank {rank} {failure.text}")
            if failure is not None:
                failures.append(failure)
                deadline = deadline or time.monotonic() + GRACE_S
    return failures


def _died(rank: int, process: BaseProcess) -> _Failure:
    process.join(GRACE_S)
    code = process.exitcode
    if code == STOPPED:
        return _Failure(rank, _INTERRUPTED, "stopped")
    if code is not None and code < 0:
        hint = ". Is there enough memory?" if -code == signal.SIGKILL else ""
        return _Failure(rank, _DIED, f"was killed by signal {signal.Signals(-code).name}{hint}", killed=True)
    return _Failure(rank, _DIED, f"ended with exit code {code}")


def _rank_failed(failures: list[_Failure], count: int) -> RankFailed:
    """Return the error to raise: a rank's own failure takes precedence over failures that it caused in others."""
    first = min(failures, key=lambda failure: failure.severity)
    if len({failure.text for failure in failures}) == 1 and len(failures) == count:
        # All ranks failed alike, so the error belongs to the run and not to one rank.
        return RankFailed(first.text, first.trace)
    link = " " if first.severity == _DIED else ": "
    return RankFailed(f"rank {first.rank} of {count}{link}{first.text}", first.trace)


def _backend(device: str) -> str:
    local = number(os.environ, "LOCAL_WORLD_SIZE", 1)
    device = resolved_device(device, local)
    alone = device.startswith("cuda") if local == 1 else device == "cuda" and local <= torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if alone and dist.is_nccl_available() else "gloo"
