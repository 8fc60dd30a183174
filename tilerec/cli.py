"""`tilerec`: the command line.

tilerec recipes                                     what there is to run
tilerec train synthetic                             run it
tilerec train movielens --data ml-latest-small      from raw files
tilerec train synthetic --set train.batch_size=4096 --show
"""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilerec.errors import TilerecError
from tilerec.recipes.registry import RECIPES, make_run, needs_data
from tilerec.train.config import RunConfig
from tilerec.train.loop import train as run_training
from tilerec.train.override import override_all, settings
from tilerec.train.report import report

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train recommender models.",
)


@app.callback()
def _root() -> None:
    """Train recommender models."""


@app.command()
def recipes() -> None:
    """List the recipes."""
    table = Table("recipe", "data", "what it runs")
    for name, recipe in RECIPES.items():
        first_line = (inspect.getdoc(recipe) or "").split("\n")[0]
        table.add_row(name, "--data PATH" if needs_data(recipe) else "makes its own", first_line)
    _console().print(table)


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A name from `tilerec recipes`, or module:function of your own.")
    ],
    data: Annotated[str | None, typer.Option(help="Path of the data, for recipes that read files.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: name=value. May be given several times."),
    ] = None,
    on_bad_row: Annotated[
        str | None,
        typer.Option(help="Malformed lines: 'error' stops, 'skip' leaves them out and counts them."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to train: cpu, cuda, cuda:1, …")] = None,
    log_dir: Annotated[
        str | None, typer.Option(help="Folder for logs; '' for none. Default: runs/<recipe>/<date and time>.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print all settings and stop.")] = False,
) -> None:
    """Run a recipe and print its scores."""
    console = _console()
    try:
        run = make_run(recipe, data)
        run = _with_options(run, set_ or [], on_bad_row=on_bad_row, device=device, log_dir=log_dir)
        if show:
            for name, value in settings(run).items():
                console.print(Text(f"{name} = {_plain(value)}"), soft_wrap=True)
            return
        result = run_training(run, console=console)
    except TilerecError as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(report(result))


def _with_options(
    run: RunConfig, sets: list[str], *, on_bad_row: str | None, device: str | None, log_dir: str | None
) -> RunConfig:
    given = list(sets)
    if on_bad_row is not None:
        given.append(f"data.on_bad_row={on_bad_row}")
    if device is not None:
        given.append(f"train.device={device}")
    if log_dir is not None:
        given.append(f"log_dir={log_dir}")
    run = override_all(run, given)
    if not run.log_dir and log_dir is None and not any(text.startswith("log_dir=") for text in given):
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path("runs") / run.name / stamp
        # Two runs started in one second get folders of their own.
        number = 1
        while folder.exists():
            number += 1
            folder = folder.with_name(f"{stamp}-{number}")
        run = override_all(run, [f"log_dir={folder}"])
    return run


def _plain(value: object) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, tuple):
        return ",".join(map(_plain, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _console() -> Console:
    return Console()


def main() -> None:
    """The console script."""
    app()
