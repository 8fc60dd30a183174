"""`RandomRecDataset`: batches of random numbers, with TorchRec's arguments and, for a seed, its draws.

Order of the draws of a batch, all from one generator: for each key the lengths of its bags (integers), then its ids
(integers); then the dense features (normal); then the labels (0 or 1).

Legend: B samples, F keys, I dense features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import torch
from torch.utils.data import IterableDataset

from tilerec.data.batch import Batch
from tilerec.errors import ConfigError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

_WHO = "RandomRecDataset"


class RandomRecDataset(IterableDataset[Batch]):
    """Random batches: uniform ids, normal dense features, labels 0 or 1.

    The constructor draws `num_generated_batches` batches, which an iteration repeats. With 0, every batch is drawn when
    it is used.

    Args:
        keys: F feature names.
        batch_size: B.
        hash_size: number of different ids of every key; `hash_sizes`: one number per key. One of the two is needed
            (neither: 100).
        ids_per_feature: most ids of a bag of every key; `ids_per_features`: one number per key (neither: 2).
        num_dense: I.
        manual_seed: seed of the draws; None: they come from torch's default generator.
        num_batches: batches of an iteration; None: endless.
        num_generated_batches: batches kept in memory.
        min_ids_per_feature, min_ids_per_features: least ids of a bag; neither: `ids_per_feature`,
            or 0 without it.

    Batches have dense features float32 `[B, I]`, ids int64, lengths int32 `[F B]` and labels int64 `[B]`.

    Raises:
        ConfigError: both forms of an argument are given, or a list has not one number per key.
    """

    def __init__(
        self, keys: list[str], batch_size: int, hash_size: int | None = None, hash_sizes: list[int] | None = None,
        ids_per_feature: int | None = None, ids_per_features: list[int] | None = None, num_dense: int = 50,
        manual_seed: int | None = None, num_batches: int | None = None, num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None, min_ids_per_features: list[int] | None = None,
    ) -> None:  # fmt: skip
        self._keys, self._batch_size, self._num_dense = list(keys), batch_size, num_dense
        self._hash_sizes = self._per_key("hash_size", hash_size, hash_sizes, [100] * len(keys))
        self._most = self._per_key("ids_per_feature", ids_per_feature, ids_per_features, [2] * len(keys))
        least = [0] * len(keys) if ids_per_feature is None else self._most
        self._least = self._per_key("min_ids_per_feature", min_ids_per_feature, min_ids_per_features, least)
        self._generator = None if manual_seed is None else torch.Generator().manual_seed(manual_seed)
        self._kept = [self._draw() for _ in range(num_generated_batches)]
        self.num_batches = num_batches

    def _per_key(self, name: str, one: int | None, many: Sequence[int] | None, default: Sequence[int]) -> list[int]:
        if one is not None and many is not None:
            raise ConfigError(f"{_WHO}: got both {name} and {name}s; expected one of them. Leave one out.")
        numbers = list(many) if many is not None else [one] * len(self._keys) if one is not None else list(default)
        if len(numbers) != len(self._keys):
            raise ConfigError(
                f"{_WHO}: {name}s: got {len(numbers)} numbers; expected {len(self._keys)}, one per key. Pass {name} "
                "for all keys alike."
            )
        return numbers

    def __iter__(self) -> Iterator[Batch]:
        return islice(cycle(self._kept) if self._kept else iter(self._draw, None), self.num_batches)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(f"{_WHO}: has no length without num_batches=.")
        return self.num_batches

    def _draw(self) -> Batch:
        values, lengths, draw = [], [], self._generator
        for size, least, most in zip(self._hash_sizes, self._least, self._most, strict=True):
            bags = torch.randint(least, most + 1, (self._batch_size,), dtype=torch.int32, generator=draw)
            lengths.append(bags)
            values.append(torch.randint(0, size, (int(bags.sum()),), generator=draw))
        features = KeyedJaggedTensor.from_lengths_sync(self._keys, torch.cat(values), torch.cat(lengths))
        dense = torch.randn(self._batch_size, self._num_dense, generator=draw)
        return Batch(dense, features, torch.randint(0, 2, (self._batch_size,), generator=draw))
