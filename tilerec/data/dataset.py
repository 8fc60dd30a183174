"""Interface of data sets for the train loop: training batches, held-out batches, and the columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from tilerec.errors import ConfigError, MissingExtraError

try:
    import pyarrow as pa
except ModuleNotFoundError:
    raise MissingExtraError("tilerec.data", "pyarrow", "data") from None

from tilerec.data.batch import Batch
from tilerec.data.delimited import RowCount
from tilerec.data.share import Share, check_shares, shares
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

_D = TypeVar("_D", bound="Dataset")


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


@dataclass(frozen=True)
class Catalog:
    """Items of a data set, each with its features, for models that rank them. Legend: N items.

    Attributes:
        ids: row of each item in the table of the item feature, int64 [N]; items may share a row if ids are hashed.
        values: the items as the data name them [N].
        counts: occurrences as the item of a sample in the training part, int64 [N].
        features: the item feature and others, N samples.
    """

    ids: torch.Tensor
    values: pa.Array
    counts: torch.Tensor
    features: KeyedJaggedTensor

    def __len__(self) -> int:
        return int(self.ids.numel())

    def batch(self) -> Batch:
        """Return the items as samples without dense features; labels are 0."""
        return Batch(torch.zeros(len(self), 0), self.features, torch.zeros(len(self)))


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
        check_shares(batch_size, epoch, rank, world_size, start)
        for share in shares(self.train(batch_size, epoch), rank, world_size):
            if share.end > start:
                yield share

    @abstractmethod
    def held_out(self, batch_size: int) -> Iterator[Batch]:
        """Yield the batches of one pass over the held-out part, always in the same order."""

    @property
    def fingerprint(self) -> str:
        """Text that is the same on all ranks that open the same data; "" if ranks do not compare it."""
        return ""

    def with_label_bounds(self: _D, low: float, high: float) -> _D:
        """Return the data with a check of each label when it is read, where errors can name its place.

        The default returns the data unchanged. Override it for sources whose labels may be any number.

        Args:
            low, high: least and greatest label that a task accepts.
        """
        return self

    def best_predictions(self) -> torch.Tensor | None:
        """Return the true probabilities of the held-out labels, in order, float64 [held-out samples]; None if unknown.

        No model predicts better than these on average, so their AUC and log loss are the best possible.
        """
        return None

    @abstractmethod
    def row_count(self) -> RowCount:
        """Return the rows read and the bad rows left out in the last complete pass over the source."""

    def catalog(self, item: str, others: Sequence[str] = ()) -> Catalog:
        """Return the items that a retrieval model ranks.

        Args:
            item: the feature with the id of the item.
            others: further features of an item.

        Raises:
            ConfigError: the features do not exist, or data of this kind have no list of items.
        """
        raise ConfigError(
            f"{type(self).__name__}: got a task that ranks items; expected data.kind = 'interactions' or 'files'. "
            "Change the data, or the task."
        )

    def vocabularies(self) -> Mapping[str, pa.Array]:
        """Return the values of features with a vocabulary, by name: value i has row i + 1. A run keeps them."""
        return {}


class RowDataset(Dataset):
    """Samples of files in their order, to evaluate or predict all of them."""

    @abstractmethod
    def rows(self, batch_size: int, keys: Sequence[str] = ()) -> Iterator[tuple[Batch, pa.Table]]:
        """Yield all samples in the order of the data, each batch with the table of its key columns.

        Args:
            batch_size: samples of each batch but the last.
            keys: columns of the data, unchanged, such as those that name a sample.
        """

    @property
    @abstractmethod
    def column_names(self) -> Sequence[str]:
        """Columns that `rows` can yield as keys."""

    @property
    @abstractmethod
    def default_keys(self) -> Sequence[str]:
        """Columns that name the samples by default; none if no column does."""
