"""A flat output in parts, one per feature, whose gradients are joined in memory that steps reuse.

The backward of `Tensor.split` joins the gradients in fresh memory: for 42 MB, its page faults cost more than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilerec.ops.backends import reused_empty


def split_parts(flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return consecutive views of `flat` [sum of sizes], as `flat.split(sizes)` does."""
    if len(sizes) < 2 or not (flat.requires_grad and torch.is_grad_enabled()):
        return flat.split(list(sizes))
    parts: tuple[Tensor, ...] = _Parts.apply(flat, list(sizes))
    return parts


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return flat.split(sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        joined = reused_empty(sum([grad.numel() for grad in grads]), grads[0].dtype, grads[0].device)
        return torch.cat(grads, out=joined), None
