"""Concatenation of the features of several keyed jagged tensors of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from tilerec.errors import InputError
from tilerec.sparse.inverse_indices import join_inverse
from tilerec.sparse.keys import Keys
from tilerec.sparse.kjt_fields import Parts
from tilerec.sparse.segments import Segments
from tilerec.sparse.strides import Strides


def join(tensors: Sequence[Parts]) -> Parts:
    """Concatenate the features of all `tensors`; see `KeyedJaggedTensor.concat`."""
    first = tensors[0]
    _check_all_or_none("weights", tensors, lambda parts: parts.weights is not None)
    _check_all_or_none("variable batch sizes", tensors, lambda parts: parts.strides is not None)
    _check_all_or_none("inverse indices", tensors, lambda parts: parts.inverse_indices is not None)
    strides = _join_strides(tensors)
    weights = [parts.weights for parts in tensors if parts.weights is not None]
    inverse_pairs = [parts.inverse_indices for parts in tensors if parts.inverse_indices is not None]
    return Parts(
        Keys.of([key for parts in tensors for key in parts.keys]),
        torch.cat([parts.values for parts in tensors]),
        torch.cat(weights) if weights else None,
        Segments(torch.cat([parts.segments.lengths() for parts in tensors]), None),
        strides=strides,
        inverse_indices=join_inverse(inverse_pairs) if first.inverse_indices is not None else None,
        key_offsets=_join_key_offsets(tensors),
    )


def _check_all_or_none(what: str, tensors: Sequence[Parts], has: Callable[[Parts], bool]) -> None:
    flags = [has(parts) for parts in tensors]
    if any(flags) and not all(flags):
        lacking = tensors[flags.index(False)]
        raise InputError(
            f"KeyedJaggedTensor.concat: got no {what} of keys {_some(lacking)}, but of other keys; expected all or "
            f"none. Add or remove them."
        )


def _join_strides(tensors: Sequence[Parts]) -> Strides | None:
    first = tensors[0]
    if first.strides is not None:
        counts = [row for parts in tensors if parts.strides is not None for row in parts.strides.counts()]
        return Strides.checked(len(counts), counts)
    for parts in tensors[1:]:
        if parts.stride() != first.stride():
            raise InputError(
                f"KeyedJaggedTensor.concat: got batch sizes {first.stride()} (keys {_some(first)}) and "
                f"{parts.stride()} (keys {_some(parts)}); expected one batch size. Concatenate tensors of one batch."
            )
    return None


def _join_key_offsets(tensors: Sequence[Parts]) -> list[int] | None:
    """Return the joined key offsets, or None unless all tensors have fetched theirs."""
    known = [parts.key_offsets for parts in tensors if parts.key_offsets is not None]
    if len(known) < len(tensors):
        return None
    key_lengths = [end - start for offsets in known for start, end in pairwise(offsets)]
    return list(accumulate(key_lengths, initial=0))


def _some(parts: Parts) -> list[str]:
    return list(parts.keys.names[:4])
