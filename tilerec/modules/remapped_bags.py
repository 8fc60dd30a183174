"""Bags with rows in place of ids: ids without a row are dropped, which shortens their bags.

Legend: N ids, B bags.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def remapped_batch(features: KeyedJaggedTensor, rows: Mapping[str, Tensor], drops: bool = True) -> KeyedJaggedTensor:
    """Return the batch with rows in place of the ids of some keys; rows of -1 are dropped from their bags.

    Args:
        drops: whether there may be rows of -1.
    """
    sizes = features.length_per_key()
    keys = features.keys()
    own = features.values().split(sizes)
    parts = [rows[key] if key in rows else part.to(torch.int64) for key, part in zip(keys, own, strict=True)]
    values = torch.cat(parts) if len(parts) != 1 else parts[0]
    weights, lengths = features.weights_or_none(), features.lengths()
    if drops and any(bool((rows[key] < 0).any()) for key in keys if key in rows):
        kept_N = torch.cat(
            [
                rows[key] >= 0 if key in rows else torch.ones_like(part, dtype=torch.bool)
                for key, part in zip(keys, own, strict=True)
            ]
        )
        lengths = kept_lengths(kept_N, features.offsets()).to(lengths.dtype)
        values = values[kept_N]
        weights = None if weights is None else weights[kept_N]
        sizes = [int(part.sum()) for part in kept_N.split(sizes)]
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys,
        values,
        weights,
        lengths,
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        length_per_key=sizes,
        inverse_indices=features.inverse_indices_or_none(),
    )


def remapped_feature(part: JaggedTensor, rows_N: Tensor, drops: bool = True) -> JaggedTensor:
    """Return a feature with rows in place of ids, without rows of -1. `drops`: whether there may be rows of -1."""
    weights = part.weights_or_none()
    kept_N = rows_N >= 0
    if not drops or bool(kept_N.all()):
        return JaggedTensor(rows_N, weights, part.lengths())
    lengths = kept_lengths(kept_N, part.offsets()).to(part.lengths().dtype)
    return JaggedTensor(rows_N[kept_N], None if weights is None else weights[kept_N], lengths)


def kept_lengths(kept_N: Tensor, offsets: Tensor) -> Tensor:
    """Return the number of kept ids of each bag, int64."""
    before = torch.zeros(kept_N.numel() + 1, dtype=torch.int64, device=kept_N.device)
    torch.cumsum(kept_N, 0, out=before[1:])
    at = before[offsets]
    return at[1:] - at[:-1]
