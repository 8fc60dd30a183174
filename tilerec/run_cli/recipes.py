"""`tilerec recipes`: the list of recipes."""

from __future__ import annotations

import inspect

from tilerec.terminal import SafeConsole


def recipes() -> None:
    """List the recipes."""
    from rich.table import Table

    from tilerec.recipes.registry import RECIPES, needs_data

    table = Table("recipe", "data", "description")
    for name, recipe in RECIPES.items():
        first_line = (inspect.getdoc(recipe) or "").split("\n")[0]
        table.add_row(name, "--data PATH" if needs_data(recipe) else "generated", first_line)
    SafeConsole().print(table)
