"""The items of a batch whose distinct ids were sent; `distinct_ids.py` explains.

Legend: I items, U distinct ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_OPS = torch.ops.tilerec


@dataclass(frozen=True)
class Repeats:
    """Where rows of distinct ids belong in this rank's output."""

    items_I: Tensor  # of `distinct_ids`
    starts_U1: Tensor
    firsts: list[int]  # per slot, its first distinct id in `starts_U1`; -1: its ids were sent as they are
    gaps: bool  # some bags of these slots have no id
    counts: dict[int, tuple[int, int]]  # per slot with repeats, its items and its distinct ids

    def place_(
        self, out: Tensor, rows: Tensor, slots: Tensor, segments: Sequence[Sequence[int]], features: Sequence[int],
        fresh: bool,
    ) -> None:  # fmt: skip
        """Write the rows of segments to all their items.

        Args:
            segments: arguments of `place_rows_`.
            features: per segment, its slot.
        """
        firsts = [self.firsts[slot] for slot in features]
        _OPS.expand_rows_(out, rows, slots, *segments, fresh, self.items_I, self.starts_U1, firsts, features)

    def pick_(
        self, rows: Tensor, grad: Tensor, slots: Tensor, segments: Sequence[Sequence[int]], features: Sequence[int]
    ) -> None:
        """Gather the gradients of segments, summed over the items; arguments as of `place_`, without `adds`."""
        _OPS.sum_rows_(rows, grad, slots, *segments, self.items_I, self.starts_U1, [self.firsts[s] for s in features])
