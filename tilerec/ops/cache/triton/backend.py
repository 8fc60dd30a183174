"""The ops of cached tables by Triton: `cache_ask_`, `cache_plan`, `cache_move_`, `cache_seat_`, `cache_lines_` on GPUs.

`definition.py` says what they mean, and has the nouns; the kernels are in files of the ops' names, what they
share in `books.py`. The plans are those of the reference, number by number.

A request of all cached tables of a batch is: zeros, `ask_kernel`, `torch.sort` of N keys (4 bytes each; 8 with LFU),
zeros, `give_kernel`, `torch.cumsum` of flags, `plan_kernel`, `carry_kernel` out, `carry_kernel` in, `seat_kernel`: 9
launches and the sort, however many tables there are. No kernel returns a number to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilerec.ops.cache.triton.lines import cache_lines_
from tilerec.ops.cache.triton.move import cache_move_
from tilerec.ops.cache.triton.plan import cache_plan
from tilerec.ops.cache.triton.request import cache_ask_
from tilerec.ops.cache.triton.seat import cache_seat_
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.library import on_own_device

KERNELS: dict[str, Callable[..., Any]] = {
    "cache_ask_": cache_ask_,
    "cache_plan": cache_plan,
    "cache_move_": cache_move_,
    "cache_seat_": cache_seat_,
    "cache_lines_": cache_lines_,
}


def register(key: str = "CUDA") -> None:
    """Let these kernels serve the ops on devices of this dispatch key."""
    for name, kernel in KERNELS.items():
        LIBRARY.impl(name, on_own_device(kernel), key, allow_override=True)
