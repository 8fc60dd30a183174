"""Asynchronous readback: copy small kernel results to the host and run a callback once the copy has finished.

The copy runs behind the kernel on its stream. `poll` runs the callbacks of finished copies, in stream order, and
never blocks; `wait_all` waits for the rest. Streams are independent: a slow stream does not delay the callbacks of
other streams. On the CPU callbacks run at once.

    step 1: on_arrival(result, use)      returns at once
    step 2: poll(device)            calls use([0, -1, -1]) if the copy has finished

Terms
  arrivals   one such queue per device. Each `AsyncReadback` is independent: the functions of this file share one, error
             reports of kernels (`triton/reports.py`) use another
  copy       a pinned host buffer and the event that marks the end of its copy; both are reused

CUDA graphs. Under capture nothing is copied; the tensor then belongs to the graph. Each later poll outside of a capture
starts a copy of it, unless the previous one is still running, so results of replays are read as well. One poll copies
the results of only a few captured ops, in turn: ops never leave the list, and the cost of a poll must not grow with it.

With `adds`, the first number is a count and the others describe the latest counted event (count 0: no event). Replays
add to a sum that is never cleared; the host stores how much of it has been used. So no event is lost or reported twice,
for any number of replays between polls, on any stream. Without `adds`, `use` itself must handle repeated numbers.

    replays yield (2, 7), (0, -1), (1, 4)    the sum is then (3, 4)    use([3, 4]), if no poll ran in between

Memory that a graph writes is undefined before its first replay. So the sums are tensors zeroed outside of captures.
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

_SPARES = 256  # minimum number of zeroed sums when a capture begins
OPS_PER_POLL = 4  # captured ops that one poll copies; `wait_all` copies all


class _Copy(NamedTuple):
    host: Tensor  # pinned
    event: torch.cuda.Event


@dataclass(eq=False, slots=True)
class _CapturedNumbers:
    numbers: Tensor
    use: Use
    on_its_way: bool = False
    used: int = 0  # part of the sum already passed to `use`


class _PendingCopy(NamedTuple):
    copy: _Copy
    use: Use
    graph: _CapturedNumbers | None


@dataclass
class _Device:
    """Copies under way, buffers and captured ops of one device."""

    sent: defaultdict[int, deque[_PendingCopy]] = field(default_factory=lambda: defaultdict(deque))  # by stream
    copies: defaultdict[int, list[_Copy]] = field(default_factory=lambda: defaultdict(list))  # free ones, by size
    of_graphs: list[_CapturedNumbers] = field(default_factory=list)
    turn: int = 0  # index in of_graphs at which the next poll begins
    spares: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # zeros, by size


_ALL_ARRIVALS: list[AsyncReadback] = []


class AsyncReadback:
    """Queues of asynchronous readbacks, one per device."""

    def __init__(self, adds: bool) -> None:
        self._adds = adds
        self._lock = threading.RLock()  # reentrant: a finalizer may run another op while it is held
        self._devices: defaultdict[torch.device, _Device] = defaultdict(_Device)
        _ALL_ARRIVALS.append(self)

    def on_arrival(self, numbers: Tensor, use: Use) -> None:
        """Copy `numbers` (int64 `[n]`, written on the current stream) to the host and call `use` with them later."""
        if runs_synchronously(numbers.device):
            use(numbers.tolist())
            return
        with self._lock:
            device = self._devices[numbers.device]
            spares = device.spares[numbers.shape[0]] if self._adds else None
            if torch.cuda.is_current_stream_capturing():
                if spares is None:
                    device.of_graphs.append(_CapturedNumbers(numbers, use))
                elif spares:
                    device.of_graphs.append(_CapturedNumbers(_added(spares.pop(), numbers), use))
                else:
                    warnings.warn(
                        f"tilerec does not report the rows that this captured op and later ones skip: {_SPARES} ops "
                        "were captured since the last step outside of a capture; run one before the next capture.",
                        stacklevel=2,
                    )
            else:
                if spares is not None and len(spares) < _SPARES:
                    spares.extend(zeros(_SPARES, numbers.shape[0], numbers.device))
                _start_copy(device, numbers, use)

    def poll(self, where: torch.device) -> None:
        """Run the callbacks of finished copies; never blocks. If one raises, the others run at the next call."""
        self._use(where, OPS_PER_POLL)

    def _use(self, where: torch.device, limit: int | None) -> None:
        """Run the callbacks of finished copies and start copies for up to `limit` captured ops (None: for all)."""
        device = self._devices.get(where)
        if device is None:  # the CPU, or a device without copies
            return
        queues = [queue for queue in tuple(device.sent.values()) if queue]
        if not (queues or device.of_graphs) or torch.cuda.is_current_stream_capturing():
            return
        for queue in queues:
            while queue and (arrived := self._next_arrived(device, queue)) is not None:
                numbers, use = arrived
                use(numbers)
        count = len(device.of_graphs)
        for _ in range(count if limit is None else min(limit, count)):
            with self._lock:
                graph = device.of_graphs[device.turn % count]
                device.turn += 1
                if not graph.on_its_way:
                    _start_copy(device, graph.numbers, graph.use, graph)

    def wait_all(self, where: torch.device) -> None:
        """Wait for all copies under way and run their callbacks."""
        if runs_synchronously(where) or (where := _with_index(where)) not in self._devices:
            return
        for _ in range(2):  # first the copies under way, then new copies of the graphs' results
            torch.cuda.synchronize(where)
            self._use(where, None)

    def _next_arrived(self, device: _Device, queue: deque[_PendingCopy]) -> tuple[list[int], Use] | None:
        with self._lock:
            while queue:
                # Remove it before the query: a finalizer may poll this queue in between.
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


def _start_copy(device: _Device, numbers: Tensor, use: Use, graph: _CapturedNumbers | None = None) -> None:
    free = device.copies[numbers.shape[0]]
    copy = free.pop() if free else _new_copy(numbers.shape[0])
    copy.host.copy_(numbers, non_blocking=True)
    stream = torch.cuda.current_stream(numbers.device)
    copy.event.record(stream)
    device.sent[stream.cuda_stream].append(_PendingCopy(copy, use, graph))
    if graph is not None:
        graph.on_its_way = True


def _added(total: Tensor, numbers: Tensor) -> Tensor:
    """Record the addition of `numbers` to the sum; return the sum.

    The count is added last: a reader that sees it also sees the numbers that belong to it.
    """
    if numbers.shape[0] > 1:
        torch.where(numbers[:1] > 0, numbers[1:], total[1:], out=total[1:])
    total[:1] += numbers[:1]
    return total


def _new_copy(size: int) -> _Copy:
    with torch.inference_mode(False):  # calls outside of inference mode write to it as well
        host = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
    return _Copy(host, torch.cuda.Event())


def zeros(count: int, size: int, device: torch.device) -> list[Tensor]:
    """Return `count` zeroed int64 tensors of `size`, usable in and outside of inference mode."""
    with torch.inference_mode(False):
        return list(torch.zeros(count, size, dtype=torch.int64, device=device).unbind())


def clear(numbers: Tensor) -> None:
    """Zero numbers on a device, even if they were created in inference mode."""
    with torch.inference_mode():
        numbers.zero_()


def runs_synchronously(device: torch.device) -> bool:
    """Return True if kernels have finished when their launch returns."""
    return device.type == "cpu"


def _with_index(device: torch.device) -> torch.device:
    """Replace `cuda` by the current device with its index, as tensors report it."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


_NUMBERS = AsyncReadback(adds=True)


def on_arrival(numbers: Tensor, use: Use) -> None:
    """Copy `numbers` (int64 `[n]`, written on the current stream) to the host and call `use` with them later.

    The first number is a count (0: no event); the others describe the event. For replays of a captured call, `use` gets
    the sum of new counts and the latest event's numbers; it is not called if the sum is 0.
    """
    _NUMBERS.on_arrival(numbers, use)


def poll(device: torch.device) -> None:
    """Run the callbacks of finished copies; never blocks. If one raises, the others run at the next call."""
    _NUMBERS.poll(device)


def wait_all(device: torch.device) -> None:
    """Wait for all copies under way and run their callbacks."""
    _NUMBERS.wait_all(device)


def drain(device: torch.device) -> None:
    """Wait for all pending reports of kernels: bad ids and skipped rows. Otherwise the next op would deliver them."""
    for arrivals in _ALL_ARRIVALS:
        arrivals.wait_all(device)
