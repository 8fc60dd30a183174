"""`tilerec export-index`: the item vectors of a retrieval or next-item run, for search outside of tilerec.

tilerec export-index run.toml --out index --faiss flat
tilerec export-index run.toml --out index --index int8
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import ConfigError, TilerecError
from tilerec.progress import LOADING, command_phase, row_progress
from tilerec.run_cli.ranks import run_on_ranks
from tilerec.terminal import print_plain, print_rank_error

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import nn

    from tilerec.comms.process import ProcessGroupComms
    from tilerec.data.dataset import Dataset
    from tilerec.train.trained_run import TrainedRun


def export_index(
    run: Annotated[str, typer.Argument(help="A run file, for its newest model, or the log folder of a run.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    faiss: Annotated[str, typer.Option(help="Also write a faiss index: flat (exact) or hnsw.")] = "none",
    index: Annotated[
        str, typer.Option(help="Also write an item index for models in PyTorch: exact, int8, ivf or ivf-int8.")
    ] = "none",
    queries: Annotated[
        str | None, typer.Option(help="File, folder or URL with samples, whose query vectors are written as well.")
    ] = None,
    keys: Annotated[str, typer.Option(help="Columns to copy beside query vectors, comma-separated.")] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the run: name=value. Repeatable.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda, … Default: that of the run.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of processes; tables are sharded over them.", min=1)] = None,
) -> None:
    """Write the vectors of all items of a retrieval or next-item run, and optionally a faiss index."""
    from tilerec.retrieval.index_files import check_out

    with command_phase(LOADING):
        from tilerec.train.trained_run import find_trained

    try:
        trained = find_trained(run).with_settings(set_ or [])
        read = {"--queries": [queries or ""], **trained.data_inputs, **trained.inputs}
        check_out(out, faiss, index, read)
        names = tuple(name.strip() for name in keys.split(",") if name.strip())
        place = device or trained.config.train.device
        run_on_ranks(_export, trained, str(out), faiss, index, queries, names, place, nproc=nproc, device=place)
    except TilerecError as error:
        print_rank_error(error)
        raise typer.Exit(1) from None


def _export(
    group: ProcessGroupComms | None,
    trained: TrainedRun,
    out: str,
    kind: str,
    form: str,
    queries: str | None,
    keys: tuple[str, ...],
    device: str,
) -> None:
    """Export on one rank; rank 0 writes the files."""
    from tilerec.retrieval.index_files import write_index
    from tilerec.retrieval.ranking_task import RankingTask
    from tilerec.train.device import run_device
    from tilerec.train.kinds import kind_of
    from tilerec.train.predictions import key_columns
    from tilerec.train.world import World

    world, recall = World(group), None
    try:
        config = trained.config
        place = run_device(device, world.size)
        rows = None if queries is None else config.data.open_rows((queries,), labels=False)
        dataset = config.data.open_catalog() if rows is None else rows
        task = config.task.build(dataset, config.train, place, world)
        if not isinstance(task, RankingTask):
            raise ConfigError(
                f"{trained.folder}: got a run with task.kind = {kind_of(config.task)!r}; expected 'retrieval' or "
                "'next_item'. Use `tilerec predict` for this run."
            )
        with command_phase("load the model", show=world.rank == 0):
            model = trained.load(dataset, place, world)
        with command_phase("compute the vectors of items", show=world.rank == 0):
            index = task.index_vectors(model)
        tower = "" if form == "none" else _query_hash(trained, dataset, model)
        tables: Iterator[tuple[int, pa.Table]] = iter(())
        if rows is not None:
            names = key_columns(rows, keys or config.data.keys, ["vector"])
            tables = task.query_tables(model, rows, names, config.train.eval_batch_size)
        with row_progress("queries", dataset.row_count().rows, show=world.rank == 0) as progress:
            if world.rank:
                for _ in tables:
                    pass
            else:
                facts = {"run": str(trained.folder), "name": config.name, "task": kind_of(config.task)}
                recall = write_index(
                    Path(out), index, facts, tables, kind=kind, form=form, tower=tower, progress=progress
                )
    except BaseException as error:
        world.abort(error)
        raise
    if world.rank == 0:
        count, dim = index.vectors.shape
        print_plain(f"wrote {out}: {count:,} items with {dim} numbers each, of {trained.folder}")
        if recall is not None:
            vectors = "vectors of items" if queries is None else "queries"
            print_plain(
                f"--index {form}: recall@{recall.k} {recall.recall:.3f} at {recall.rows:.1%} of the rows, for "
                f"{recall.queries:,} {vectors}"
            )


def _query_hash(trained: TrainedRun, dataset: Dataset, model: nn.Module) -> str:
    """Return the hash of the query tower's weights, on rank 0. Collective.

    The model may be sharded, so the names are those of one without values.
    """
    import torch

    from tilerec.models.two_tower import Tower, TwoTower
    from tilerec.train.saved_model import weights_hash

    meta = torch.device("meta")
    whole = trained.config.model.build(dataset, meta, meta)
    return weights_hash(model, {*Tower(whole, "query").state_dict()} if isinstance(whole, TwoTower) else None)
