"""Laying a module's leaves side by side in one flat storage per data type and device.

The leaves stay what they are (`nn.Parameter`s that own their values); only their memory moves. Nothing reads the flat
storage by itself, so a leaf that is moved elsewhere stays right: it just is not adjacent any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

ALIGNMENT = 128
"""Bytes at whose multiples a leaf begins (one GPU cache line; also whole AVX-512 vectors)."""


def _padded(tensor: Tensor) -> int:
    """Elements that a leaf takes in the flat storage."""
    unit = ALIGNMENT // tensor.element_size()
    return -(-tensor.numel() // unit) * unit


def _adjacent(group: Sequence[nn.Parameter]) -> bool:
    """Whether the leaves already are consecutive ranges of one storage."""
    place = group[0].data_ptr()
    for parameter in group:
        if (
            parameter.data_ptr() != place
            or parameter.untyped_storage().data_ptr() != group[0].untyped_storage().data_ptr()
        ):
            return False
        place += _padded(parameter) * parameter.element_size()
    return True


def lay_flat(parameters: Iterable[nn.Parameter]) -> None:
    """Move leaves into consecutive ranges of one storage per (dtype, device), in the given order.

    Meta leaves stay as they are. Peak memory is twice the group's bytes while it is copied.
    """
    groups: defaultdict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.device.type != "meta":
            groups[(parameter.dtype, parameter.device)].append(parameter)
    for (dtype, device), group in groups.items():
        if _adjacent(group):
            continue
        with torch.no_grad():
            flat = torch.zeros(sum(map(_padded, group)), dtype=dtype, device=device)
            start = 0
            for parameter in group:
                place = flat[start : start + parameter.numel()].view(parameter.shape)
                place.copy_(parameter)
                parameter.data = place
                start += _padded(parameter)
