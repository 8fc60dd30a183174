"""Numbers on their way from the host to a device, without the host waiting for them.

`torch.tensor(numbers, device="cuda")` waits until everything the device was given before is done. What a step sends
goes through pinned memory instead; what stays the same from step to step is sent once.
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


_OF_GRAPHS: list[object] = []
"""What captured CUDA graphs read at every replay: pinned memory, and what was sent before the capture."""

P = ParamSpec("P")
T = TypeVar("T")


def kept(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """What a function of hashable arguments makes of numbers sent to a device, made once and kept; the `most` latest.

    Once per stream: a tensor is sent on the stream that asks for it, and no other stream waits for that. So its memory,
    when it is given up, is used again only behind the kernels that read it.

    Under capture nothing is kept, since what is sent then is there when the graph runs, and not before. What has been
    made, on whichever stream, is used, and stays for as long as the process, as graphs hold no references.
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
                    for oldest in list(memo)[:1]:  # a list: other threads write, too
                        memo.pop(oldest, None)
                memo[key] = found
            return found

        return made

    return keep


def capturing() -> bool:
    """Whether the current stream's launches go into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_stream() -> int:
    """The current device's current stream, 0 without GPUs."""
    if not torch.cuda.is_initialized():
        return 0
    return int(current_raw_stream(current_device()))


def constants(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The same, made once for the numbers of a layout (`kept`); never write to it."""
    # A tracer's tensors are of its program only.
    if torch.compiler.is_compiling() or dispatch_mode_count():
        return upload(numbers, device)
    return _kept(tuple(numbers), device)


@kept(512)
def _kept(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return upload(numbers, device)
