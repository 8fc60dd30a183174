"""Checks of values and weights, the items of segments: types and shapes, without waiting for a device.

Shapes
    values_N  [N] or [N, ...]   ids, or vectors such as embeddings
    weights_N [N], or as values_N
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilerec.errors import InputError

SHOWN = 200
"""Most numbers that `repr` and `str` print; above it they print shapes."""
LINES = 16
"""Most keys whose numbers are printed, one line each."""


def is_printable_in_full(tensor: Tensor) -> bool:
    """Return True if `repr` may read the contents: a small tensor with memory, while no graph is traced."""
    plain = isinstance(tensor, torch.nn.Parameter) or type(tensor) is Tensor
    return plain and not tensor.is_meta and tensor.numel() <= SHOWN and not torch.compiler.is_compiling()


def check_tensor(owner: str, name: str, given: Any) -> None:
    """Raise `InputError` unless `given` is a tensor; `owner` and `name` are for the message."""
    if not isinstance(given, Tensor):
        raise InputError(
            f"{owner}: got a {type(given).__name__} as {name}; expected a torch.Tensor. Write torch.as_tensor({name})."
        )


def check_items(owner: str, values: Any, weights: Any) -> None:
    """Raise `InputError` unless values are a tensor of items; weights, if any, one number per item or per element."""
    check_tensor(owner, "values", values)
    if values.dim() == 0:
        raise InputError(
            f"{owner}: got values without a dimension; expected [N], one item after the other. Write values.reshape(1)."
        )
    if weights is None:
        return
    check_tensor(owner, "weights", weights)
    if weights.is_complex():
        raise InputError(
            f"{owner}: got weights of {weights.dtype}; expected real numbers, as rows are multiplied by them. Pass "
            "weights.real or weights.abs()."
        )
    if weights.dim() != 1 and (weights.dim() != values.dim() or weights.shape[1:] != values.shape[1:]):
        raise InputError(
            f"{owner}: got weights of shape {list(weights.shape)}; expected one number per value, "
            f"[{values.shape[0]}], or the shape of the values, {list(values.shape)}. Flatten them."
        )
    # A compiler would turn the comparison into a guard, and fail if sizes are read from data.
    if not torch.compiler.is_compiling() and weights.shape[0] != values.shape[0]:
        raise InputError(
            f"{owner}: got {weights.shape[0]} weights; expected {values.shape[0]}. Pass one weight per value."
        )


def check_ids(owner: str, values: Tensor) -> None:
    """Raise `InputError` for ids of more than one dimension: a lookup would read only their first N, row by row."""
    if values.dim() > 1 and not values.is_floating_point():
        raise InputError(
            f"{owner}: got values of shape {list(values.shape)} and {values.dtype}; expected one id each, [N]. "
            f"Flatten them and count every id in the lengths (only floating-point items may be vectors)."
        )
