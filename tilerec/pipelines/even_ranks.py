"""`EvenRanks`: ranks with different numbers of batches finish a pass together.

A rank without batches trains on empty ones until the last rank has finished. When a batch is read, the ranks exchange
its number of samples. The result is read at the batch's turn, steps later, so no rank waits for it.
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

    def post(self, found: BatchInFlight, *, ended: bool) -> None:
        """Send the number of samples of a batch that was just read to all ranks; fill in an empty batch at the end."""
        if self._exchange is None:
            self._open(found)
        assert self._exchange is not None
        if ended and found.error is None:
            found.batch = self._empty
            if found.batch is None and self._any_batch:
                found.error = self._why_none
        elif found.error is None:
            try:
                found.samples = samples_of(found.batch)
            except ConfigError as error:
                found.error = error
        found.unread = found.error is not None
        number = FAILED if found.unread else END if ended else found.samples
        found.handle = self._exchange.post(number)

    def _open(self, found: BatchInFlight) -> None:
        """Open the channel and agree on an empty batch. Collective."""
        channel = self._group.split("pipeline")
        # Not at the exit of the process, when its groups may be destroyed already.
        weakref.finalize(self, _close, channel).atexit = False
        self._exchange = SampleExchange(channel, self._who)
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
        others = cast("list[tuple[bool, Any]]", channel.all_gather_object((found.batch is not None, own)))
        self._any_batch = any(has for has, _ in others)
        if own is None:
            own = next((empty for _, empty in others if empty is not None), None)
        self._empty = own

    def read(self, found: BatchInFlight) -> list[int] | None:
        """Return the number of samples of all ranks at a batch's turn, and note it; None after the last turn."""
        assert self._exchange is not None
        assert found.handle is not None
        numbers = self._exchange.read(found.handle)
        if numbers is not None:
            found.all_samples = [max(number, 0) for number in numbers]
            found.some_ended = END in numbers
        return numbers

    def is_end(self, found: BatchInFlight) -> bool:
        """Return True if no rank has a batch at this turn; False also if a rank could not read its batch."""
        assert found.handle is not None
        return all(number == END for number in found.handle.wait().tolist())


def _close(channel: Group) -> None:
    with contextlib.suppress(ValueError):  # torch: the process group was destroyed before
        channel.close()
