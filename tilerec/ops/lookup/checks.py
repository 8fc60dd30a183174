"""Argument checks of lookups, for every backend, and their error messages.

Checks use only shapes, dtypes and numbers on the host, so none synchronizes with a device. Kernels that read ids and
offsets detect bad values; the messages are here.

Legend: as in `definition.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from tilerec.errors import InputError

INDEX_TYPES = (torch.int64, torch.int32)


def check_layout(
    shapes: Sequence[Sequence[int]],
    tables: Sequence[int],
    keys: Sequence[int],
    means: Sequence[int],
    pooled: bool,
) -> None:
    """Raise an `InputError` for tables that are not matrices, and for features of tables or keys that do not exist."""
    for t, shape in enumerate(shapes):
        if len(shape) != 2:
            raise InputError(f"Table {t} of a lookup: weight has shape {list(shape)}; expected [rows, dim].")
    for f, t in enumerate(tables):
        if not 0 <= t < len(shapes):
            raise InputError(f"Feature {f} of a lookup reads table {t}; expected [0, {len(shapes)}).")
    if pooled and not len(tables) == len(keys) == len(means):
        raise InputError(
            f"A lookup of {len(tables)} features: got {len(keys)} keys and {len(means)} poolings; expected one of each "
            "per feature."
        )
    if any(key < 0 for key in keys):
        raise InputError(f"A lookup's features read keys {list(keys)}; expected numbers of at least 0.")


def check_contiguous(weights: Sequence[Tensor]) -> None:
    """Raise an `InputError` for a table whose rows are not contiguous."""
    if not all(map(Tensor.is_contiguous, weights)):
        t, weight = next((t, w) for t, w in enumerate(weights) if not w.is_contiguous())
        raise InputError(
            f"Table {t} of a lookup: weight of shape {tuple(weight.shape)} has strides {weight.stride()}, "
            "expected contiguous rows. Pass weight.contiguous()."
        )


def check_batch(ids: Tensor, offsets: Tensor, sample_weights: Tensor | None) -> None:
    """Raise an `InputError` unless the batch consists of flat lists of ids, offsets and weights."""
    if sample_weights is not None and sample_weights.shape != ids.shape:
        raise InputError(
            f"A lookup's sample_weights have shape {list(sample_weights.shape)}, the ids {list(ids.shape)}; expected "
            "one weight per id. Check how weights and values were put together."
        )
    if sample_weights is not None and sample_weights.is_complex():
        raise InputError(
            f"A lookup's sample_weights have type {sample_weights.dtype}; expected real numbers, as rows are "
            "multiplied by them. Pass weights.real or weights.abs()."
        )
    if ids.dim() == 1 and offsets.dim() == 1 and ids.dtype in INDEX_TYPES and offsets.dtype in INDEX_TYPES:
        return
    for name, values in (("ids", ids), ("offsets", offsets)):
        if values.dim() != 1 or not _is_integer(values.dtype):
            raise InputError(
                f"A lookup's {name} have shape {list(values.shape)} and type {values.dtype}; expected a flat list of "
                "integers. Flatten them."
            )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def check_starts(starts: Tensor, features: int) -> None:
    """Raise an `InputError` for starts that do not match the number of features."""
    if starts.shape[0] != features + 1:
        raise InputError(
            f"An unpooled lookup of {features} features has {starts.shape[0]} starts; expected "
            f"{features + 1}: where each feature's ids begin, and the end of the last."
        )


def pooled_shape(
    dims: Sequence[int], last_key: int, keys: Sequence[int], batches: Sequence[int], offsets: Tensor, names: str,
) -> tuple[int, ...]:  # fmt: skip
    """Return the shape of a pooled lookup's output: `[B, C]`, or flat for variable batches.

    `dims` are per feature; `last_key` is the largest of `keys` (-1: no keys). Raises an `InputError` if the offsets
    describe too few bags.
    """
    if len(batches) == 1:
        bags = batches[0] * (last_key + 1)
        shape: tuple[int, ...] = (batches[0], sum(dims))
    else:
        if last_key >= len(batches):
            raise InputError(
                f"A lookup reads key number {last_key}, but there are batch sizes for {len(batches)} keys; expected "
                "one per key, or a single one for all."
            )
        bags = sum(batches[: last_key + 1])
        shape = (sum([batches[k] * d for k, d in zip(keys, dims, strict=True)]),)
    if min(batches, default=0) < 0 or (last_key >= 0 and bags >= offsets.shape[0]):
        label = names.split(",")[keys.index(last_key)].rpartition("@")[0] if names else ""
        raise InputError(
            f"Feature '{label or last_key}': the offsets hold fewer bags than the batch sizes require "
            f"({offsets.shape[0]} offsets for {bags} bags; expected {bags + 1}). Check the batch sizes per key."
        )
    return shape


def check_gradient(grad: Tensor, wanted: Sequence[int], count: int) -> None:
    """Raise an `InputError` for a gradient whose size differs from the lookup's output of shape `wanted`."""
    if grad.numel() != count:
        raise InputError(
            f"sample_weight_grad: the gradient has shape {list(grad.shape)}; expected {list(wanted)}, the shape of "
            "the lookup's output."
        )


