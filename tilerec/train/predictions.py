"""Predictions of a trained model on a data set, and the Parquet file of them.

    user_id  item_id  score                 one task
    user_id  item_id  score_click  score_buy    several

Each rank predicts its share of every batch, and rank 0 writes. Memory: a few batches, whatever the size of the data.

Legend: n samples of a batch, T tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from torch import Tensor, nn

from tilerec.atomic_file import open_replacement
from tilerec.data.batch import Batch
from tilerec.data.columns import nearest
from tilerec.data.share import bounds, cut
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError
from tilerec.train.evaluate import Predictions, Scores, predict_batch
from tilerec.train.world import World

ROW_COLUMN = "row"
"""Column with the number of each row, where no other key is known."""
_ROWS_PER_GROUP = 1 << 16
"""Least rows of a row group of the file, except for the last one."""


def score_columns(tasks: Sequence[str]) -> list[str]:
    """Return the names of the columns with predictions: `score` for one task, `score_<task>` for several."""
    return ["score"] if len(tasks) == 1 else [f"score_{task}" for task in tasks]


def key_columns(dataset: TableDataset, given: Sequence[str] = ()) -> list[str]:
    """Return the columns that name the samples: those given, or all id columns with one id per sample.

    Raises:
        ConfigError: a column does not exist, occurs twice, or has the name of a prediction.
    """
    single = [column.column for column in dataset.columns.ids if column.kind == "single" and not column.boundaries]
    keys = list(given) or list(dict.fromkeys(single))
    for name in keys:
        if name not in dataset.schema.names:
            raise ConfigError(
                f"--keys: got {name!r}, which the data do not have; {nearest(name, dataset.schema.names)}"
            )
        if name in score_columns(dataset.tasks) or keys.count(name) > 1:
            raise ConfigError(
                f"--keys: got {name!r}, which is a column of the predictions already; expected other names, each "
                "once. Choose other key columns."
            )
    return keys


def scored_rows(
    model: nn.Module,
    dataset: TableDataset,
    keys: Sequence[str],
    batch_size: int,
    device: torch.device,
    world: World,
) -> Iterator[tuple[Batch, pa.Table, Tensor]]:
    """Yield each batch of all rows, its keys, and its probabilities float64 [n] or [n, T]. Collective."""
    tasks = len(dataset.tasks)
    for batch, table in dataset.rows(batch_size, keys):
        low, high = bounds(batch.batch_size, world.rank, world.size)
        own = predict_batch(model, cut(batch, low, high), device)
        scores = world.gathered("scores", own.reshape(-1))
        yield batch, table, scores.view(-1, tasks) if tasks > 1 else scores


def evaluate_rows(
    model: nn.Module,
    dataset: TableDataset,
    batch_size: int,
    device: torch.device,
    world: World,
    progress: Callable[[int], object] = lambda rows: None,
) -> dict[str, Scores]:
    """Return the exact scores of each task on all rows; takes 12 bytes per sample and task. Collective.

    Args:
        progress: called with the number of rows of each batch.
    """
    probabilities, labels, weights = [], [], []
    for batch, _, scores in scored_rows(model, dataset, (), batch_size, device, world):
        probabilities.append(scores)
        labels.append(batch.labels)
        weights += [] if batch.weights is None else [batch.weights]
        progress(batch.batch_size)
    found = Predictions(torch.cat(probabilities), torch.cat(labels), torch.cat(weights) if weights else None)
    return Scores.by_task(found, dataset.tasks)


def write_predictions(
    path: str | Path,
    rows: Iterable[tuple[Batch, pa.Table, Tensor]],
    tasks: Sequence[str],
    *,
    rank: int = 0,
    progress: Callable[[int], object] = lambda rows: None,
) -> int:
    """Write keys and scores to a Parquet file on rank 0; return the number of rows.

    The file is replaced as a whole when all rows are there; until then, an earlier file is unchanged. Scores are
    float32.

    Args:
        rows: of `scored_rows`.
        progress: called with the number of rows of each batch.

    Raises:
        FileError: the file cannot be written.
    """
    if rank:
        return sum(table.num_rows for _, table, _ in rows)
    total = 0
    writer: parquet.ParquetWriter | None = None
    held: list[pa.Table] = []
    with open_replacement(path, "Predictions") as file:
        for _, table, scores in rows:
            held.append(_with_scores(table, scores, tasks, total))
            total += len(scores)
            progress(len(scores))
            if sum(one.num_rows for one in held) >= _ROWS_PER_GROUP:
                writer = _written(held, file, writer)
        if held:
            writer = _written(held, file, writer)
        if writer is not None:
            writer.close()
    return total


def _with_scores(table: pa.Table, scores: Tensor, tasks: Sequence[str], first: int) -> pa.Table:
    if not table.num_columns:
        table = pa.table({ROW_COLUMN: pa.array(range(first, first + len(scores)), pa.int64())})
    columns_T = scores.float().view(len(scores), len(tasks)).unbind(1)
    for name, column in zip(score_columns(tasks), columns_T, strict=True):
        table = table.append_column(name, pa.array(column.numpy()))
    return table


def _written(held: list[pa.Table], file: object, writer: parquet.ParquetWriter | None) -> parquet.ParquetWriter:
    """Write the tables as one row group and empty the list; return the writer."""
    whole = pa.concat_tables(held, promote_options="permissive")
    held.clear()
    if writer is None:
        writer = parquet.ParquetWriter(file, whole.schema)
    writer.write_table(whole.cast(writer.schema))
    return writer
