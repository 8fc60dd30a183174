"""`tilerec export`: the trained model of a run as one file, for Python and C++ programs that serve it.

tilerec export run.toml --out model.pt2
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import ConfigError, TilerecError
from tilerec.file_kind import EXPORT
from tilerec.output_path import check_output_file
from tilerec.progress import LOADING, command_phase
from tilerec.terminal import print_plain, print_rank_error

if TYPE_CHECKING:
    from torch import nn

    from tilerec.data.batch import Batch
    from tilerec.models.sasrec_tower import SASRecTower
    from tilerec.models.two_tower import Tower
    from tilerec.train.trained_run import TrainedRun

EXAMPLE_SAMPLES = 7
"""Samples of the example batch: a number that no layer has as its width."""


def export(
    run: Annotated[
        str, typer.Argument(help="A run file, for its newest model; the log folder of a run; or a checkpoint in it.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write, such as model.pt2.")],
    data: Annotated[
        str | None, typer.Option(help="File with samples, for the names and types of inputs. Default: the run's data.")
    ] = None,
    tower: Annotated[
        str, typer.Option(help="Of a two-tower or next-item run: export the 'query' or the 'candidate' side alone.")
    ] = "",
    strict: Annotated[bool, typer.Option(help="Trace with Dynamo instead of running the Python code.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the run: name=value. Repeatable.")
    ] = None,
) -> None:
    """Write the newest model of a run, with its weights, to one file that runs without Python."""
    with command_phase(LOADING):
        from tilerec.train.trained_run import find_trained

    try:
        trained = find_trained(run).with_settings(set_ or [])
        shared = {"--data": [data or ""], **trained.data_inputs}
        check_output_file("--out", out, EXPORT, trained.inputs, shared=shared)
        _export(trained, out, data, tower, strict)
    except TilerecError as error:
        print_rank_error(error)
        raise typer.Exit(1) from None


def _export(trained: TrainedRun, out: Path, data: str | None, tower: str, strict: bool) -> None:
    import torch

    from tilerec.export.exporting import export as write
    from tilerec.export.loading import load
    from tilerec.train.world import World

    config = trained.config
    with command_phase("load the model"):
        if data is None:
            dataset = config.data.open()
            batch = next(iter(dataset.held_out(EXAMPLE_SAMPLES)))
        else:
            rows = config.data.open_rows((data,), labels=False)
            dataset, (batch, _) = rows, next(iter(rows.rows(EXAMPLE_SAMPLES, ())))
        model = trained.load(dataset, torch.device("cpu"), World(None))
    model, example = _part(model, batch, tower)
    with command_phase("compile the model"):
        write(model, example, out, strict=strict)
    manifest = load(out, verify=False).manifest
    print_plain(f"wrote {out}: {out.stat().st_size:,} bytes, {len(manifest.tables)} tables of {trained.folder}")
    for line in (spec.line() for spec in manifest.signature.specs()):
        print_plain(f"  input   {line}")
    for line in (spec.line() for spec in manifest.outputs):
        print_plain(f"  output  {line}")


def _part(model: nn.Module, batch: Batch, tower: str) -> tuple[nn.Module, object]:
    """Return the module to export, and its example."""
    from tilerec.models.sasrec import SASRec

    if not tower:
        if isinstance(model, SASRec):
            raise ConfigError(
                "--tower: got nothing for a run of next items; expected 'query', for vectors of sequences, or "
                "'candidate', for those of items. Choose one."
            )
        return model, {"dense_features": batch.dense_features, "sparse_features": batch.sparse_features}
    part = one_tower(model, tower)
    keys = batch.sparse_features.keys()
    return part, batch.sparse_features.permute([keys.index(name) for name in part.features])


def one_tower(model: nn.Module, side: str) -> Tower | SASRecTower:
    """Return the "query" or the "candidate" tower of a model.

    Raises:
        ConfigError: the model has none.
    """
    from tilerec.models.sasrec import SASRec
    from tilerec.models.sasrec_tower import SASRecTower
    from tilerec.models.two_tower import Tower, TwoTower

    if isinstance(model, SASRec):
        return SASRecTower(model, side)
    if not isinstance(model, TwoTower):
        raise ConfigError(
            f"--tower: got '{side}' for a run of {type(model).__name__}; expected a run with model.kind = "
            "'two_tower' or 'sasrec'. Leave it out."
        )
    return Tower(model, side)
