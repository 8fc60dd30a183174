"""`tilerec`: the command line.

tilerec recipes                                     list the recipes
tilerec train synthetic                             run one
tilerec train movielens --data ml-latest-small      train from raw files
tilerec train synthetic --set train.batch_size=4096 --show
tilerec train synthetic --nproc 2                   shard the tables over two processes
torchrun --nproc-per-node 2 -m tilerec train synthetic
tilerec init clicks.parquet                         write a first run file for a data set (run_cli/)
tilerec train run.toml                              train it
tilerec eval run.toml test.parquet                  score its newest model
tilerec predict run.toml test.parquet --out scores.parquet
tilerec quantize run.toml --max-ne 0.01% --out served  quantize its tables, by data
tilerec export run.toml --out model.pt2             write the model to one file that runs without Python
tilerec serve model.pt2                             serve that file over HTTP
tilerec export-index run.toml --out index           write the item vectors of a retrieval run
tilerec calibrate --nproc 2 --out topology.json     measure this machine's speeds for the planner (calibrate_cli.py)
tilerec stats ml-latest-small --out stats.json      measure the distribution of ids for the planner (stats_cli.py)
tilerec data convert clicks.tsv --out clicks.parquet text files to Parquet (data_cli.py)
tilerec checkpoint verify runs/today                look at checkpoints, verify, compare and export them
tilerec plan synthetic --ranks-per-host 8           plan the sharding and estimate the time of a step (plan_cli/)
tilerec port train.py --out ported.py               rewrite a program's imports of TorchRec (port_cli.py)
tilerec plan tables.json --config plan.toml         take options from a file (option_file.py)
tilerec doctor                                      check this installation (doctor_cli.py)
tilerec --install-completion                        complete commands and options in the shell

Each command is imported when it is used, and imports its modules when it runs, so it starts fast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

from tilerec.command_group import CommandGroup, CommandsOnUse
from tilerec.command_policy import interrupt_by_exception
from tilerec.option_file import with_config
from tilerec.terminal import printable


def _from(module: str, name: str, *, config: bool = False) -> Callable[[], Any]:
    """Return a maker of a command that imports its function or its app; config: with the option `--config`."""

    def make() -> Any:
        found = getattr(import_module(f"tilerec.{module}"), name)
        return with_config(found) if config else found

    return make


@cache
def _checkpoint_app() -> Any:
    from tilerec.checkpoint_cli import checkpoint_app, export, import_checkpoint

    checkpoint_app.command("export")(with_config(export))
    checkpoint_app.command("import")(with_config(import_checkpoint))
    return checkpoint_app


_COMMANDS: dict[str, Callable[[], Any]] = {
    "recipes": _from("run_cli.recipes", "recipes"),
    "train": _from("run_cli.train", "train", config=True),
    "eval": _from("run_cli.evaluate", "evaluate", config=True),
    "predict": _from("run_cli.predict", "predict", config=True),
    "quantize": _from("run_cli.quantize", "quantize", config=True),
    "export": _from("run_cli.export", "export", config=True),
    "export-index": _from("run_cli.export_index", "export_index", config=True),
    "parity": _from("run_cli.parity", "parity"),
    "serve": _from("run_cli.serve", "serve", config=True),
    "bench-serve": _from("run_cli.serve", "bench_serve", config=True),
    "serve-files": _from("run_cli.serve_files", "serve_files", config=True),
    "init": _from("run_cli.init", "init", config=True),
    "calibrate": _from("calibrate_cli", "calibrate", config=True),
    "stats": _from("stats_cli", "stats", config=True),
    "port": _from("port_cli", "port"),
    "doctor": _from("doctor_cli", "doctor"),
    "plan": _from("plan_cli.app", "plan_app"),
    "data": _from("data_cli", "data_app"),
    "checkpoint": _checkpoint_app,
    "delta": _from("delta_cli", "delta_app"),
}


class _Commands(CommandGroup):
    """The commands of `tilerec`. A process imports and makes the one that it runs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = CommandsOnUse(_COMMANDS)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes as long to import as all else of a help text
    help="Train recommender models.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tilerec.doctor_cli import own_version

        typer.echo(f"tilerec {own_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train recommender models."""


def main() -> None:
    """Run the command line."""
    # Warnings also contain names of tables and files: escape control characters in them.
    usual = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: printable(usual(*args, **kwargs))
    interrupt_by_exception()
    app()


if __name__ == "__main__":
    main()
