"""Parts of batches in the order of a pass, or in the order of the source."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

from tilerec.data.batch_part import BatchPart
from tilerec.data.hold_out import HeldOutRows
from tilerec.data.order import BatchOrder, LanePart, RankPart, Window
from tilerec.data.row_groups import RowGroups
from tilerec.data.window_loader import WindowLoader
from tilerec.errors import InputError


@dataclass(frozen=True)
class RankParts:
    """A rank's rows of a global batch: their place, and the rows themselves (none: no rows)."""

    place: RankPart
    parts: tuple[BatchPart, ...]

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return sum(part.bytes for part in self.parts)


class PassReader:
    """A rank's parts of the global batches of a pass, from a position to the end.

    Each lane of the rank has one window in memory: it is loaded when a batch needs its first row, and gathered at once
    into all batches that it has rows for.

    Args:
        order: of the pass.
        loader: reads windows.
        batch_size: of the global batches.
        rank, world_size: the rank, and the number of ranks.
        start: position of the first batch.
    """

    def __init__(
        self, order: BatchOrder, loader: WindowLoader, batch_size: int, rank: int, world_size: int, start: int
    ) -> None:
        self._order, self._loader = order, loader
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._next = start
        self._coming: deque[RankPart] = deque()
        self._ready: dict[int, deque[BatchPart]] = {}

    def __iter__(self) -> Iterator[RankParts]:
        while self._coming or self._order.has(self._next):
            if not self._coming:
                self._plan_batch()
            place = self._coming[0]
            parts = tuple(part for lane in place.lanes for part in self._lane_parts(lane))
            self._coming.popleft()
            yield RankParts(place, parts)
            del parts

    def _plan_batch(self) -> None:
        place = self._order.rank_part(self._next, self._batch_size, self._rank, self._world_size)
        self._coming.append(place)
        self._next = place.end

    def _lane_parts(self, wanted: LanePart) -> Iterator[BatchPart]:
        ready = self._ready.setdefault(wanted.lane, deque())
        position = wanted.start
        while position < wanted.end:
            if not ready:
                self._load(self._order.window_at(wanted.lane, position), position, ready)
            part = ready.popleft()
            position += part.rows
            yield part

    def _load(self, window: Window, position: int, ready: deque[BatchPart]) -> None:
        """Gather the rows of a window from `position` on, for this batch and the following ones."""
        ranges: list[tuple[int, int]] = []
        batch = 0
        while True:
            if batch == len(self._coming):
                if not self._order.has(self._next):
                    break
                self._plan_batch()
            part = next((lane for lane in self._coming[batch].lanes if lane.lane == window.lane), None)
            batch += 1
            if part is None:
                continue
            if part.start >= window.end:
                break
            start = max(part.start, position)
            if start < min(part.end, window.end):
                ranges.append((start - window.start, min(part.end, window.end) - window.start))
            if part.end >= window.end:
                break
        ready.extend(self._loader.load(window.groups, ranges, generator=self._order.generator(window)))


@dataclass(frozen=True)
class OrderedParts:
    """Consecutive rows of the source, with key columns of the same rows."""

    parts: tuple[BatchPart, ...]
    keys: pa.Table

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return sum(part.bytes for part in self.parts) + int(self.keys.nbytes)


def ordered_parts(
    source: RowGroups,
    loader: WindowLoader,
    batch_size: int,
    *,
    held: HeldOutRows | None = None,
    keys: Sequence[str] = (),
) -> Iterator[OrderedParts]:
    """Yield the rows of a source in its order, in batches.

    Args:
        held: the held-out rows, which take part; None: all rows do.
        keys: columns to yield along; all rows must take part.
    """
    parts: list[BatchPart] = []
    tables: list[pa.Table] = []
    rows = 0
    no_keys = pa.table({})
    key_schema = pa.schema([(name, source.key_type(name)) for name in keys])
    for group in source.in_order():
        count = source.group_rows[group] if held is None else held.count(group)
        cuts = [0, *range(min(batch_size - rows, count), count, batch_size), count]
        ranges = [(low, high) for low, high in pairwise(cuts) if high > low]
        if not ranges:
            continue
        table = no_keys
        if keys:
            with source.open(group) as reader:
                table = _cast_keys(reader.read(keys), key_schema, source.where(group))
        for part, (low, high) in zip(loader.load([group], ranges, held_out=held is not None), ranges, strict=True):
            parts.append(part)
            if keys:
                tables.append(table.slice(low, high - low))
            rows += part.rows
            if rows == batch_size:
                yield OrderedParts(tuple(parts), pa.concat_tables(tables) if keys else no_keys)
                parts, tables, rows = [], [], 0
    if parts:
        yield OrderedParts(tuple(parts), pa.concat_tables(tables) if keys else no_keys)


def _cast_keys(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """Return key columns with the types that all row groups have."""
    columns = []
    for field in schema:
        try:
            columns.append(table.column(field.name).cast(field.type))
        except pa.ArrowInvalid as error:
            what, wanted = f"a value that does not fit ({error})", f"values of the type {field.type}"
            if pa.types.is_string(field.type):
                what, wanted = "text that is not UTF-8", "UTF-8, which files of predictions hold"
            raise InputError(
                f"{where}: key column {field.name!r}: got {what}; expected {wanted}. Convert the files, for example "
                "with iconv, or choose other keys (--keys)."
            ) from error
    return pa.table(columns, schema=schema)
