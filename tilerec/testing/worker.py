"""Worker process of `Ranks`: joins the group, then runs one case after the other until the pipe closes.

Messages, pickled, over one pipe per rank
    to the rank      a `Case`
    from the rank    "ready"                                  it has joined the group
                     ("result", value) then "clean"           the case ended; its extra process groups are destroyed
                     ("result", value) then an "unclean"      the case ended, but the barrier after it failed
                     ("error", type, text, traceback, bytes)  the case failed; the process ends

A rank that fails ends its process, as it would under torchrun: its connections close, so its peers raise.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(frozen=True)
class FunctionRef:
    """Reference to a function at the top of a module: module and name, and the file to load if the import fails."""

    module: str
    name: str
    path: str | None

    @staticmethod
    def of(function: Callable[..., Any]) -> FunctionRef:
        """Return the reference. Raises `ValueError` for a lambda, a method or a function inside another."""
        module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
        found = getattr(sys.modules.get(module or ""), name, None)
        if module is None or found is not function:
            raise ValueError(
                f"{function!r} cannot be imported by another process; pass a function defined at the top of a "
                f"module (no lambda, no method, none inside another function)."
            )
        return FunctionRef(module, name, getattr(sys.modules[module], "__file__", None))

    def load(self) -> Callable[..., Any]:
        """Return the function, imported in this process."""
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError:
            # Test runners may give modules names that cannot be imported from sys.path.
            spec = importlib.util.spec_from_file_location(self.module, self.path) if self.path else None
            if spec is None or spec.loader is None:
                raise
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, self.name)
        return function


@dataclass(frozen=True)
class WorkerSettings:
    """Settings with which a process becomes a rank."""

    rank: int
    world_size: int
    backend: str
    rendezvous: str
    group_timeout_s: float
    threads: int
    environment: Mapping[str, str]
    stacks: str
    setup: FunctionRef | None


@dataclass(frozen=True)
class Case:
    """One call; `arguments` are pickled separately, so that the function's module is loaded before them."""

    function: FunctionRef
    arguments: bytes


def serve(place: WorkerSettings, pipe: Connection) -> None:
    """Run one rank: join the group, run cases, end the process."""
    try:
        _join(place)
        pipe.send_bytes(pickle.dumps("ready"))
        while True:
            try:
                case: Case = pickle.loads(pipe.recv_bytes())
            except EOFError:
                break
            function = case.function.load()
            value = function(*pickle.loads(case.arguments))
            pipe.send_bytes(_dump_result(place.rank, value))
            try:
                _clean()
            except RuntimeError as error:
                pipe.send_bytes(_dump_error(error, "unclean"))
                _end(1)
            pipe.send_bytes(pickle.dumps("clean"))
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(_dump_error(error))
        _end(1)
    _end(0)


def _end(code: int) -> None:
    """End the process at once: destroying a group would wait for calls that never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(place: WorkerSettings) -> None:
    os.environ.clear()
    os.environ.update(place.environment)
    torch.set_num_threads(place.threads)
    if hasattr(signal, "SIGUSR1"):
        # Never closed: the parent requests the stacks of a hanging rank.
        stacks = open(place.stacks, "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    if place.setup is not None:
        place.setup.load()()
    dist.init_process_group(
        place.backend,
        init_method=f"file://{place.rendezvous}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=place.group_timeout_s),
    )


def _clean() -> None:
    """Close the process groups that the case opened, once no rank uses them any more."""
    dist.barrier()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _dump_result(rank: int, value: object) -> bytes:
    try:
        return pickle.dumps(("result", value))
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(value).__name__} that cannot be pickled; return plain values or tensors."
        ) from error


def _dump_error(error: BaseException, kind: str = "error") -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        # Some exceptions cannot be pickled; their text still can.
        pickled = b""
    return pickle.dumps((kind, type(error).__name__, str(error), text, pickled))
