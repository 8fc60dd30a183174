"""Numbers that a kernel leaves on a device, and what is done with them once they have arrived: nobody waits.

They are copied to the host behind the kernel, with what to do remembered; `use_arrived` does it for those that have
come, in the order of their stream (a slow stream keeps no other from its news), `use_all` waits for the rest. On the
CPU numbers are there at once.

    step 1: when_arrived(result, use)      nothing to be seen yet
    step 2: use_arrived(device)            use([0, -1, -1]), if the copy is done by now

Nouns
  arrivals   one such queue per device. Whoever asks for what has come is told of its own numbers only: the functions
             here share a queue, reports of kernels (`triton/reports.py`) have another
  copy       where numbers go on the host (pinned memory), and the event that says that they are there; used again

Under CUDA-graph capture nothing is copied: the tensor is the graph's. From then on every look outside of a capture
sends a copy, unless the last one is still on its way, so replays are seen, too: of a few captured ops, in turn, since
none is ever taken off the list, and a look is to cost the same however many there are. With `adds`, numbers are a
count and what is to be said of the latest that were counted (0: nothing). Replays add to a sum that nobody clears; the
host knows how much of it has been used. So none is lost or used twice, however many replays there are from look to
look, and on whichever streams. Without, `use` does as it thinks right.

    replays leave (2, 7), (0, -1), (1, 4)    the sum is then (3, 4)    use([3, 4]), if nobody looked in between

What a graph writes is anything before its first replay. So the sums are tensors that were zeroed outside of captures.
"""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Use = Callable[[list[int]], None]

_SPARES = 256  # there are at least so many when a capture begins
_AT_A_LOOK = 4  # captured ops that one look asks for news; `use_all` asks all


class _Copy(NamedTuple):
    host: Tensor  # pinned
    event: torch.cuda.Event


@dataclass(eq=False, slots=True)
class _OfGraph:
    numbers: Tensor
    use: Use
    on_its_way: bool = False
    used: int = 0  # of a sum


class _Sent(NamedTuple):
    copy: _Copy
    use: Use
    graph: _OfGraph | None


@dataclass
class _Device:
    """What one device has sent."""

    sent: defaultdict[int, deque[_Sent]] = field(default_factory=lambda: defaultdict(deque))  # by stream
    copies: defaultdict[int, list[_Copy]] = field(
        default_factory=lambda: defaultdict(list)
    )  # free ones, by size
    of_graphs: list[_OfGraph] = field(default_factory=list)
    turn: int = 0  # of them: where the next look begins to ask
    spares: defaultdict[int, list[Tensor]] = field(
        default_factory=lambda: defaultdict(list)
    )  # zeros, by size


_EVERY: list[Arrivals] = []


