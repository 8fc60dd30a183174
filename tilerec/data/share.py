"""A rank's share of a global batch.

W ranks train on the same global batches as one process would: rank r takes the samples [r B / W, (r + 1) B / W) of
each. So the mean over the global batch, and with it every update, equals that of one process.

    B = 5, W = 2:    rank 0 takes samples 0, 1    rank 1 takes samples 2, 3, 4

Legend: B samples of the global batch, W ranks, F sparse features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.data.batch import Batch
from tilerec.errors import ConfigError, InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class Share:
    """One rank's samples of a global batch.

    Attributes:
        batch: the samples; may be empty.
        first: position of the share's first sample in the pass over the data.
        total: B.
        end: number of samples of the pass up to the end of the global batch. A pass that stops after this batch
            continues from here (`Dataset.train_shares(start=)`), on any number of ranks.
    """

    batch: Batch
    first: int
    total: int
    end: int


def bounds(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first and the last + 1 of a rank's samples within a global batch of `total`."""
    return total * rank // world_size, total * (rank + 1) // world_size


def check_shares(batch_size: int, epoch: int, rank: int, world_size: int, start: int) -> None:
    """Raise `ConfigError` unless the arguments of `Dataset.train_shares` name a batch size, a rank and a position."""
    if batch_size < 1:
        raise ConfigError(f"batch_size: got {batch_size}; expected at least 1. Set it higher.")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: got {rank} of world_size={world_size}; expected 0 to world_size - 1. Correct them.")
    for name, value in (("epoch", epoch), ("start", start)):
        if value < 0:
            raise ConfigError(f"{name}: got {value}; expected at least 0. Leave it out for the first samples.")


def shares(batches: Iterable[Batch], rank: int, world_size: int) -> Iterator[Share]:
    """Yield a rank's share of each global batch."""
    start = 0
    for batch in batches:
        first, last = bounds(batch.batch_size, rank, world_size)
        own, end = start + first, start + batch.batch_size
        yield Share(cut(batch, first, last), own, batch.batch_size, end)
        start = end


def cut(batch: Batch, first: int, last: int) -> Batch:
    """Return the samples [first, last) of a batch.

    Raises:
        InputError: the batch's features differ in batch size, so any sample may use any bag.
    """
    if (first, last) == (0, batch.batch_size):
        return batch
    features = batch.sparse_features
    if features.variable_stride_per_key():
        raise InputError(
            "Batch: got features of different batch sizes, which cannot be divided among ranks; expected one batch "
            "size. Let each rank read its own batches (tilerec.parallel.even_batches), or use one batch size."
        )
    return Batch(
        dense_features=batch.dense_features[first:last],
        sparse_features=_cut_features(features, first, last),
        labels=batch.labels[first:last],
        weights=None if batch.weights is None else batch.weights[first:last],
    )


def _cut_features(features: KeyedJaggedTensor, first: int, last: int) -> KeyedJaggedTensor:
    keys, stride = features.keys(), features.stride()
    begins_F = torch.arange(len(keys), device=features.offsets().device) * stride
    places = features.offsets()[torch.stack([begins_F + first, begins_F + last])].tolist()
    weights = features.weights_or_none()

    def parts(tensor: Tensor) -> Tensor:
        own = [tensor[a:b] for a, b in zip(*places, strict=True)]
        return torch.cat(own) if own else tensor[:0]

    return KeyedJaggedTensor(
        keys,
        parts(features.values()),
        None if weights is None else parts(weights),
        features.lengths().view(len(keys), stride)[:, first:last].reshape(-1),
        stride=last - first,
    )
