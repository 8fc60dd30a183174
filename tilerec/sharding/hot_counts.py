"""`HotCounts`: the most frequent ids of some tables among a rank's batches, in bounded memory.

Every 16th batch is counted, from the first one on. On a CPU that takes the time to sort its ids. On a GPU the ids are
copied to the host without a wait, and counted once they have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from tilerec.ops.gradient.definition import bag_starts
from tilerec.ops.hot.heavy_hitters import HeavyHitters, Keys
from tilerec.sharding.layout import SharedLayout

STRIDE = 16
"""One of so many batches is counted."""
LEAST_COUNTERS = 256


class FrequentIds(NamedTuple):
    """Ids [k] with their counts [k], the most frequent first; counted: ids in all; error: of HeavyHitters."""

    ids: Keys
    counts: Keys
    counted: int
    error: int


class _Sample(NamedTuple):
    """A batch to count: its ids in all forms, offsets, and the slots' keys. copied: ends the copy from a GPU."""

    every: Sequence[Tensor]
    forms: Sequence[int]
    keys: Sequence[int]
    offsets: Tensor
    batches: Sequence[int]
    copied: torch.cuda.Event | None


@final
class HotCounts:
    """Counts since the last `reset`. Make them with `of`."""

    def __init__(self, layout: SharedLayout, wanted: dict[int, int]) -> None:
        self._slots, self._wanted = layout.slots, wanted
        self._rows = [table.tiling.rows for table in layout.tables]
        self.reset()

    @staticmethod
    def of(layout: SharedLayout, at_least: int) -> HotCounts | None:
        """Return counts for tables with hot rows, and for all if `at_least` ids of each are wanted; None: no table."""
        wanted = {}
        for t, table in enumerate(layout.tables):
            head = table.tiling.head
            most = max(at_least, 0 if head is None else 2 * len(head.hot))
            if most:
                wanted[t] = most
        return HotCounts(layout, wanted) if wanted else None

    def reset(self) -> None:
        """Forget all counts."""
        self._steps = 0
        self._sample: _Sample | None = None
        self._found = {t: HeavyHitters(max(LEAST_COUNTERS, 2 * most)) for t, most in self._wanted.items()}
        self._counted = dict.fromkeys(self._wanted, 0)

    def add(
        self, every: Sequence[Tensor], forms: Sequence[int], keys: Sequence[int], offsets: Tensor,
        batches: Sequence[int],
    ) -> None:  # fmt: skip
        """Count a batch, if it is its turn. Arguments: as of `HotIds`. Ids outside of their table are left out."""
        if self._sample is not None and self._sample.copied is not None and self._sample.copied.query():
            self._finish()
        self._steps += 1
        if (self._steps - 1) % STRIDE:
            return
        self._finish()
        copied = None
        if every[0].device.type == "cuda":
            every = [ids.to("cpu", non_blocking=True) for ids in every]
            offsets = offsets.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._sample = _Sample(every, forms, keys, offsets, batches, copied)
        if copied is None:
            self._finish()

    def top(self, table: int) -> FrequentIds | None:
        """Return the most frequent ids of a table; None if they are not counted."""
        if table not in self._wanted:
            return None
        self._finish()
        ids, counts = self._found[table].top(self._wanted[table])
        return FrequentIds(ids, counts, self._counted[table], self._found[table].error)

    def _finish(self) -> None:
        """Count the batch that waits."""
        if self._sample is None:
            return
        every, forms, keys, offsets, batches, copied = self._sample
        self._sample = None
        if copied is not None:
            copied.synchronize()
        own = [s for s, slot in enumerate(self._slots) if slot.table in self._wanted]
        firsts, counts = bag_starts([keys[s] for s in own], batches)
        for s, first, count in zip(own, firsts, counts, strict=True):
            if first + count >= offsets.numel():
                continue  # offsets that are too few are refused where ids are routed
            table = self._slots[s].table
            begin, end = int(offsets[first]), int(offsets[first + count])
            ids_n, counts_n = np.unique(every[forms[s]][begin:end].numpy(), return_counts=True)
            inside = (ids_n >= 0) & (ids_n < self._rows[table])
            self._found[table].add(ids_n[inside].astype(np.int64), counts_n[inside])
            self._counted[table] += int(counts_n[inside].sum())
