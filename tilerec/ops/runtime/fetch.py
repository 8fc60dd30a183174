"""Reads of tensors by the host: many device scalars with one synchronization per device.

int(count) for each of 26 tables' counts on a GPU     26 synchronizations
fetch(counts)                                         1 synchronization
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fetch(numbers: Sequence[Tensor]) -> list[int]:
    """Return the values of 0-d integer tensors (any dtypes and devices), in order.

    Synchronizes once per device, and not at all for CPU tensors.

    Example: tensors 4 on the host, 7 and 9 on a GPU -> [4, 7, 9], after one synchronization.
    """
    places: dict[torch.device, list[int]] = {}
    for at, number in enumerate(numbers):
        places.setdefault(number.device, []).append(at)
    found = [0] * len(numbers)
    for own in places.values():
        together = torch.stack([numbers[at].detach().to(torch.int64) for at in own]).tolist()
        for at, value in zip(own, together, strict=True):
            found[at] = value
    return found


def host_readable(tensor: Tensor) -> bool:
    """Return True if the host can read the tensor's values at once: no device has to finish its work first."""
    return tensor.device.type == "cpu"
