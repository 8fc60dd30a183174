"""`CommandGroup`: a group of commands whose help has the whole first sentence of each."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    """A group for `typer.Typer(cls=...)`. Typer's own cuts each sentence off after one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        shown = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, found.get_short_help_str(_WHOLE)) for name, found in shown if found and not found.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


_WHOLE = 1_000
"""Characters of a sentence, at most; typer's limit is what fits on a line."""
