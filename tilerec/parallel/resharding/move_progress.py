"""Progress of a move of tables: a bar on rank 0, or calls of the user's function."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from tilerec.errors import ConfigError

BAR_DELAY_S = 1.0
"""Seconds that a move takes before its bar appears on a terminal."""


@dataclass(frozen=True)
class Moving:
    """Progress of a move on one rank.

    Attributes:
        tables, all_tables: number of tables that have moved, and of all tables of the move.
        bytes, all_bytes: bytes that this rank has sent and received so far, and in the whole move.
        names: names of the tables that move now.
    """

    tables: int
    all_tables: int
    bytes: int
    all_bytes: int
    names: tuple[str, ...]


ProgressOption = bool | Callable[[Moving], Any] | None
"""None: a bar on rank 0 if stderr is a terminal and the move takes `BAR_DELAY_S`. True: a bar at once. False: no bar.

A function is called on every rank with a `Moving` after each round of messages.
"""


def check_progress(option: object) -> None:
    """Raise `ConfigError` if an object is not a `ProgressOption`."""
    if not (option is None or isinstance(option, bool) or callable(option)):
        raise ConfigError(
            f"reshard: progress: got {option!r:.80}; expected True, False, None, or a function of a Moving."
        )


@final
class MoveProgress:
    """Shows the progress of a move after every round of messages.

    Args:
        option: see `ProgressOption`.
        tables, size: number of tables, and bytes that this rank sends and receives, in the whole move.
    """

    def __init__(self, option: ProgressOption, rank: int, tables: int, size: int) -> None:
        self._call = option if callable(option) else None
        self._tables, self._bytes = tables, size
        self._begun = time.monotonic()
        self._bar: Any = None
        self._console: Any = None
        self._patience = 0.0 if option is True else BAR_DELAY_S
        if self._call is None and option is not False and rank == 0:
            from rich.console import Console

            console = Console(stderr=True)
            if option is True or console.is_terminal:
                self._console = console

    def tell(self, tables: int, size: int, names: tuple[str, ...]) -> None:
        """Show that this many tables and bytes are done. The user's function may raise."""
        if self._call is not None:
            self._call(Moving(tables, self._tables, size, self._bytes, names))
        elif self._console is not None:
            self._show(tables, size, names)

    def _show(self, tables: int, size: int, names: tuple[str, ...]) -> None:
        if self._bar is None:
            if time.monotonic() - self._begun < self._patience:
                return
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("resharding"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[tables]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("resharding", total=self._bytes, tables="")
            self._bar.start()
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"{tables}/{self._tables} tables, {names[0]}{more}" if names else f"{tables} tables"
        self._bar.update(self._task, completed=size, tables=text)

    def close(self) -> None:
        """Remove the bar, after the end or a failure of the move."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
