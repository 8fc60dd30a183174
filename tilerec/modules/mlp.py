"""Perceptron and multi-layer perceptron.

Legend of the shapes in names: B samples, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.activation import SwishLayerNorm
from tilerec.modules.linear import Linear, linear
from tilerec.modules.utils import (
    ModuleFactory,
    TensorFunction,
    check_last_dim,
    check_size,
    extract_module_or_tensor_callable,
)
from tilerec.ops.runtime.dispatch import can_bypass_dispatcher
from tilerec.torch_private import runs_forward_only

_FUNCTIONS: dict[str, TensorFunction] = {"relu": torch.relu, "sigmoid": torch.sigmoid}
_ACTIVATION_NAMES = [*_FUNCTIONS, "swish_layernorm"]


def _identity(input: torch.Tensor) -> torch.Tensor:
    """Return the input, as the absent activation. Named functions, unlike lambdas, can be pickled with a module."""
    return input


class Perceptron(nn.Module):
    """One linear layer and an activation: `y = activation(x Wᵀ + b)`.

    Args:
        in_size: features of the input.
        out_size: features of the output.
        bias: whether to add `b`.
        activation: a module or a function of one tensor.
        device, dtype: of the weights.

    Shape: `[B, in_size]` (or any number of leading dimensions) to `[B, out_size]`.

    State: `_linear.weight` [out_size, in_size], `_linear.bias` [out_size]; `_activation_fn.*` if the
    activation has any.

    >>> Perceptron(in_size=10, out_size=3)(torch.zeros(5, 10)).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: nn.Module | TensorFunction = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._in_size = check_size("Perceptron: in_size", in_size)
        self._out_size = check_size("Perceptron: out_size", out_size)
        self._linear = Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_last_dim("Perceptron", input, self._in_size)
        layer = self._linear
        if can_bypass_dispatcher((input,)) and self._activation_fn is torch.relu and runs_forward_only(layer, Linear):
            return linear(input, layer.weight, layer.bias, relu=True)  # no hook reads the product without the relu
        output: torch.Tensor = self._activation_fn(layer(input))
        return output


class MLP(nn.Module):
    """A stack of perceptrons.

    Args:
        in_size: features of the input.
        layer_sizes: output features of each layer; if empty, forward returns its input.
        bias: whether the layers have biases.
        activation: of every layer. A name ("relu", "sigmoid", "swish_layernorm"), a function of one tensor, a
            module class or zero-argument factory (each layer gets its own), or a module (all layers share it).
        device, dtype: of the weights.
        activation_on_last: whether the last layer has an activation; if False, the output is linear.

    Shape: `[B, in_size]` to `[B, layer_sizes[-1]]`.

    State: `_mlp.<layer>._linear.weight`, `_mlp.<layer>._linear.bias`.

    Raises:
        ConfigError: a size below 1, an unknown activation.

    >>> MLP(in_size=8, layer_sizes=[4, 2])(torch.zeros(5, 8)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: str | ModuleFactory | nn.Module | TensorFunction = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        sizes = [
            check_size("MLP: in_size", in_size),
            *(check_size("MLP: each of layer_sizes", s) for s in layer_sizes),
        ]
        if isinstance(activation, str) and activation not in _ACTIVATION_NAMES:
            raise ConfigError(
                f"MLP: got activation={activation!r}; expected one of {_ACTIVATION_NAMES}, a function or a module."
            )

        def activation_of(layer: int) -> nn.Module | TensorFunction:
            if layer == len(sizes) - 1 and not activation_on_last:
                return _identity
            if activation == "swish_layernorm":
                return SwishLayerNorm(sizes[layer], device=device, dtype=dtype)
            if isinstance(activation, str):
                return _FUNCTIONS[activation]
            return extract_module_or_tensor_callable(activation)

        self._in_size = in_size
        self._mlp = nn.Sequential(
            *(
                Perceptron(
                    sizes[layer - 1],
                    sizes[layer],
                    bias=bias,
                    activation=activation_of(layer),
                    device=device,
                    dtype=dtype,
                )
                for layer in range(1, len(sizes))
            )
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_last_dim("MLP", input, self._in_size)
        output: torch.Tensor = self._mlp(input)
        return output
