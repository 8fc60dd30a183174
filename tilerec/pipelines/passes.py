"""Passes over iterators: the batches in flight of each, oldest first.

Nouns
  pass    one iterator from its first batch to its end; a second epoch over the same object is a new pass
  origin  the place of a batch: number of its pass, and its number in the pass

A pass is found by the iterator object, which the pass does not keep alive. So training and evaluation may alternate,
and their batches never mix.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, final

from tilerec.errors import ConfigError, InputError
from tilerec.pipelines.batch_in_flight import BatchInFlight, Origin
from tilerec.pipelines.batch_structure import Marks, tensors_of
from tilerec.pipelines.even_ranks import EvenRanks


@final
class Pass:
    """One pass over an iterator."""

    def __init__(self, number: int, who: str, even: EvenRanks | None) -> None:
        self._number, self._who, self._even = number, who, even
        self._count = 0
        self._failure: Exception | None = None
        self.batches: deque[BatchInFlight] = deque()
        self.ended = False  # the iterator has no more batches
        self.closed = False  # nothing more will be read
        self.over = False  # its end, or a failure that ends it, was raised
        self.held: list[BatchInFlight] = []  # forwards of a cycle of accumulation whose backward is to come

    def read(self, iterator: Iterator[Any]) -> None:
        """Read the next batch; with other ranks, an empty one after the end."""
        found = BatchInFlight(Origin(self._number, self._count))
        before = self.ended or self._failure is not None
        if not before:
            try:
                found.batch = next(iterator)
                if found.batch is None:
                    raise InputError(
                        f"{self._who}: batch {self._count} of iterator {self._number} is None; expected a batch. "
                        "An iterator ends by StopIteration."
                    )
                found.marks = Marks.of(tensors_of(found.batch))
            except StopIteration:
                self.ended = True
            except Exception as error:
                self._failure = error
        found.error, found.unread = self._failure, self._failure is not None
        if self._even is None:
            self.closed = self.ended or self._failure is not None
            if before or self.ended:
                return
        else:
            found.origin = Origin(self._number, self._count, filler=self.ended)
            self._even.number(found, ended=self.ended)
        self._count += 1
        self.batches.append(found)

    def take(self) -> BatchInFlight:
        """Return the oldest batch, whose turn it is; raise its error, or `StopIteration` after the last one."""
        if not self.batches:
            self.over = True
            raise StopIteration
        first = self.batches.popleft()
        # A batch that a rank could not read ends the pass; a batch that cannot be routed does not.
        self.over = first.unread
        if self._even is not None and first.unread:
            self._even.send(first)  # the other ranks wait for its number
        elif self._even is not None:
            self.over = True
            if self._even.read(first) is None:
                # All ranks have posted headers for batches after the end. A process that exits before they have
                # arrived is aborted: gloo's thread then needs the interpreter.
                for batch in (first, *self.batches):
                    batch.wait()
                raise StopIteration
            self.over = False
        if first.error is not None:
            raise first.error
        return first

    def is_over(self) -> bool:
        """Return True if no batch of any rank follows the one that was taken last."""
        if self._even is None or not self.batches:
            return not self.batches
        following = self.batches[0]
        return following.error is None and self._even.is_end(following)


@final
class Passes:
    """The passes of a pipeline, by iterator object."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._count = 0
        # By id: the pass, and the iterator or a weak reference to it. The reference keeps the id from a second use.
        self._passes: dict[int, tuple[Pass, Any]] = {}

    def of(self, iterator: Iterator[Any], even: EvenRanks | None) -> Pass:
        """Return the pass of an iterator, a new one on its first use and after its end."""
        if not hasattr(iterator, "__next__"):
            raise ConfigError(
                f"{self._who}.progress: got a {type(iterator).__name__}; expected an iterator. Pass iter(…), the same "
                "object in every call."
            )
        key = id(iterator)
        if key not in self._passes:
            passes = self._passes
            try:
                keeper: Any = weakref.ref(iterator, lambda _: passes.pop(key, None))
            except TypeError:  # iterators of lists have no weak references: kept until their end
                keeper = iterator
            self._passes[key] = Pass(self._count, self._who, even), keeper
            self._count += 1
        return self._passes[key][0]

    def end(self, iterator: Iterator[Any]) -> None:
        """Forget the pass of an iterator."""
        self._passes.pop(id(iterator), None)

    def clear(self) -> None:
        """Forget all passes, with their batches in flight."""
        self._passes.clear()

    def in_flight(self) -> list[BatchInFlight]:
        """Return all batches in flight."""
        return [batch for one, _ in self._passes.values() for batch in one.batches]
