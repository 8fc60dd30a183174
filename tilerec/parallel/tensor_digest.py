"""`tensor_digest`: 16 bytes that differ if one word of a tensor differs, or two words are exchanged."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 1 << 20
"""Rows per step of a digest."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_digest(tensor: Tensor) -> tuple[int, int]:
    """Return two sums over the tensor's words modulo 2^64, weighted by the odd numbers 1, 3, 5, ...

    The first weights words by row, the second by column. Odd factors keep every bit of a difference.
    """
    flat = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    columns = torch.arange(1, 2 * flat.shape[1], 2, device=tensor.device)
    for start in range(0, flat.shape[0], BLOCK_ROWS):
        words = flat[start : start + BLOCK_ROWS].contiguous().view(_WORDS[tensor.element_size()])
        rows = torch.arange(2 * start + 1, 2 * (start + words.shape[0]), 2, device=tensor.device)
        by_row, by_column = (words.sum(dim=dim, dtype=torch.int64) for dim in (1, 0))
        sums += torch.stack(((by_row * rows).sum(), (by_column * columns).sum()))
    first, second = sums.tolist()
    return first, second
