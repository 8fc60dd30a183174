"""`StreamGroups`: iterable data sets of PyTorch as row groups that are read in order, once per pass.

    stream   s0 s1 s2 s3 | s4 s5 s6 s7 | s8 s9       groups of `rows_per_group` samples, here 4; the last may be smaller

A stream has no length and no places. So each rank iterates over all of it, and a pass that continues skips the samples
before its position. That gives the batches of one process only if all passes have the same samples. The constructor
therefore compares the first samples of two passes that run side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, zip_longest
from typing import Any, TypeAlias

import pyarrow as pa
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tilerec.data.map_groups import FIRST_SAMPLES
from tilerec.data.row_groups import GroupReader, RowGroups, RowSource, TableReader
from tilerec.data.sample_table import first_table, fitted, sample_table
from tilerec.errors import ConfigError, InputError

Samples: TypeAlias = list[Any] | pa.Table
"""Consecutive samples: dicts, or the rows of a table."""


class StreamGroups(RowSource):
    """Samples of an iterable data set: a `torch.utils.data.IterableDataset`, a `DataLoader`, or another object whose
    `__iter__` begins anew.

    An item is a sample, a dict as for `MapGroups`; a list of samples; or a `pyarrow.Table` or `RecordBatch` of several
    rows. If the data set has a method `set_epoch`, it is called before each pass.

    Args:
        dataset: the data set; it is read from a background thread.
        rows_per_group: samples that are converted together. Windows are whole groups.

    Raises:
        ConfigError: a setting is invalid, or a `DataLoader` makes batches of its own.
        InputError: no samples, samples that are no dicts, or a data set that does not repeat its samples.
    """

    sampled = True

    def __init__(self, dataset: Any, *, rows_per_group: int = 1 << 13) -> None:
        if rows_per_group < 1:
            raise ConfigError(f"rows_per_group: got {rows_per_group}; expected at least 1. Leave it out.")
        self._dataset, self.rows_per_group = dataset, rows_per_group
        self._beginning = threading.Lock()
        self.name = type(dataset).__name__
        if isinstance(dataset, DataLoader):
            self.name = f"DataLoader of {type(dataset.dataset).__name__}"
            _check_loader(dataset, self.name)
        pieces = self._first_pieces(0)
        self._check_workers(pieces)
        first = _joined(pieces)
        self.schema = self._table(first).schema
        self._first = self._table(first).slice(0, 1).to_pylist()
        self._rows: dict[int, int] = {}  # samples of a complete pass by epoch, the last one at the end

    @property
    def fingerprint(self) -> str:
        return f"the first sample {self._first}"

    @property
    def rows(self) -> int:
        """Samples of the last complete pass; 0 before it."""
        return next(reversed(self._rows.values()), 0)

    def reorders(self) -> bool:
        """Return True if `set_epoch` changes the first samples."""
        if self._set_epoch is None:
            return False
        first, second = (self._table(_joined(self._first_pieces(epoch))) for epoch in (0, 1))
        return _differ(first, second)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Return: each group is checked when it is read."""

    def begin(self, columns: Iterable[str], *, epoch: int = 0, skip: int = 0) -> StreamPass:
        """Return a new pass, before its first group.

        Args:
            columns: names of the columns to convert; those that the stream lacks are left out.
            epoch: for a data set with `set_epoch`.
            skip: groups to leave out at the start; their samples are not converted.
        """
        return StreamPass(self, [one for one in dict.fromkeys(columns) if one in self.schema.names], epoch, skip)

    def pieces(self, epoch: int) -> Iterator[Samples]:
        """Yield the samples of a pass, as many at a time as the data set returns."""
        with self._beginning:  # an evaluation may begin its pass at the same time, with another epoch
            if self._set_epoch is not None:
                self._set_epoch(epoch)
            items = iter(self._dataset)
            first = list(islice(items, 1))
        for item in chain(first, items):
            if isinstance(item, pa.RecordBatch):
                yield pa.Table.from_batches([item])
            else:
                yield item if isinstance(item, (list, pa.Table)) else [item]

    def end_pass(self, rows: int, epoch: int) -> None:
        """Record the samples of a complete pass.

        Raises:
            InputError: an earlier pass had another number of samples.
        """
        key = 0 if self._set_epoch is None else epoch
        known = self._rows.pop(key, rows)
        self._rows[key] = rows
        if known != rows:
            raise InputError(
                f"{self.name}: got {rows:,} samples in this pass and {known:,} in an earlier one; expected the same "
                "samples in every pass. Write them to files, and train on these."
            )

    @property
    def _set_epoch(self) -> Callable[[int], object] | None:
        inner = self._dataset.dataset if isinstance(self._dataset, DataLoader) else None
        return getattr(self._dataset, "set_epoch", None) or getattr(inner, "set_epoch", None)

    def _first_pieces(self, epoch: int) -> list[Samples]:
        """Return the first samples of an epoch, after a check that two passes at the same time have the same."""
        heads: tuple[list[Samples], list[Samples]] = ([], [])
        # In turn: passes that share a state, such as an open file, get other samples.
        none: Samples = []
        for turn in zip_longest(self.pieces(epoch), self.pieces(epoch), fillvalue=none):
            for head, piece in zip(heads, turn, strict=True):
                head.append(piece)
            if sum(map(len, heads[0])) >= FIRST_SAMPLES:
                break
        first, second = (_joined([piece for piece in head if len(piece)]) for head in heads)
        if not len(first):
            raise InputError(f"{self.name}: got no samples; expected some. Check the data set.")
        if _differ(self._table(first), self._table(second)):
            raise InputError(
                f"{self.name}: got other samples in a second pass that runs at the same time; expected the same, since "
                "every rank, every evaluation and a run that continues reads the data set from its start. Let "
                "__iter__ begin anew: seed its shuffle, and open its files there. Pass a DataLoader with "
                "persistent_workers=False. Or write the samples to files."
            )
        return [piece for piece in heads[0] if len(piece)]

    def _table(self, samples: Samples) -> pa.Table:
        """Return the first of some samples as a table."""
        head = _part(samples, 0, FIRST_SAMPLES)
        return head if isinstance(head, pa.Table) else first_table(head, f"{self.name}, samples 0 to {len(head) - 1}")

    def _check_workers(self, pieces: list[Samples]) -> None:
        """Raise if each worker of a `DataLoader` returns all samples of an iterable data set."""
        loader = self._dataset
        workers = loader.num_workers if isinstance(loader, DataLoader) else 0
        if workers < 2 or len(pieces) < workers or not isinstance(loader.dataset, IterableDataset):
            return
        first, *others = [self._table(piece) for piece in pieces[:workers]]
        if not any(_differ(first, other) for other in others):
            raise InputError(
                f"{self.name}: got each sample {workers} times, once from each worker; expected each once. Divide the "
                "samples in __iter__ by torch.utils.data.get_worker_info()."
            )


