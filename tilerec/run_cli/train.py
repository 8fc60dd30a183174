"""`tilerec train`: run a run file or a recipe.

tilerec train run.toml --nproc 2
tilerec train synthetic --set train.batch_size=4096
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.progress import LOADING, command_phase
from tilerec.run_cli.ranks import run_on_ranks
from tilerec.terminal import SafeConsole, print_rank_error

if TYPE_CHECKING:
    from tilerec.comms.process import ProcessGroupComms
    from tilerec.train.config import RunConfig


_Replace = Annotated[
    int | None,
    typer.Option(
        "--replace", help="Number of killed ranks that --nproc replaces, from the other ranks' memory.", min=0
    ),
]
_Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue from the newest whole checkpoint in --log-dir, if there is one."),
]


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run file (.toml), a name from `tilerec recipes`, or module:function of your own.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Path of the data, for recipes that read files; replaces that of a run file."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: name=value. Repeatable."),
    ] = None,
    on_bad_row: Annotated[
        str | None,
        typer.Option(help="Malformed lines: 'error' stops the run, 'skip' skips and counts them."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device: cpu, cuda, cuda:1, … Default: that of the run; a GPU if there is one.")
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option(help="Folder for logs and model; '' for none. Default: runs/<name>/<date and time>."),
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
        typer.Option(help="Sharding type of every table: row_wise, table_wise, column_wise, … Default: the planner's."),
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints of the whole run.", min=1)] = None,
    resume: _Resume = False,
    replace_ranks: _Replace = None,
    trace: Annotated[str | None, typer.Option(help="File for the times of all stages, for Perfetto.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print all settings and stop.")] = False,
) -> None:
    """Train a run file or a recipe, print its scores, and leave logs and model in a folder.

    On several ranks (--nproc or torchrun) each rank trains on its share of the same batches, and the scores are the
    same.
    """
    with command_phase(LOADING):
        from tilerec.recipes.registry import make_run
        from tilerec.train import loop  # noqa: F401 - the modules of a run
        from tilerec.train.log_folder import check_outputs

    try:
        run = make_run(recipe, data)
        options = {
            "data.on_bad_row": on_bad_row,
            "train.device": device,
            "log_dir": log_dir,
            "parallel.plan": plan,
            "parallel.sharding": sharding,
            "parallel.replace": replace_ranks,
            "trace": trace,
            "checkpoint.every": save_every,
            "checkpoint.resume": resume or None,
        }
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        _check_resume(resume, log_dir or run.log_dir)
        run = _with_log_dir(run, recipe, [*(set_ or []), *given])
        if show:
            _print_settings(run)
            return
        check_outputs(run, recipe)
        _on_ranks(run, nproc)
    except TilerecError as error:
        print_rank_error(error)
        raise typer.Exit(1) from None


def _check_resume(resume: bool, log_dir: str) -> None:
    if resume and not log_dir:
        raise ConfigError(
            "--resume: got no --log-dir; expected the folder of the run to continue. Give it, or set log_dir."
        )


def _print_settings(run: RunConfig) -> None:
    """Print every setting, as `--set` accepts it."""
    from rich.text import Text

    from tilerec.train.override import settings

    console = SafeConsole()
    for name, value in settings(run).items():
        console.print(Text(f"{name} = {_plain(value)}"), soft_wrap=True)


def _on_ranks(run: RunConfig, nproc: int | None) -> None:
    """Train on every rank; a run that a signal ends without a save leaves a line on how to continue it."""
    from tilerec.run_cli.stopped_run import stop_line

    with stop_line(run):
        run_on_ranks(
            _train, run, nproc=nproc, device=run.train.device, grouped=run.parallel.shards,
            saves=run.checkpoint.saves, timeout_s=run.parallel.timeout, replace=run.parallel.replace,
        )  # fmt: skip


def _train(group: ProcessGroupComms | None, run: RunConfig) -> None:
    """Train; rank 0 shows progress and scores."""
    from tilerec.run_cli.stopped_run import saved_line
    from tilerec.train.loop import train as run_training
    from tilerec.train.report import report

    console = SafeConsole() if group is None or not group.rank else None
    with saved_line(run, console):
        result = run_training(run, console=console, group=group)
    if console is not None:
        console.print(report(result))
    if result.log_errors:
        raise FileError(
            f"log_dir {run.log_dir!r}: got {len(result.log_errors)} incomplete logs; expected complete logs. The "
            f"scores above are complete. {' '.join(result.log_errors)}"
        )


def _with_log_dir(run: RunConfig, source: str, given: list[str]) -> RunConfig:
    """Return the run with overrides, and with a new log folder unless one is given.

    A run file's logs are beside it, where `tilerec eval` and `tilerec predict` look for the newest model.
    """
    from tilerec.train.override import override_all
    from tilerec.train.trained_run import runs_folder

    run = override_all(run, given)
    if not run.log_dir and not any(text.startswith("log_dir=") for text in given):
        stamp = time.strftime("%Y%m%d-%H%M%S")
        file = Path(source) if source.endswith(".toml") else Path("run")
        folder = runs_folder(file, run.name) / stamp
        # Two runs that start in the same second get separate folders.
        number = 1
        while folder.exists():
            number += 1
            folder = folder.with_name(f"{stamp}-{number}")
        run = replace(run, log_dir=str(folder))
    return run


def _plain(value: object) -> str:
    """Format a value as `--set` accepts it."""
    if isinstance(value, tuple):
        return ",".join(map(_plain, value))
    if isinstance(value, dict):
        return ",".join(f"{name}={_plain(one)}" for name, one in value.items())
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
