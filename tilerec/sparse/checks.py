"""What a caller hands to `KeyedJaggedTensor` becomes parts that fit, or an `InputError`.

Types, shapes and host numbers are checked, which waits for no device; contents by `sparse/validate.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.sparse.inverse import InverseIndices, checked_inverse
from tilerec.sparse.items import check_ids, check_items
from tilerec.sparse.keys import Keys
from tilerec.sparse.parts import Parts
from tilerec.sparse.segments import checked_segments
from tilerec.sparse.strides import Strides


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
    """The parts of a tensor made of these, see `KeyedJaggedTensor`."""
    check_items("KeyedJaggedTensor", values, weights)
    check_ids("KeyedJaggedTensor", values)
    names = Keys.of(keys)
    counts = stride_per_key_per_rank
    if counts is not None and len(counts) == 0:
        counts = None
    segments = checked_segments(
        "KeyedJaggedTensor", lengths, offsets, rows=len(names) if counts is None else None
    )
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


def _check_stride(parts: Parts, stride: int | None) -> None:
    """Lengths must be whole bags per key: a remainder would silently shift every later key."""
    bags, keys = parts.segments.count(), len(parts.keys)
    if parts.strides is not None:
        wanted = sum(parts.strides.per_key())
        if bags != wanted:
            raise InputError(
                f"KeyedJaggedTensor: {bags} lengths, but stride_per_key_per_rank sums to {wanted} bags; wanted one "
                f"length per bag."
            )
        if stride is not None and not torch.compiler.is_compiling() and stride != parts.stride():
            warnings.warn(
                f"KeyedJaggedTensor: stride {stride} has no effect, this variable batch has {parts.stride()}: the "
                f"samples of its inverse indices, or without them at least the largest key's bags; leave stride out.",
                stacklevel=5,
            )
        return
    if keys == 0:
        if bags != 0:
            raise InputError(f"KeyedJaggedTensor: no keys, but {bags} lengths; wanted none.")
        return
    if bags % keys != 0:
        raise InputError(
            f"KeyedJaggedTensor: {bags} lengths are not a multiple of the {keys} keys; wanted one length per key and "
            f"sample. For batch sizes that vary by key pass stride_per_key_per_rank=."
        )
    if stride is not None and stride * keys != bags:
        raise InputError(
            f"KeyedJaggedTensor: stride {stride} with {keys} keys wants {stride * keys} lengths, got {bags}; leave "
            f"stride out, it follows from the lengths."
        )


def check_key_offsets(parts: Parts, key_offsets: list[int]) -> None:
    """`InputError` unless they begin at 0, do not descend, and end at the number of values, one more than keys."""
    keys, values = len(parts.keys), parts.values.shape[0]
    if len(key_offsets) != keys + 1:
        raise InputError(
            f"KeyedJaggedTensor: {len(key_offsets) - 1} lengths per key for {keys} keys; wanted one each."
        )
    if key_offsets[0] != 0:
        raise InputError(
            f"KeyedJaggedTensor: the first offset is {key_offsets[0]}; wanted 0, since values that belong to no "
            f"bag would shift the features; pass values[offsets[0]:] and offsets - offsets[0]."
        )
    if sorted(key_offsets) != key_offsets:
        raise InputError(
            "KeyedJaggedTensor: a feature has a negative number of ids; wanted lengths that are not negative; "
            "validate_keyed_jagged_tensor() tells which bag is wrong."
        )
    if key_offsets[-1] != values:
        raise InputError(
            f"KeyedJaggedTensor: the lengths sum to {key_offsets[-1]}, but there are {values} values; "
            f"validate_keyed_jagged_tensor() tells which bag is wrong."
        )


def check_derived(
    parts: Parts,
    stride_per_key: Sequence[int] | None,
    lengths_offset_per_key: Sequence[int] | None,
    index_per_key: dict[str, int] | None,
) -> None:
    """`InputError` for what a caller need not say, and says wrong."""
    for name, given, derived in (
        ("stride_per_key", stride_per_key, parts.stride_per_key),
        ("lengths_offset_per_key", lengths_offset_per_key, parts.bag_offsets),
    ):
        if given and list(given) != derived():
            raise InputError(
                f"KeyedJaggedTensor: {name} is {list(given)[:8]}, but the lengths say {derived()[:8]}."
            )
    if index_per_key is not None and index_per_key != parts.keys.positions():
        raise InputError(
            "KeyedJaggedTensor: index_per_key contradicts keys; leave it out, it follows from them."
        )
