"""Checks of the arguments of `KeyedJaggedTensor`: they become consistent `Parts`, or an `InputError` is raised.

Types, shapes and host numbers are checked, without waiting for a device. `sparse/validate.py` checks contents.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.sparse.inverse_indices import InverseIndices, checked_inverse
from tilerec.sparse.keys import Keys
from tilerec.sparse.kjt_fields import Parts
from tilerec.sparse.segments import checked_segments
from tilerec.sparse.strides import Strides
from tilerec.sparse.value_checks import check_ids, check_items


def checked_parts(
    keys: Sequence[str],
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
    stride: int | None,
    stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None,
    inverse_indices: InverseIndices | None,
) -> Parts:
    """Return the parts of a tensor with these arguments of `KeyedJaggedTensor`."""
    check_items("KeyedJaggedTensor", values, weights)
    check_ids("KeyedJaggedTensor", values)
    if not torch.compiler.is_compiling() and values.shape[0] == 0:
        values = _with_own_stride(values)
        weights = None if weights is None else _with_own_stride(weights)
        lengths = _with_own_stride(lengths) if isinstance(lengths, Tensor) else lengths
    names = Keys.of(keys)
    counts = stride_per_key_per_rank
    if counts is not None and len(counts) == 0:
        counts = None
    segments = checked_segments("KeyedJaggedTensor", lengths, offsets, rows=len(names) if counts is None else None)
    inverse_indices = checked_inverse(inverse_indices)
    parts = Parts(
        names,
        values,
        weights,
        segments,
        stride if stride is not None and (counts is not None or len(names) == 0) else 0,
        None if counts is None else Strides.checked(len(names), counts),
        inverse_indices,
    )
    _check_stride(parts, stride)
    return parts


def _with_own_stride(part: Tensor) -> Tensor:
    """Return an empty tensor with torch's own strides. NumPy's have strides of 0, which compiled programs guard."""
    if part.numel() or part.requires_grad or 0 not in part.stride():
        return part
    return part.new_empty(part.shape)


def _check_stride(parts: Parts, stride: int | None) -> None:
    """Raise unless every key has a whole number of bags: a remainder would silently shift every later key."""
    bags, keys = parts.segments.count(), len(parts.keys)
    if parts.strides is not None:
        wanted = sum(parts.strides.per_key())
        if bags != wanted:
            raise InputError(
                f"KeyedJaggedTensor: got {bags} lengths; expected {wanted}, the sum of stride_per_key_per_rank. Pass "
                f"one length per bag."
            )
        if stride is not None and not torch.compiler.is_compiling() and stride != parts.stride():
            warnings.warn(
                f"KeyedJaggedTensor: got stride={stride}, which has no effect; expected {parts.stride()}: the samples "
                f"of the inverse indices, or without them at least the bags of the largest key. Leave stride out.",
                stacklevel=5,
            )
        return
    if keys == 0:
        if bags != 0:
            raise InputError(f"KeyedJaggedTensor: got {bags} lengths without keys; expected none. Pass the keys.")
        return
    if bags % keys != 0:
        raise InputError(
            f"KeyedJaggedTensor: got {bags} lengths; expected a multiple of {keys}, the number of keys. Pass one "
            f"length per key and sample; for batch sizes that vary by key pass stride_per_key_per_rank=."
        )
    if stride is not None and stride * keys != bags:
        raise InputError(
            f"KeyedJaggedTensor: got {bags} lengths with stride={stride} and {keys} keys; expected {stride * keys}. "
            f"Leave stride out: it is derived from the lengths."
        )


def check_key_offsets(parts: Parts, key_offsets: list[int]) -> None:
    """Raise `InputError` unless the offsets start at 0, do not descend, end at N and number one more than the keys."""
    keys, values = len(parts.keys), parts.values.shape[0]
    if len(key_offsets) != keys + 1:
        raise InputError(
            f"KeyedJaggedTensor: got {len(key_offsets) - 1} lengths per key; expected {keys}. Pass one for each key."
        )
    if key_offsets[0] != 0:
        raise InputError(
            f"KeyedJaggedTensor: got {key_offsets[0]} as the first offset; expected 0, since values outside all bags "
            f"would shift the features. Pass values[offsets[0]:] and offsets - offsets[0]."
        )
    if sorted(key_offsets) != key_offsets:
        raise InputError(
            "KeyedJaggedTensor: got a negative number of ids for a feature; expected lengths from 0. "
            "validate_keyed_jagged_tensor() finds the bag."
        )
    if key_offsets[-1] != values:
        raise InputError(
            f"KeyedJaggedTensor: got lengths that sum to {key_offsets[-1]}; expected {values}, the number of values. "
            f"validate_keyed_jagged_tensor() finds the bag."
        )


def check_derived(
    parts: Parts,
    stride_per_key: Sequence[int] | None,
    lengths_offset_per_key: Sequence[int] | None,
    index_per_key: dict[str, int] | None,
) -> None:
    """Raise `InputError` if an optional argument contradicts the value derived from the other arguments."""
    for name, given, derived in (
        ("stride_per_key", stride_per_key, parts.stride_per_key),
        ("lengths_offset_per_key", lengths_offset_per_key, parts.bag_offsets),
    ):
        if given and list(given) != derived():
            raise InputError(
                f"KeyedJaggedTensor: got {name}={list(given)[:8]}; expected {derived()[:8]}, derived from the lengths. "
                "Leave it out."
            )
    if index_per_key is not None and index_per_key != parts.keys.positions():
        raise InputError(
            "KeyedJaggedTensor: got an index_per_key that contradicts keys; expected their positions. Leave it out."
        )
