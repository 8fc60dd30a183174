"""Arrays in the memory of Arrow's pool, and a list of large blocks, without page faults.

The C library returns freed arrays of a few hundred KB to the system and gets them back one page fault at a time: 118 ms
for 400 arrays of 200 KB. Arrow's pool asks the system for large pages: 100 MB in such arrays take 3.5 ms to fill, and
one array about 1 us to get (AMD EPYC, 2 cores). But the pool too returns memory that stays free for some milliseconds.
Arrays of a batch come back after as many steps as are read ahead, so `Blocks` keeps these: without, the system clears
the pages of each window anew, which was 14 % of the time of list columns.

Any thread may release an array, by dropping its references, whether NumPy's or torch's.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

_LEAST_BYTES = 1 << 17
_STEP_BYTES = 1 << 16


def empty(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of `count` items with arbitrary values."""
    kind = np.dtype(dtype)
    if not count:
        return np.empty(0, kind)
    return np.frombuffer(pa.allocate_buffer(count * kind.itemsize), kind)


def tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor on its memory. Arrays of Arrow may be read-only: do not write their tensors."""
    return torch.from_dlpack(array)


def joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return one-dimensional arrays of one type, concatenated."""
    return np.concatenate(arrays, out=empty(sum(map(len, arrays)), arrays[0].dtype))


@final
class Blocks:
    """Large arrays whose memory is used again, once neither NumPy nor torch refers to it. One thread allocates.

    Free memory that two calls of `begin_round` find unused is returned.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, pa.Buffer]] = []  # with the number of the round in which each became free
        self._round = 0

    def begin_round(self) -> None:
        """Return memory that has been free for a round to the system."""
        self._round += 1
        # A block that another thread appends meanwhile is returned too, which does no harm.
        self._free[:] = [(since, block) for since, block in self._free if since >= self._round - 1]

    def empty(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array of `count` items with arbitrary values."""
        kind = np.dtype(dtype)
        if count * kind.itemsize < _LEAST_BYTES:
            return empty(count, kind)
        # Sizes in steps: a block for some ids also fits a few more or fewer.
        block = self._block(-(-count * kind.itemsize // _STEP_BYTES) * _STEP_BYTES)
        # The lease is the base of every slice: a buffer is beneath it, not an array.
        lease = np.frombuffer(block, np.uint8)
        weakref.finalize(lease, self._give_back, block).atexit = False
        return lease[: count * kind.itemsize].view(kind)

    def _block(self, size: int) -> pa.Buffer:
        # Other threads append only, so places in the list stay valid here. The latest block may be in the cache still.
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place][1].size == size:
                return self._free.pop(place)[1]
        return pa.allocate_buffer(size)

    def _give_back(self, block: pa.Buffer) -> None:
        self._free.append((self._round, block))
