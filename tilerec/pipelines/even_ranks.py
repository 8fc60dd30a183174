"""`EvenRanks`: ranks with different numbers of batches finish a pass together.

A rank without batches trains on empty ones until the last rank has finished. For each batch the ranks exchange its
number of samples. The result is read at the batch's turn, steps later, so no rank waits for it.

The number travels as the note of a route that the ranks begin at that time anyway (`RoutesAhead`), because a message of
its own costs 3 % of a small step. Batches without such a route, as the first one, get a message of their own (`send`).
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from typing import Any, cast, final

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.parallel.uneven_batches import END, FAILED, SampleExchange
from tilerec.pipelines.batch_in_flight import BatchInFlight
from tilerec.pipelines.batch_structure import empty_like, samples_of


@final
class EvenRanks:
    """The exchange of sample counts, and the empty batch of a rank that has finished.

    Args:
        group: all ranks that train together. The first batch opens a channel of it (collective).
        empty: a batch without samples; None: derived from the first batch of any rank.
        who: the pipeline, in errors.
    """

    def __init__(self, group: Group, empty: Any, who: str) -> None:
        self._group, self._who = group, who
        self._empty = empty
        self._exchange: SampleExchange | None = None
        self._any_batch = False  # a rank has had a batch

    def number(self, found: BatchInFlight, *, ended: bool) -> None:
        """Set the number of a batch that was just read, for all ranks; fill in an empty batch at the end."""
        if self._exchange is None:
            self._open()
        if not self._any_batch and not found.origin.batch:
            self._agree_on_empty(found)
        if ended and found.error is None:
            found.batch = self._empty
            if found.batch is None and self._any_batch:
                found.error = self._why_none
        samples = END
        if not ended and found.error is None:
            try:
                samples = samples_of(found.batch)
            except ConfigError as error:
                found.error = error
        found.unread = found.error is not None
        found.number = FAILED if found.unread else samples

    def send(self, found: BatchInFlight) -> None:
        """Send the number of a batch to all ranks in a message of its own, unless a route carries it. Collective."""
        if found.unsent:
            assert self._exchange is not None
            assert found.number is not None
            found.handle = self._exchange.post(found.number)

    def _open(self) -> None:
        """Open the channel. Collective."""
        channel = self._group.split("pipeline")
        # Not at the exit of the process, when its groups may be destroyed already.
        weakref.finalize(self, _close, channel).atexit = False
        self._channel, self._exchange = channel, SampleExchange(channel, self._who)

    def _agree_on_empty(self, found: BatchInFlight) -> None:
        """Agree on an empty batch, at the start of the first pass in which a rank has a batch. Collective."""
        self._why_none: Exception = ConfigError(
            f"{self._who}: this rank has no batch, and an empty one cannot be derived from those of the other ranks. "
            "Pass empty=, a batch without samples."
        )
        own = self._empty
        if own is None and found.batch is not None:
            try:
                own = empty_like(found.batch)
                pickle.dumps(own)  # the other ranks receive it
            except Exception as error:
                self._why_none, own = error, None
        others = cast("list[tuple[bool, Any]]", self._channel.all_gather_object((found.batch is not None, own)))
        self._any_batch = any(has for has, _ in others)
        if own is None:
            own = next((empty for _, empty in others if empty is not None), None)
        self._empty = own

    def read(self, found: BatchInFlight) -> list[int] | None:
        """Return the number of samples of all ranks at a batch's turn, and note it; None after the last turn."""
        assert self._exchange is not None
        numbers = self._exchange.check(self._numbers(found))
        if numbers is not None:
            found.all_samples = [max(number, 0) for number in numbers]
            found.some_ended = END in numbers
        return numbers

    def is_end(self, found: BatchInFlight) -> bool:
        """Return True if no rank has a batch at this turn; False also if a rank could not read its batch."""
        return all(number == END for number in self._numbers(found))

    def _numbers(self, found: BatchInFlight) -> list[int]:
        """Return the numbers of all ranks at a batch's turn."""
        self.send(found)
        if found.carrier is not None:
            return found.carrier.notes()
        assert found.handle is not None
        return [int(number) for number in found.handle.wait().tolist()]


def _close(channel: Group) -> None:
    with contextlib.suppress(ValueError):  # torch: the process group was destroyed before
        channel.close()
