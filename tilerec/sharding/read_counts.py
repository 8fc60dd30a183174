"""`ReadCounts`: what a rank's batches have read of a module's tables, summed over steps.

One addition of a small tensor per step, where the counts are already: nothing waits for the device.

Legend: K parts of a layout, in the rank's wire order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class ReadCounts:
    """Sums since `reset`.

    Args:
        slots: how many the module has.
        route_slots: the slot of each route.
    """

    def __init__(self, slots: int, route_slots: Sequence[int]) -> None:
        self._first_route = {slot: r for r, slot in reversed(list(enumerate(route_slots)))}
        self._slots = slots
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.steps = 0
        self._samples = 0  # where all slots have as many bags
        self._bags = [0] * self._slots
        self._counts_K2: Tensor | None = None

    def add(self, counts_K2: Tensor, keys: Sequence[int], batches: Sequence[int]) -> None:
        """A routed batch.

        Args:
            counts_K2: bags and ids of each part.
            keys: per route, the position of its key.
            batches: samples, or samples of each key.
        """
        self.steps += 1
        if len(batches) == 1:
            self._samples += batches[0]
        else:
            for slot, route in self._first_route.items():
                self._bags[slot] += batches[keys[route]]
        if self._counts_K2 is None or self._counts_K2.device != counts_K2.device:
            earlier = self._counts_K2
            with torch.inference_mode(False):  # an evaluation may come first, and training adds to it
                self._counts_K2 = torch.zeros_like(counts_K2, dtype=torch.int64)
            if earlier is not None:
                self._counts_K2 += earlier.to(counts_K2.device)
        self._counts_K2 += counts_K2

    def bags(self) -> list[int]:
        """Per slot, samples (bags, for a pooled one)."""
        return [self._samples + own for own in self._bags]

    def ids(self, parts: int) -> list[int]:
        """Per part, ids that were read of it."""
        return [0] * parts if self._counts_K2 is None else self._counts_K2[:, 1].tolist()
