"""What the train loop asks of data: batches to learn from, batches held out, and what the columns are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilerec.data.batch import Batch
from tilerec.data.delimited import RowCount


@dataclass(frozen=True)
class SparseFeature:
    """A key of the batch's sparse features, and how many table rows its ids may name: they lie in [0, num_rows)."""

    name: str
    num_rows: int


class Dataset(ABC):
    """Samples with labels, split into a part to learn from and a part held out.

    The same arguments give the same batches. Iterators hold bounded memory.
    """

    @property
    @abstractmethod
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        """The keys of `Batch.sparse_features`, in order."""

    @property
    @abstractmethod
    def dense_features(self) -> tuple[str, ...]:
        """Names of the columns of `Batch.dense_features`; may be empty."""

    @abstractmethod
    def train(self, batch_size: int, epoch: int = 0) -> Iterator[Batch]:
        """One pass over the part to learn from. The last batch may be smaller; none is empty."""

    @abstractmethod
    def held_out(self, batch_size: int) -> Iterator[Batch]:
        """One pass over the part held out, always in the same order."""

    @abstractmethod
    def best_predictions(self) -> torch.Tensor | None:
        """float64 [held-out samples]: the true probabilities of the held-out labels, in order; None if unknown.

        No model ranks better than these on average, so their AUC and log loss are the best reachable ones.
        """

    @abstractmethod
    def row_count(self) -> RowCount:
        """Rows read and bad rows left out in the latest whole pass over the source."""
