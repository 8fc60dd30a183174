"""Caching allocator for large CPU tensors.

The C library maps each allocation above 32 MiB (and, at first, smaller ones) anew and unmaps it when freed. A training
step would then pay every time for fresh pages that the system zeroes: with 27 MB per buffer this costs as much as the
work that fills them. PyTorch has a caching allocator for GPUs but none for the CPU. This file has a small one for the
large outputs of ops.

Terms
  block  memory of one size class, in 2 MiB pages if the system provides them
  lease  a tensor's hold on a block; the block becomes free when the tensor's storage is freed

Size classes are eighths of powers of two: a block is at most an eighth larger than the requested size. Up to
`MAX_FREE_BYTES` bytes of free blocks are kept; the most recently freed block is reused first.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tilerec.ops.runtime.cpu.library import advise_huge_pages

MIN_REUSED_BYTES = 4 << 20
"""Minimum size in bytes for reuse; the C library reuses smaller pieces itself."""

MAX_FREE_BYTES = 1 << 30
"""Maximum total size of free blocks, in bytes."""


def size_class(size: int) -> int:
    """Return the bytes of the block for `size` bytes. Example: 27 MiB -> 28 MiB, 4 MiB + 1 -> 4.5 MiB."""
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


class _Blocks:
    """Free blocks, the most recently freed last. Any thread may free a tensor, even while another one allocates."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: dict[int, list[Tensor]] = {}

    def kept(self) -> int:
        """Return the total size of free blocks in bytes."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def take(self, size: int) -> Tensor:
        with self._lock:
            # A single pop: the garbage collector may free a tensor here, which calls `give` in this very thread.
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
            # Blocks of other sizes are dropped first. A block that is freed in between does no harm.
            others = [blocks for blocks in list(self._free.values()) if blocks is not own]
            for blocks in (*others, own):
                while blocks and self.kept() > MAX_FREE_BYTES:
                    blocks.pop()


_BLOCKS = _Blocks()


class _Source(threading.local):
    """This thread's source of memory, tried before `_BLOCKS`."""

    take: Callable[[int], Tensor | None] | None = None


_SOURCE = _Source()


@contextlib.contextmanager
def outputs_from(take: Callable[[int], Tensor | None]) -> Iterator[None]:
    """Take the memory of large outputs that ops of this thread make inside from elsewhere.

    Args:
        take: returns a number of bytes as a tensor, or None for memory as usual.
    """
    before, _SOURCE.take = _SOURCE.take, take
    try:
        yield
    finally:
        _SOURCE.take = before


def reused_empty(shape: Sequence[int] | int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return an uninitialized tensor like `torch.empty(shape)`, but reuse blocks for large CPU tensors.

    The tensor's storage cannot be resized (`resize_`). Everything else works as usual.
    """
    size = (math.prod(shape) if not isinstance(shape, int) else shape) * dtype.itemsize
    if size < MIN_REUSED_BYTES or (device is not None and device.type != "cpu"):
        return torch.empty(shape, dtype=dtype, device=device)
    if _SOURCE.take is not None:
        found = _SOURCE.take(size)
        if found is not None:
            return found.view(dtype).view(shape)
    block = _BLOCKS.take(size_class(size))
    # One C type per size class, not per size: ctypes never frees these types.
    lease = (ctypes.c_char * block.numel()).from_address(block.data_ptr())
    weakref.finalize(lease, _BLOCKS.give, block).atexit = False
    # The storage holds the lease until it is freed.
    return torch.frombuffer(lease, dtype=dtype, count=size // dtype.itemsize).view(shape)
