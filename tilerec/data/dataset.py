"""Interface of data sets for the train loop: training batches, held-out batches, and the columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilerec.data.batch import Batch
from tilerec.data.delimited import RowCount
from tilerec.data.share import Share, shares


@dataclass(frozen=True)
class SparseFeature:
    """A key of the batch's sparse features, and its table.

    Attributes:
        name: the key.
        num_rows: rows of the table; ids are in [0, num_rows).
        table: the table's name. Features with the same name share one table, and have the same `num_rows`. "": the
            feature has its own table.
        weighted: each id has a weight, in the weights of `Batch.sparse_features`.
        managed: ids are 64-bit hashes, and a managed-collision table assigns its rows to them.
        max_length: the largest number of ids of a sample; 0: unlimited.
    """

    name: str
    num_rows: int
    table: str = ""
    weighted: bool = False
    managed: bool = False
    max_length: int = 0


class Dataset(ABC):
    """Samples with labels, split into a training part and a held-out part.

    Equal arguments give equal batches. Iterators use bounded memory.
    """

    @property
    @abstractmethod
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        """The keys of `Batch.sparse_features`, in order."""

    @property
    @abstractmethod
    def dense_features(self) -> tuple[str, ...]:
        """Names of the columns of `Batch.dense_features`; may be empty."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the columns of `Batch.labels`; one name for labels [B]."""
        return ("click",)

    @abstractmethod
    def train(self, batch_size: int, epoch: int = 0) -> Iterator[Batch]:
        """Yield the batches of one pass over the training part. The last batch may be smaller; none is empty."""

    def train_shares(
        self, batch_size: int, epoch: int = 0, *, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> Iterator[Share]:
        """Yield a rank's share of each global batch of `train`.

        The default reads every batch completely, and keeps the share. Override it for sources that can read a share
        alone, or begin in the middle.

        Args:
            batch_size: of the global batches.
            start: number of samples of the pass to leave out, a multiple of `batch_size`: the `end` of the last share
                of an interrupted pass. The remaining shares are the same as without it.
        """
        for share in shares(self.train(batch_size, epoch), rank, world_size):
            if share.end > start:
                yield share

    @abstractmethod
    def held_out(self, batch_size: int) -> Iterator[Batch]:
        """Yield the batches of one pass over the held-out part, always in the same order."""

    def best_predictions(self) -> torch.Tensor | None:
        """Return the true probabilities of the held-out labels, in order, float64 [held-out samples]; None if unknown.

        No model predicts better than these on average, so their AUC and log loss are the best possible.
        """
        return None

    @abstractmethod
    def row_count(self) -> RowCount:
        """Return the rows read and the bad rows left out in the last complete pass over the source."""
