"""`WindowLoader`: decodes the row groups of a window and gathers the rows of batches from it.

A large row group is decoded in slabs of columns. Each slab is released after its rows were gathered, so a window needs
little more memory than its gathered rows.

Legend: n rows of the window that take part, b rows of one batch part.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from tilerec.data.arrow_values import join_values, read_values
from tilerec.data.batch_part import BatchPart
from tilerec.data.chosen_rows import ChosenRows
from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn
from tilerec.data.fields import (
    BagIds,
    Bounds,
    Floats,
    Ints,
    ReadColumn,
    read_dense,
    read_ids_unhashed,
    read_label,
    read_sample_weight,
)
from tilerec.data.hold_out import HeldOutRows, row_indices
from tilerec.data.part_ids import PartIds, gather_ids
from tilerec.data.pooled_memory import Blocks, empty, joined
from tilerec.data.row_groups import GroupReader, RowGroups
from tilerec.errors import InputError

MAX_OPEN_GROUPS = 16
SLAB_BYTES = 1 << 20
"""About the cache of a core: a column is gathered while it is there. 32 MB are 20 % slower."""


Found = Floats | BagIds
"""A field's values in one row group."""


@dataclass(frozen=True)
class _Window:
    """Parts of batches that are filled column by column.

    Attributes:
        parts: labels, ids and weights are written into them.
        chosen: their rows.
        dense_columns: float32 [I * b] of each part, column by column until all are gathered: each number of a column
            would touch a cache line of its own in rows.
    """

    parts: list[BatchPart]
    chosen: ChosenRows
    dense_columns: list[Tensor]


class _Field(ABC):
    """A field of the batch; it reads `columns`."""

    columns: tuple[str, ...]

    @abstractmethod
    def read(self, read: ReadColumn, where: str) -> Found:
        """Read the field from one row group."""

    @abstractmethod
    def put(self, found: list[Found], window: _Window) -> None:
        """Gather rows into parts of batches, given the field in consecutive row groups."""


class _LabelField(_Field):
    def __init__(self, label: LabelColumn, task: int, bounds: Bounds | None) -> None:
        self.columns = (label.column,)
        self._label, self._task, self._bounds = label, task, bounds

    def read(self, read: ReadColumn, where: str) -> Found:
        return read_label(self._label, read, where, self._bounds)

    def put(self, found: list[Found], window: _Window) -> None:
        for part, labels_b in zip(window.parts, window.chosen.pieces(_joined(found)), strict=True):
            part.labels[:, self._task] = labels_b


class _DenseField(_Field):
    def __init__(self, dense: DenseColumn, place: int) -> None:
        self.columns = (dense.column,)
        self._dense, self._place = dense, place

    def read(self, read: ReadColumn, where: str) -> Found:
        return read_dense(self._dense, read, where)

    def put(self, found: list[Found], window: _Window) -> None:
        starts = [self._place * count for count in window.chosen.counts]
        window.chosen.take(_joined(found), window.dense_columns, starts)


class _WeightField(_Field):
    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def read(self, read: ReadColumn, where: str) -> Found:
        return read_sample_weight(self.columns[0], read, where)

    def put(self, found: list[Found], window: _Window) -> None:
        for part, weights_b in zip(window.parts, window.chosen.pieces(_joined(found)), strict=True):
            part.weights = weights_b


class _IdField(_Field):
    def __init__(self, columns: Columns, column: IdColumn) -> None:
        self.columns = tuple(name for name in (column.column, column.weights) if name)
        self._every, self._column = columns, column

    def read(self, read: ReadColumn, where: str) -> Found:
        return read_ids_unhashed(self._every, self._column, read, where)

    def put(self, found: list[Found], window: _Window) -> None:
        bags = [one for one in found if isinstance(one, BagIds)]
        gather_ids(bags, [part.ids for part in window.parts], window.chosen)


def _fields(columns: Columns, label_bounds: Bounds | None) -> list[_Field]:
    return [
        *(_LabelField(label, task, label_bounds) for task, label in enumerate(columns.labels)),
        *(_DenseField(dense, place) for place, dense in enumerate(columns.dense)),
        *((_WeightField(columns.weight),) if columns.weight else ()),
        *(_IdField(columns, column) for column in columns.ids),
    ]


