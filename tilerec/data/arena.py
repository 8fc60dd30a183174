"""`Arena`: memory for arrays of a few hundred KB that come and go together, without page faults.

The C library returns freed arrays of this size to the system and gets them back one page fault at a time: 118 ms for
400 arrays of 200 KB, against 13 ms for one array of 80 MB (AMD EPYC, 2 cores). An arena cuts arrays from large chunks.
A chunk is used again once none of its arrays is referenced, by NumPy or by torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 4 << 20
_ALIGNMENT = 64


@final
class Arena:
    """Uninitialised arrays. One thread allocates; any thread may release an array, by dropping its references.

    Args:
        chunk_bytes: bytes of a chunk. Larger arrays get one of their own.
        kept_chunks: number of free chunks that are kept; further ones are returned to the system.
    """

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES, kept_chunks: int = 64) -> None:
        self._chunk_bytes, self._kept = chunk_bytes, kept_chunks
        self._free: list[npt.NDArray[np.uint8]] = []
        self._chunk: npt.NDArray[np.uint8] | None = None
        self._used = 0

    def empty(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array of `count` items with arbitrary values."""
        kind = np.dtype(dtype)
        size = count * kind.itemsize
        if size > self._chunk_bytes:
            return self._leased(-(-size // self._chunk_bytes))[:size].view(kind)
        if self._chunk is None or self._used + size > self._chunk_bytes:
            self._chunk, self._used = self._leased(1), 0
        start = self._used
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[start : start + size].view(kind)

    def joined(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return one-dimensional arrays of one type, concatenated."""
        return np.concatenate(arrays, out=self.empty(sum(map(len, arrays)), arrays[0].dtype))

    def take(self, array_n: npt.NDArray[Any], index_b: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the items at indices, which must be in range: NumPy's check of each one costs more than the copy."""
        return np.take(array_n, index_b, out=self.empty(len(index_b), array_n.dtype), mode="clip")

    def _leased(self, chunks: int) -> npt.NDArray[np.uint8]:
        """Return memory that comes back to the arena when no array refers to it."""
        size = chunks * self._chunk_bytes
        memory = None
        for place, free in enumerate(self._free):
            if len(free) == size:
                memory = self._free.pop(place)
                break
        if memory is None:
            memory = np.empty(size, np.uint8)
        # A view through the buffer protocol: NumPy makes it the base of its slices, instead of the memory itself.
        lease = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(lease, _give_back, self._free, memory, self._kept)
        return lease


def _give_back(free: list[npt.NDArray[np.uint8]], memory: npt.NDArray[np.uint8], kept: int) -> None:
    if len(free) < kept:
        free.append(memory)
