"""Concatenation of features: of several keyed jagged tensors of one batch, or of one jagged tensor per key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from tilerec.errors import InputError
from tilerec.sparse.argument_checks import checked_parts
from tilerec.sparse.inverse_indices import join_inverse
from tilerec.sparse.jagged_tensor import JaggedTensor
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


def join_features(features: Mapping[str, JaggedTensor], variable: bool) -> Parts:
    """Concatenate jagged tensors in the order of the dict; see `KeyedJaggedTensor.from_jt_dict`."""
    parts = list(features.values())
    for key, part in features.items():
        if not isinstance(part, JaggedTensor):
            raise InputError(
                f"KeyedJaggedTensor.from_jt_dict: got a {type(part).__name__} for {key!r}; expected a "
                f"JaggedTensor. JaggedTensor.from_dense makes one from a list of tensors."
            )
    weighted = [part.weights_or_none() is not None for part in parts]
    if any(weighted) and not all(weighted):
        lacking = [key for key, has in zip(features, weighted, strict=True) if not has]
        raise InputError(
            f"KeyedJaggedTensor.from_jt_dict: got no weights for {lacking[:8]}, but for others; expected all or "
            "none. Add or remove weights."
        )
    strides = [part._segments.count() for part in parts]
    variable = variable or any(stride != strides[0] for stride in strides)
    return checked_parts(
        tuple(features),
        torch.cat([part.values() for part in parts]),
        torch.cat([part.weights() for part in parts]) if all(weighted) else None,
        torch.cat([part.lengths() for part in parts]),
        None,
        None,
        [[stride] for stride in strides] if variable else None,
        None,
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
