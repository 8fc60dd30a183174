"""What kernels found wrong, and how the host learns of it without waiting.

A kernel that meets a bad id writes what it saw into its report, an int64 tensor on the device, and goes on as if the id
were not there: no device-side assertion, which would end every later call of the process. The report is copied to the
host behind the kernel; `raise_due` raises what has arrived. Each op calls it first, so an error appears at the next op
after the copy is done, with the message that the CPU gives; `raise_all` waits for what is under way.

  report   int64 [4]: 0 or 1 (taken), then three numbers that the kernel's op gives a meaning to

A kernel takes a report by `tl.atomic_cas(report, 0, 1) == 0` and only then writes the numbers: the first to come is
told, and which one that is among several bad ids of one batch may differ from run to run.

Under CUDA-graph capture nothing is copied: the report is kept, and looked at by the next call outside the capture.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Raise = Callable[[int, int, int], None]
SIZE = 4


@dataclass
class _Sent:
    """A report on its way to the host."""

    report: Tensor
    arrived: Tensor  # pinned
    event: torch.cuda.Event
    raise_: Raise


@dataclass
class _Device:
    sent: deque[_Sent] = field(default_factory=deque)
    captured: list[tuple[Tensor, Raise]] = field(default_factory=list)


_LOCK = threading.Lock()
_DEVICES: dict[torch.device, _Device] = {}


def new_report(device: torch.device) -> Tensor:
    """A report that is not taken."""
    return torch.zeros(SIZE, dtype=torch.int64, device=device)


def post(report: Tensor, raise_: Raise) -> None:
    """Have `raise_(a, b, c)` called with the report's numbers if a kernel has taken it; called behind the kernel.

    On the CPU (interpreted kernels) that is at once.
    """
    if report.device.type == "cpu":
        _raise_if_taken(report, raise_)
        return
    with _LOCK:
        waiting = _DEVICES.setdefault(report.device, _Device())
        if torch.cuda.is_current_stream_capturing():
            waiting.captured.append((report, raise_))
            return
        waiting.sent.append(_send(report, raise_))


def _send(report: Tensor, raise_: Raise) -> _Sent:
    arrived = torch.empty(SIZE, dtype=torch.int64, device="cpu", pin_memory=True)
    arrived.copy_(report, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(report.device))
    return _Sent(report, arrived, event, raise_)


def raise_due(device: torch.device) -> None:
    """Raise the error of a report that has arrived; never waits."""
    if device.type == "cpu" or device not in _DEVICES or torch.cuda.is_current_stream_capturing():
        return
    with _LOCK:
        waiting = _DEVICES[device]
        for report, raise_ in waiting.captured:
            waiting.sent.append(_send(report, raise_))
        due = []
        while waiting.sent and waiting.sent[0].event.query():
            due.append(waiting.sent.popleft())
    for sent in due:
        _raise_if_taken(sent.arrived, sent.raise_, sent.report)


def raise_all(device: torch.device) -> None:
    """Wait for the device's reports and raise the first that is taken."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        raise_due(device)


def _raise_if_taken(arrived: Tensor, raise_: Raise, report: Tensor | None = None) -> None:
    taken, a, b, c = arrived.tolist()
    if taken:
        if report is not None:
            report.zero_()
        raise_(a, b, c)
