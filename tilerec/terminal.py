"""Console output of the command line. Control characters in names from files and data are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and marks that change the direction of text."""


def printable(text: str) -> str:
    """Return the text with control characters replaced by escapes: ESC becomes `\\x1b`."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


@final
class SafeConsole(Console):
    """A rich console that escapes control characters in all printed text.

    Colours and cursor moves that rich itself writes are not part of the text; they stay.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def print_error(text: str) -> None:
    """Print `error: ...` to stderr."""
    _print_marked("error: ", "bold red", text)


def print_rank_error(error: Exception, where: str = "") -> None:
    """Print an error to stderr, after the traceback of the rank that failed, if it has one (`error.trace`).

    Args:
        where: prefix of the error's text.
    """
    trace = getattr(error, "trace", "")
    if trace:
        SafeConsole(stderr=True).print(trace, soft_wrap=True, markup=False, highlight=False)
    print_error(f"{where}{error}")


def print_warning(text: str) -> None:
    """Print `warning: ...` to stderr."""
    _print_marked("warning: ", "bold yellow", text)


def _print_marked(mark: str, style: str, text: str) -> None:
    SafeConsole(stderr=True).print(Text.assemble((mark, style), printable(text)), soft_wrap=True)


def print_plain(text: str) -> None:
    """Print text literally, without rich markup."""
    SafeConsole().print(Text(printable(text)), soft_wrap=True)
