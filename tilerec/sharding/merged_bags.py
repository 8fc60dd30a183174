"""Unions of present bags: a proxy adds the rows of a merge's parts, and sends one sum per bag of their union.

Only layouts with sums inside a host have merges (`ExchangeLayout.own_merges`).

Legend: P present bags of all parts, M merges, U bags of a merge (the union of its parts' present bags), K parts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.ops.runtime.upload import upload
from tilerec.sharding.layout import ExchangeLayout


@dataclass(frozen=True)
class BagUnion:
    """Bags of a merge `[U]`, and for each of its parts the positions of its present bags among them."""

    slots: Tensor
    ranks: list[Tensor]


@dataclass(frozen=True)
class BagMarks:
    """Marks of all merges, concatenated, on the device: the host does not wait for them."""

    mark: Tensor  # per bag of each merge: True if it is present in any of the parts
    edges: Tensor  # start of each merge in `mark`, and the end
    ranks_P: Tensor  # per present bag of all parts, its position in the union of its merge
    sizes_M: Tensor  # U of each merge


class MergedBags:
    """Bags of the merges of this rank's batches."""

    def __init__(self, layout: ExchangeLayout) -> None:
        self._layout = layout
        self._slots = [layout.parts[merge.parts[0]].slot for merge in layout.own_merges]
        self._of_part = [-1] * len(layout.parts)  # merge of each part in wire order; -1: none
        for m, merge in enumerate(layout.own_merges):
            for p in merge.parts:
                self._of_part[layout.wire[p]] = m

    def mark(self, slots: Tensor, counts_K2: Tensor, bags: list[int]) -> BagMarks:
        """Mark the bags that are present in any part of each merge, for all merges at once, without a host wait.

        Args:
            slots: bag numbers of all parts in wire order; elements after the last present bag are ignored.
            counts_K2: present bags and ids of each part.
            bags: per slot.
        """
        device = slots.device
        starts = list(itertools.accumulate([bags[slot] for slot in self._slots], initial=0))
        total = starts[-1]
        if not self._slots:
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            return BagMarks(nothing, nothing, nothing, nothing)
        # Bags of no merge, and elements after the last present bag, go to one position past the end.
        firsts = [total if m < 0 else starts[m] for m in self._of_part]
        numbers = upload([*firsts, total, *starts], device)
        first_K, edges = numbers[: len(firsts) + 1], numbers[len(firsts) + 1 :]
        present_K = counts_K2[:, 0]
        first_P = torch.repeat_interleave(
            first_K, torch.cat((present_K, slots.numel() - present_K.sum(0, True))), output_size=slots.numel()
        )
        place_P = torch.where(first_P < total, first_P + slots, total)
        mark = torch.zeros(total + 1, dtype=torch.bool, device=device).index_fill_(0, place_P, True)[:total]
        before = torch.zeros(total + 1, dtype=torch.int32, device=device)
        torch.cumsum(mark, 0, dtype=torch.int32, out=before[1:])
        at_edges = before[edges].to(torch.int64)
        return BagMarks(mark, edges, before[place_P] - before[first_P], at_edges[1:] - at_edges[:-1])

    def unite(self, marks: BagMarks, counts: list[tuple[int, int]], sizes: list[int]) -> list[BagUnion]:
        """Return per merge its bags, and the positions of each part's bags among them.

        Args:
            counts: P and N of each part in wire order.
            sizes: U of each merge.
        """
        if not sizes:
            return []
        total = sum(sizes)
        starts_U = torch.repeat_interleave(marks.edges[:-1], marks.sizes_M, output_size=total)
        slots_U = (torch.nonzero_static(marks.mark, size=total)[:, 0] - starts_U).to(torch.int32)
        starts = list(itertools.accumulate([p for p, _ in counts], initial=0))
        unions = []
        for merge, slots in zip(self._layout.own_merges, slots_U.split(sizes), strict=True):
            wires = [self._layout.wire[p] for p in merge.parts]
            unions.append(BagUnion(slots, [marks.ranks_P[starts[w] : starts[w + 1]] for w in wires]))
        return unions
