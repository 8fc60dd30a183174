"""Progress over rows, as a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tilerec.terminal import SafeConsole


@contextmanager
def row_progress(what: str, total: int, *, show: bool = True) -> Iterator[Callable[[int], object]]:
    """Yield a function that adds rows to a progress bar on stderr; without a terminal it prints nothing."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = SafeConsole(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} rows"),
        TimeRemainingColumn(),
    )
    hidden = not (show and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total)
        yield lambda rows: bar.advance(task, rows)
