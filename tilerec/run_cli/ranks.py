"""The ranks of a command: this process, new processes (`--nproc`), or those that torchrun started."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tilerec.errors import ConfigError, TilerecError
from tilerec.stop_signals import STOPPED, RunStopped, StopSignals, blocked_signals
from tilerec.terminal import SafeConsole, print_rank_error


def run_on_ranks(
    function: Callable[..., object],
    *args: Any,
    nproc: int | None,
    device: str,
    grouped: bool = False,
    saves: bool = False,
    replace: int = 0,
) -> None:
    """Run `function(group, *args)` on every rank; `group` is None for a single process.

    Args:
        function: see `launch`.
        nproc: number of processes to start; None or 1 for this one.
        device: see `joined`.
        grouped: pass a group of one rank to a single process.
        saves, replace: see `launch`.

    Raises:
        ConfigError: nproc is given under torchrun.
        RankFailed: a rank failed.
        RunStopped: a signal has stopped a run with checkpoints, and it is saved.
    """
    # An exception that a signal raises during imports could be lost.
    with blocked_signals():
        from tilerec.train.launch import joined, launch, under_torchrun

    if under_torchrun():
        if nproc is not None:
            raise ConfigError(
                f"--nproc: got {nproc} under torchrun, which has already started the processes; expected no "
                "--nproc. Leave it out."
            )
        _run_as_rank(function, args, device)
        return
    with _exit_on_sigterm():
        if nproc is not None and nproc > 1:
            launch(nproc, function, *args, device=device, saves=saves, replace=replace)
        elif grouped:
            with joined(device) as group:
                function(group, *args)
        else:
            function(None, *args)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, as schedulers send it, so that temporary files are removed.

    A handler of the caller, and one that ignores the signal, stay. Ranks have `StopSignals`.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    with StopSignals(None, math.inf) as stop:
        stop.begin()
        try:
            yield
        except KeyboardInterrupt:
            if stop.interrupted:
                raise SystemExit(STOPPED) from None
            raise


def _run_as_rank(function: Callable[..., object], args: tuple[Any, ...], device: str) -> None:
    """Run in a process that torchrun started. End the process if it fails or is stopped: torchrun stops the others."""
    from rich.text import Text

    from tilerec.train.launch import GRACE_S, end, joined

    where = ""
    try:
        with StopSignals(None, GRACE_S / 2) as stop, joined(device) as group:
            where = f"rank {group.rank} of {group.size}: "
            stop.begin()
            function(group, *args)
    except TilerecError as error:
        print_rank_error(error, where)
        end(1)
    except (KeyboardInterrupt, RunStopped):
        end(STOPPED)
    except BaseException:
        SafeConsole(stderr=True).print(Text(f"error: {where}{traceback.format_exc()}"), soft_wrap=True)
        end(1)
