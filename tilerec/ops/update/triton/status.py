"""Status of an update: the number of rows skipped because their gradient is not finite, and the first of them.

Nouns
  status    int64 [STATUS_SIZE + counters]: skipped rows, table and row of the first (-1, -1 if none), its code, a lock;
            then the counters
  code      table << 40 | row: the first row is the one with the least code
  counter   of a super-chunk: the number of its chunks that are summed (`runs.py`)

Initialization takes no launch of its own: the launch that makes keys, the first of a step, does it. With an order made
ahead (`order.py`), `init_status_kernel` does it.

    two counters, initial                 0, -1, -1, 2^63 - 1, 0, 0, 0
    rows 7 and 4 of table 2 were skipped  2, 2, 4, 2 << 40 | 4, 0, …
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.runtime.triton.launch import launch

EMPTY_STATUS = (0, -1, -1, (1 << 63) - 1, 0)
STATUS_SIZE = len(EMPTY_STATUS)
"""Numbers before the counters."""
_BLOCK = 128


@triton.jit
def init_status(status, count, BLOCK: tl.constexpr):
    """Initialize `count` numbers of a status, by one program."""
    lanes = tl.arange(0, BLOCK)
    for first in range(0, count, BLOCK):
        i = first + lanes
        number = tl.where((i == 1) | (i == 2), -1, 0).to(tl.int64)
        number = tl.where(i == 3, 0x7FFFFFFFFFFFFFFF, number)
        tl.store(status + i, number, mask=i < count)


@triton.jit(do_not_specialize=["count"])
def init_status_kernel(status, count, BLOCK: tl.constexpr):
    init_status(status, count, BLOCK)


@triton.jit
def record_not_finite(status, count, first):
    """Add to the skipped rows, and record the first. first: the least code of this program's skipped rows.

    An atomic minimum finds the least code of all. The program that lowered it writes table and row under a lock, unless
    another program has lowered it further meanwhile.
    """
    tl.atomic_add(status, count)
    if first < tl.atomic_min(status + 3, first):
        free = tl.full((), 0, tl.int64)
        taken = tl.full((), 1, tl.int64)
        while tl.atomic_cas(status + 4, free, taken) == 1:
            pass
        if tl.atomic_min(status + 3, first) == first:
            tl.atomic_xchg(status + 1, first >> 40)
            tl.atomic_xchg(status + 2, first & 0xFFFFFFFFFF)
        tl.debug_barrier()
        tl.atomic_xchg(status + 4, free)


def new_status(counters: int, device: torch.device) -> Tensor:
    """Return an initialized status, by a launch of its own."""
    status = torch.empty(STATUS_SIZE + counters, dtype=torch.int64, device=device)
    launch(init_status_kernel, (1,), status, status.numel(), BLOCK=_BLOCK, num_warps=1)
    return status
