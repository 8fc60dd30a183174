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
from tilerec.data.dataset import RowDataset
from tilerec.data.share import bounds, cut
from tilerec.errors import ConfigError
from tilerec.file_kind import PREDICT
from tilerec.train.evaluate import predict_batch
from tilerec.train.world import World

ROW_COLUMN = "row"
"""Column with the number of each row, where no other key is known."""
_ROWS_PER_GROUP = 1 << 16
"""Least rows of a row group of the file, except for the last one."""


def score_columns(tasks: Sequence[str]) -> list[str]:
    """Return the names of the columns with predictions: `score` for one task, `score_<task>` for several."""
    return ["score"] if len(tasks) == 1 else [f"score_{task}" for task in tasks]


def key_columns(dataset: RowDataset, given: Sequence[str], predicted: Sequence[str]) -> list[str]:
    """Return the columns that name the samples: those given, or the data's default.

    Args:
        predicted: columns of the predictions.

    Raises:
        ConfigError: a column does not exist, occurs twice, or has the name of a prediction.
    """
    keys = list(given) or list(dataset.default_keys)
    for name in keys:
        if name not in dataset.column_names:
            raise ConfigError(
                f"--keys: got {name!r}, which the data do not have; {nearest(name, dataset.column_names)}"
            )
        if name in predicted or keys.count(name) > 1:
            raise ConfigError(
                f"--keys: got {name!r}, which is a column of the predictions already; expected other names, each "
                "once. Choose other key columns."
            )
    return keys


def scored_rows(
    model: nn.Module,
    dataset: RowDataset,
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


def write_predictions(
    path: str | Path,
    tables: Iterable[tuple[int, pa.Table]],
    *,
    rank: int = 0,
    progress: Callable[[int], object] = lambda rows: None,
) -> int:
    """Write tables of predictions to a Parquet file on rank 0; return the number of samples.

    The file is replaced as a whole when all rows are there; until then, an earlier file is unchanged.

    Args:
        tables: of `Task.predict`: the number of samples and the predictions of each batch.
        progress: called with the number of samples of each batch.

    Raises:
        FileError: the file cannot be written.
    """
    if rank:
        return sum(samples for samples, _ in tables)
    total = 0
    writer: parquet.ParquetWriter | None = None
    held: list[pa.Table] = []
    with open_replacement(path, "Predictions") as file:
        for samples, table in tables:
            held.append(table)
            total += samples
            progress(samples)
            if sum(one.num_rows for one in held) >= _ROWS_PER_GROUP:
                writer = _written(held, file, writer)
        if held:
            writer = _written(held, file, writer)
        if writer is not None:
            writer.close()
    return total


def score_table(keys: pa.Table, scores: Tensor, tasks: Sequence[str], first: int) -> pa.Table:
    """Return keys with the scores of their samples, float32; without keys, with the numbers of the rows.

    Args:
        scores: [n] or [n, T].
        first: number of the first row.
    """
    if not keys.num_columns:
        keys = pa.table({ROW_COLUMN: pa.array(range(first, first + len(scores)), pa.int64())})
    columns_T = scores.float().view(len(scores), len(tasks)).unbind(1)
    for name, column in zip(score_columns(tasks), columns_T, strict=True):
        keys = keys.append_column(name, pa.array(column.numpy()))
    return keys


def _written(held: list[pa.Table], file: object, writer: parquet.ParquetWriter | None) -> parquet.ParquetWriter:
    """Write the tables as one row group and empty the list; return the writer."""
    whole = pa.concat_tables(held, promote_options="permissive")
    held.clear()
    if writer is None:
        writer = parquet.ParquetWriter(file, whole.schema.with_metadata(PREDICT.metadata))
    writer.write_table(whole.cast(writer.schema))
    return writer
