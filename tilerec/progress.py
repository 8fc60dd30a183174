"""Progress of a command on stderr: the phase it is in, and bars over rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tilerec.phase import phase, timed
from tilerec.terminal import SafeConsole

LOADING = "load PyTorch"
"""The phase in which a command imports its modules."""


def command_phase(what: str, *, show: bool = True) -> AbstractContextManager[None]:
    """Return a `tilerec.phase.phase` on stderr. Without `show` and on a launcher's ranks above 0 it prints nothing."""
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    return phase(what, SafeConsole(stderr=True) if show and first else None)


@contextmanager
def row_progress(what: str, total: int, *, show: bool = True) -> Iterator[Callable[[int], object]]:
    """Yield a function that adds rows to a progress bar on stderr; without a terminal there is no bar.

    A line with the time follows if it took a second.
    """
    done = 0
    with _bar(what, total, "rows", show) as update:

        def add(rows: int) -> None:
            nonlocal done
            done += rows
            update(done, total, done)

        yield add


def read_progress(what: str, unit: str = "rows") -> AbstractContextManager[Callable[[int, int | None, int], None]]:
    """Return a bar as `row_progress` draws it, whose function takes a reader's position, its end, and its rows.

    Args:
        unit: name of what is counted.
    """
    return _bar(what, None, unit, True)


@contextmanager
def _bar(what: str, total: int | None, unit: str, show: bool) -> Iterator[Callable[[int, int | None, int], None]]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = SafeConsole(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} " + unit),
        TimeRemainingColumn(),
    )
    hidden = not (show and console.is_terminal)
    with (
        timed(what, console if show else None),
        Progress(*columns, console=console, transient=True, disable=hidden) as bar,
    ):
        task = bar.add_task(what, total=total, rows=0)
        yield lambda done, total, rows: bar.update(task, completed=done, total=total, rows=rows)
