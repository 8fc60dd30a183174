"""What an update tells the host: how many rows it left alone because their gradient is not finite, and the first.

Nouns
  told      int64 [TOLD + counters]: rows left alone, table and row of the first (-1, -1 if none), its code, a lock;
            then the counters
  code      table << 40 | row: the first is the one with the least
  counter   of a super-chunk: how many of its chunks are summed (`runs.py`)

Nothing is launched to begin it: the launch that makes keys does so on its way, a step's first. Where an order was made
ahead (`order.py`), `begin_update` does.

    two counters, begun     0, -1, -1, 2^63 - 1, 0, 0, 0
    rows 7 and 4 of table 2 were left alone     2, 2, 4, 2 << 40 | 4, 0, …
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.runtime.triton.launch import launch

NOTHING_TOLD = (0, -1, -1, (1 << 63) - 1, 0)
TOLD = len(NOTHING_TOLD)
"""Numbers before the counters."""
_BLOCK = 128


@triton.jit
def begin_told(told, count, BLOCK: tl.constexpr):
    """`count` numbers as they are before anything is told, by one program."""
    lanes = tl.arange(0, BLOCK)
    for first in range(0, count, BLOCK):
        i = first + lanes
        number = tl.where((i == 1) | (i == 2), -1, 0).to(tl.int64)
        number = tl.where(i == 3, 0x7FFFFFFFFFFFFFFF, number)
        tl.store(told + i, number, mask=i < count)


@triton.jit(do_not_specialize=["count"])
def begin_update(told, count, BLOCK: tl.constexpr):
    begin_told(told, count, BLOCK)


@triton.jit
def tell_not_finite(told, count, first):
    """Count rows that were left alone, and keep the first. first: the least code among this program's.

    The least of all is agreed on by an atomic minimum; whoever brought it writes it out, unless a lesser one has come
    meanwhile.
    """
    tl.atomic_add(told, count)
    if first < tl.atomic_min(told + 3, first):
        free = tl.full((), 0, tl.int64)
        taken = tl.full((), 1, tl.int64)
        while tl.atomic_cas(told + 4, free, taken) == 1:
            pass
        if tl.atomic_min(told + 3, first) == first:
            tl.atomic_xchg(told + 1, first >> 40)
            tl.atomic_xchg(told + 2, first & 0xFFFFFFFFFF)
        tl.debug_barrier()
        tl.atomic_xchg(told + 4, free)


def begun(counters: int, device: torch.device) -> Tensor:
    """A begun one, by a launch of its own."""
    told = torch.empty(TOLD + counters, dtype=torch.int64, device=device)
    launch(begin_update, (1,), told, told.numel(), BLOCK=_BLOCK, num_warps=1)
    return told
