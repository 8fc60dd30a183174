"""Numbers on their way from the host to a device, without the host waiting for them.

`torch.tensor(numbers, device="cuda")` waits until everything the device was given before is done. What a step sends
goes through pinned memory instead; what stays the same from step to step is sent once.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(numbers: Sequence[int] | npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """int64 [len(numbers)] on the device."""
    if torch.compiler.is_compiling():
        return torch.tensor(list(numbers), dtype=torch.int64, device=device)
    if isinstance(numbers, np.ndarray):
        host = torch.from_numpy(numbers)
    elif len(numbers):
        host = torch.frombuffer(array("q", numbers), dtype=torch.int64)  # ten times faster than torch.tensor
    else:
        host = torch.zeros(0, dtype=torch.int64, device="cpu")
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        return host.to(device, non_blocking=True)
    # Pinned memory is given out again only after the copy out of it has run.
    pinned = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _OF_GRAPHS.append(pinned)
    return pinned.to(device, non_blocking=True)


_OF_GRAPHS: list[Tensor] = []
"""What captured CUDA graphs copy from at every replay."""


def constants(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The same, made once per process for the numbers of a layout; never write to it."""
    # A tracer's tensors are of its program only.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return upload(numbers, device)
    return _kept(tuple(numbers), device)


@functools.lru_cache(maxsize=512)
def _kept(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return upload(numbers, device)
