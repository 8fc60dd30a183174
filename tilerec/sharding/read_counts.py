"""`ReadCounts`: the number of bags and ids that a rank's batches have read, summed over steps.

Each step adds one small tensor on the device of its counts, so the host never waits for the device.

Legend: K parts of a layout, in the rank's wire order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

NO_REPEATS: Mapping[int, tuple[int, int]] = MappingProxyType({})


@final
class ReadCounts:
    """Counts of bags and ids since the last `reset`.

    Args:
        slots: number of slots of the module.
        route_slots: the slot of each route.
    """

    def __init__(self, slots: int, route_slots: Sequence[int]) -> None:
        self._first_route = {slot: r for r, slot in reversed(list(enumerate(route_slots)))}
        self._slots = slots
        self.reset()

    def reset(self) -> None:
        """Set all counts to 0."""
        self.steps = 0
        self._samples = 0  # of batches in which all slots have the same number of bags
        self._bags = [0] * self._slots
        self._repeated = [(0, 0)] * self._slots
        self._counts_K2: Tensor | None = None

    def add(
        self, counts_K2: Tensor, keys: Sequence[int], batches: Sequence[int],
        repeated: Mapping[int, tuple[int, int]] = NO_REPEATS,
    ) -> None:  # fmt: skip
        """Add the counts of a routed batch.

        Args:
            counts_K2: bags and ids of each part.
            keys: per route, the position of its key.
            batches: number of samples; one number, or one per key.
            repeated: ids of a slot whose repeated ids travel once, and distinct ids, which are the counted ones.
        """
        for slot, (ids, distinct) in repeated.items():
            self._repeated[slot] = self._repeated[slot][0] + ids, self._repeated[slot][1] + distinct
        self.steps += 1
        if len(batches) == 1:
            self._samples += batches[0]
        else:
            for slot, route in self._first_route.items():
                self._bags[slot] += batches[keys[route]]
        if self._counts_K2 is None or self._counts_K2.device != counts_K2.device:
            earlier = self._counts_K2
            with torch.inference_mode(False):  # training may add to a tensor that an evaluation created
                self._counts_K2 = torch.zeros_like(counts_K2, dtype=torch.int64)
            if earlier is not None:
                self._counts_K2 += earlier.to(counts_K2.device)
        self._counts_K2 += counts_K2

    def bags(self) -> list[int]:
        """Return per slot the number of samples (bags, for a pooled slot)."""
        return [self._samples + own for own in self._bags]

    def repeated(self) -> list[tuple[int, int]]:
        """Return per slot the ids of the batches whose repeated ids travelled once, and their distinct ids."""
        return list(self._repeated)

    def ids(self, parts: int) -> list[int]:
        """Return per part the number of ids that were read from it."""
        return [0] * parts if self._counts_K2 is None else self._counts_K2[:, 1].tolist()
