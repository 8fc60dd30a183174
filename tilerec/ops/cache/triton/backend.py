"""Triton kernels of the cache ops: `cache_ask_`, `cache_plan`, `cache_move_`, `cache_seat_`, `cache_lines_` on GPUs.

`definition.py` defines the ops and the nouns. Each op's kernels are in the file of its name, their shared code in
`books.py`. Plans equal those of the reference, number by number.

One request for all cached tables of a batch takes 9 launches and a sort, however many tables there are: zeros,
`ask_kernel`, `torch.sort` of N keys (4 bytes each; 8 with LFU), zeros, `give_kernel`, `torch.cumsum` of flags,
`plan_kernel`, `carry_kernel` out, `carry_kernel` in, `seat_kernel`. No kernel returns a number to the host.
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
    """Register these kernels for the ops on devices of this dispatch key."""
    for name, kernel in KERNELS.items():
        LIBRARY.impl(name, on_own_device(kernel), key, allow_override=True)
