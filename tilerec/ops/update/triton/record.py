"""A gradient record as kernel arguments: checked, contiguous, its features' numbers on the device.

Example: two features of batches of 4 bags, tables 0 and 0, gradients of 8 and 8 columns in rows of 16:
(first key, rows, first bag, bags, gradient start, gradient stride, mean, bits of bags) are (0, 10, 0, 4, 0, 16, 0, 1)
and (0, 10, 4, 4, 8, 16, 0, 1).

Legend: F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.runtime.triton.addresses import cached_per_stream, constants, upload
from tilerec.ops.update.checks import check_reach, check_record
from tilerec.ops.update.order import layers
from tilerec.ops.update.triton.sort import Record, power_of_two
from tilerec.ops.update.triton.tables import KernelTables

_INDEX = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Features:
    """Features of a record, as kernel arguments."""

    numbers: Tensor  # int64 [F, PER_FEATURE]
    layers: int
    count: int  # of their bags
    vec: int
    means: bool


def _describe_features(
    op: str, grad_count: int, ids_count: int, offsets_count: int | None, dims: Sequence[int], first_keys: Sequence[int],
    rows: Sequence[int], device: torch.device, cached_per_stream: bool, tables: Sequence[int], starts: Sequence[int],
    bags: Sequence[int], grad_starts: Sequence[int], grad_strides: Sequence[int], means: Sequence[int],
) -> Features:  # fmt: skip
    check_reach(
        op, grad_count, ids_count, offsets_count, dims, tables, starts, bags, grad_starts, grad_strides
    )
    numbers: list[int] = []
    for t, *own in zip(tables, starts, bags, grad_starts, grad_strides, means, strict=True):
        numbers += [first_keys[t], rows[t], *own, max(own[1] - 1, 1).bit_length() - 1]
    some = [f for f, count in enumerate(bags) if count]
    vec = power_of_two([*(grad_starts[f] for f in some), *(grad_strides[f] for f in some)], 8)
    put = constants(tuple(numbers), device) if cached_per_stream else upload(numbers, device)
    return Features(put, layers(starts, bags), sum(bags), vec, any(means) and offsets_count is not None)


@cached_per_stream(256)
def _kept_features(*key: object) -> Features:
    """Return cached features: with one batch size, bags have the same positions in every step."""
    return _describe_features(*key)  # type: ignore[arg-type]


def read_record(
    op: str, tables: KernelTables, grad: Tensor, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None,
    per_feature: Sequence[Sequence[int]], cached_per_stream: bool, grad_count: int | None = None,
) -> Record:  # fmt: skip
    """Return the record as kernel arguments; raise the reference's errors, except those for values on the device.

    kept: cache the features' numbers for later calls; grad_count: elements of the gradient, if `grad` is another
    tensor.
    """
    check_record(op, ids, offsets, sample_weights, *per_feature)
    grad, ids = grad.contiguous(), (ids if ids.dtype in _INDEX else ids.to(torch.int64)).contiguous()
    if offsets is not None:
        offsets = offsets.contiguous()
    if sample_weights is not None:
        sample_weights = sample_weights.contiguous()
    ids_count = ids.numel()
    grad_count = grad.numel() if grad_count is None else grad_count
    if cached_per_stream and offsets is not None:
        features = _kept_features(
            op, grad_count, 0, offsets.numel(), tables.dims, tables.first_keys, tables.rows, ids.device, True,
            *map(tuple, per_feature),
        )  # fmt: skip
    else:
        count = None if offsets is None else offsets.numel()
        features = _describe_features(
            op, grad_count, ids_count, count, tables.dims, tables.first_keys, tables.rows, ids.device, False,
            *per_feature,
        )  # fmt: skip
    total = features.count if offsets is None else features.layers * ids_count
    vec = min(features.vec, 16 // grad.element_size())
    return Record(
        grad, ids, offsets, sample_weights, features.numbers, len(per_feature[0]), features.means, total, vec
    )


def same_device(op: str, device: torch.device, **others: Tensor | Sequence[Tensor] | None) -> None:
    for name, given in others.items():
        for tensor in [given] if isinstance(given, Tensor) else given or ():
            if tensor.device != device:
                raise InputError(
                    f"{op}: {name} are on {tensor.device}, the ids on {device}; move one of them with .to()."
                )
