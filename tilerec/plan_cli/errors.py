"""Errors of a command: one line, and exit status 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tilerec.errors import TilerecError
from tilerec.terminal import print_error


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a `TilerecError` in one line and exit with status 1."""
    try:
        yield
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
