"""Laying a module's leaves side by side in one flat storage per data type and device.

The leaves stay what they are (`nn.Parameter`s that own their values); only their memory moves. Nothing reads the flat
storage by itself, so a leaf that is moved elsewhere stays right: it just is not adjacent any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

ALIGNMENT = 128
"""Bytes at whose multiples a leaf begins (one GPU cache line; also whole AVX-512 vectors)."""


def _padded(tensor: Tensor) -> int:
    """Elements that a leaf takes in the flat storage."""
    unit = ALIGNMENT // tensor.element_size()
    return -(-tensor.numel() // unit) * unit


def _owns_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def lay_flat(parameters: Iterable[nn.Parameter]) -> None:
    """Move leaves that own their storage into ranges of one storage per (dtype, device).

    Leaves that already are ranges of a larger storage stay there (a table tied to another module's), as do meta leaves.
    Peak memory is twice the group's bytes while it is copied.
    """
    groups: defaultdict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in {id(p): p for p in parameters}.values():
        if parameter.device.type != "meta" and _owns_storage(parameter) and parameter.is_contiguous():
            groups[(parameter.dtype, parameter.device)].append(parameter)
    for (dtype, device), group in groups.items():
        if len(group) < 2:
            continue
        with torch.no_grad():
            flat = torch.zeros(sum(map(_padded, group)), dtype=dtype, device=device)
            start = 0
            for parameter in group:
                place = flat[start : start + parameter.numel()].view(parameter.shape)
                place.copy_(parameter)
                parameter.data = place
                start += _padded(parameter)
