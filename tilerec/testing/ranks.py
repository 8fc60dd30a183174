"""`Ranks`: pool of W processes on this machine that form one gloo group and run functions.

    with Ranks(4, hosts=2) as ranks:
        for case in cases:
            results = ranks.run(check, case)        # check(case) on every rank; [4] results

The processes are started once and reused. The first start in a program takes about as long as importing torch. A later
start (a pool of another size, or after a failure) takes some 50 ms, because new processes are forked from a server that
has torch imported. The rendezvous uses a file, so no port is needed.

No run hangs: ranks that have not finished at the time-out are killed, and the error holds their stacks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, final

from tilerec.errors import CommsError
from tilerec.testing.worker import Case, FunctionRef, WorkerSettings, serve

# Seconds after the first failure in which the other ranks can report their errors.
_GRACE_S = 2.0
_START_TIMEOUT_S = 60.0
# Modules that are slow to import. If this process has imported one, functions that ranks run are likely to need it.
_SLOW_IMPORTS = (
    "pytest",
    "hypothesis",
    "torchmetrics",
    "pyarrow.parquet",
    "torch.distributed.checkpoint",
    "tilerec.recipes",
)


class RankError(RuntimeError):
    """A rank failed in its process; the message holds its number and its traceback."""


@final
class Ranks:
    """W processes with one default process group; a context manager.

    Args:
        world_size: number of ranks, W >= 1.
        hosts: number of simulated hosts of W / hosts ranks each: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
            GROUP_RANK and GROUP_WORLD_SIZE are set as torchrun sets them.
        timeout_s: time limit of one `run`, in seconds. A collective times out a little earlier, with its own error.
        threads: number of torch's threads in each rank.
        setup: called without arguments in each rank before it joins the group.
        backend: backend of the default group; "gloo" supports CPU and CUDA tensors.

    The other processes import functions by name: define them at the top of a module. A script needs
    `if __name__ == "__main__":`, as every multi-process program does.
    """

    def __init__(
        self,
        world_size: int,
        hosts: int = 1,
        *,
        timeout_s: float = 60.0,
        threads: int = 1,
        setup: Callable[[], object] | None = None,
        backend: str = "gloo",
    ) -> None:
        if world_size < 1 or hosts < 1 or world_size % hosts:
            raise ValueError(
                f"Ranks: got {world_size} ranks on {hosts} hosts; expected at least one of each, and equally many "
                f"ranks on every host."
            )
        self.world_size = world_size
        self.hosts = hosts
        self._timeout_s = timeout_s
        self._threads = threads
        self._setup = None if setup is None else FunctionRef.of(setup)
        self._backend = backend
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, return_exceptions: bool = False) -> list[Any]:
        """Run `function(*args)` on every rank and return the results in the order of the ranks.

        Args:
            function: a function at the top of a module. Arguments and results are pickled.
            return_exceptions: return an exception in its rank's place instead of raising it, and let the other ranks
                run until they end or time out.

        Raises the exception of the rank that failed first; exceptions caused by a peer's failure come last. Its cause
        is a `RankError` with the rank and its traceback. Raises `RankError` itself for a rank that died or hung. The
        next `run` then replaces the processes.
        """
        case = Case(FunctionRef.of(function), pickle.dumps(args))
        deadline = time.monotonic() + self._timeout_s
        if not self._processes:
            self._start()
            deadline = time.monotonic() + self._timeout_s
        for pipe in self._pipes:
            try:
                pipe.send_bytes(pickle.dumps(case))
            except BrokenPipeError:
                # The rank died between two runs; `_collect` reports it.
                continue
        outcomes = self._collect(deadline, f"{case.function.name}()", return_exceptions)
        failures = [outcome for outcome in outcomes if isinstance(outcome, _Failure)]
        if not failures:
            return outcomes
        self._kill()
        if return_exceptions:
            outcomes = [
                outcome.result if isinstance(outcome, _Failure) and outcome.has_result else outcome
                for outcome in outcomes
            ]
            return [
                _exception_of(outcome, [outcome], self.world_size) if isinstance(outcome, _Failure) else outcome
                for outcome in outcomes
            ]
        failures.sort(key=lambda failure: (failure.severity, failure.order))
        raise _exception_of(failures[0], failures, self.world_size)

    def close(self) -> None:
        """End the processes. The next `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 1.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    # -- parts of a run ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        context = _context()
        self._folder = tempfile.TemporaryDirectory(prefix="tilerec-ranks-")
        folder = Path(self._folder.name)
        for rank in range(self.world_size):
            place = WorkerSettings(
                rank=rank,
                world_size=self.world_size,
                backend=self._backend,
                rendezvous=str(folder / "rendezvous"),
                group_timeout_s=max(1.0, 0.8 * self._timeout_s),
                threads=self._threads,
                environment={**os.environ, **self._variables(rank)},
                stacks=str(folder / f"stacks-{rank}"),
                setup=self._setup,
            )
            parent_end, child_end = context.Pipe()
            process = context.Process(target=serve, args=(place, child_end), daemon=True, name=f"rank {rank}")
            process.start()
            child_end.close()
            self._processes.append(process)
            self._pipes.append(parent_end)
        outcomes = self._collect(time.monotonic() + _START_TIMEOUT_S, "starting", return_exceptions=False)
        failures = [outcome for outcome in outcomes if isinstance(outcome, _Failure)]
        if failures:
            self._kill()
            failures.sort(key=lambda failure: (failure.severity, failure.order))
            raise _exception_of(failures[0], failures, self.world_size)

    def _variables(self, rank: int) -> dict[str, str]:
        local_size = self.world_size // self.hosts
        variables = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank % local_size,
            "LOCAL_WORLD_SIZE": local_size,
            "GROUP_RANK": rank // local_size,
            "GROUP_WORLD_SIZE": self.hosts,
        }
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        # Use the loopback interface: the machine's name may not resolve.
        interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback)}
        return {**{name: str(value) for name, value in variables.items()}, **interface}

    def _collect(self, deadline: float, activity: str, return_exceptions: bool) -> list[Any]:
        """Return a result or a `_Failure` per rank."""
        outcomes: dict[int, Any] = {}
        results: dict[int, Any] = {}
        open_pipes = dict(zip(self._pipes, range(self.world_size), strict=True))
        while open_pipes:
            ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                try:
                    message = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = _Failure.died(rank, len(outcomes), activity, self._processes[rank])
                else:
                    if message[0] == "result":
                        results[rank] = message[1]
                        continue
                    if message in ("ready", "clean"):
                        outcomes[rank] = results.get(rank)
                    else:
                        outcomes[rank] = _Failure.raised(rank, len(outcomes), *message)
                        if message[0] == "unclean":
                            outcomes[rank].keep(results[rank])
                del open_pipes[pipe]
                if _failed(outcomes[rank]) and not return_exceptions:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if open_pipes:
            failed = any(map(_failed, outcomes.values()))
            late = {rank: self._stacks(rank) for rank in open_pipes.values()}
            for rank, stacks in late.items():
                limit = "after another rank had failed" if failed else f"after {self._timeout_s:g} s"
                outcomes[rank] = _Failure.hung(rank, len(outcomes), activity, limit, stacks)
        return [outcomes[rank] for rank in range(self.world_size)]

    def _stacks(self, rank: int) -> str:
        """Return the stacks of a rank that does not answer; "" if they are not available."""
        process, folder = self._processes[rank], self._folder
        if not hasattr(signal, "SIGUSR1") or folder is None or process.pid is None or not process.is_alive():
            return ""
        path = Path(folder.name) / f"stacks-{rank}"
        if not path.exists():
            return ""
        os.kill(process.pid, signal.SIGUSR1)
        before, deadline = -1, time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.02)
            size = path.stat().st_size
            if size and size == before:
                break
            before = size
        return path.read_text(errors="replace")


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    hosts: int = 1,
    timeout_s: float = 60.0,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run `fn(*args)` once on `world_size` processes of one gloo group; for many cases on one group use `Ranks`."""
    with Ranks(world_size, hosts, timeout_s=timeout_s) as ranks:
        return ranks.run(fn, *args, return_exceptions=return_exceptions)


# Parts of torch's error messages for a dead or late peer, in any call.
_PEER_ERRORS = ("gloo/transport", "Connection closed by peer", "NCCL error", "Timed out waiting")


@final
class _Failure:
    """Failure of a rank.

    severity: 0 raised its own error, 1 died, 2 raised an error that a peer caused, 3 hung, 4 finished the case but
        failed in the barrier after it.
    """

    def __init__(self, rank: int, order: int, severity: int, text: str, detail: str, pickled: bytes = b"") -> None:
        self.rank = rank
        self.order = order
        self.severity = severity
        self.text = text
        self.detail = detail
        self.pickled = pickled
        self.has_result = False
        self.result: Any = None

    def keep(self, result: object) -> None:
        """Store the result of the case, which had finished before the failure."""
        self.has_result, self.result = True, result

    @staticmethod
    def raised(rank: int, order: int, message: str, kind: str, text: str, trace: str, pickled: bytes) -> _Failure:
        by_peer = kind == CommsError.__name__ or any(words in text for words in _PEER_ERRORS)
        severity = 4 if message == "unclean" else 2 if by_peer else 0
        return _Failure(rank, order, severity, f"{kind}: {text}", trace, pickled)

    @staticmethod
    def died(rank: int, order: int, activity: str, process: BaseProcess) -> _Failure:
        process.join(1.0)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"killed by signal {signal.Signals(-code).name}"
        else:
            how = f"exit code {code}"
        return _Failure(rank, order, 1, f"died in {activity}, {how}", "")

    @staticmethod
    def hung(rank: int, order: int, activity: str, limit: str, stacks: str) -> _Failure:
        return _Failure(rank, order, 3, f"still in {activity} {limit}; it was killed", stacks)


def _failed(outcome: object) -> bool:
    """Return True if the rank failed in the case itself, not in the barrier after it, which peers make fail."""
    return isinstance(outcome, _Failure) and not outcome.has_result


def _exception_of(first: _Failure, failures: list[_Failure], world_size: int) -> BaseException:
    """Return the rank's own exception if it could be pickled, with a `RankError` of all failures as its cause."""
    lines = [f"Rank {first.rank} of {world_size}: {first.text}", first.detail.rstrip()]
    for other in failures:
        if other is not first:
            lines += [
                f"rank {other.rank}: {other.text}",
                other.detail.rstrip() if other.severity == 3 else "",
            ]
    summary = RankError("\n".join(line for line in lines if line))
    if not first.pickled:
        return summary
    error = pickle.loads(first.pickled)
    assert isinstance(error, BaseException)
    error.__cause__ = summary
    return error


def _context() -> Any:
    """Return a context that forks processes from a server without threads that has imported torch and tilerec.

    Without fork on this platform, it spawns them.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # torch.optim imports torch._dynamo when its first optimizer is created.
    wanted = ["tilerec.testing.worker", "tilerec", "tilerec.sharding.shard_collection", "torch._dynamo"]
    context.set_forkserver_preload(wanted + [name for name in _SLOW_IMPORTS if name in sys.modules])
    return context
