"""`tilerec`: the command line.

tilerec recipes                                     list the recipes
tilerec train synthetic                             run one
tilerec train movielens --data ml-latest-small      train from raw files
tilerec train synthetic --set train.batch_size=4096 --show
tilerec train synthetic --nproc 2                   shard the tables over two processes
torchrun --nproc-per-node 2 -m tilerec train synthetic
tilerec calibrate --nproc 2 --out topology.json     measure this machine's speeds for the planner (calibrate_cli.py)
tilerec stats ml-latest-small --out stats.json      measure the distribution of ids for the planner (stats_cli.py)
tilerec plan synthetic --ranks-per-host 8           plan the sharding and estimate the time of a step (plan_cli/)

Each command imports its modules when it runs, so `tilerec --help` starts fast.
"""

from __future__ import annotations

import inspect
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.calibrate_cli import calibrate
from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.plan_cli.app import plan_app
from tilerec.stats_cli import stats
from tilerec.terminal import SafeConsole, print_rank_error, printable

if TYPE_CHECKING:
    from tilerec.comms.process import ProcessGroupComms
    from tilerec.train.config import RunConfig

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train recommender models.",
)


app.add_typer(plan_app, name="plan")


@app.callback()
def _root() -> None:
    """Train recommender models."""


@app.command()
def recipes() -> None:
    """List the recipes."""
    from rich.table import Table

    from tilerec.recipes.registry import RECIPES, needs_data

    table = Table("recipe", "data", "description")
    for name, recipe in RECIPES.items():
        first_line = (inspect.getdoc(recipe) or "").split("\n")[0]
        table.add_row(name, "--data PATH" if needs_data(recipe) else "generated", first_line)
    _console().print(table)


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A name from `tilerec recipes`, or module:function of your own.")
    ],
    data: Annotated[str | None, typer.Option(help="Path of the data, for recipes that read files.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: name=value. Repeatable."),
    ] = None,
    on_bad_row: Annotated[
        str | None,
        typer.Option(help="Malformed lines: 'error' stops the run, 'skip' skips and counts them."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device to train on: cpu, cuda, cuda:1, …")] = None,
    log_dir: Annotated[
        str | None, typer.Option(help="Folder for logs; '' for none. Default: runs/<recipe>/<date and time>.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(help="Number of processes on this machine; tables are sharded over them.", min=1),
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="Sharding plan: the plan.json that an earlier run wrote to its logs.")
    ] = None,
    sharding: Annotated[
        str | None,
        typer.Option(
            help="Sharding type of every table: row_wise, table_wise, column_wise, … Default: the planner's."
        ),
    ] = None,
    trace: Annotated[str | None, typer.Option(help="File for the times of all stages, for Perfetto.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print all settings and stop.")] = False,
) -> None:
    """Run a recipe and print its scores.

    On several ranks (--nproc or torchrun) each rank trains on its share of the same batches, and the scores are the
    same.
    """
    from rich.text import Text

    from tilerec.recipes.registry import make_run
    from tilerec.train.config import ParallelConfig
    from tilerec.train.launch import joined, launch, under_torchrun
    from tilerec.train.override import settings

    try:
        run = make_run(recipe, data)
        options = {
            "data.on_bad_row": on_bad_row,
            "train.device": device,
            "log_dir": log_dir,
            "parallel.plan": plan,
            "parallel.sharding": sharding,
            "trace": trace,
        }
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        run = _with_log_dir(run, [*(set_ or []), *given])
        if show:
            console = _console()
            for name, value in settings(run).items():
                console.print(Text(f"{name} = {_plain(value)}"), soft_wrap=True)
            return
        if under_torchrun():
            if nproc is not None:
                raise ConfigError(
                    f"--nproc: got {nproc} under torchrun, which has already started the processes; expected no "
                    "--nproc. Leave it out."
                )
            _train_as_rank(run)
        elif nproc is not None and nproc > 1:
            launch(nproc, _train, run, device=run.train.device)
        elif run.parallel != ParallelConfig():
            # One rank holds all tiles. Sharding still runs, so the plan is checked.
            with joined(run.train.device) as group:
                _train(group, run)
        else:
            _train(None, run)
    except TilerecError as error:
        print_rank_error(error)
        raise typer.Exit(1) from None


app.command()(calibrate)
app.command()(stats)


def _train(group: ProcessGroupComms | None, run: RunConfig) -> None:
    """Train; rank 0 shows progress and scores."""
    from tilerec.train.loop import train as run_training
    from tilerec.train.report import report

    console = _console() if group is None or not group.rank else None
    result = run_training(run, console=console, group=group)
    if console is not None:
        console.print(report(result))
    if result.log_errors:
        raise FileError(
            f"log_dir {run.log_dir!r}: got {len(result.log_errors)} incomplete logs; expected complete logs. The "
            f"scores above are complete. {' '.join(result.log_errors)}"
        )


def _train_as_rank(run: RunConfig) -> None:
    """Train in a process that torchrun started. End the process if training fails, so torchrun stops the others."""
    from rich.text import Text

    from tilerec.train.launch import end, joined

    where = ""
    try:
        with joined(run.train.device) as group:
            where = f"rank {group.rank} of {group.size}: "
            _train(group, run)
    except TilerecError as error:
        print_rank_error(error, where)
        end(1)
    except BaseException:
        SafeConsole(stderr=True).print(Text(f"error: {where}{traceback.format_exc()}"), soft_wrap=True)
        end(1)


def _with_log_dir(run: RunConfig, given: list[str]) -> RunConfig:
    from tilerec.train.override import override_all

    run = override_all(run, given)
    if not run.log_dir and not any(text.startswith("log_dir=") for text in given):
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path("runs") / run.name / stamp
        # Two runs that start in the same second get separate folders.
        number = 1
        while folder.exists():
            number += 1
            folder = folder.with_name(f"{stamp}-{number}")
        run = override_all(run, [f"log_dir={folder}"])
    return run


def _plain(value: object) -> str:
    """Format a value as `--set` accepts it."""
    if isinstance(value, tuple):
        return ",".join(map(_plain, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _console() -> SafeConsole:
    return SafeConsole()


def main() -> None:
    """Run the command line."""
    # Warnings also contain names of tables and files: escape control characters in them.
    usual = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: printable(usual(*args, **kwargs))
    app()


if __name__ == "__main__":
    main()
