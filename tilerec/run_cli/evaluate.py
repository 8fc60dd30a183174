"""`tilerec eval`: scores of a trained run on files, or on its held-out part.

tilerec eval run.toml test.parquet
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import TilerecError
from tilerec.progress import LOADING, command_phase, row_progress
from tilerec.run_cli.ranks import run_on_ranks
from tilerec.terminal import SafeConsole, print_rank_error

if TYPE_CHECKING:
    from tilerec.comms.process import ProcessGroupComms
    from tilerec.train.trained_run import TrainedRun


def evaluate(
    run: Annotated[
        str, typer.Argument(help="A run file, for its newest model; the log folder of a run; or a checkpoint in it.")
    ],
    data: Annotated[
        str | None,
        typer.Argument(help="File, folder or URL with labelled samples. Default: the run's held-out part."),
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also score popularity, EASE and item-to-item transitions.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the run: name=value. Repeatable.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda, … Default: that of the run.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of processes; tables are sharded over them.", min=1)] = None,
) -> None:
    """Print the scores of the newest model of a run on labelled data."""
    with command_phase(LOADING):
        from tilerec.train.trained_run import find_trained

    try:
        trained = find_trained(run).with_settings(set_ or [])
        place = device or trained.config.train.device
        run_on_ranks(_evaluate, trained, data, baselines, place, nproc=nproc, device=place)
    except TilerecError as error:
        print_rank_error(error)
        raise typer.Exit(1) from None


def _evaluate(
    group: ProcessGroupComms | None, trained: TrainedRun, data: str | None, baselines: bool, device: str
) -> None:
    """Evaluate on one rank; rank 0 prints."""
    from tilerec.train.device import run_device
    from tilerec.train.labelled_data import LabelledData, counted
    from tilerec.train.report import score_table
    from tilerec.train.world import World

    world = World(group)
    try:
        config = trained.config
        place = run_device(device, world.size)
        with command_phase("open the data", show=world.rank == 0):
            samples = LabelledData.open(config, data)
        dataset = samples.dataset
        with command_phase("load the model", show=world.rank == 0):
            model = trained.load(dataset, place, world)
        task = config.task.build(dataset, config.train, place, world)
        with row_progress("evaluate", dataset.row_count().rows, show=world.rank == 0) as progress:
            tasks = dict(task.evaluate(model, counted(samples.batches, progress)).tasks)
        if baselines:
            from tilerec.retrieval.baselines import checked_baselines

            scores = checked_baselines(task, dataset, data, config.train.eval_batch_size)
            tasks = {"model": next(iter(tasks.values())), **scores}
    except BaseException as error:
        world.abort(error)
        raise
    if world.rank == 0:
        what = f"samples of {data}" if data else "held-out samples"
        SafeConsole().print(score_table(config.name, what, tasks, mean=not baselines))