class Arrivals:
    """Numbers on their way to the host, by device."""

    def __init__(self, adds: bool) -> None:
        self._adds = adds
        self._lock = threading.RLock()  # a finalizer may run an op in the midst of one
        self._devices: defaultdict[torch.device, _Device] = defaultdict(_Device)
        _EVERY.append(self)

    def when_arrived(self, numbers: Tensor, use: Use) -> None:
        """Have `use` called with these (int64 `[n]`, complete behind what the current stream has been given)."""
        if at_once(numbers.device):
            use(numbers.tolist())
            return
        with self._lock:
            device = self._devices[numbers.device]
            spares = device.spares[numbers.shape[0]] if self._adds else None
            if torch.cuda.is_current_stream_capturing():
                if spares is None:
                    device.of_graphs.append(_OfGraph(numbers, use))
                elif spares:
                    device.of_graphs.append(_OfGraph(_added(spares.pop(), numbers), use))
                else:
                    warnings.warn(
                        f"This captured op, and those after it, will not be heard of (rows that it skips): {_SPARES} "
                        "have been captured since a step was last run outside of a capture; run one before the next.",
                        stacklevel=2,
                    )
            else:
                if spares is not None and len(spares) < _SPARES:
                    spares.extend(zeros(_SPARES, numbers.shape[0], numbers.device))
                _send(device, numbers, use)

    def use_arrived(self, where: torch.device) -> None:
        """Use what has arrived; never waits. The first `use` that raises ends it, the others have their turn next
        time."""
        self._use(where, _AT_A_LOOK)

    def _use(self, where: torch.device, asked: int | None) -> None:
        """`asked`: how many of the graphs' ops are asked for news; None: all."""
        device = self._devices.get(where)
        if device is None:  # the CPU, or it has sent nothing
            return
        queues = [queue for queue in tuple(device.sent.values()) if queue]
        if not (queues or device.of_graphs) or torch.cuda.is_current_stream_capturing():
            return
        for queue in queues:
            while queue and (arrived := self._next_arrived(device, queue)) is not None:
                numbers, use = arrived
                use(numbers)
        count = len(device.of_graphs)
        for _ in range(count if asked is None else min(asked, count)):
            with self._lock:
                graph = device.of_graphs[device.turn % count]
                device.turn += 1
                if not graph.on_its_way:
                    _send(device, graph.numbers, graph.use, graph)

    def use_all(self, where: torch.device) -> None:
        """Wait for what is under way and use it."""
        if at_once(where) or (where := _numbered(where)) not in self._devices:
            return
        for _ in range(2):  # what is on its way; then those of graphs, as they are after it
            torch.cuda.synchronize(where)
            self._use(where, None)

    def _next_arrived(self, device: _Device, queue: deque[_Sent]) -> tuple[list[int], Use] | None:
        with self._lock:
            while queue:
                # Taken out before it is asked for: a finalizer in between may look here, too.
                first = queue.popleft()
                if not first.copy.event.query():
                    queue.appendleft(first)
                    return None
                copy, use, graph = first
                numbers: list[int] = copy.host.tolist()
                device.copies[len(numbers)].append(copy)
                if graph is not None:
                    graph.on_its_way = False
                    if self._adds:
                        added = numbers[0] - graph.used
                        if not added:
                            continue
                        graph.used, numbers[0] = numbers[0], added
                return numbers, use
            return None


def _send(device: _Device, numbers: Tensor, use: Use, graph: _OfGraph | None = None) -> None:
    free = device.copies[numbers.shape[0]]
    copy = free.pop() if free else _new_copy(numbers.shape[0])
    copy.host.copy_(numbers, non_blocking=True)
    stream = torch.cuda.current_stream(numbers.device)
    copy.event.record(stream)
    device.sent[stream.cuda_stream].append(_Sent(copy, use, graph))
    if graph is not None:
        graph.on_its_way = True


def _added(total: Tensor, numbers: Tensor) -> Tensor:
    """The sum, with what every replay adds to it. The count comes last: who reads it reads the words to it."""
    if numbers.shape[0] > 1:
        torch.where(numbers[:1] > 0, numbers[1:], total[1:], out=total[1:])
    total[:1] += numbers[:1]
    return total


def _new_copy(size: int) -> _Copy:
    with torch.inference_mode(False):  # calls outside of inference mode write to it, too
        host = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
    return _Copy(host, torch.cuda.Event())


def zeros(count: int, size: int, device: torch.device) -> list[Tensor]:
    """`count` tensors of `size` int64, to be used again, in or out of inference mode."""
    with torch.inference_mode(False):
        return list(torch.zeros(count, size, dtype=torch.int64, device=device).unbind())


def clear(numbers: Tensor) -> None:
    """Zero numbers on a device, whether or not they were made in inference mode."""
    with torch.inference_mode():
        numbers.zero_()


def at_once(device: torch.device) -> bool:
    """Whether kernels have run when their launch returns."""
    return device.type == "cpu"


def _numbered(device: torch.device) -> torch.device:
    """`cuda` is the current device; tensors say which."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


_NUMBERS = Arrivals(adds=True)


def when_arrived(numbers: Tensor, use: Use) -> None:
    """Have `use` called with these numbers (int64 `[n]`, complete behind what the current stream has been given).

    The first is a count, 0 if there is nothing to say; the others say it. Of replays of a captured call `use` gets the
    sum of the counts that are new, and what the latest of them says; never 0.
    """
    _NUMBERS.when_arrived(numbers, use)


def use_arrived(device: torch.device) -> None:
    """Use what has arrived; never waits. The first `use` that raises ends it, the others have their turn next time."""
    _NUMBERS.use_arrived(device)


def use_all(device: torch.device) -> None:
    """Wait for what is under way and use it."""
    _NUMBERS.use_all(device)


def hear_all(device: torch.device) -> None:
    """Wait for whatever kernels have to say, of bad ids and of rows they skipped: the next op would tell, and there may
    be none."""
    for arrivals in _EVERY:
        arrivals.use_all(device)