def _labels(names: str, feature: int, tables: Sequence[int]) -> tuple[str, str]:
    label = names.split(",")[feature] if names else ""
    name, _, table = label.rpartition("@")
    return name or str(feature), table or str(tables[feature])


def raise_uncovered(position: int, value: int, ids: int) -> NoReturn:
    """Raise the `InputError` for ids outside of all bags: `offsets[position]`, the first or the last, is `value`."""
    if position == 0 and value:
        raise InputError(
            f"KeyedJaggedTensor: the first offset is {value}; expected 0, since values before it belong to no bag. "
            "Pass values[offsets[0]:] and offsets - offsets[0]."
        )
    raise InputError(
        f"KeyedJaggedTensor: the lengths sum to {value}, but there are {ids} values; expected as many. "
        "validate_keyed_jagged_tensor() names the feature and the bag."
    )


def check_covered(offsets: Tensor, ids: Tensor) -> None:
    """Raise an `InputError` unless offsets begin at 0 and end at the number of ids. Synchronizes with their device."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise_uncovered(0, first, ids.numel())
    if last != ids.numel():
        raise_uncovered(offsets.numel() - 1, last, ids.numel())


def raise_bad_offsets(
    names: str, tables: Sequence[int], feature: int, position: int, value: int, ids: int, pooled: bool = True
) -> NoReturn:
    """Raise the `InputError` for `offsets[position]`, which is `value`; `ids` is the number of the batch's values.

    A negative feature means that the offsets of the whole batch do not cover all values.
    """
    if feature < 0:
        raise_uncovered(position, value, ids)
    name, _ = _labels(names, feature, tables)
    wanted = f"lie in [0, {ids}] (the number of values)"
    if not pooled:
        wanted += ", begin at 0 and end there"
    raise InputError(
        f"Feature '{name}': offsets[{position}] is {value}; offsets must not fall and must "
        f"{wanted}. Check how lengths and values were put together."
    )


def raise_no_rows(names: str, tables: Sequence[int], feature: int) -> NoReturn:
    """Raise the `InputError` for a table without memory."""
    _, table = _labels(names, feature, tables)
    raise InputError(
        f"Table '{table}': its rows have no memory (its storage was freed). Give it memory with "
        "to_empty(device=...) and load it."
    )


def raise_other_dim(names: str, tables: Sequence[int], feature: int, dim: int, first: int) -> NoReturn:
    """Raise the `InputError` for a sequence lookup's table whose dim is not the first feature's."""
    _, table = _labels(names, feature, tables)
    raise InputError(
        f"Table '{table}': dim {dim}, but the first feature's table has dim {first}; an unpooled lookup returns "
        "one tensor, so all of its tables need one dim. Look up tables of another dim separately."
    )
