"""What was made of a batch ahead of its turn: by `prefetch`, on whichever stream is current there.

Nouns
  sources  the tensors that it was made of, in the versions that they had, and whatever else it depends on
  made     the tensors that were made of them, and the stream on which that was

    keep (batch i + 1)   while batch i trains
    take (batch i + 1)   the same sources: what was made, once, and the current stream waits for the one that made it
                         written to since, or others: nothing, and the caller makes it anew

It belongs to the very tensors, not to their numbers: nothing is compared, and nobody waits. Of what is never taken,
some are kept and the oldest let go. So what is missing or stale costs time and nothing else.

While a CUDA graph is captured nothing is kept or taken: what a graph waits for must be in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from tilerec.ops.runtime.upload import capturing

MOST = 4
"""Batches to come of which something is kept."""


@dataclass(frozen=True)
class Sources:
    """It keeps its tensors alive: no other batch can have their memory."""

    tensors: tuple[Tensor | None, ...]
    marks: tuple[Any, ...]
    others: tuple[Any, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor | None], others: tuple[Any, ...] = ()) -> Sources | None:
        """None for tensors whose writes nobody counts (inference mode's)."""
        if any([t is not None and t.is_inference() for t in tensors]):  # noqa: C419 - called at every step
            return None
        return Sources(tuple(tensors), tuple([_mark(t) for t in tensors]), others)

    def same(self, now: Sources) -> bool:
        """Whether these are still what they were, and what `now` is."""
        if self.others != now.others or self.marks != now.marks:
            return False
        return self.marks == tuple(
            [_mark(t) for t in self.tensors]
        )  # a write counts, whoever holds the tensor


def _mark(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor._version)


@final
class Moment:
    """A point in a stream of a GPU's, that another one may wait for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device)
        self._event = torch.cuda.Event()
        self._event.record(self.stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> Moment:
        return self

    def wait(self, tensors: Sequence[Tensor | None]) -> None:
        """The current stream goes on behind it, and reads these tensors."""
        stream = torch.cuda.current_stream(self.stream.device)
        if stream == self.stream:
            return
        stream.wait_event(self._event)
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(
                    stream
                )  # their memory is not another's before this stream is done with it


@dataclass(frozen=True)
class _Made:
    sources: Sources
    tensors: list[Tensor]
    moment: Moment | None  # None: on the CPU


@final
class MadeAhead:
    """What was made of batches to come. Copies and files begin without."""

    def __init__(self) -> None:
        self._made: list[_Made] = []  # replaced, never changed: several threads may prefetch

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return MadeAhead, ()

    def keep(
        self, sources: Sources | None, tensors: list[Tensor], device: torch.device, most: int = MOST
    ) -> None:
        """Keep what the current stream has made of these sources.

        Args:
            device: where it was made; tensors on the host may be among them.
            most: how many are kept, the newest.
        """
        if sources is None or capturing():
            return
        moment = None
        if device.type == "cuda":
            moment = Moment(device)
            for tensor in sources.tensors:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(moment.stream)
        # Asked for again, it is made again: a graph's replay may have filled the batch anew, which no version counts.
        others = [made for made in self._made if not made.sources.same(sources)]
        self._made = [*others, _Made(sources, tensors, moment)][-most:]

    def take(self, sources: Sources | None, *, stays: bool = False) -> list[Tensor] | None:
        """What was made of these sources; behind it the current stream waits, if another one made it.

        Args:
            stays: it may be taken again.
        """
        if not self._made or sources is None:
            return None
        found = next((made for made in self._made if made.sources.same(sources)), None)
        if found is None:
            return None
        if not stays:
            self._made = [made for made in self._made if made is not found]
        if capturing():
            return None
        if found.moment is not None:
            found.moment.wait(found.tensors)
        return found.tensors
