"""Error reports of kernels: the host reads them asynchronously and raises.

A kernel that finds a bad id writes it into its report, an int64 tensor on the device, and skips the id. It runs no
device-side assertion, which would make every later CUDA call of the process fail. The report is copied to the host
behind the kernel, and `raise_due` raises the errors of copies that have finished. Each op calls `raise_due` first, so
an error appears at the next op after the copy has finished, with the message that the CPU op gives. `raise_all` waits
for the copies in flight.

  report   int64 [4]: 0 or 1 (taken), then three numbers whose meaning the kernel's op defines

`ops/runtime/readback.py` does the copies.

A kernel takes a report by `tl.atomic_cas(report, 0, 1) == 0` and writes the numbers only then. The first program to
take it wins: which of several bad ids of one batch is reported may differ from run to run.

A report that comes back untaken is reused, on the stream where it was used before. So a step fills and allocates
nothing for its reports; it pays for a copy of 32 bytes each.

Under CUDA-graph capture the graph keeps the report. Every later call outside of a capture copies it again, so errors of
replays are detected, too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilerec.ops.runtime.readback import AsyncReadback, clear, runs_synchronously, zeros
from tilerec.ops.runtime.upload import current_stream

Raise = Callable[[int, int, int], None]
SIZE = 4

_BLOCK = 512  # reports allocated at a time
_LEAST = 256  # free reports of a stream, at least, when a capture begins

_REPORTS = AsyncReadback(adds=False)  # a taken report keeps its numbers until its error is raised
_LOCK = threading.RLock()  # a finalizer may run an op inside another op


@dataclass
class _Device:
    """Reports of one device."""

    free: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # by stream
    own: set[int] = field(default_factory=set)  # addresses of the reports that are reused


_DEVICES: defaultdict[torch.device, _Device] = defaultdict(_Device)


def new_report(device: torch.device) -> Tensor:
    """Return a report that is not taken."""
    if runs_synchronously(device):
        return _made(1, device)[0]
    stream = current_stream()
    with _LOCK:
        state = _DEVICES[device]
        free = state.free[stream]
        if len(free) < _LEAST:
            if torch.cuda.is_current_stream_capturing():
                # A free report of any stream: its copy has finished, so no stream is using it. A report allocated here
                # would be part of the graph: undefined before the first replay, and zeroed again by every replay.
                free = free or next((own for own in state.free.values() if own), free)
                if not free:
                    return _made(1, device)[0]
            else:
                made = _made(_BLOCK, device)
                free.extend(made)
                state.own.update(map(Tensor.data_ptr, made))
        return free.pop()


def post(report: Tensor, raise_: Raise) -> None:
    """Arrange for `raise_(a, b, c)` to be called with the report's numbers if a kernel took it. Call it after a launch.

    On the CPU (interpreted kernels) `raise_` is called at once.
    """
    device = report.device
    if runs_synchronously(device):
        taken, a, b, c = report.tolist()
        if taken:
            raise_(a, b, c)
        return
    state = _DEVICES[device]
    again = report.data_ptr() in state.own and not torch.cuda.is_current_stream_capturing()
    free = state.free[current_stream()] if again else None

    def deliver(numbers: list[int]) -> None:
        taken, a, b, c = numbers
        if taken == 1:
            clear(report)
            raise_(a, b, c)
        elif free is not None:
            free.append(report)

    _REPORTS.on_arrival(report, deliver)


def raise_due(device: torch.device) -> None:
    """Raise the error of a report whose copy has finished; never wait."""
    _REPORTS.poll(device)


def raise_all(device: torch.device) -> None:
    """Wait for the device's reports and raise the error of the first that is taken."""
    _REPORTS.wait_all(device)


def _made(count: int, device: torch.device) -> list[Tensor]:
    return zeros(count, SIZE, device)
