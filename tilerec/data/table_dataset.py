"""`TableDataset`: samples from tables on disk or in memory, or from data sets of PyTorch, with columns that you choose.

Order of a pass: `order.py`, and `stream_order.py` for iterable data sets. It is a pure function of (seed, epoch,
position), so any number of ranks trains on the same global batches, and an interrupted pass continues at the `end` of
any share, on another number of ranks too.

Memory: per pass, one window of gathered rows for each lane of the rank, one slab of decoded columns, and
`read_ahead_bytes` of batches. A window is one row group, or several small ones with `shuffle_rows` rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import pyarrow as pa

from tilerec.data.assembly import assembled_rows, assembled_shares
from tilerec.data.batch import Batch
from tilerec.data.batch_join import SessionSavings
from tilerec.data.columns import Columns
from tilerec.data.dataset import Catalog, RowDataset, SparseFeature
from tilerec.data.delimited import RowCount
from tilerec.data.hold_out import NO_HOLD_OUT, HoldOut
from tilerec.data.item_catalog import ItemReader
from tilerec.data.pass_reader import OrderedParts
from tilerec.data.row_groups import RowGroups
from tilerec.data.row_passes import RowPasses
from tilerec.data.share import Share, check_shares
from tilerec.data.shuffle import check_seed
from tilerec.data.table_source import as_source, opened
from tilerec.errors import ConfigError, InputError


class TableDataset(RowDataset):
    """Samples from Parquet files, text files, Arrow tables, frames, or data sets of PyTorch.

    Args:
        data: a source (`ParquetGroups`, `DelimitedGroups`, `MapGroups`, `StreamGroups`); a table in memory: a pyarrow
            table, a pandas or Polars frame, or a dict of columns; or a data set of `torch.utils.data`, map-style or
            iterable, whose samples are dicts (`table_source.py`).
        columns: roles of the columns; all others are not read.
        hold_out: the rows that are held out of training; none by default.
        held_out_data: other data with the held-out rows, in place of `hold_out`.
        seed: of the order of the training rows.
        shuffle_rows: row groups are shuffled together until they have this many rows.
        lanes: number of row groups that each batch takes rows from. On W ranks, a rank decodes only the row groups of
            its lanes / W lanes; with one lane, every rank decodes every row group. It defines the order, so keep it
            when the number of ranks changes: take a multiple of the largest number of ranks. An iterable data set
            has one lane.
        group_by_session: column with equal values for consecutive samples of one session. Sessions are shuffled as
            wholes, and the samples of one share their equal bags (`batch_join.py`).
        read_ahead_bytes: bytes of batches that a background thread reads ahead of training.
        labels: False for data without labels, such as samples to predict: labels are NaN, and `train` is refused.
        items: other data with one row per item, for the catalog; None: the items are those of `samples`.
        samples: function that opens the data of the run, where `data` are other files; None: `data`.

    Raises:
        ConfigError: a column that does not exist (the message has the nearest name), or settings that contradict.
        InputError: data that cannot be read, a column of a wrong type, or no rows to train on.
    """

    def __init__(
        self,
        data: Any,
        columns: Columns,
        *,
        hold_out: HoldOut = NO_HOLD_OUT,
        held_out_data: Any = None,
        seed: int = 0,
        shuffle_rows: int = 1 << 17,
        lanes: int = 1,
        group_by_session: str = "",
        read_ahead_bytes: int = 64 << 20,
        labels: bool = True,
        items: Any = None,
        samples: Callable[[], RowGroups] | None = None,
    ) -> None:
        for name, value in (
            ("shuffle_rows", shuffle_rows),
            ("lanes", lanes),
            ("read_ahead_bytes", read_ahead_bytes),
        ):
            if value < 1:
                raise ConfigError(f"{name}: got {value}; expected at least 1. Leave it out for the default.")
        check_seed(seed)
        if hold_out.path:
            raise ConfigError(
                f"hold_out.path: got {hold_out.path}; expected held_out_data=ParquetGroups(...) here. Pass the data "
                "itself."
            )
        if held_out_data is not None and hold_out != NO_HOLD_OUT:
            raise ConfigError("held_out_data: got it with hold_out, too; expected one of them. Leave one out.")
        self._columns, self._labels = columns, labels
        self._read_ahead_bytes, self._session = read_ahead_bytes, group_by_session
        columns.vocabularies  # noqa: B018 - a file that cannot be read raises here, not in the middle of a pass
        self._savings = SessionSavings()
        self._passes = RowPasses(
            as_source(data), columns, rule=hold_out, seed=seed, shuffle_rows=shuffle_rows, lanes=lanes,
            session=group_by_session, labels=labels,
        )  # fmt: skip
        self._held_passes = (
            None
            if held_out_data is None
            else RowPasses(as_source(held_out_data), self._passes.typed_columns, labels=labels)
        )
        self._items_data, self._samples_data = items, samples
        if labels and not self._passes.is_stream and not self.train_rows:
            raise InputError(
                f"{self._passes.source.name}: got no rows to train on; expected some. Hold out less, or add data."
            )

    def with_label_bounds(self, low: float, high: float) -> TableDataset:
        other = copy(self)
        other._passes = self._passes.with_label_bounds((low, high))
        other._held_passes = None if self._held_passes is None else self._held_passes.with_label_bounds((low, high))
        return other

    @property
    def columns(self) -> Columns:
        """Roles of the columns."""
        return self._columns

    @property
    def schema(self) -> pa.Schema:
        """Names and types of all columns of the data."""
        return self._passes.source.schema

    @property
    def column_names(self) -> Sequence[str]:
        return list(self.schema.names)

    @property
    def default_keys(self) -> Sequence[str]:
        single = [one.column for one in self._columns.ids if one.kind == "single" and not one.boundaries]
        return list(dict.fromkeys(single))

    @property
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        return self._columns.sparse_features

    @property
    def dense_features(self) -> tuple[str, ...]:
        return tuple(dense.column for dense in self._columns.dense)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(label.name for label in self._columns.labels)

    @property
    def train_rows(self) -> int:
        """Number of samples of one pass over the training part.

        Raises:
            ConfigError: the data are a stream.
        """
        _check_size_known(self._passes, "train_rows")
        return self._passes.total_rows - self._passes.held_out_rows

    @property
    def held_out_rows(self) -> int:
        """Number of samples of the held-out part.

        Raises:
            ConfigError: the data are a stream.
        """
        _check_size_known(self._held_passes or self._passes, "held_out_rows")
        return self._passes.held_out_rows if self._held_passes is None else self._held_passes.total_rows

    def session_savings(self) -> SessionSavings:
        """Return the ids that shared bags left out so far in the latest pass, with `group_by_session`."""
        return self._savings

    def train(self, batch_size: int, epoch: int = 0) -> Iterator[Batch]:
        for share in self.train_shares(batch_size, epoch):
            yield share.batch

    def train_shares(
        self, batch_size: int, epoch: int = 0, *, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> Iterator[Share]:
        """Yield a rank's share of each global batch from position `start` on.

        Row groups before that position are not decoded. With one lane, a rank's share is the usual range of the batch
        (`bounds`). With several, it is the rows of the rank's lanes, so sizes of shares differ a little.

        Raises:
            ConfigError: fewer lanes than ranks, a dataset without labels, or a rank, an epoch or a position that does
                not exist.
            InputError: bad rows or damaged files; the message names the file, the row group and the column.
        """
        check_shares(batch_size, epoch, rank, world_size, start)
        if not self._labels:
            raise ConfigError("TableDataset: got labels=False; expected labels to train on. Open it with labels=True.")
        parts, no_rows = self._passes.shares(batch_size, epoch, rank, world_size, start)
        savings = SessionSavings() if self._session else None
        self._savings = savings or self._savings
        yield from assembled_shares(parts, self._features, no_rows, savings, self._read_ahead_bytes)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        apart = self._held_passes
        items = self._passes.held_out(batch_size) if apart is None else apart.rows(batch_size)
        for batch, _ in self._batches(items, batch_size):
            yield batch

    def rows(self, batch_size: int, keys: Sequence[str] = ()) -> Iterator[tuple[Batch, pa.Table]]:
        """Yield all rows in the order of the data, each batch with the table of its key columns.

        Args:
            batch_size: rows of each batch but the last.
            keys: columns of the data, unchanged, such as those that name a sample.
        """
        yield from self._batches(self._passes.rows(batch_size, keys), batch_size)

    def catalog(self, item: str, others: Sequence[str] = ()) -> Catalog:
        reader = ItemReader(self._passes.typed_columns, item, others)
        counted = self._passes.opened() if self._samples_data is None else self._samples_data()
        held = self._passes.held_in(counted) if self._samples_data is None else None
        if self._items_data is not None:
            source = opened(as_source(self._items_data), self._columns.names)
        else:  # the features of items need a pass of their own over a stream
            source = self._passes.opened() if self._passes.is_stream and others else counted
        return reader.catalog(source, counted, held)

    def row_count(self) -> RowCount:
        return RowCount(rows=sum(one.total_rows for one in self._sources))

    @property
    def fingerprint(self) -> str:
        return "; ".join(one.source.fingerprint for one in self._sources if one.source.fingerprint)

    @property
    def _sources(self) -> list[RowPasses]:
        return [self._passes] if self._held_passes is None else [self._passes, self._held_passes]

    def _batches(self, items: Iterator[OrderedParts], batch_size: int) -> Iterator[tuple[Batch, pa.Table]]:
        _check_batch_size(batch_size)
        return assembled_rows(items, self._features, self._read_ahead_bytes)

    @property
    def _features(self) -> list[str]:
        return [column.feature for column in self._columns.ids]


def _check_size_known(passes: RowPasses, what: str) -> None:
    if passes.is_stream:
        raise ConfigError(
            f"TableDataset.{what}: got {passes.source.name}, a stream of unknown length; expected files, a table or a "
            "map-style data set. Count the samples of a pass."
        )


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size: got {batch_size}; expected at least 1. Set it higher.")
