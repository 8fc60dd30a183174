"""The ranks of a command: this process, new processes (`--nproc`), or those that a launcher started."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tilerec.errors import TilerecError
from tilerec.stop_signals import STOPPED, StopSignals, blocked_signals
from tilerec.terminal import SafeConsole, print_rank_error


def run_on_ranks(function: Callable[..., object], *args: Any, nproc: int | None, device: str, **options: Any) -> None:
    """Run `function(group, *args)` on every rank, as `on_ranks` does; failures look as those of commands.

    Args:
        options: `grouped`, `saves`, `timeout_s` and `replace` of `on_ranks`.

    Raises: as `on_ranks`; SystemExit for SIGTERM, so that temporary files are removed.
    """
    # An exception that a signal raises during imports could be lost.
    with blocked_signals():
        from tilerec.train.placement import Placement
        from tilerec.train.ranks import on_ranks

    # Processes of a launcher have signal handlers of their own.
    alone = Placement.of(os.environ) is None
    if alone and nproc is not None and nproc > 1:
        SafeConsole(stderr=True).print(f"start {nproc} processes", style="dim", highlight=False)
    with _exit_on_sigterm() if alone else contextlib.nullcontext():
        on_ranks(function, *args, nproc=nproc, device=device, report=_report, **options)


def _report(error: BaseException, where: str) -> None:
    """Print the failure of a rank: an error that the user can fix, or a traceback."""
    from rich.text import Text

    if isinstance(error, TilerecError):
        print_rank_error(error, where)
    else:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        SafeConsole(stderr=True).print(Text(f"error: {where}{trace}"), soft_wrap=True)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, as schedulers send it, so that temporary files are removed.

    A handler of the caller, and one that ignores the signal, stay.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    with StopSignals(None, math.inf, on_request=_notice) as stop:
        stop.begin()
        try:
            yield
        except KeyboardInterrupt:
            if stop.interrupted:
                raise SystemExit(STOPPED) from None
            raise


def _notice(number: int) -> None:
    """Print that the command stops, because a save may take minutes."""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    SafeConsole(stderr=True).print(f"{name}: stopping. A second one ends the run without a save.", style="dim")
