"""Numbers that a kernel leaves on a device, and what is done with them once they have arrived: nobody waits.

`when_arrived` copies them to the host behind the kernel and remembers what to do; `use_arrived` does it for those that
have come, `use_all` waits for the rest. On the CPU numbers are there at once.

Under CUDA-graph capture the tensor is the graph's: every `use_arrived` outside of a capture looks at it anew, so it
sees what the last replay left, or zeros if there was none since.

    step 1: when_arrived(result, use)      nothing to be seen yet
    step 2: use_arrived(device)            use([0, -1, -1]), if the copy is done by now
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Use = Callable[[list[int]], None]


class _Copy(NamedTuple):
    host: Tensor  # pinned
    event: torch.cuda.Event


@dataclass
class _Sent:
    copy: _Copy
    use: Use


@dataclass
class _Device:
    sent: deque[_Sent] = field(default_factory=deque)
    copies: defaultdict[int, list[_Copy]] = field(
        default_factory=lambda: defaultdict(list)
    )  # free ones, by size
    in_graphs: list[tuple[Tensor, Use]] = field(default_factory=list)


_LOCK = threading.RLock()  # a finalizer may run an op in the midst of one
_DEVICES: defaultdict[torch.device, _Device] = defaultdict(_Device)


def when_arrived(numbers: Tensor, use: Use) -> None:
    """Have `use` called with these numbers (int64 `[n]`, complete behind what the current stream has been given)."""
    if _at_once(numbers.device):
        use(numbers.tolist())
        return
    with _LOCK:
        state = _DEVICES[numbers.device]
        if torch.cuda.is_current_stream_capturing():
            state.in_graphs.append((numbers, use))
        else:
            _send(state, numbers, use)


def use_arrived(device: torch.device) -> None:
    """Use what has arrived; never waits. The first `use` that raises ends it, the others have their turn next time."""
    if _at_once(device) or device not in _DEVICES or torch.cuda.is_current_stream_capturing():
        return
    state = _DEVICES[device]
    while (sent := _next_arrived(state)) is not None:
        numbers = sent.copy.host.tolist()
        with _LOCK:
            state.copies[len(numbers)].append(sent.copy)
        sent.use(numbers)
    with _LOCK:
        if not state.sent:
            for kept, use in state.in_graphs:
                _send(state, kept, use)
                kept.zero_()  # behind the copy: what one replay left is used once


def use_all(device: torch.device) -> None:
    """Wait for what is under way and use it."""
    if _at_once(device) or (device := _numbered(device)) not in _DEVICES:
        return
    for _ in range(2):  # what is on its way; then those of graphs, as they are after it
        torch.cuda.synchronize(device)
        use_arrived(device)


def _next_arrived(state: _Device) -> _Sent | None:
    with _LOCK:
        return state.sent.popleft() if state.sent and state.sent[0].copy.event.query() else None


def _send(state: _Device, numbers: Tensor, use: Use) -> None:
    free = state.copies[numbers.numel()]
    copy = free.pop() if free else _new_copy(numbers.numel())
    copy.host.copy_(numbers, non_blocking=True)
    copy.event.record(torch.cuda.current_stream(numbers.device))
    state.sent.append(_Sent(copy, use))


def _new_copy(size: int) -> _Copy:
    return _Copy(torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True), torch.cuda.Event())


def _at_once(device: torch.device) -> bool:
    return device.type == "cpu"


def _numbered(device: torch.device) -> torch.device:
    """`cuda` is the current device; tensors say which."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
