"""Numbers on their way from the host to a device, without the host waiting for them.

`torch.tensor(numbers, device="cuda")` waits until everything the device was given before is done. What a step sends
goes through pinned memory instead; what stays the same from step to step is sent once.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(numbers)] on the device."""
    if torch.compiler.is_compiling():
        return torch.tensor(list(numbers), dtype=torch.int64, device=device)
    # A buffer is read ten times faster than a list.
    host = (
        torch.frombuffer(array("q", numbers), dtype=torch.int64)
        if len(numbers)
        else torch.zeros(0, dtype=torch.int64, device="cpu")
    )
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        return host.to(device, non_blocking=True)
    # Pinned memory is given out again only after the copy out of it has run.
    return host.pin_memory().to(device, non_blocking=True)


def constant(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The same, made once per process for the numbers of a layout; never write to it."""
    # A tracer's tensors are of its program only.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return upload(numbers, device)
    return _constant(tuple(numbers), device)


@functools.lru_cache(maxsize=512)
def _constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return upload(numbers, device)
