"""Asynchronous upload of integers from the host to a device.

`torch.tensor(numbers, device="cuda")` blocks until the device has finished all earlier work. Numbers that change per
step are copied through pinned memory instead; numbers that stay the same are copied once.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilerec.torch_private import current_device, current_raw_stream, dispatch_mode_count


def upload(numbers: Sequence[int] | npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Return the numbers as int64 [len(numbers)] on the device."""
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
    # PyTorch reuses pinned memory only after the copy from it has run.
    pinned = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _OF_GRAPHS.append(pinned)
    return pinned.to(device, non_blocking=True)


_OF_GRAPHS: list[object] = []
"""Objects that captured CUDA graphs read at every replay: pinned memory, and tensors uploaded before the capture."""

P = ParamSpec("P")
T = TypeVar("T")


def cached_per_stream(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Cache the results of a function that uploads numbers to a device; keep the `most` latest results.

    Arguments must be hashable and positional. Results are cached per stream: a tensor is uploaded on the stream that
    uses it, and no other stream waits for the upload. Its memory is therefore reused only behind the kernels that
    read it.

    Under capture no new result is cached, since a captured upload runs only when the graph does. A result cached
    earlier, on any stream, is used; it then lives as long as the process, since graphs hold no references.
    """

    def keep(make: Callable[P, T]) -> Callable[P, T]:
        memo: dict[tuple[int, tuple[object, ...]], T] = {}

        @functools.wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> T:
            assert not kwargs, "by position only"
            if capturing():
                found = next((value for (_, known), value in list(memo.items()) if known == args), None)
                if found is None:
                    return make(*args, **kwargs)
                _OF_GRAPHS.append(found)
                return found
            key = (current_stream(), args)
            found = memo.get(key)
            if found is None:
                found = make(*args, **kwargs)
                while len(memo) >= most:
                    for oldest in list(memo)[:1]:  # a list, since other threads may write to memo
                        memo.pop(oldest, None)
                memo[key] = found
            return found

        return made

    return keep


def capturing() -> bool:
    """Return True if the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_stream() -> int:
    """Return the raw handle of the current device's current stream; 0 without GPUs."""
    if not torch.cuda.is_initialized():
        return 0
    return int(current_raw_stream(current_device()))


def constants(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers as a cached int64 tensor on the device (see `cached_per_stream`). Never write to it."""
    # A tracer's tensors are valid only in its own program.
    if torch.compiler.is_compiling() or dispatch_mode_count():
        return upload(numbers, device)
    return _cached_constants(tuple(numbers), device)


@cached_per_stream(512)
def _cached_constants(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return upload(numbers, device)
