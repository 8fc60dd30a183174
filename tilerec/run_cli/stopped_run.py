"""The last line of a run that a signal has ended: how to continue it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tilerec.checkpoint.manager import latest
from tilerec.stop_signals import RunStopped
from tilerec.terminal import print_plain
from tilerec.train.config import RunConfig
from tilerec.train.run_metadata import FOLDER


@contextmanager
def stop_line(run: RunConfig) -> Iterator[None]:
    """Print how to continue the run if a signal ends the block without a save; `saved_line` is for the others."""
    try:
        yield
    except RunStopped:
        raise
    except (KeyboardInterrupt, SystemExit):
        found = latest(Path(run.log_dir) / FOLDER) if run.log_dir else None
        if found is not None:
            print_plain(f"stopped; the newest checkpoint is of step {found.step:,}. {_to_continue(run)}")
        else:
            hint = "" if run.checkpoint.saves else " --save-every N saves some."
            print_plain(f"stopped without a checkpoint.{hint}")
        raise


@contextmanager
def saved_line(run: RunConfig, console: Console | None) -> Iterator[None]:
    """Print how to continue the run if it ends the block because it was saved to stop.

    Args:
        console: None on ranks that print nothing.
    """
    try:
        yield
    except RunStopped as stopped:
        if console is not None:
            print_plain(f"stopped after step {stopped.step:,}, and saved. {_to_continue(run)}")
        raise


def _to_continue(run: RunConfig) -> str:
    return f"The same command with --log-dir {shlex.quote(run.log_dir)} --resume continues."