def _joined(found: list[Found]) -> Floats:
    arrays = [values for values in found if isinstance(values, np.ndarray)]
    return arrays[0] if len(arrays) == 1 else joined(arrays)


class WindowLoader:
    """Reads the rows of windows from a source.

    Args:
        source: the row groups.
        columns: their roles.
        held: the rows that are held out; None if none are.
        session: column with equal values for consecutive samples of one session; "": none.
        labels: False leaves the label columns unread; labels are NaN.
        label_bounds: see `read_label`.
        slab_bytes: bytes of columns that are decoded together.
    """

    def __init__(
        self,
        source: RowGroups,
        columns: Columns,
        held: HeldOutRows | None,
        *,
        session: str = "",
        labels: bool = True,
        label_bounds: Bounds | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self._source, self._columns, self._held = source, columns, held
        self._session = session
        self._slab_bytes = slab_bytes
        self._blocks = Blocks()
        self._weighted = any(column.weights for column in columns.ids)
        self._rows_so_far = self._ids_so_far = 0
        self._fields = [one for one in _fields(columns, label_bounds) if labels or not isinstance(one, _LabelField)]

    def load(
        self,
        groups: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        *,
        generator: np.random.Generator | None = None,
        held_out: bool = False,
    ) -> list[BatchPart]:
        """Return parts of batches from consecutive row groups.

        Args:
            groups: numbers of the row groups.
            ranges: positions [start, end) of each part among the rows that take part, in their order.
            generator: of the order; None keeps the order of the source.
            held_out: the held-out rows take part, instead of the others.
        """
        counts = [self._source.group_rows[group] for group in groups]
        masks = [None if self._held is None else self._held.mask(group) for group in groups]
        rows_n = row_indices(masks, counts, held_out=held_out)
        with ExitStack() as stack:
            # Few row groups stay open for all slabs. Many small ones are read whole, one after the other.
            kept: list[GroupReader] = []
            if len(groups) <= MAX_OPEN_GROUPS:
                kept = [stack.enter_context(self._source.open(group)) for group in groups]
            session_of_n = self._sessions(groups, kept)[rows_n] if self._session else None
            if generator is not None:
                order_n = (
                    generator.permutation(len(rows_n))
                    if session_of_n is None
                    else _permuted_runs(session_of_n, generator)
                )
                rows_n = order_n if all(mask is None for mask in masks) else rows_n[order_n]
                session_of_n = None if session_of_n is None else session_of_n[order_n]
            chosen = [rows_n[start:end] for start, end in ranges]
            self._blocks.begin_round()
            ids_per_row = self._ids_per_row(kept, sum(counts))
            parts = [self._empty_part(len(rows_b), ids_per_row) for rows_b in chosen]
            if session_of_n is not None:
                for part, (start, end) in zip(parts, ranges, strict=True):
                    part.sessions = session_of_n[start:end]
            dense = len(self._columns.dense)
            columns = [torch.from_numpy(self._blocks.empty(dense * part.rows, np.float32)) for part in parts]
            window = _Window(parts, ChosenRows(chosen), columns)
            for slab in self._slabs(kept):
                self._gather(slab, groups, kept, window)
            for part in parts:
                # The memory of one part's columns becomes that of the next part's rows.
                rows_bI = self._blocks.empty(dense * part.rows, np.float32).reshape(part.rows, dense)
                rows_bI[...] = columns.pop(0).numpy().reshape(dense, part.rows).T
                part.dense = rows_bI
        self._rows_so_far += sum(part.rows for part in parts)
        self._ids_so_far += sum(part.ids.count for part in parts)
        return parts

    def _ids_per_row(self, readers: list[GroupReader], rows: int) -> float:
        """Return an estimate: that of the parts so far, and in the first window that of the file."""
        if all(column.kind == "single" for column in self._columns.ids):
            # The same in every window, so that parts have the sizes of earlier ones, whose memory they use again.
            return float(sum(column.multi_hot for column in self._columns.ids))
        if self._rows_so_far:
            # Parts differ little, because rows are in random order: a little more than the average is enough.
            return 1.03 * self._ids_so_far / self._rows_so_far
        return sum(
            float(column.multi_hot)
            if column.kind == "single" or not readers
            else sum(reader.column_bytes(column.column) for reader in readers) / (8 * max(rows, 1))
            for column in self._columns.ids
        )

    def no_rows(self) -> BatchPart:
        """Return a part of a batch without rows."""
        part = self._empty_part(0)
        part.weights = np.zeros(0, np.float32) if self._columns.weight else None
        part.sessions = np.zeros(0, np.int64) if self._session else None
        part.ids.ends = [0] * len(self._columns.ids)
        return part

    def _empty_part(self, rows: int, ids_per_row: float = 0.0) -> BatchPart:
        columns = self._columns
        dense, tasks = len(columns.dense), len(columns.labels)
        labels = empty(rows * tasks, np.float32).reshape(rows, tasks)
        labels.fill(np.nan)
        room = math.ceil(rows * ids_per_row)
        ids = PartIds(len(columns.ids), rows, room, weighted=self._weighted, blocks=self._blocks)
        return BatchPart(np.empty((0, dense), np.float32), labels, ids)

    def _slabs(self, readers: list[GroupReader]) -> Iterator[list[_Field]]:
        """Yield the fields in slabs; all at once without open row groups."""
        slab: list[_Field] = []
        held = 0
        for one in self._fields:
            size = sum(reader.column_bytes(name) for reader in readers for name in one.columns)
            if slab and held + size > self._slab_bytes:
                yield slab
                slab, held = [], 0
            slab.append(one)
            held += size
        yield slab

    def _gather(
        self,
        slab: list[_Field],
        groups: Sequence[int],
        kept: list[GroupReader],
        window: _Window,
    ) -> None:
        names = list(dict.fromkeys(name for one in slab for name in one.columns))
        read: list[list[Found]] = [[] for _ in slab]
        for place, group in enumerate(groups):
            table = self._table(group, kept[place] if kept else None, names)
            where = self._source.where(group)
            for found, one in zip(read, slab, strict=True):
                found.append(one.read(table.column, where))
        del table
        for found, one in zip(read, slab, strict=True):
            one.put(found, window)
            found.clear()

    def _table(self, group: int, kept: GroupReader | None, names: list[str]) -> pa.Table:
        if kept is not None:
            table = kept.read(names)
        else:
            with self._source.open(group) as reader:
                table = reader.read(names)
        if table.num_rows != self._source.group_rows[group]:
            raise InputError(
                f"{self._source.where(group)}: got {table.num_rows} rows; expected {self._source.group_rows[group]}, "
                "as when the data was opened. Leave files unchanged during a run."
            )
        return table

    def _sessions(self, groups: Sequence[int], kept: list[GroupReader]) -> Ints:
        """Return a number for each row, equal for equal values of the session column."""
        found = []
        for place, group in enumerate(groups):
            table = self._table(group, kept[place] if kept else None, [self._session])
            values = read_values(table.column(0))
            if values.missing is not None or values.offsets is not None:
                raise InputError(
                    f"{self._source.where(group)}: session column {self._session!r}: got nulls or lists; expected one "
                    "value in each row. Fill them in."
                )
            found.append(values)
        joined = join_values(found).values
        return joined.view(np.int64) if joined.dtype.itemsize == 8 else joined.astype(np.int64)


def _permuted_runs(session_of_n: Ints, generator: np.random.Generator) -> Ints:
    """Return the rows with runs of equal sessions in a random permutation; rows of a run stay in order."""
    if not len(session_of_n):
        return np.zeros(0, np.int64)
    starts = np.concatenate([[0], np.flatnonzero(session_of_n[1:] != session_of_n[:-1]) + 1])
    lengths = np.diff(starts, append=len(session_of_n))
    order = generator.permutation(len(starts))
    firsts_n = np.repeat(starts[order], lengths[order])
    ends = np.cumsum(lengths[order])
    return firsts_n + np.arange(len(session_of_n)) - np.repeat(ends - lengths[order], lengths[order])
