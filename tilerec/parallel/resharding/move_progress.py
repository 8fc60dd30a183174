"""How far a move of tables is: for a bar on rank 0, or for a function of the user's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from tilerec.errors import ConfigError

PATIENCE_S = 1.0
"""A bar appears on a terminal when a move has taken this long, in seconds."""


@dataclass(frozen=True)
class Moving:
    """Where a move stands, seen from one rank.

    Attributes:
        tables, all_tables: moved already, and to be moved.
        bytes, all_bytes: of this rank's tiles that have come or were sent, and of all of them.
        names: of the tables that move now.
    """

    tables: int
    all_tables: int
    bytes: int
    all_bytes: int
    names: tuple[str, ...]


ProgressOption = bool | Callable[[Moving], Any] | None
"""None: a bar on rank 0 where stderr is a terminal, if it takes long; True: there in any case; False: none."""


def check_progress(option: object) -> None:
    """Refuse what is no option."""
    if not (option is None or isinstance(option, bool) or callable(option)):
        raise ConfigError(
            f"reshard: progress is {option!r:.80}; wanted True, False, None, or a function of a Moving."
        )


@final
class MoveProgress:
    """Hears of every round of a move."""

    def __init__(self, option: ProgressOption, rank: int, tables: int, size: int) -> None:
        self._call = option if callable(option) else None
        self._tables, self._bytes = tables, size
        self._begun = time.monotonic()
        self._bar: Any = None
        self._console: Any = None
        self._patience = 0.0 if option is True else PATIENCE_S
        if self._call is None and option is not False and rank == 0:
            from rich.console import Console

            console = Console(stderr=True)
            if option is True or console.is_terminal:
                self._console = console

    def tell(self, tables: int, size: int, names: tuple[str, ...]) -> None:
        """So many tables and bytes are done. A function of the user's may raise."""
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
        what = f"{tables}/{self._tables} tables, {names[0]}{more}" if names else f"{tables} tables"
        self._bar.update(self._task, completed=size, tables=what)

    def close(self) -> None:
        """The move is over, or has failed."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
