"""Equal values on all ranks: a digest that detects differences, and the broadcast of a tensor from one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.comms.group import Group

BLOCK_ROWS = 1 << 20
"""Rows per step of a digest."""

CHUNK = 1 << 24
"""Bytes per message of a broadcast."""

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


@torch.no_grad()
def broadcast_tensor(group: Group, tensor: Tensor, ranks: Sequence[int] | None = None) -> None:
    """Overwrite a tensor with the values of the first of these ranks. Collective among them.

    Args:
        ranks: the ranks that call, in the same order; None: all, from rank 0.
    """
    if not tensor.numel():
        return
    first, *others = range(group.size) if ranks is None else ranks
    flat = tensor.detach().contiguous().view(-1)
    for part in flat.split(max(1, CHUNK // tensor.element_size())):
        if group.rank == first:
            group.exchange("initial values", {}, dict.fromkeys(others, part)).wait()
        else:
            group.exchange("initial values", {first: part}, {}).wait()
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
