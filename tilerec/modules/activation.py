"""Activations with parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from tilerec.errors import InputError
from tilerec.modules.utils import check_size


class SwishLayerNorm(nn.Module):
    """Swish with a layer norm in the gate: `y = x · sigmoid(LayerNorm(x))`.

    Swish is `x · sigmoid(x)` (Ramachandran et al., 1710.05941). The norm keeps the gate in the steep part of the
    sigmoid at any scale of `x`.

    Args:
        input_dims: the trailing dimensions to normalise over: a width, or a list of sizes.
        device: of the norm's scale and shift.
        dtype: of the norm's scale and shift.

    Shape: `[*, *input_dims]` in and out.

    State: `norm.0.weight`, `norm.0.bias`, each of shape `input_dims`.
    """

    def __init__(
        self,
        input_dims: int | list[int] | torch.Size,
        device: torch.device | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dims: Sequence[int] = [input_dims] if isinstance(input_dims, int) else list(input_dims)
        self._dims = tuple(check_size("SwishLayerNorm: each of input_dims", d) for d in dims)
        self.norm = nn.Sequential(nn.LayerNorm(self._dims, device=device, dtype=dtype), nn.Sigmoid())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if tuple(input.shape[input.dim() - len(self._dims) :]) != self._dims:
            raise InputError(
                f"SwishLayerNorm: got input of shape {list(input.shape)}; expected trailing dimensions "
                f"{list(self._dims)}. Check the layer before it, or input_dims."
            )
        return input * self.norm(input)

    def extra_repr(self) -> str:
        return f"input_dims={list(self._dims)}, elements={math.prod(self._dims)}"
