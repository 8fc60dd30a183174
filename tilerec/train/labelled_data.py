"""`LabelledData`: the labelled samples that a run's model is scored on, its held-out part or other files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset
from tilerec.train.config import RunConfig


@dataclass(frozen=True)
class LabelledData:
    """Labelled samples.

    Attributes:
        dataset: the data set, with the checks of the run's task.
        batches: all samples, in batches of the run's `train.eval_batch_size`; to be read once.
    """

    dataset: Dataset
    batches: Iterator[Batch]

    @classmethod
    def open(cls, config: RunConfig, data: str | None) -> LabelledData:
        """Open a file, folder or URL with the columns of a run, or its held-out part if `data` is None.

        Raises:
            ConfigError: a column does not exist, or the run's data have no columns with names.
            InputError: the data cannot be read.
        """
        size = config.train.eval_batch_size
        if data is None:
            dataset = config.task.with_checks(config.data.open())
            return cls(dataset, dataset.held_out(size))
        rows = config.task.with_checks(config.data.open_rows((data,), labels=True))
        return cls(rows, (batch for batch, _ in rows.rows(size)))


def counted(batches: Iterable[Batch], progress: Callable[[int], object]) -> Iterator[Batch]:
    """Yield batches, and report the samples of each to `progress` once the next one is needed."""
    for batch in batches:
        yield batch
        progress(batch.batch_size)
