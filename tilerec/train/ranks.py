"""Ranks of a program: this process, new processes, or those that a launcher started. The one place that decides it.

on_ranks(function, argument)                  plain Python: function(None, argument)
torchrun, srun, Kubernetes                    function(group, argument) in every process
Ray Train, or a process group of the caller   function(group, argument) on that group
on_ranks(function, argument, nproc=2)         two new processes
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

import torch.distributed as dist

from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError, TilerecError
from tilerec.stop_signals import STOPPED, RunStopped, StopSignals
from tilerec.train.launch import GRACE_S, TIMEOUT_S, end, joined, launch
from tilerec.train.placement import Placement

Report: TypeAlias = Callable[[BaseException, str], None]
"""Prints the failure of a rank, given a text that names the rank."""


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    nproc: int | None = None,
    device: str = "cpu",
    grouped: bool = False,
    saves: bool = False,
    replace: int = 0,
    timeout_s: float = TIMEOUT_S,
    report: Report | None = None,
) -> Any:
    """Run `function(group, *args)` on every rank; return its result, or None if new processes are the ranks.

    In a process that a launcher started, a failure is printed and ends the process, because the teardown of a group
    waits for calls that never finish. In others it is raised.

    Args:
        function: `group` is None for a single process. See `launch` for new processes.
        nproc: number of processes to start; None or 1 for this one.
        device: see `joined`.
        grouped: pass a group of one rank to a single process.
        saves, replace: see `launch`.
        timeout_s: seconds that a rank waits for the others in a collective.
        report: prints a failure; None prints its text, or its traceback.

    Raises:
        ConfigError: nproc is given under a launcher.
        RankFailed: a new process failed.
        RunStopped: a signal has stopped a run with checkpoints, and it is saved.
    """
    if dist.is_initialized():
        return function(ProcessGroupComms(), *args)
    if Placement.of(os.environ) is not None:
        if nproc is not None:
            raise ConfigError(
                f"--nproc: got {nproc} under a launcher (torchrun, srun), which has already started the processes; "
                "expected no --nproc. Leave it out."
            )
        return _as_rank(function, args, device, timeout_s, report or print_failure)
    if nproc is not None and nproc > 1:
        launch(nproc, function, *args, device=device, saves=saves, timeout_s=timeout_s, replace=replace)
        return None
    if grouped:
        with joined(device, timeout_s=timeout_s) as group:
            return function(group, *args)
    return function(None, *args)


def _as_rank(function: Callable[..., Any], args: tuple[Any, ...], device: str, timeout_s: float, report: Report) -> Any:
    """Run in a process that a launcher started. End the process if it fails or is stopped: the launcher stops all."""
    where = ""
    try:
        with StopSignals(None, GRACE_S / 2) as stop, joined(device, timeout_s=timeout_s) as group:
            where = f"rank {group.rank} of {group.size}: "
            stop.begin()
            return function(group, *args)
    except RunStopped as stopped:
        end(stopped.exit_code)
    except KeyboardInterrupt:
        end(STOPPED)
    except BaseException as error:
        report(error, where)
        end(1)


def print_failure(error: BaseException, where: str) -> None:
    """Print an error of a rank to stderr: its text if the caller can fix it, else its traceback."""
    known = isinstance(error, TilerecError)
    text = str(error) if known else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    print(f"error: {where}{text}", file=sys.stderr)
