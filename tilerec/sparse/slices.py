"""Slices by key: the features of a keyed jagged tensor as jagged tensors that share its memory.

    values [1, 2, 3, 4, 5], lengths a: [2, 0], b: [1, 2]   ->   "a": [1, 2], [] | "b": [3], [4, 5]

All functions need the key offsets.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import sub

import torch
from torch import Tensor

from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.kjt_fields import Parts
from tilerec.sparse.segments import Segments


def key_lengths(parts: Parts) -> list[int]:
    """Return the number of ids of each key [F]."""
    key_offsets = parts.key_offsets
    assert key_offsets is not None, "the key offsets are fetched before a tensor is sliced"
    return list(map(sub, key_offsets[1:], key_offsets[:-1]))


def slice_one(parts: Parts, position: int) -> JaggedTensor:
    """Return the bags of the feature at `position`."""
    key_offsets = parts.key_offsets
    assert key_offsets is not None, "the key offsets are fetched before a tensor is sliced"
    start, end = key_offsets[position], key_offsets[position + 1]
    if parts.strides is None:
        stride = parts.segments.count_per_key(len(parts.keys))
        first_bag, last_bag = stride * position, stride * (position + 1)
    else:
        bag_offsets = parts.strides.bag_offsets()
        first_bag, last_bag = bag_offsets[position], bag_offsets[position + 1]
    return JaggedTensor.from_segments(
        parts.values[start:end],
        None if parts.weights is None else parts.weights[start:end],
        Segments(parts.segments.lengths()[first_bag:last_bag], None),
    )


def slice_all(parts: Parts, compute_offsets: bool) -> dict[str, JaggedTensor]:
    """Return the bags of every feature by name; `compute_offsets` also computes their offsets, all together."""
    sizes = key_lengths(parts)
    strides = parts.stride_per_key()
    values = parts.values.split(sizes)
    weights = [None] * len(values) if parts.weights is None else parts.weights.split(sizes)
    lengths = parts.segments.lengths().split(strides)
    rows: Iterable[tuple[Tensor, int] | None] = repeat(None)
    if compute_offsets and not torch.compiler.is_compiling():
        rows = _offset_rows(parts, strides)
    make = JaggedTensor.from_segments
    return {
        key: make(value, weight, Segments(length, None, row))
        for key, value, weight, length, row in zip(parts.keys.names, values, weights, lengths, rows, strict=False)
    }


def _offset_rows(parts: Parts, strides: list[int]) -> Iterable[tuple[Tensor, int] | None]:
    """Return each key's bag offsets relative to its first id, computed for all keys with one subtraction."""
    offsets_S1 = parts.segments.offsets()
    if parts.strides is not None:
        # Rows of different lengths form no table; each key derives its own offsets.
        return repeat(None)
    stride = strides[0]
    # Row f holds the B + 1 offsets of key f; neighbouring rows overlap in one entry.
    rows_FB1 = offsets_S1.unfold(0, stride + 1, stride) if stride else offsets_S1.new_zeros(len(strides), 1)
    return zip(repeat(rows_FB1 - rows_FB1[:, :1]), range(len(strides)), strict=False)
