"""`tilerec`: the command line.

tilerec recipes                                     list the recipes
tilerec train synthetic                             run one
tilerec train movielens --data ml-latest-small      train from raw files
tilerec train synthetic --set train.batch_size=4096 --show
tilerec train synthetic --nproc 2                   shard the tables over two processes
torchrun --nproc-per-node 2 -m tilerec train synthetic
tilerec calibrate --nproc 2 --out topology.json     measure this machine's speeds for the planner
tilerec stats ml-latest-small --out stats.json      measure the distribution of ids for the planner
tilerec plan synthetic --ranks-per-host 8           plan the sharding and estimate the time of a step (plan_cli)

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

from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.plan_cli.app import plan_app
from tilerec.terminal import SafeConsole, print_error, printable

if TYPE_CHECKING:
    from rich.table import Table

    from tilerec.comms.group import Group
    from tilerec.comms.process import ProcessGroupComms
    from tilerec.data.ids import IdSource
    from tilerec.data.statistics import Statistics
    from tilerec.spec.speeds import Speeds
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
        _print_error(error)
        raise typer.Exit(1) from None


@app.command()
def calibrate(
    nproc: Annotated[
        int, typer.Option(help="Processes to measure at once: use the number that will train here.", min=1)
    ] = 2,
    out: Annotated[Path, typer.Option(help="The topology file to write.")] = Path("topology.json"),
    device: Annotated[str, typer.Option(help="Device to measure: cpu or cuda.")] = "cpu",
) -> None:
    """Measure this machine (under a minute), print its speeds and write a topology file for the planner."""
    from tilerec.terminal import print_plain
    from tilerec.train.launch import launch

    try:
        if not out.parent.is_dir():
            raise ConfigError(
                f"--out: got {out}; expected a file in an existing folder. Create {out.parent} first."
            )
        if out.is_dir():
            raise ConfigError(f"--out: got the folder {out}; expected a file. Name a file in it.")
        launch(nproc, _calibrate, str(out), device, device=device)
    except TilerecError as error:
        _print_error(error)
        raise typer.Exit(1) from None
    print_plain(f"wrote {out}: the speeds of {nproc} {device} ranks")


def _calibrate(group: Group, out: str, device: str) -> None:
    """Measure on all ranks of a group; rank 0 prints the speeds, then writes the topology.

    Raises:
        FileError: the file cannot be written. The topology is printed first, so you can save it by hand.
    """
    import json

    import torch

    from tilerec.atomic_file import write_file
    from tilerec.planner.cost.calibrate import calibrate, machine
    from tilerec.terminal import print_plain

    own = f"cuda:{group.rank % torch.cuda.device_count()}" if device == "cuda" else device
    measured = calibrate(group, machine(group.size, device), own)
    if group.rank:
        return
    assert measured.speeds is not None
    print_plain(_speeds_text(measured.speeds))
    text = json.dumps(measured.to_json(), indent=1)
    try:
        write_file(out, text + "\n", "Topology")
    except FileError:
        print_plain(f"The topology, to save by hand:\n{text}")
        raise


def _speeds_text(speeds: Speeds) -> str:
    """Format all speeds as two tables: rates per width, then single numbers."""
    from tilerec.planner.report.report_text import format_columns
    from tilerec.spec.speeds import PER_WIDTH, SINGLE

    widths = [str(width) for width in speeds.widths]
    rates = [[name, *(f"{1e9 * rate:.4g}" for rate in getattr(speeds, name))] for name in PER_WIDTH]
    single = [[name, f"{1e9 * getattr(speeds, name):.4g}"] for name in SINGLE]
    single += [["fresh", f"{1e9 * speeds.fresh:.4g}"]] if speeds.fresh is not None else []
    return "\n\n".join(
        [
            speeds.origin,
            format_columns(["ns per row of columns", *widths], rates, range(1, 1 + len(widths))),
            format_columns(["ns per id, byte, call, ...", ""], single, [1]),
            f"cache per rank: {speeds.cache:,} bytes",
        ]
    )


@app.command()
def stats(
    data: Annotated[
        str | None, typer.Argument(help="A file or folder: Criteo, MovieLens, delimited text or Parquet.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The JSON file to write; `tilerec plan` reads it.")] = Path(
        "stats.json"
    ),
    recipe: Annotated[
        str | None,
        typer.Option(help="Count the row ids that this recipe trains on, instead of a file's ids."),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format", help="auto, criteo, movielens, delimited or parquet. auto: from file name and header."
        ),
    ] = "auto",
    features: Annotated[
        str, typer.Option(help="Columns with ids, comma-separated. Default: those of the format.")
    ] = "",
    separator: Annotated[
        str, typer.Option(help="Separator of the ids within one field of delimited text.")
    ] = "",
    on_bad_row: Annotated[
        str, typer.Option(help="Malformed lines: 'error' stops, 'skip' skips and counts them.")
    ] = "error",
) -> None:
    """Read a data set once and write statistics of its ids: count, distinct count, skew."""
    from tilerec.data.ids import BatchIds, open_ids
    from tilerec.recipes.registry import make_run
    from tilerec.terminal import print_plain
    from tilerec.train.override import override_all

    try:
        if not out.absolute().parent.is_dir():
            raise ConfigError(
                f"--out: got {out}; expected a file in an existing folder. Create {out.parent} first."
            )
        names = tuple(name.strip() for name in features.split(",") if name.strip())
        source: IdSource
        if recipe is not None:
            if names or separator or format_ != "auto":
                raise ConfigError(
                    "--recipe: got --features, --separator or --format, too; expected none of them, as the recipe "
                    "defines its data. Leave them out."
                )
            run = override_all(make_run(recipe, data), [f"data.on_bad_row={on_bad_row}"] if data else [])
            dataset = run.data.open()
            source = BatchIds(lambda: dataset.train(run.train.batch_size), f"recipe {recipe}")
        elif data is None:
            raise ConfigError(
                "DATA: got nothing; expected a file or folder. Give one, or --recipe for a recipe that generates data."
            )
        else:
            source = open_ids(
                data,
                format=format_,  # type: ignore[arg-type] # `open_ids` checks both strings
                features=names,
                separator=separator,
                on_bad_row=on_bad_row,  # type: ignore[arg-type]
            )
        found = _gather_statistics(source)
        _console().print(_stats_table(found))
        found.save(out)
    except TilerecError as error:
        _print_error(error)
        raise typer.Exit(1) from None
    skipped = f", {found.skipped:,} malformed lines skipped" if found.skipped else ""
    print_plain(f"wrote {out}: {found.rows:,} samples{skipped}")


def _gather_statistics(source: IdSource) -> Statistics:
    """Read a source; show a progress bar if stderr is a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from tilerec.data.statistics import gather

    console = SafeConsole(stderr=True)
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} samples"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("read", total=source.progress.total or None, rows=0)
        return gather(
            source, lambda progress: bar.update(task, completed=progress.done, rows=source.count.rows)
        )


def _stats_table(found: Statistics) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("feature", "ids per sample", "distinct", "expected", "exponent", "error", "most frequent")
    for column in table.columns[1:6]:
        column.justify = "right"
    for name, one in found.features.items():
        heavy = ", ".join(f"{str(value)[:16]} {100 * count / one.ids:.1f}%" for value, count in one.heavy[:1])
        cells = (
            f"{one.ids_per_sample:.3g}",
            f"{one.distinct:,}",
            f"{one.population:,}",
            f"{one.exponent:.2f}",
            f"{100 * one.distance:.1f}%",
        )
        table.add_row(Text(name), *cells, Text(heavy))
    return table


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
        _print_error(error, where)
        end(1)
    except BaseException:
        SafeConsole(stderr=True).print(Text(f"error: {where}{traceback.format_exc()}"), soft_wrap=True)
        end(1)


def _print_error(error: TilerecError, where: str = "") -> None:
    trace = getattr(error, "trace", "")  # of a rank that failed
    if trace:
        SafeConsole(stderr=True).print(trace, soft_wrap=True, markup=False, highlight=False)
    print_error(f"{where}{error}")


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
