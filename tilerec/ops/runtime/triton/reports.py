"""What kernels found wrong, and how the host learns of it without waiting.

A kernel that meets a bad id writes what it saw into its report, an int64 tensor on the device, and goes on as if the id
were not there: no device-side assertion, which would end every later call of the process. The report is copied to the
host behind the kernel; `raise_due` raises what has arrived. Each op calls it first, so an error appears at the next op
after the copy is done, with the message that the CPU gives; `raise_all` waits for what is under way.

  report   int64 [4]: 0 or 1 (taken), then three numbers that the kernel's op gives a meaning to

`ops/runtime/readback.py` is how it gets there.

A kernel takes a report by `tl.atomic_cas(report, 0, 1) == 0` and only then writes the numbers: the first to come is
told, and which one that is among several bad ids of one batch may differ from run to run.

A report that came back untaken is as good as new. So a step fills and allocates nothing for its reports; all it pays
is a copy of 32 bytes for each. They are used again on the stream where they were used before.

Under CUDA-graph capture the report is the graph's from then on, and every call outside of a capture has it looked at
anew, so replays are looked at, too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilerec.ops.runtime.readback import Arrivals, at_once, clear, zeros
from tilerec.ops.runtime.upload import current_stream

Raise = Callable[[int, int, int], None]
SIZE = 4

_BLOCK = 512  # reports that are made at a time
_LEAST = 256  # there are at least so many when a capture begins

_REPORTS = Arrivals(adds=False)  # a taken report stays as it is until it was told
_LOCK = threading.RLock()  # a finalizer may run an op in the midst of one


@dataclass
class _Device:
    """The reports of one device."""

    free: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # by stream
    own: set[int] = field(default_factory=set)  # addresses of reports that are used again


_DEVICES: defaultdict[torch.device, _Device] = defaultdict(_Device)


def new_report(device: torch.device) -> Tensor:
    """A report that is not taken."""
    if at_once(device):
        return _made(1, device)[0]
    stream = current_stream()
    with _LOCK:
        state = _DEVICES[device]
        free = state.free[stream]
        if len(free) < _LEAST:
            if torch.cuda.is_current_stream_capturing():
                # One of any stream's: its copy has arrived, so nothing is under way. What is made here is a part of
                # the graph: anything before the first replay, and every other forgets what the one before it found.
                free = free or next((own for own in state.free.values() if own), free)
                if not free:
                    return _made(1, device)[0]
            else:
                made = _made(_BLOCK, device)
                free.extend(made)
                state.own.update(map(Tensor.data_ptr, made))
        return free.pop()


def post(report: Tensor, raise_: Raise) -> None:
    """Have `raise_(a, b, c)` called with the report's numbers if a kernel has taken it; called behind the kernel.

    On the CPU (interpreted kernels) that is at once.
    """
    device = report.device
    if at_once(device):
        taken, a, b, c = report.tolist()
        if taken:
            raise_(a, b, c)
        return
    state = _DEVICES[device]
    again = report.data_ptr() in state.own and not torch.cuda.is_current_stream_capturing()
    free = state.free[current_stream()] if again else None

    def tell(numbers: list[int]) -> None:
        taken, a, b, c = numbers
        if taken == 1:
            clear(report)
            raise_(a, b, c)
        elif free is not None:
            free.append(report)

    _REPORTS.when_arrived(report, tell)


def raise_due(device: torch.device) -> None:
    """Raise the error of a report that has arrived; never waits."""
    _REPORTS.use_arrived(device)


def raise_all(device: torch.device) -> None:
    """Wait for the device's reports and raise the first that is taken."""
    _REPORTS.use_all(device)


def _made(count: int, device: torch.device) -> list[Tensor]:
    return zeros(count, SIZE, device)
