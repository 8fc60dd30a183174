"""`CommandGroup`: a group of commands whose help has the whole first sentence of each, and `CommandsOnUse`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, final

import typer
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


@final
class CommandsOnUse(MutableMapping[str, Any]):
    """Commands of a group by name, each made when it is first looked up.

    All commands of `tilerec` take 0.3 s to make, one takes a hundredth of that (Intel Xeon).

    Args:
        makers: of the function or the `typer.Typer` of each command, in the order of the help.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers, self._made = dict(makers), dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _command(name, self._makers[name]())
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._makers[name] = lambda: command
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._makers[name]
        self._made.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _command(name: str, found: Any) -> Any:
    """Return a function or a `typer.Typer` as a command without options for completion."""
    outer = typer.Typer(add_completion=False, rich_markup_mode=None)
    if isinstance(found, typer.Typer):
        outer.add_typer(found, name=name)
        return typer.main.get_group(outer).commands[name]
    outer.command(name)(found)
    return typer.main.get_command(outer)


_WHOLE = 1_000
"""Characters of a sentence, at most; typer's limit is what fits on a line."""
