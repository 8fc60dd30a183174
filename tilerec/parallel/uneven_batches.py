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

# Sent in place of a number of samples.
_END, _FAILED = -1, -2


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


def _turns(
    batches: Iterator[_B], channel: Group, empty: _B, count: Callable[[_B], int]
) -> Iterator[Turn[_B]]:
    try:
        lookahead = _Lookahead(batches, channel, empty, count)
        while True:
            batch, own, handle = lookahead.batch, lookahead.own, lookahead.handle
            rank_samples = handle.wait().tolist()
            if lookahead.error is not None:
                raise lookahead.error
            failed = [rank for rank, number in enumerate(rank_samples) if number == _FAILED]
            if failed:
                raise CommsError(
                    f"even_batches on rank {channel.rank} of {channel.size}: rank {failed[0]} could not read its next "
                    "batch; see the error on that rank."
                )
            if all(number == _END for number in rank_samples):
                return
            # The exchange for the next turn overlaps with training on this turn's batch.
            lookahead.read()
            yield Turn(batch, max(own, 0), sum(max(number, 0) for number in rank_samples), channel.size)
    finally:
        channel.close()


class _Lookahead(Generic[_B]):
    """The next batch of this rank, and the running exchange of its number of samples."""

    handle: Handle

    def __init__(self, batches: Iterator[_B], channel: Group, empty: _B, count: Callable[[_B], int]) -> None:
        self._batches, self._channel, self._empty, self._count = batches, channel, empty, count
        self.batch, self.own = empty, 0
        self.error: Exception | None = None
        self.read()

    def read(self) -> None:
        if self.own != _END:
            try:
                self.batch = next(self._batches)
                self.own = self._count(self.batch)
            except StopIteration:
                self.batch, self.own = self._empty, _END
            except Exception as error:
                self.error, self.own = error, _FAILED
        size = self._channel.size
        samples_W = torch.full((size,), self.own, dtype=torch.int64, device=self._channel.device)
        ones = [1] * size
        self.handle = self._channel.all_to_all("samples", torch.zeros_like(samples_W), samples_W, ones, ones)


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
