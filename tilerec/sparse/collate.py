"""Samples as one batch: `torch.utils.data.default_collate` takes keyed jagged tensors, alone or inside of records.

DataLoader(dataset, batch_size=512)     items hold keyed jagged tensors of one sample or several
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilerec.errors import InputError
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keys import shorten
from tilerec.torch_private import register_collate


def collate_features(samples: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Return the samples of all tensors as one batch, in their order.

    Args:
        samples: tensors with the same keys in one order, each of any batch size; all of them weighted, or none.

    Raises:
        InputError: the keys or weights differ; a batch size that varies by key, or inverse indices.

    Example: {"a": [[1, 2]]} and {"a": [[], [3]]} become {"a": [[1, 2], [], [3]]}.
    """
    keys = samples[0].keys()
    weighted = samples[0].weights_or_none() is not None
    for i, one in enumerate(samples):
        if one.keys() != keys:
            raise InputError(
                f"collate: item {i}: got keys {shorten(one.keys())}; expected those of item 0, {shorten(keys)}. Give "
                "every item the same keys in one order; a missing feature has a length of 0."
            )
        if one.variable_stride_per_key() or one.inverse_indices_or_none() is not None:
            raise InputError(
                f"collate: item {i}: got a batch size that varies by key, or inverse indices; expected one batch size. "
                "Collate the samples before you remove repeated bags."
            )
        if (one.weights_or_none() is not None) != weighted:
            raise InputError(
                f"collate: item {i}: got {'no weights' if weighted else 'weights'}; expected them in all items, or in "
                "none. Give the others weights of 1."
            )
    sizes = [one.length_per_key() for one in samples]

    def by_key(flat: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [own.split(size) for own, size in zip(flat, sizes, strict=True)]
        return torch.cat([own[k] for k in range(len(keys)) for own in parts]) if keys else flat[0]

    lengths = torch.cat([one.lengths().view(len(keys), one.stride()) for one in samples], dim=1)
    return KeyedJaggedTensor(
        keys,
        by_key([one.values() for one in samples]),
        by_key([one.weights() for one in samples]) if weighted else None,
        lengths=lengths.reshape(-1),
    )


def collate_bags(samples: Sequence[JaggedTensor]) -> JaggedTensor:
    """Return the bags of all jagged tensors as one, in their order; all of them weighted, or none."""
    weights = [own for one in samples if (own := one.weights_or_none()) is not None]
    if len(weights) not in (0, len(samples)):
        raise InputError(
            f"collate: got weights in {len(weights)} of {len(samples)} items; expected them in all, or in none. Give "
            "the others weights of 1."
        )
    return JaggedTensor(
        torch.cat([one.values() for one in samples]),
        torch.cat(weights) if weights else None,
        torch.cat([one.lengths() for one in samples]),
    )


def _collate_features(batch: Any, *, collate_fn_map: Any = None) -> KeyedJaggedTensor:
    return collate_features(batch)


def _collate_bags(batch: Any, *, collate_fn_map: Any = None) -> JaggedTensor:
    return collate_bags(batch)


register_collate(KeyedJaggedTensor, _collate_features)
register_collate(JaggedTensor, _collate_bags)
