"""`even_batches`: ranks that run out of batches before others keep in step with empty ones.

Every lookup in sharded tables is a collective, so a rank without batches must go on calling it until the last rank is
through. Each step, the ranks tell one another how many samples their next batch has:

    rank 0: 4 2 .        turns of rank 0: 4 2 0       samples of all ranks: 6 5 3
    rank 1: 2 3 3        turns of rank 1: 2 3 3

That one small collective travels while the batch before is being trained on, on a channel of its own: it costs no wait.

Nouns
  turn   one step of all ranks: this rank's batch, perhaps empty, and how many samples there are in all

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

# In the place of a number of samples.
_END, _FAILED = -1, -2


@dataclass(frozen=True)
class Turn(Generic[_B]):
    """One step of all ranks.

    Attributes:
        batch: this rank's.
        samples: in it.
        total: samples of all ranks' batches together.
        world_size: W.
    """

    batch: _B
    samples: int
    total: int
    world_size: int

    @property
    def scale(self) -> float:
        """What to multiply this rank's mean loss with: samples * W / total, and 0 for an empty batch.

        Ranks' gradients are summed and divided by W; with this factor the result is the gradient of the mean over
        all samples, also where ranks have different numbers of them. The mean over an empty batch is NaN, and NaN * 0
        still is: sum the losses of the samples and divide by `max(samples, 1)`.
        """
        return self.samples * self.world_size / self.total if self.total else 0.0


def even_batches(
    batches: Iterable[_B], group: Group, empty: _B, samples: Callable[[_B], int] | None = None
) -> Iterator[Turn[_B]]:
    """This rank's batches, then `empty`, until every rank is through.

    All ranks of the group call it at the same time, take all turns, and train on each of them, empty or not.

    Args:
        batches: this rank's; any number, none included. Read one batch ahead.
        group: the ranks; a channel of it is opened here and given back after the last turn.
        empty: a batch without samples.
        samples: how many samples a batch has; None reads its `batch_size`, or calls its `stride()`.

    Raises:
        what reading `batches` raised on this rank; CommsError on a rank whose peer could not read its next batch. Both
        come at the same turn, after the last one for which every rank had a batch.
    """
    count = _samples if samples is None else samples
    if count(empty) != 0:
        raise ConfigError(f"even_batches: `empty` has {count(empty)} samples; pass a batch without any.")
    # Opened now, not at the first turn: opening is a collective.
    return _turns(iter(batches), group.split("even batches"), empty, count)


def _turns(
    batches: Iterator[_B], channel: Group, empty: _B, count: Callable[[_B], int]
) -> Iterator[Turn[_B]]:
    try:
        reader = _Reader(batches, channel, empty, count)
        while True:
            batch, own, handle = reader.batch, reader.own, reader.handle
            told = handle.wait().tolist()
            if reader.error is not None:
                raise reader.error
            failed = [rank for rank, number in enumerate(told) if number == _FAILED]
            if failed:
                raise CommsError(
                    f"even_batches on rank {channel.rank} of {channel.size}: rank {failed[0]} could not read its next "
                    f"batch; look for the error there."
                )
            if all(number == _END for number in told):
                return
            # The next turn's numbers travel while this turn's batch is trained on.
            reader.read()
            yield Turn(batch, max(own, 0), sum(max(number, 0) for number in told), channel.size)
    finally:
        channel.close()


class _Reader(Generic[_B]):
    """One batch ahead: the next batch and its number of samples, on its way to the peers."""

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
        told_W = torch.full((size,), self.own, dtype=torch.int64, device=self._channel.device)
        ones = [1] * size
        self.handle = self._channel.all_to_all("samples", torch.zeros_like(told_W), told_W, ones, ones)


def _samples(batch: Any) -> int:
    size = getattr(batch, "batch_size", None)
    if isinstance(size, int):
        return size
    stride = getattr(batch, "stride", None)
    if callable(stride):
        return int(stride())
    raise ConfigError(
        f"even_batches: a {type(batch).__name__} has neither batch_size nor stride(); pass samples=, a function that "
        "counts a batch's samples."
    )
