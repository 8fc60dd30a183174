"""Placement of a module's leaves side by side in one flat storage per data type and device.

The leaves remain `nn.Parameter`s that own their values; only their memory is shared. No code reads the flat storage
itself, so a leaf that is moved elsewhere stays correct. It is only no longer adjacent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from tilerec.ops.backends import advise_huge_pages
from tilerec.storage.row_file import file_of

ALIGNMENT = 128
"""Alignment of a leaf's first byte (one GPU cache line; also whole AVX-512 vectors)."""

HUGE_FROM = 4 << 20
"""Minimum bytes of a CPU storage for which huge pages are requested; smaller ones waste more than they gain."""

Shape = tuple[int, int]


def _padded(numel: int, dtype: torch.dtype) -> int:
    """Return the number of elements that a leaf occupies in the flat storage."""
    unit = ALIGNMENT // dtype.itemsize
    return -(-numel // unit) * unit


def flat_memory(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str | None) -> list[Tensor]:
    """Return memory for leaves of these shapes: consecutive ranges of one new storage, uninitialised except the gaps.

    Huge pages are requested before the first write. On meta, each leaf is its own tensor.

    Example: shapes [(5, 3), (2, 7)] of float32 are elements 0..14 and 32..45 of 64; 15..31 and 46..63 are zero.
    """
    flat = torch.empty(sum(_padded(rows * dim, dtype) for rows, dim in shapes), dtype=dtype, device=device)
    if flat.is_meta:
        return [torch.empty(shape, dtype=dtype, device=flat.device) for shape in shapes]
    if flat.device.type == "cpu" and flat.nbytes >= HUGE_FROM:
        advise_huge_pages(flat)
    places, start = [], 0
    for rows, dim in shapes:
        end, next_start = start + rows * dim, start + _padded(rows * dim, dtype)
        places.append(flat[start:end].view(rows, dim))
        flat[end:next_start].zero_()
        start = next_start
    return places


def _adjacent(group: Sequence[nn.Parameter]) -> bool:
    """Return True if the leaves already are consecutive ranges of one storage."""
    place = group[0].data_ptr()
    for parameter in group:
        if (
            parameter.data_ptr() != place
            or parameter.untyped_storage().data_ptr() != group[0].untyped_storage().data_ptr()
        ):
            return False
        place += _padded(parameter.numel(), parameter.dtype) * parameter.element_size()
    return True


@torch.no_grad()
def lay_flat(parameters: Iterable[nn.Parameter]) -> None:
    """Move leaves `[rows, dim]` into consecutive ranges of one storage per (dtype, device), in the given order.

    Leaves on meta and in files stay as they are. Peak memory is twice the group's bytes while it is copied.
    """
    groups: defaultdict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.device.type != "meta" and file_of(parameter) is None:
            groups[(parameter.dtype, parameter.device)].append(parameter)
    for (dtype, device), group in groups.items():
        if _adjacent(group):
            continue
        places = flat_memory([(p.shape[0], p.shape[1]) for p in group], dtype, device)
        for parameter, place in zip(group, places, strict=True):
            parameter.data = place.copy_(parameter)
