"""`even_batches`: uneven numbers of batches per rank, filled up with empty batches.

Every lookup in sharded tables is a collective, so a rank without batches must keep calling it until the last rank has
finished. In each step the ranks exchange the number of samples in their next batch:

    rank 0: 4 2 .        turns of rank 0: 4 2 0       samples of all ranks: 6 5 3
    rank 1: 2 3 3        turns of rank 1: 2 3 3

This small collective runs on its own channel and overlaps with training on the previous batch, so it adds no wait.

Nouns
  turn   one step of all ranks: this rank's batch, which may be empty, and the number of samples of all ranks

Legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from tilerec.comms.group import Group, Handle
from tilerec.errors import CommsError, ConfigError

_B = TypeVar("_B")

END, FAILED = -1, -2
"""Sent in place of a number of samples: this rank has no more batches; it could not read its next batch."""


@dataclass(frozen=True)
class Turn(Generic[_B]):
    """One step of all ranks.

    Attributes:
        batch: this rank's batch.
        samples: number of samples in it.
        total: number of samples in the batches of all ranks.
        world_size: W.
    """

    batch: _B
    samples: int
    total: int
    world_size: int

    @property
    def scale(self) -> float:
        """Factor for this rank's mean loss: samples * W / total, and 0 for an empty batch.

        Gradients are summed over the ranks and divided by W. With this factor the result is the gradient of the mean
        over all samples, even if ranks have different numbers of them. The mean over an empty batch is NaN, and
        NaN * 0 is NaN: sum the losses of the samples and divide by `max(samples, 1)`.
        """
        return self.samples * self.world_size / self.total if self.total else 0.0


class SampleExchange:
    """Exchange of the numbers of samples in the ranks' next batches.

    Args:
        channel: a channel of its own, so that the exchange may run beside a step.
        who: the caller, in errors.
    """

    def __init__(self, channel: Group, who: str) -> None:
        self._channel, self._who = channel, who

    def post(self, own: int) -> Handle:
        """Send the number of samples of this rank's next batch, `END` or `FAILED`. Collective; never waits."""
        size = self._channel.size
        samples_W = torch.full((size,), own, dtype=torch.int64, device=self._channel.device)
        ones = [1] * size
        return self._channel.all_to_all("samples", torch.zeros_like(samples_W), samples_W, ones, ones)

    def read(self, handle: Handle) -> list[int] | None:
        """Return the numbers of all ranks, `END` for ranks without a batch; None if no rank has one.

        Raises:
            CommsError: another rank could not read its next batch.
        """
        return self.check([int(number) for number in handle.wait().tolist()])

    def check(self, samples: list[int]) -> list[int] | None:
        """Return the numbers as `read` does, for numbers that another message carried."""
        failed = [rank for rank, number in enumerate(samples) if number == FAILED]
        if failed:
            raise CommsError(
                f"{self._who} on rank {self._channel.rank} of {self._channel.size}: rank {failed[0]} could not read "
                "its next batch; see the error on that rank."
            )
        return None if all(number == END for number in samples) else samples


def even_batches(
    batches: Iterable[_B], group: Group, empty: _B, samples: Callable[[_B], int] | None = None
) -> Iterator[Turn[_B]]:
    """Return an iterator over this rank's batches, then over `empty` until every rank has finished. Collective.

    All ranks of the group call it at the same time, take all turns, and train on each of them, empty or not.

    Args:
        batches: this rank's batches; any number, including none. They are read one batch ahead.
        group: the ranks. The call opens a channel of the group and closes it after the last turn.
        empty: a batch without samples.
        samples: function that returns the number of samples of a batch; None: its `batch_size`, or its `stride()`.

    Raises:
        Exception: the error from reading `batches` on this rank.
        CommsError: another rank could not read its next batch. All ranks raise at the same turn, after the last turn
            for which every rank had a batch.
        ConfigError: `empty` has samples, or the number of samples of a batch cannot be read.
    """
    count = _samples if samples is None else samples
    if count(empty) != 0:
        raise ConfigError(
            f"even_batches: empty: got a batch of {count(empty)} samples; expected a batch without samples."
        )
    # Opened here and not at the first turn, because opening a channel is a collective.
    return _turns(iter(batches), group.split("even batches"), empty, count)


def _turns(batches: Iterator[_B], channel: Group, empty: _B, count: Callable[[_B], int]) -> Iterator[Turn[_B]]:
    try:
        lookahead = _Lookahead(batches, channel, empty, count)
        while True:
            batch, own, handle = lookahead.batch, lookahead.own, lookahead.handle
            if lookahead.error is not None:
                handle.wait()
                raise lookahead.error
            samples = lookahead.exchange.read(handle)
            if samples is None:
                return
            # The exchange for the next turn overlaps with training on this turn's batch.
            lookahead.read()
            yield Turn(batch, max(own, 0), sum(max(number, 0) for number in samples), channel.size)
    finally:
        channel.close()


class _Lookahead(Generic[_B]):
    """The next batch of this rank, and the running exchange of its number of samples."""

    handle: Handle

    def __init__(self, batches: Iterator[_B], channel: Group, empty: _B, count: Callable[[_B], int]) -> None:
        self._batches, self._empty, self._count = batches, empty, count
        self.exchange = SampleExchange(channel, "even_batches")
        self.batch, self.own = empty, 0
        self.error: Exception | None = None
        self.read()

    def read(self) -> None:
        if self.own != END:
            try:
                self.batch = next(self._batches)
                self.own = self._count(self.batch)
            except StopIteration:
                self.batch, self.own = self._empty, END
            except Exception as error:
                self.error, self.own = error, FAILED
        self.handle = self.exchange.post(self.own)


def _samples(batch: Any) -> int:
    size = getattr(batch, "batch_size", None)
    if isinstance(size, int):
        return size
    stride = getattr(batch, "stride", None)
    if callable(stride):
        return int(stride())
    raise ConfigError(
        f"even_batches: got a {type(batch).__name__} without batch_size and stride(); pass samples=, a function that "
        "counts a batch's samples."
    )
