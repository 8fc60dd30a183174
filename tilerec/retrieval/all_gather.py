"""`gather_rows`: the rows of all ranks on every rank, differentiable.

    forward     every rank sends its rows to every rank
    backward    every rank sends the gradient of each rank's rows to that rank, which adds them

So the loss of each rank may use the rows of all, and a row gets the sum of its gradients on all ranks.

Legend: n rows of this rank, N rows of all, D dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilerec.comms.group import Group


def gather_sizes(rows: int, group: Group | None) -> list[int]:
    """Return the number of rows of each rank. Collective."""
    if group is None or group.size == 1:
        return [rows]
    size_W = torch.full((group.size,), rows, dtype=torch.int64, device=group.device)
    ones = [1] * group.size
    sizes: list[int] = group.all_to_all("sizes", torch.zeros_like(size_W), size_W, ones, ones).wait().tolist()
    return sizes


def gather_rows(rows_nD: Tensor, sizes: list[int], group: Group | None, name: str) -> Tensor:
    """Return the rows of all ranks [N, D], or [N] for [n]; in the order of the ranks. Collective, its backward too.

    Args:
        rows_nD: contiguous after `contiguous()`; n = sizes[rank].
        sizes: rows of each rank.
        group: the ranks; None for one.
        name: of the message.
    """
    if group is None or group.size == 1:
        return rows_nD
    gathered: Tensor = _GatherRows.apply(rows_nD, sizes, group, name)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_nD: Tensor, sizes: list[int], group: Group, name: str) -> Tensor:
        ctx.sizes, ctx.group, ctx.name = sizes, group, name
        width = rows_nD[0].numel() if rows_nD.shape[0] else rows_nD.new_empty((1, *rows_nD.shape[1:])).numel()
        ctx.shape, ctx.width = rows_nD.shape, width
        out = rows_nD.new_empty(sum(sizes) * width)
        copies = rows_nD.detach().reshape(-1).repeat(group.size)
        splits = [size * width for size in sizes]
        group.all_to_all(name, out, copies, splits, [rows_nD.numel()] * group.size).wait()
        return out.view(-1, *rows_nD.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.sizes[ctx.group.rank] * ctx.width
        received = grad_ND.new_empty(own * ctx.group.size)
        splits = [size * ctx.width for size in ctx.sizes]
        group, sends = ctx.group, grad_ND.contiguous().reshape(-1)
        group.all_to_all(f"gradients of {ctx.name}", received, sends, [own] * group.size, splits).wait()
        return received.view(group.size, -1).sum(0).view(ctx.shape), None, None, None
