"""`CacheTensors`: the device memory of one cache, over the host tensors that it caches.

host    the table, then its optimizer's slots `[rows, ...]`, in host memory or in a file
lines   the same tensors `[lines + 1, ...]` on the cache's device. The last line is all zeros: ids that are no rows
        read it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tilerec.storage.cache_sets import CacheSets
from tilerec.storage.file_rows import FileRows
from tilerec.storage.host_rows import HostRows


class CacheTensors(NamedTuple):
    """The tensors of a cache over its current host tensors."""

    home: HostRows | FileRows  # the host tensors
    identity: tuple[Any, ...]  # `identity_of` the host tensors
    lines: list[Tensor]
    dirty_L: Tensor  # lines that were updated since their row was read or written back
    sets: CacheSets
    counters: Tensor  # int64 [8]; see ops/cache/definition.py

    def books(self) -> list[Tensor]:
        """Return the books, in the order of `ops/cache`."""
        sets = self.sets
        return [
            sets.line_of_E, sets.row_in_L, sets.named_L, sets.flights_L, sets.count_E, self.dirty_L, self.counters,
        ]  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the cache."""
        return [*self.lines, *self.books()]

    @property
    def line_bytes(self) -> int:
        """Bytes of one line."""
        return bytes_per_row(self.lines)


def identity_of(host: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the identity of host tensors: address, shape and dtype of each."""
    return tuple((t.data_ptr(), tuple(t.shape), t.dtype) for t in host)


def bytes_per_row(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of one row of all these tensors together."""
    return sum([t.element_size() * t[:1].numel() for t in tensors])
