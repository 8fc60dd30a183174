"""Phases of a command that a person waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LINE_AFTER_S = 1.0
"""Seconds after which a phase gets a line. Lines of shorter phases would hide those of a run."""


@contextmanager
def phase(what: str, console: Console | None) -> Iterator[None]:
    """Show a spinner on a terminal while the block runs, then what `timed` prints.

    Args:
        what: the work, such as "open the data".
        console: where to show it; None for no output.
    """
    if console is None:
        yield
        return
    with timed(what, console), console.status(what):
        yield


@contextmanager
def timed(what: str, console: Console | None) -> Iterator[None]:
    """Print the time of a block in one line if it took a second. A block that raises gets no line."""
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    if console is not None and seconds >= LINE_AFTER_S:
        console.print(f"{what}: {seconds:.1f} s", style="dim", highlight=False, markup=False, soft_wrap=True)
