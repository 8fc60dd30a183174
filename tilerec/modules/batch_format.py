"""Check of a batch's form before a lookup: its class, dtype of the ids, devices, and no torch.func transform."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.modules.table import Table
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.torch_private import functorch_is_active, is_functorch_wrapped


def check_format(kind: str, features: KeyedJaggedTensor, tables: Callable[[], Iterable[Table]]) -> None:
    """Raise unless `features` is a valid batch of ids.

    Args:
        kind: class of the collection, for errors.
        tables: returns those that the batch reads.

    Raises:
        InputError: the batch is of another class, its ids are no integers, or its tensors are on several devices.
        RuntimeError: a torch.func transform differentiates a table or the sample weights.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise InputError(
            f"{kind}: got a {type(features).__name__}; expected a KeyedJaggedTensor. Make one with "
            "KeyedJaggedTensor.from_lengths_sync(keys, values, lengths), or from_jt_dict(dict of JaggedTensors)."
        )
    if not torch.compiler.is_compiling() and functorch_is_active():
        weights = [table._parameters["weight"] for table in tables()]
        _refuse_transforms(kind, [*weights, features.weights_or_none()])
    ids = features.values()
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{kind}: got ids of dtype {ids.dtype}; expected int32 or int64. Cast the batch's values.")
    parts = features._parts
    given = parts.segments.given_lengths, parts.segments.given_offsets, parts.weights
    for k, tensor in enumerate(given):
        if tensor is not None and tensor.device != ids.device:
            raise InputError(
                f"KeyedJaggedTensor: got {('lengths', 'offsets', 'weights')[k]} on {tensor.device}; expected "
                f"{ids.device}, where the values are. Move the batch with .to()."
            )


def _refuse_transforms(kind: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise if a torch.func transform differentiates one of the tensors.

    Lookups have no rule for torch.func: forward mode would return zeros silently, and reverse mode would raise obscure
    errors.
    """
    for tensor in tensors:
        if tensor is not None and (tensor.requires_grad or is_functorch_wrapped(tensor)):
            raise RuntimeError(
                f"{kind}: lookups do not support torch.func transforms (grad, vjp, jvp, vmap, ...). Use "
                "torch.autograd.grad over torch.func.functional_call, or freeze the tables (requires_grad_(False)) "
                "and transform the rest."
            )
