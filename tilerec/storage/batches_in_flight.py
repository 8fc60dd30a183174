"""`BatchesInFlight`: the batches whose rows a cache holds in its lines.

A batch is in flight from the request that loads its rows until its update (without an update: until its lookup). Each
has a serial, which ascends, and one of 31 bits. The lines of its rows are marked with this bit, and are not reassigned
while a batch in flight has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from tilerec.storage.tensor_mark import mark_of

Segments = tuple[tuple[int, int], ...]
"""Ranges [begin, end) of a batch's ids that read one table."""

MAX_BATCHES_IN_FLIGHT = 16
"""Maximum number of batches that hold their lines; a further prefetch or lookup releases the oldest batch's lines."""

_BITS = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Bags:
    """Bag ranges of a batch under one offsets tensor; other offsets may divide the same ids into as many bags."""

    offsets: Tensor
    mark: tuple[Any, ...]  # of the offsets
    ranges: tuple[tuple[int, int, int, int], ...]
    """Per range: first bag, number of bags, first id, end of ids."""

    @staticmethod
    def of(offsets: Tensor, ranges: Sequence[tuple[int, int, int, int]]) -> Bags:
        """Return the ranges under the current version of `offsets`."""
        return Bags(offsets, mark_of(offsets), tuple(ranges))

    def has_offsets(self, offsets: Tensor) -> bool:
        return self.mark == mark_of(offsets)


@dataclass(eq=False)
class BatchInFlight:
    """A batch in flight. It keeps its ids alive, so no other batch can be allocated at their address."""

    ids: Tensor
    mark: tuple[Any, ...]  # of the ids
    segments: Segments
    serial: int
    bit: int
    count: int  # number of its ids that read this table
    looked_up: bool = False  # its update is still to come
    bags: Bags | None = None  # per segment, if known

    def has(self, ids: Tensor) -> bool:
        return self.mark == mark_of(ids)


@final
class BatchesInFlight:
    """The batches in flight of one cache, oldest first."""

    def __init__(self) -> None:
        self.last_serial = 0
        self._batches: list[BatchInFlight] = []
        self._clean = _BITS  # bits that are set for no line

    def __iter__(self) -> Iterator[BatchInFlight]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def find(self, ids: Tensor, segments: Segments) -> BatchInFlight | None:
        """Return the batch with these ids, unchanged since its request, and these segments."""
        own = tuple(sorted(segments))
        return next((batch for batch in self._batches if batch.segments == own and batch.has(ids)), None)

    def add(self, ids: Tensor, segments: Segments, serial: int, bit: int) -> BatchInFlight:
        count = sum([end - begin for begin, end in segments])
        batch = BatchInFlight(ids, mark_of(ids), tuple(sorted(segments)), serial, bit, count)
        self._batches.append(batch)
        return batch

    def remove(self, batch: BatchInFlight) -> None:
        self._batches.remove(batch)

    def clear(self) -> None:
        self._batches.clear()

    def lines_were_made(self) -> None:
        """Record that the cache has new lines, on which no bit is set."""
        self._clean = _BITS

    def release_oldest(self, ids: Tensor) -> None:
        """Remove the oldest batch if there are MAX_BATCHES_IN_FLIGHT.

        Prefer a batch of other ids: for these ids another table of the same lookup has just found its lines.
        """
        if len(self._batches) >= MAX_BATCHES_IN_FLIGHT:
            others = [batch for batch in self._batches if not batch.has(ids)]
            self._batches.remove(others[0] if others else self._batches[0])

    def next_serial(self) -> int:
        self.last_serial += 1
        return self.last_serial

    def next_bit(self, flights_L: Tensor) -> tuple[int, int]:
        """Return a bit that is set for no line, and the bits of all batches in flight and of this one.

        Args:
            flights_L: per line, the bits of its batches. Bits of finished batches are cleared if no bit is left.
        """
        alive = 0
        for batch in self._batches:
            alive |= batch.bit
        if not self._clean:
            flights_L.bitwise_and_(alive)
            self._clean = _BITS & ~alive
        bit = self._clean & -self._clean
        self._clean &= ~bit
        return bit, alive | bit

    def look_up(self, ids: Tensor, segments: Segments, *, updates: bool) -> None:
        """Record that a batch was looked up. `updates`: its update is still to come."""
        batch = self.find(ids, segments)
        if batch is None:
            return
        if updates:
            batch.looked_up = True
        elif not batch.looked_up:  # else this is an evaluation between a training lookup and its update
            self.remove(batch)

    def update(self, ids: Tensor, segments: Segments) -> None:
        """Remove a batch that was updated, and the batches that were looked up before it."""
        batch = self.find(ids, segments)
        last = self.last_serial if batch is None else batch.serial
        self._batches = [
            other for other in self._batches if other is not batch and not (other.looked_up and other.serial <= last)
        ]

    def known_segment(self, ids: Tensor, offsets: Tensor, start: int, count: int) -> tuple[int, int] | None:
        """Return the range [begin, end) of these bags' ids if it is recorded for a batch in flight; else None.

        This saves reading the offsets from the device.
        """
        for batch in self._batches:
            if batch.bags is not None and batch.has(ids) and batch.bags.has_offsets(offsets):
                for first, bags, begin, end in batch.bags.ranges:
                    if (first, bags) == (start, count):
                        return begin, end
        return None
