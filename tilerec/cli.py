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

Each command imports its modules when it runs, so `tilerec --help` starts fast.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Annotated

import typer

from tilerec.calibrate_cli import calibrate
from tilerec.checkpoint_cli import checkpoint_app, import_checkpoint
from tilerec.checkpoint_cli import export as export_checkpoint
from tilerec.command_group import CommandGroup
from tilerec.command_policy import interrupt_by_exception
from tilerec.data_cli import data_app
from tilerec.delta_cli import delta_app
from tilerec.doctor_cli import doctor, own_version
from tilerec.option_file import with_config
from tilerec.plan_cli.app import plan_app
from tilerec.port_cli import port
from tilerec.run_cli.commands import add_run_commands
from tilerec.stats_cli import stats
from tilerec.terminal import SafeConsole, printable

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes as long to import as all else of a help text
    help="Train recommender models.",
)


app.add_typer(plan_app, name="plan")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(delta_app, name="delta")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilerec {own_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
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
    SafeConsole().print(table)


add_run_commands(app)
checkpoint_app.command("export")(with_config(export_checkpoint))
checkpoint_app.command("import")(with_config(import_checkpoint))
app.command()(with_config(calibrate))
app.command()(with_config(stats))
app.command()(port)
app.command()(doctor)


def main() -> None:
    """Run the command line."""
    # Warnings also contain names of tables and files: escape control characters in them.
    usual = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: printable(usual(*args, **kwargs))
    interrupt_by_exception()
    app()


if __name__ == "__main__":
    main()
