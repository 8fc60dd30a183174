"""Numbers of tensors, read together: a device is waited for once, however many there are.

counts of 26 tables on a GPU, `int(count)` each     26 waits
fetch(counts)                                       1 wait
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fetch(numbers: Sequence[Tensor]) -> list[int]:
    """What integers (0-d, any type, any devices) are, in their order. Waits once per device, not at all for the host's.

    Example: tensors 4 on the host, 7 and 9 on a GPU -> [4, 7, 9], after one wait.
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
