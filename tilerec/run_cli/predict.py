"""`tilerec predict`: predictions of a trained run on files.

tilerec predict run.toml test.parquet --out scores.parquet
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import TilerecError
from tilerec.file_kind import PREDICT
from tilerec.output_path import check_output_file
from tilerec.progress import LOADING, command_phase, row_progress
from tilerec.run_cli.ranks import run_on_ranks
from tilerec.terminal import print_plain, print_rank_error

if TYPE_CHECKING:
    from tilerec.comms.process import ProcessGroupComms
    from tilerec.train.trained_run import TrainedRun


def predict(
    run: Annotated[
        str, typer.Argument(help="A run file, for its newest model; the log folder of a run; or a checkpoint in it.")
    ],
    data: Annotated[str, typer.Argument(help="File, folder or URL with the samples; labels are not needed.")],
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    keys: Annotated[
        str,
        typer.Option(help="Columns to copy, comma-separated. Default: id columns with one id, or the row number."),
    ] = "",
    batch_size: Annotated[int, typer.Option(help="Samples per batch; 0: train.eval_batch_size of the run.", min=0)] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the run: name=value. Repeatable.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda, … Default: that of the run.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of processes; tables are sharded over them.", min=1)] = None,
) -> None:
    """Write predictions with the newest model of a run: key columns and scores, or the best items of each query."""
    with command_phase(LOADING):
        from tilerec.train.trained_run import find_trained

    try:
        trained = find_trained(run).with_settings(set_ or [])
        check_output_file("--out", out, PREDICT, {"DATA": [data], **trained.inputs}, shared=trained.data_inputs)
        names = tuple(name.strip() for name in keys.split(",") if name.strip())
        place = device or trained.config.train.device
        run_on_ranks(_predict, trained, data, str(out), names, batch_size, place, nproc=nproc, device=place)
    except TilerecError as error:
        print_rank_error(error)
        raise typer.Exit(1) from None


def _predict(
    group: ProcessGroupComms | None,
    trained: TrainedRun,
    data: str,
    out: str,
    keys: tuple[str, ...],
    batch_size: int,
    device: str,
) -> None:
    """Predict on one rank; rank 0 writes the file."""
    from tilerec.train.device import run_device
    from tilerec.train.predictions import key_columns, write_predictions
    from tilerec.train.world import World

    world = World(group)
    try:
        config = trained.config
        place = run_device(device, world.size)
        with command_phase("open the data", show=world.rank == 0):
            dataset = config.data.open_rows((data,), labels=False)
        task = config.task.build(dataset, config.train, place, world)
        names = key_columns(dataset, keys or config.data.keys, task.prediction_columns())
        with command_phase("load the model", show=world.rank == 0):
            model = trained.load(dataset, place, world)
        tables = task.predict(model, dataset, names, batch_size or config.train.eval_batch_size)
        with row_progress("predict", dataset.row_count().rows, show=world.rank == 0) as progress:
            total = write_predictions(out, tables, rank=world.rank, progress=progress)
    except BaseException as error:
        world.abort(error)
        raise
    if world.rank == 0:
        print_plain(f"wrote {out}: predictions for {total:,} samples of {trained.folder}")
