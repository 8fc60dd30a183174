"""Headers of a route in flight: sizes of the payloads, flags and a note, between every pair of ranks.

The note is a number that the caller of a route sends along with it. It is the last word of a header, on channels that
carry notes (`HeaderSizes.carry_notes`).

Legend: P present bags, N ids, U bags of a merge.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilerec.comms.group import Handle
from tilerec.sharding.layout import ExchangeLayout
from tilerec.storage.prefetched_results import StreamEvent


def header_sizes(layout: ExchangeLayout) -> tuple[list[int], list[int]]:
    """Return the words of the headers to and from each rank, [W]."""
    out = [1 + 2 * len(parts) for parts in layout.sent]
    for merge in layout.own_merges:
        out[merge.proxy] += 1 + len(merge.parts)
    into = [
        1 + 2 * len(parts) + sum(1 + len(merge.parts) for merge in merges)
        for parts, merges in zip(layout.received, layout.merging, strict=True)
    ]
    return out, into


@dataclass(frozen=True)
class Headers:
    """Contents of a step's only device-to-host copy."""

    fault: int  # of this rank's batch, for `raise_fault`; 0: none
    counts: list[tuple[int, int]]  # P and N of each part sent, in wire order
    sizes: list[int]  # U of each merge of this home
    # Per home: flags; P and N of each part received; U and P of each merge made on this rank; padding; the note.
    received: list[list[int]]
    refusals: int  # number of ranks of all teams that refused this step (0 without `everyone`)
    refusers: int  # sum of the numbers of these ranks


@dataclass(frozen=True)
class PostedHeaders:
    """Headers in flight. `read` is the only place of a step where the host waits; it also sets `received_notes`."""

    handle: Handle
    refusals: Handle | None
    fault: Tensor | None
    values: Tensor  # flags, P and N of each part sent, the note, U of each merge
    parts: int
    merges: int
    sizes: list[int]  # words from each rank
    sent: StreamEvent | None  # on a GPU; another stream may be current when the headers are read
    received_notes: list[int] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for the headers of all ranks, without their contents."""
        self.handle.wait()
        if self.refusals is not None:
            self.refusals.wait()

    def read(self) -> Headers:
        """Wait for the headers of all ranks, and return their contents."""
        if self.sent is not None:
            self.sent.wait([self.values, self.fault])
        pieces = [self.values] if self.fault is None else [self.fault, self.values]
        if self.refusals is not None:
            pieces.insert(0, self.refusals.wait())
        numbers = iter(torch.cat((*pieces, self.handle.wait())).tolist())

        def take(count: int) -> list[int]:
            return list(itertools.islice(numbers, count))

        refusals, refusers = take(2) if self.refusals is not None else (0, 0)
        low, high = (0, 0) if self.fault is None else take(2)
        _, *counts, _ = take(2 + 2 * self.parts)
        sizes_M, received = take(self.merges), [take(size) for size in self.sizes]
        self.received_notes[:] = [header[-1] for header in received]
        counts_K = list(zip(counts[::2], counts[1::2], strict=True))
        return Headers((high << 32) + low % (1 << 32), counts_K, sizes_M, received, refusals, refusers)

    def notes(self) -> list[int]:
        """Return the note of each rank [W], on a channel that carried notes when the headers were posted.

        Waits for the headers if `read` has not been called.
        """
        if not self.received_notes:
            words = self.handle.wait()
            ends = torch.tensor(self.sizes).cumsum(0) - 1
            self.received_notes[:] = words[ends.to(words.device)].tolist()
        return self.received_notes
