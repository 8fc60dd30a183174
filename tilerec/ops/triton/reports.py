"""What kernels found wrong, and how the host learns of it without waiting.

A kernel that meets a bad id writes what it saw into its report, an int64 tensor on the device, and goes on as if the id
were not there: no device-side assertion, which would end every later call of the process. The report is copied to the
host behind the kernel; `raise_due` raises what has arrived. Each op calls it first, so an error appears at the next op
after the copy is done, with the message that the CPU gives; `raise_all` waits for what is under way.

  report   int64 [4]: 0 or 1 (taken), then three numbers that the kernel's op gives a meaning to
  arrival  where a report goes on the host (pinned memory), and the event that says that it is there

A kernel takes a report by `tl.atomic_cas(report, 0, 1) == 0` and only then writes the numbers: the first to come is
told, and which one that is among several bad ids of one batch may differ from run to run.

A report that came back untaken is as good as new. So a step fills and allocates nothing for its reports; all it pays
is a copy of 32 bytes for each. They are used again on the stream where they were used before.

Under CUDA-graph capture nothing is copied: the report is the graph's from then on, and every call outside of a capture
has it looked at anew, so replays are looked at, too.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Raise = Callable[[int, int, int], None]
SIZE = 4

_BLOCK = 64  # reports that are made at a time


class _Arrival(NamedTuple):
    numbers: Tensor
    event: torch.cuda.Event


@dataclass(eq=False)
class _Posted:
    """A report that a kernel may have taken, and what is to be done then."""

    report: Tensor
    raise_: Raise
    stream: int
    in_graph: bool  # a replay may take it at any time
    arrival: _Arrival | None = None  # while it is on its way


@dataclass
class _Device:
    """The reports of one device."""

    free: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # by stream
    own: set[int] = field(default_factory=set)  # addresses of reports that are used again
    arrivals: list[_Arrival] = field(default_factory=list)
    sent: deque[_Posted] = field(default_factory=deque)
    in_graphs: list[_Posted] = field(default_factory=list)


_LOCK = threading.RLock()  # a finalizer may run an op in the midst of one
_DEVICES: defaultdict[torch.device, _Device] = defaultdict(_Device)


def new_report(device: torch.device) -> Tensor:
    """A report that is not taken."""
    if _at_once(device):
        return _made(1, device)[0]
    stream = torch.cuda.current_stream(device).cuda_stream
    with _LOCK:
        state = _DEVICES[device]
        free = state.free[stream]
        if not free and torch.cuda.is_current_stream_capturing():
            # One of any stream's: its copy has arrived, so nothing is under way. What is made here is a part of the
            # graph, and every replay would forget what the one before it found.
            free = next((own for own in state.free.values() if own), free)
            if not free:
                return _made(1, device)[0]
        if not free:
            free.extend(_made(_BLOCK, device))
            state.own.update(map(Tensor.data_ptr, free))
        return free.pop()


def post(report: Tensor, raise_: Raise) -> None:
    """Have `raise_(a, b, c)` called with the report's numbers if a kernel has taken it; called behind the kernel.

    On the CPU (interpreted kernels) that is at once.
    """
    device = report.device
    if _at_once(device):
        _raise_if_taken(report, raise_)
        return
    posted = _Posted(report, raise_, torch.cuda.current_stream(device).cuda_stream, False)
    with _LOCK:
        state = _DEVICES[device]
        if torch.cuda.is_current_stream_capturing():
            posted.in_graph = True
            state.in_graphs.append(posted)
        else:
            _send(state, posted)


def raise_due(device: torch.device) -> None:
    """Raise the error of a report that has arrived; never waits."""
    if _at_once(device) or device not in _DEVICES or torch.cuda.is_current_stream_capturing():
        return
    state = _DEVICES[device]
    while (posted := _next_arrived(state)) is not None:
        assert posted.arrival is not None
        numbers, (report, raise_) = posted.arrival.numbers, (posted.report, posted.raise_)
        taken = bool(numbers[0])
        with _LOCK:
            if not taken and not posted.in_graph and report.data_ptr() in state.own:
                state.free[posted.stream].append(report)
            if not taken:
                state.arrivals.append(posted.arrival)
            posted.arrival = None
        if taken:
            report.zero_()
            _raise_if_taken(numbers, raise_)
    with _LOCK:
        for posted in state.in_graphs:
            if posted.arrival is None:
                _send(state, posted)


def raise_all(device: torch.device) -> None:
    """Wait for the device's reports and raise the first that is taken."""
    if _at_once(device):
        return
    device = _numbered(device)
    for _ in range(2):  # what is on its way; then those of graphs, as they are after it
        torch.cuda.synchronize(device)
        raise_due(device)


def _next_arrived(state: _Device) -> _Posted | None:
    """The first report under way, if it has arrived."""
    with _LOCK:
        if state.sent:
            arrival = state.sent[0].arrival
            assert arrival is not None
            if arrival.event.query():
                return state.sent.popleft()
    return None


def _send(state: _Device, posted: _Posted) -> None:
    arrival = state.arrivals.pop() if state.arrivals else _Arrival(_host_numbers(), torch.cuda.Event())
    arrival.numbers.copy_(posted.report, non_blocking=True)
    arrival.event.record(torch.cuda.current_stream(posted.report.device))
    posted.arrival = arrival
    state.sent.append(posted)


def _at_once(device: torch.device) -> bool:
    """Whether kernels have run when their launch returns."""
    return device.type == "cpu"


def _made(count: int, device: torch.device) -> list[Tensor]:
    return list(torch.zeros(count, SIZE, dtype=torch.int64, device=device).unbind())


def _host_numbers() -> Tensor:
    return torch.empty(SIZE, dtype=torch.int64, device="cpu", pin_memory=True)


def _raise_if_taken(numbers: Tensor, raise_: Raise) -> None:
    taken, a, b, c = numbers.tolist()
    if taken:
        raise_(a, b, c)


def _numbered(device: torch.device) -> torch.device:
    """`cuda` is the current device; tensors say which."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
