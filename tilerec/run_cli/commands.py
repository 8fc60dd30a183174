"""The commands of runs and of the models that they leave."""

from __future__ import annotations

import typer

from tilerec.option_file import with_config
from tilerec.run_cli.evaluate import evaluate
from tilerec.run_cli.export import export
from tilerec.run_cli.export_index import export_index
from tilerec.run_cli.init import init
from tilerec.run_cli.parity import parity
from tilerec.run_cli.predict import predict
from tilerec.run_cli.quantize import quantize
from tilerec.run_cli.serve import bench_serve, serve
from tilerec.run_cli.serve_files import serve_files
from tilerec.run_cli.train import train


def add_run_commands(app: typer.Typer) -> None:
    """Add the commands, in the order of the help."""
    app.command()(with_config(train))
    app.command("eval")(with_config(evaluate))
    app.command()(with_config(predict))
    app.command()(with_config(quantize))
    app.command()(with_config(export))
    app.command("export-index")(with_config(export_index))
    app.command()(parity)
    app.command()(with_config(serve))
    app.command("bench-serve")(with_config(bench_serve))
    app.command("serve-files")(with_config(serve_files))
    app.command()(with_config(init))
