"""Synthetic clicks drawn from a planted model, so that the best possible AUC and log loss are known.

Glossary
    row        sample number i of a stream; all its values are a function of (seed, stream, i)
    block      1,024 rows drawn together from a counter-based generator (Philox) keyed by (seed, stream), at block i
    planted    the model that generates the labels:

        logit(row) = bias + dense_scale  * sum_i w_i x_i                / sqrt(I)
                          + main_scale   * sum_f mean over bag of u_f   / sqrt(F)
                          + pair_scale   * sum_{f<g} <v_f, v_g>         / sqrt(F (F - 1) / 2 * K)
        label = 1 with probability 1 / (1 + exp(-logit)),   v_f = mean over bag of v_f(id)

    x_i, w_i, u_f(id) and each of the K components of v_f(id) are standard normal. The values of an id are hashed from
    (seed, table, id), so tables of any size cost no memory. An empty bag contributes 0. The sums are scaled so that
    the standard deviation of each part is about its `*_scale` for one-id bags.

Because a row is a function of its number, a stream can start at any row, and several readers can share it. The order
of calls and the batch size do not change it.

Legend: B rows, F sparse features, I dense features, K pair dimensions, N ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset, SparseFeature
from tilerec.data.delimited import RowCount
from tilerec.data.power_law import check_power_law, power_law_ranks, scattered_ids
from tilerec.data.rows import mix
from tilerec.data.share import Share, bounds, check_shares
from tilerec.errors import ConfigError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

BLOCK_ROWS = 1024
_TRAIN, _HELD_OUT = 0, 1
_PAIR_DIM = 4

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PowerLawFeature:
    """A sparse feature whose ids follow a power law.

    Attributes:
        name: its key.
        num_rows: number of rows of its table.
        exponent: exponent of the power law; 0 is uniform, 1.05 is typical of clicks.
        min_length, max_length: ids per bag, uniform between the two; a min_length of 0 gives empty bags.
    """

    name: str
    num_rows: int
    exponent: float = 1.05
    min_length: int = 1
    max_length: int = 1

    def __post_init__(self) -> None:
        check_power_law(self.num_rows, self.exponent)
        if not 0 <= self.min_length <= self.max_length:
            raise ConfigError(
                f"Feature {self.name!r}: got min_length={self.min_length} and max_length={self.max_length}; expected "
                "0 <= min_length <= max_length. Correct them."
            )


@dataclass(frozen=True)
class _Drawn:
    """Rows of one block or of several blocks."""

    dense_BI: npt.NDArray[np.float32]
    lengths_FB: _Ints
    ids: tuple[_Ints, ...]  # one array of N_f ids per feature, bag after bag
    probability_B: _Floats
    label_B: npt.NDArray[np.float32]


class SyntheticClicks(Dataset):
    """An endless click stream, divided into epochs, and a held-out part from a separate stream.

    Args:
        features: the sparse features.
        num_dense: I, number of dense features.
        train_rows: rows of one epoch; every epoch has new rows.
        held_out_rows: rows of the held-out part.
        seed: seed of the rows and of the planted model.
        bias: bias of the logit; -1.5 gives about 21% clicks.
        dense_scale, main_scale, pair_scale: strengths of the parts of the planted model.
    """

    def __init__(
        self,
        features: Sequence[PowerLawFeature],
        *,
        num_dense: int = 4,
        train_rows: int = 1 << 20,
        held_out_rows: int = 1 << 16,
        seed: int = 0,
        bias: float = -1.5,
        dense_scale: float = 0.5,
        main_scale: float = 1.0,
        pair_scale: float = 0.5,
    ) -> None:
        names = [feature.name for feature in features]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"SyntheticClicks: got features named {names}; expected at least one, each name once.")
        if num_dense < 0 or train_rows < 1 or held_out_rows < 1:
            raise ConfigError(
                f"SyntheticClicks: got num_dense={num_dense}, train_rows={train_rows}, held_out_rows={held_out_rows}; "
                "expected num_dense of at least 0 and the others of at least 1."
            )
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"SyntheticClicks: got seed={seed}; expected a number in [0, 2**64). Change it.")
        self._features = tuple(features)
        self._num_dense = num_dense
        self._train_rows = train_rows
        self._held_out_rows = held_out_rows
        self._seed = seed
        self._bias = bias
        self._dense_scale = dense_scale
        self._main_scale = main_scale
        self._pair_scale = pair_scale
        self._weights_I = _normals(_keys(seed, len(features), np.arange(num_dense)), 1)[0]

    @property
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        return tuple(SparseFeature(feature.name, feature.num_rows) for feature in self._features)

    @property
    def dense_features(self) -> tuple[str, ...]:
        return tuple(f"dense_{index}" for index in range(self._num_dense))

    def train(self, batch_size: int, epoch: int = 0) -> Iterator[Batch]:
        first = epoch * self._train_rows
        for start in _starts(self._train_rows, batch_size):
            yield self.batch(first + start, min(batch_size, self._train_rows - start))

    def train_shares(
        self, batch_size: int, epoch: int = 0, *, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> Iterator[Share]:
        """Yield a rank's share of each global batch, as in `Dataset`, and generate only the share."""
        check_shares(batch_size, epoch, rank, world_size, start)
        before = epoch * self._train_rows
        for first in _starts(self._train_rows, batch_size):
            if first >= start:
                total = min(batch_size, self._train_rows - first)
                own, end = (first + bound for bound in bounds(total, rank, world_size))
                yield Share(self.batch(before + own, end - own), own, total, first + total)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        for start in _starts(self._held_out_rows, batch_size):
            yield self._batch(_HELD_OUT, start, min(batch_size, self._held_out_rows - start))

    def best_predictions(self) -> torch.Tensor | None:
        blocks = range(-(-self._held_out_rows // BLOCK_ROWS))
        parts = [self._block(_HELD_OUT, block).probability_B for block in blocks]
        return torch.from_numpy(np.concatenate(parts)[: self._held_out_rows])

    def row_count(self) -> RowCount:
        return RowCount(rows=self._train_rows + self._held_out_rows)

    def batch(self, start: int, size: int) -> Batch:
        """Return rows [start, start + size) of the training stream, which has no end."""
        return self._batch(_TRAIN, start, size)

    def probabilities(self, start: int, size: int) -> torch.Tensor:
        """Return planted click probabilities of rows [start, start + size) of the training stream, float64 [size]."""
        return torch.from_numpy(self._rows(_TRAIN, start, size).probability_B)

    def _batch(self, stream: int, start: int, size: int) -> Batch:
        drawn = self._rows(stream, start, size)
        return Batch(
            dense_features=torch.from_numpy(drawn.dense_BI),
            sparse_features=KeyedJaggedTensor.from_lengths_sync(
                keys=[feature.name for feature in self._features],
                values=torch.from_numpy(np.concatenate(drawn.ids)),
                lengths=torch.from_numpy(drawn.lengths_FB.astype(np.int32).reshape(-1)),
            ),
            labels=torch.from_numpy(drawn.label_B),
        )

    def _rows(self, stream: int, start: int, size: int) -> _Drawn:
        if start < 0 or size < 0:
            raise ConfigError(
                f"SyntheticClicks: got rows [{start}, {start} + {size}); expected both at least 0. Correct them."
            )
        if not size:
            return _cut(self._block(stream, start // BLOCK_ROWS), 0, 0)
        blocks = range(start // BLOCK_ROWS, (start + size - 1) // BLOCK_ROWS + 1)
        parts = [
            _cut(
                self._block(stream, block),
                max(start - block * BLOCK_ROWS, 0),
                min(start + size - block * BLOCK_ROWS, BLOCK_ROWS),
            )
            for block in blocks
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _block(self, stream: int, block: int) -> _Drawn:
        """Draw all rows of one block."""
        counter = np.array([0, 0, 0, block], np.uint64)
        key = np.array([self._seed, stream], np.uint64)
        random = np.random.Generator(np.random.Philox(counter=counter, key=key))
        dense_IB = _box_muller(
            random.random((self._num_dense, BLOCK_ROWS)), random.random((self._num_dense, BLOCK_ROWS))
        )
        logit_B = np.full(BLOCK_ROWS, self._bias)
        if self._num_dense:
            logit_B += self._dense_scale / np.sqrt(self._num_dense) * (self._weights_I @ dense_IB)
        main_B = np.zeros(BLOCK_ROWS)
        vector_KB = np.zeros((_PAIR_DIM, BLOCK_ROWS))
        squares_B = np.zeros(BLOCK_ROWS)
        lengths, ids = [], []
        for table, feature in enumerate(self._features):
            spread = feature.max_length - feature.min_length + 1
            lengths_B = feature.min_length + (random.random(BLOCK_ROWS) * spread).astype(np.int64)
            # Draw for the longest bag, so that all later numbers have fixed positions in the random stream.
            uniform = random.random((BLOCK_ROWS, feature.max_length))
            uniform_N = uniform[np.arange(feature.max_length)[None, :] < lengths_B[:, None]]
            ids_N = scattered_ids(power_law_ranks(uniform_N, feature.num_rows, feature.exponent), feature.num_rows)
            effects = _normals(_keys(self._seed, table, ids_N), 1 + _PAIR_DIM)
            pooled = np.stack([_bag_means(effect_N, lengths_B) for effect_N in effects])
            main_B += pooled[0]
            vector_KB += pooled[1:]
            squares_B += (pooled[1:] ** 2).sum(axis=0)
            lengths.append(lengths_B)
            ids.append(ids_N)
        count = len(self._features)
        logit_B += self._main_scale / np.sqrt(count) * main_B
        if count > 1:
            # sum_{f<g} <v_f, v_g> = (|sum v|^2 - sum |v|^2) / 2
            pairs_B = ((vector_KB**2).sum(axis=0) - squares_B) / 2
            logit_B += self._pair_scale / np.sqrt(count * (count - 1) / 2 * _PAIR_DIM) * pairs_B
        probability_B = 1 / (1 + np.exp(-logit_B))
        return _Drawn(
            dense_BI=np.ascontiguousarray(dense_IB.T).astype(np.float32),
            lengths_FB=np.stack(lengths),
            ids=tuple(ids),
            probability_B=probability_B,
            label_B=(random.random(BLOCK_ROWS) < probability_B).astype(np.float32),
        )


def _starts(rows: int, batch_size: int) -> range:
    if batch_size < 1:
        raise ConfigError(f"batch_size: got {batch_size}; expected at least 1. Set it higher.")
    return range(0, rows, batch_size)


def _keys(seed: int, table: int, ids_N: _Ints) -> npt.NDArray[np.uint64]:
    """Return one hash per id, different for every seed and table."""
    with np.errstate(over="ignore"):
        salt = mix(mix(np.array([seed], np.uint64) + np.uint64(0x9E3779B97F4A7C15)) + np.uint64(table + 1))
        return mix(ids_N.astype(np.uint64) + salt)


def _normals(keys_N: npt.NDArray[np.uint64], count: int) -> _Floats:
    """Return `count` standard normals per key, [count, N], each a function of the key alone."""
    out = np.empty((count, len(keys_N)))
    for index in range(count):
        first_N = mix(keys_N + np.uint64(2 * index + 1))
        second_N = mix(keys_N + np.uint64(2 * index + 2))
        out[index] = _box_muller(_unit(first_N), _unit(second_N))
    return out


def _unit(bits_N: npt.NDArray[np.uint64]) -> _Floats:
    """Return numbers in [0, 1) from the upper 53 bits."""
    return (bits_N >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _box_muller(first: _Floats, second: _Floats) -> _Floats:
    """Return standard normals from two uniforms in [0, 1)."""
    return np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)


def _bag_means(effect_N: _Floats, lengths_B: _Ints) -> _Floats:
    """Return the mean of each bag; 0 for an empty bag."""
    total_B = np.bincount(np.repeat(np.arange(len(lengths_B)), lengths_B), effect_N, len(lengths_B))
    return total_B / np.maximum(lengths_B, 1)


def _cut(drawn: _Drawn, start: int, stop: int) -> _Drawn:
    ends_FB = np.cumsum(drawn.lengths_FB, axis=1)
    first_F = ends_FB[:, start - 1] if start else np.zeros(len(drawn.ids), np.int64)
    last_F = ends_FB[:, stop - 1] if stop else np.zeros(len(drawn.ids), np.int64)
    return _Drawn(
        dense_BI=drawn.dense_BI[start:stop],
        lengths_FB=drawn.lengths_FB[:, start:stop],
        ids=tuple(ids[a:b] for ids, a, b in zip(drawn.ids, first_F, last_F, strict=True)),
        probability_B=drawn.probability_B[start:stop],
        label_B=drawn.label_B[start:stop],
    )


def _joined(parts: list[_Drawn]) -> _Drawn:
    return _Drawn(
        dense_BI=np.concatenate([part.dense_BI for part in parts]),
        lengths_FB=np.concatenate([part.lengths_FB for part in parts], axis=1),
        ids=tuple(np.concatenate(ids) for ids in zip(*(part.ids for part in parts), strict=True)),
        probability_B=np.concatenate([part.probability_B for part in parts]),
        label_B=np.concatenate([part.label_B for part in parts]),
    )
