"""Cache of results that `prefetch` computed for a later batch, keyed by tensor identity and version.

Nouns
  sources  the input tensors of a result, their versions, and its other inputs
  made     the result's tensors, and the stream that computed them

    keep (batch i + 1)   stores a result while batch i trains
    take (batch i + 1)   same sources: returns the result, once; the current stream waits for the stream that made it
                         changed or other sources: returns None, and the caller computes the result itself

The key is the identity of the tensors, not their values: no values are compared, and the host does not wait. Results
that are never taken are dropped, oldest first. So a missing or stale result costs only time.

While a CUDA graph is captured no result is kept or taken: a graph must contain the work that it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from tilerec.ops.runtime.upload import capturing
from tilerec.storage.tensor_mark import mark_of

MAX_RESULTS = 4
"""Maximum number of results kept for later batches."""


@dataclass(frozen=True)
class Sources:
    """The inputs of a result. It keeps its tensors alive, so no other batch can be allocated at their addresses."""

    tensors: tuple[Tensor | None, ...]
    marks: tuple[Any, ...]
    others: tuple[Any, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor | None], others: tuple[Any, ...] = ()) -> Sources | None:
        """Return the sources; None if a tensor is an inference tensor, which has no version counter."""
        if any([t is not None and t.is_inference() for t in tensors]):  # noqa: C419 - called at every step
            return None
        return Sources(tuple(tensors), _marks(tensors), others)

    def same(self, now: Sources) -> bool:
        """Return True if these sources equal `now` and have not been written to since."""
        if self.others != now.others or self.marks != now.marks:
            return False
        return self.marks == _marks(self.tensors)  # detects writes through any reference


def _marks(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple([None if t is None else mark_of(t) for t in tensors])


@final
class StreamEvent:
    """A CUDA stream and an event recorded in it, for which other streams can wait."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device)
        self._event = torch.cuda.Event()
        self._event.record(self.stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamEvent:
        return self

    def wait(self, tensors: Sequence[Tensor | None]) -> None:
        """Make the current stream wait for the event before it reads these tensors."""
        stream = torch.cuda.current_stream(self.stream.device)
        if stream == self.stream:
            return
        stream.wait_event(self._event)
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)  # the allocator reuses their memory only after this stream's work


@dataclass(frozen=True)
class _Result:
    sources: Sources
    tensors: list[Tensor]
    moment: StreamEvent | None  # None: on the CPU


@final
class PrefetchedResults:
    """Results computed for later batches. Copies and pickles begin empty."""

    def __init__(self) -> None:
        self._made: list[_Result] = []  # replaced, never mutated: several threads may prefetch

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return PrefetchedResults, ()

    def keep(
        self, sources: Sources | None, tensors: list[Tensor], device: torch.device, most: int = MAX_RESULTS
    ) -> None:
        """Keep a result that the current stream has computed from these sources.

        Args:
            device: the device of the computation; some of `tensors` may be on the host.
            most: maximum number of results kept; the newest stay.
        """
        if sources is None or capturing():
            return
        moment = None
        if device.type == "cuda":
            moment = StreamEvent(device)
            for tensor in sources.tensors:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(moment.stream)
        # A new result replaces that of equal sources: a graph replay may have refilled the batch without a new version.
        others = [made for made in self._made if not made.sources.same(sources)]
        self._made = [*others, _Result(sources, tensors, moment)][-most:]

    def take(self, sources: Sources | None, *, stays: bool = False) -> list[Tensor] | None:
        """Return the result of these sources, or None; the current stream waits for the stream that made it.

        Args:
            stays: keep the result, so that it may be taken again.
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
