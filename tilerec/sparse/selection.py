"""Selection of features of a keyed jagged tensor: neighbours as views (`split`), or any in any order (`permute`).

keys a, b, c:   split [1, 2] -> a | b, c        permute [2, 0] -> c, a
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.jagged.definition import offsets_from_lengths, select_segments
from tilerec.ops.runtime.upload import upload
from tilerec.sparse.inverse_indices import inverse_of
from tilerec.sparse.kjt_fields import Parts
from tilerec.sparse.segments import Segments
from tilerec.sparse.strides import Strides


def split(parts: Parts, segments: Sequence[int]) -> list[Parts]:
    """Split into parts of `segments[i]` neighbouring features. Needs the key offsets."""
    key_offsets = parts.key_offsets
    assert key_offsets is not None, "the key offsets are fetched before a tensor is split"
    splits = parts.keys.split(segments)
    bounds = list(accumulate(segments, initial=0))
    bag_bounds = parts.bag_offsets()
    cuts = [key_offsets[bound] for bound in bounds]
    sizes = [end - start for start, end in pairwise(cuts)]
    values = parts.values.split(sizes)
    weights = [None] * len(values) if parts.weights is None else parts.weights.split(sizes)
    lengths = parts.segments.lengths().split([bag_bounds[end] - bag_bounds[start] for start, end in pairwise(bounds)])
    stride = parts.stride()
    return [
        Parts(
            keys,
            value,
            weight,
            Segments(length, None),
            stride,
            None if parts.strides is None else parts.strides.select(range(first, last)),
            inverse_of(keys, parts.inverse_indices),
            [offset - cut for offset in key_offsets[first : last + 1]],
        )
        for keys, value, weight, length, (first, last), cut in zip(
            splits, values, weights, lengths, pairwise(bounds), cuts[:-1], strict=True
        )
    ]


def permute(parts: Parts, indices: Sequence[int], indices_tensor: Tensor | None) -> Parts:
    """Return the features at `indices`, in that order. See `permute_needs_key_offsets`."""
    keys = parts.keys.select(indices)
    order_P = upload(indices, parts.values.device) if indices_tensor is None else indices_tensor
    if order_P.shape != (len(keys),):
        raise InputError(
            f"permute: got indices_tensor of shape {list(order_P.shape)}; expected [{len(keys)}], the list of indices. "
            f"Leave it out."
        )
    lengths, strides = _permute_lengths(parts, indices, order_P)
    source_F1 = parts.key_offsets_F1().long()
    target_P1 = offsets_from_lengths(source_F1.diff().index_select(0, order_P))
    key_offsets = None
    if parts.key_offsets is not None:
        key_lengths = [end - start for start, end in pairwise(parts.key_offsets)]
        key_offsets = list(accumulate([key_lengths[index] for index in indices], initial=0))
    total = parts.values.shape[0] if key_offsets is None else key_offsets[-1]
    weights = parts.weights
    if weights is not None:
        weights = select_segments(weights, source_F1, order_P, target_P1, total)
    return Parts(
        keys,
        select_segments(parts.values, source_F1, order_P, target_P1, total),
        weights,
        Segments(lengths, None),
        parts.stride(),
        strides,
        inverse_of(keys, parts.inverse_indices),
        key_offsets,
    )


def permute_needs_key_offsets(parts: Parts, indices: Sequence[int]) -> bool:
    """Return True if a permutation must fetch key offsets, because it changes the number of ids.

    Fetching also checks them: ids outside all bags would be dropped.
    """
    return parts.key_offsets is None and not _is_bijective(parts, indices)


def _is_bijective(parts: Parts, indices: Sequence[int]) -> bool:
    """Return True if `indices` contains every feature exactly once."""
    return sorted(indices) == list(range(len(parts.keys)))


def _permute_lengths(parts: Parts, indices: Sequence[int], order_P: Tensor) -> tuple[Tensor, Strides | None]:
    lengths_S = parts.segments.lengths()
    if parts.strides is None:
        keys = len(parts.keys)
        rows_FB = lengths_S.view(keys, parts.segments.count_per_key(keys))
        return rows_FB.index_select(0, order_P).view(-1), None
    strides = parts.strides.select(indices)
    # A key's bags are a segment of the lengths, just as its ids are a segment of the values.
    source, target = parts.strides.bag_offsets(), strides.bag_offsets()
    lengths_P = select_segments(
        lengths_S,
        upload(source, lengths_S.device),
        order_P,
        upload(target, lengths_S.device),
        target[-1],
    )
    return lengths_P, strides
