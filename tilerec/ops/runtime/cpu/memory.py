"""Large CPU memory that steps give back and take again.

The C library maps an allocation above 32 MiB (and, at first, smaller ones) anew each time and unmaps it when it is
freed, so a training step pays for fresh pages, zeroed by the system, again and again: with 27 MB per buffer as much as
for the work that fills them. PyTorch has a caching allocator for GPUs and none for the CPU; here is the little one that
the ops need for their large outputs.

Nouns
  block  memory of one size class, in 2 MiB pages where the system gives them
  lease  a tensor's hold on a block; the block is free again when the tensor's storage is

Size classes are eighths of powers of two: a block is at most an eighth larger than asked for. Free blocks are kept up
to `KEEP` bytes, the latest first.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.ops.runtime.cpu.library import advise_huge_pages

LEAST = 4 << 20
"""Bytes from which memory is reused; the C library keeps smaller pieces itself."""

KEEP = 1 << 30
"""Bytes of free blocks that are kept."""


def size_class(size: int) -> int:
    """Bytes of the block for `size` bytes. Example: 27 MiB -> 28 MiB, 4 MiB + 1 -> 4.5 MiB."""
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


class _Blocks:
    """Free blocks, the latest given back last. Tensors are freed in any thread, also while this one allocates."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: dict[int, list[Tensor]] = {}

    def kept(self) -> int:
        """Bytes of free blocks."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def take(self, size: int) -> Tensor:
        with self._lock:
            # One step: a tensor that the garbage collector frees meanwhile gives back in this very thread.
            blocks = self._free.get(size)
            if blocks:
                return blocks.pop()
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
        advise_huge_pages(block)
        return block

    def give(self, block: Tensor) -> None:
        with self._lock:
            own = self._free.setdefault(block.numel(), [])
            own.append(block)
            # Blocks of other sizes go first. None of this minds a block that comes back in between.
            others = [blocks for blocks in list(self._free.values()) if blocks is not own]
            for blocks in (*others, own):
                while blocks and self.kept() > KEEP:
                    blocks.pop()


_BLOCKS = _Blocks()


def reused_empty(
    shape: Sequence[int] | int, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """As `torch.empty(shape)`; large CPU memory comes from blocks that were given back, with whatever is in them.

    The tensor's storage cannot be resized (`resize_`); all else works as usual.
    """
    size = (math.prod(shape) if not isinstance(shape, int) else shape) * dtype.itemsize
    if size < LEAST or (device is not None and device.type != "cpu"):
        return torch.empty(shape, dtype=dtype, device=device)
    block = _BLOCKS.take(size_class(size))
    # A C type per size class, not per size: they are never freed.
    lease = (ctypes.c_char * block.numel()).from_address(block.data_ptr())
    weakref.finalize(lease, _BLOCKS.give, block).atexit = False
    # The storage holds the lease until it is freed.
    return torch.frombuffer(lease, dtype=dtype, count=size // dtype.itemsize).view(shape)