class StreamPass(RowGroups):
    """Row groups of one pass over a stream: those that have been read and not dropped.

    Args:
        source: the stream.
        columns: names of the columns to convert.
        epoch, skip: see `StreamGroups.begin`.
    """

    sampled = True

    def __init__(self, source: StreamGroups, columns: Sequence[str], epoch: int, skip: int) -> None:
        self._source, self._columns, self._epoch, self._skip = source, list(columns), epoch, skip
        self.name, self.schema = source.name, source.schema
        self._step = source.rows_per_group
        self._numbers = [self._step] * skip
        self.group_rows = self._numbers
        self._tables: dict[int, pa.Table] = {}
        self._coming = self._groups()

    def fetch(self) -> bool:
        """Read the next group; return False at the end of the stream."""
        table = next(self._coming, None)
        if table is None:
            return False
        self._tables[len(self._numbers)] = table
        self._numbers.append(table.num_rows)
        return True

    def drop(self, groups: Iterable[int]) -> None:
        """Free groups that have been read."""
        for group in groups:
            del self._tables[group]

    def in_order(self) -> Iterator[int]:
        while self.fetch():
            group = len(self._numbers) - 1
            yield group
            self.drop([group])

    def first_row(self, group: int) -> int:
        return group * self._step

    def where(self, group: int) -> str:
        start = self.first_row(group)
        return f"{self.name}, samples {start} to {start + self._numbers[group] - 1}"

    @contextmanager
    def open(self, group: int) -> Iterator[GroupReader]:
        yield TableReader(self._tables[group])

    def check_columns(self, columns: Sequence[str]) -> None:
        """Return: each group is checked when it is read."""

    def close(self) -> None:
        self._coming.close()
        self._tables.clear()

    def _groups(self) -> Generator[pa.Table, None, None]:
        """Yield the groups after those that are skipped."""
        total, held, rows, left = 0, [], 0, self._skip * self._step
        for piece in self._source.pieces(self._epoch):
            total += len(piece)
            skipped = min(left, len(piece))
            left -= skipped
            at = skipped
            while at < len(piece):
                more = min(self._step - rows, len(piece) - at)
                held.append(_part(piece, at, at + more))
                rows, at = rows + more, at + more
                if rows == self._step:
                    yield self._table(held)
                    held, rows = [], 0
        if left:
            raise InputError(
                f"{self.name}: got {total:,} samples; expected more than {self._skip * self._step:,}, where the pass "
                "continues. Continue with the data set that the run began with."
            )
        if held:
            yield self._table(held)
        self._source.end_pass(total, self._epoch)

    def _table(self, held: list[Samples]) -> pa.Table:
        start = self.first_row(len(self._numbers))
        where = f"{self.name}, samples {start} to {start + sum(map(len, held)) - 1}"
        for piece in held:
            if isinstance(piece, pa.Table):
                _check_has(piece, self._columns, where)
        samples = _joined(held)
        if isinstance(samples, pa.Table):
            return fitted(samples.select(self._columns), where, self.schema)
        return sample_table(samples, self._columns, where, self.schema)


def _check_loader(loader: DataLoader[Any], name: str) -> None:
    if loader.batch_size is not None and loader.collate_fn is default_collate:
        raise ConfigError(
            f"{name}: got batch_size={loader.batch_size} with the default collate_fn, which makes batches; expected "
            "samples. Pass batch_size=None, or collate_fn=list."
        )


def _check_has(table: pa.Table, columns: Sequence[str], where: str) -> None:
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise InputError(
            f"{where}: column {missing[0]!r}: got a table without it; expected the same columns in every table. Add it."
        )


def _joined(pieces: list[Samples]) -> Samples:
    """Return consecutive pieces as one.

    Raises:
        InputError: a part of the samples are dicts, and others are tables.
    """
    tables = [piece for piece in pieces if isinstance(piece, pa.Table)]
    if not tables:
        return [sample for piece in pieces for sample in piece]
    if len(tables) < len(pieces):
        raise InputError("stream: got tables and other samples; expected either. Return one kind of items.")
    return pa.concat_tables(tables, promote_options="permissive")


def _part(piece: Samples, start: int, end: int) -> Samples:
    if start == 0 and end >= len(piece):
        return piece
    return piece.slice(start, end - start) if isinstance(piece, pa.Table) else piece[start:end]


def _differ(first: pa.Table, second: pa.Table) -> bool:
    """Compare all digits of all numbers; a NaN is equal to a NaN."""
    return repr(first.to_pylist()) != repr(second.to_pylist())
