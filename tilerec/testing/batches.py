"""Batches for tests: random batches, and conversion between ranks' local batches and the global batch.

    rank 0: "a": [1] [2, 3]   "b": []  [4]        concat_batches      "a": [1] [2, 3] [5]
    rank 1: "a": [5]          "b": [6]                ->              "b": []  [4]    [6]
    rank 2: no samples                            <- split_batch(…, [2, 1, 0])

Within each feature the samples of rank 0 come first, then those of rank 1, and so on. So the output of an unsharded
module on the global batch is the expected output of the sharded module on the local batches.

Legend: F features, B samples, R ranks, N ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from tilerec.data.power_law import check_power_law, power_law_ranks, scattered_ids
from tilerec.errors import InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def random_batch(
    keys: Sequence[str],
    rows: int | Sequence[int] | Mapping[str, int],
    batch_size: int,
    *,
    mean_length: float = 3.0,
    empty: float = 0.2,
    exponent: float = 0.0,
    weighted: bool = False,
    variable: bool = False,
    values_dtype: torch.dtype = torch.int64,
    lengths_dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> KeyedJaggedTensor:
    """Return random features; equal arguments give the same batch on every machine.

    Args:
        keys: feature names [F].
        rows: ids of a feature are in [0, rows): one number for all, or one per key.
        batch_size: number of samples, B >= 0.
        mean_length: mean number of ids per bag, at least 1 - `empty`.
        empty: fraction of bags without ids; the others hold one id or more.
        exponent: exponent of the power law of the ids, which are scattered over the table; 0 is uniform.
        weighted: add one standard normal fp32 weight per id.
        variable: each key has its own number of bags, at most B, and inverse indices map samples to bags.
        values_dtype, lengths_dtype: int32 or int64.
        seed: seed of the generator.
    """
    generator = np.random.default_rng(seed)
    if isinstance(rows, int):
        rows_F = [rows] * len(keys)
    else:
        rows_F = [rows[key] for key in keys] if isinstance(rows, Mapping) else list(rows)
    if len(rows_F) != len(keys) or batch_size < 0 or not 0 <= empty <= 1:
        raise InputError(
            f"random_batch: got {len(keys)} keys, rows for {len(rows_F)}, batch_size {batch_size}, empty {empty}; "
            f"expected rows per key, batch_size >= 0 and empty from 0 to 1."
        )
    if empty < 1 and mean_length < 1 - empty:
        raise InputError(
            f"random_batch: got mean_length {mean_length} with empty={empty}; expected {1 - empty:g} or more, as other "
            f"bags hold at least one id."
        )
    bags_F = [batch_size] * len(keys)
    if variable and batch_size > 0:
        bags_F = [int(count) for count in generator.integers(1, batch_size + 1, size=len(keys))]
    more = mean_length / (1 - empty) - 1 if empty < 1 else 0.0
    ids, lengths = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for key, count, bags in zip(keys, rows_F, bags_F, strict=True):
        lengths_B = (1 + generator.poisson(more, size=bags)) * (generator.random(bags) >= empty)
        total = int(lengths_B.sum())
        if total and count < 1:
            raise InputError(f"random_batch: feature '{key}' has {count} rows to draw from; expected at least 1.")
        if exponent:
            check_power_law(count, exponent)
            ranks_N = power_law_ranks(generator.random(total), count, exponent)
            ids.append(scattered_ids(ranks_N, count))
        else:
            ids.append(generator.integers(0, max(1, count), size=total))
        lengths.append(lengths_B)
    values_N = torch.from_numpy(np.concatenate(ids)).to(values_dtype)
    weights_N = torch.from_numpy(generator.standard_normal(len(values_N), dtype=np.float32))
    inverse_FB = torch.zeros(len(keys), batch_size, dtype=torch.int64)
    if variable:
        for f, bags in enumerate(bags_F):
            inverse_FB[f] = torch.from_numpy(generator.integers(0, max(1, bags), size=batch_size))
    batch = KeyedJaggedTensor(
        keys,
        values_N,
        weights_N if weighted else None,
        torch.from_numpy(np.concatenate(lengths)).to(lengths_dtype),
        stride=None if variable else batch_size,
        stride_per_key_per_rank=[[bags] for bags in bags_F] if variable else None,
        inverse_indices=(list(keys), inverse_FB) if variable else None,
    )
    return batch if device is None else batch.to(torch.device(device))


def split_batch(batch: KeyedJaggedTensor, sizes: Sequence[int]) -> list[KeyedJaggedTensor]:
    """Return the local batches of a global one: the first `sizes[0]` samples of every feature, the next `sizes[1]`, …

    Sizes may be 0 and sum to the batch size. A variable batch is split by its `stride_per_key_per_rank`, which needs
    one column per size (as in the result of `concat_batches`).
    """
    counts_FR = batch.stride_per_key_per_rank()
    variable = batch.variable_stride_per_key()
    if min(sizes, default=0) < 0 or sum(sizes) != batch.stride():
        raise InputError(
            f"split_batch: got sizes {list(sizes)} for a batch of {batch.stride()}; expected sizes >= 0 with that sum."
        )
    if variable and any(len(row) != len(sizes) for row in counts_FR):
        raise InputError(
            f"split_batch: a variable batch from {len(counts_FR[0])} ranks cannot be split for {len(sizes)}: any "
            f"sample may use any of its bags. Make local batches and use concat_batches."
        )
    keys = batch.keys()
    bags_FR = counts_FR if variable else [list(sizes)] * len(keys)
    lengths_F = batch.lengths().split(batch.stride_per_key())
    values_F = batch.values().split(batch.length_per_key())
    weights = batch.weights_or_none()
    weights_F = None if weights is None else weights.split(batch.length_per_key())
    inverse = batch.inverse_indices_or_none()
    starts = list(accumulate(sizes, initial=0))
    parts = []
    for r, (first, last) in enumerate(pairwise(starts)):
        lengths, cuts = [], []
        for lengths_B, bags_R in zip(lengths_F, bags_FR, strict=True):
            begin = sum(bags_R[:r])
            lengths.append(lengths_B[begin : begin + bags_R[r]])
            cuts.append((int(lengths_B[:begin].sum()), int(lengths_B[: begin + bags_R[r]].sum())))
        local = None
        if inverse is not None:
            position = {key: f for f, key in enumerate(keys)}
            before = torch.tensor([sum(bags_FR[position[key]][:r]) for key in inverse[0]], dtype=torch.int64)
            local = (inverse[0], inverse[1][:, first:last] - before.view(-1, 1).to(inverse[1]))
        parts.append(
            KeyedJaggedTensor(
                keys,
                _joined([part[a:b] for part, (a, b) in zip(values_F, cuts, strict=True)], batch.values()),
                None
                if weights is None or weights_F is None
                else _joined([part[a:b] for part, (a, b) in zip(weights_F, cuts, strict=True)], weights),
                _joined(lengths, batch.lengths()),
                stride=None if variable else sizes[r],
                stride_per_key_per_rank=[[bags_R[r]] for bags_R in bags_FR] if variable else None,
                inverse_indices=local,
            )
        )
    return parts


def concat_batches(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Return the global batch of local ones: per feature, the samples of the first batch, then of the second, …

    Batches have the same keys in the same order, weights on all or none, and may have no samples. Variable batches
    become one whose `stride_per_key_per_rank` has a column per batch; their inverse indices are joined.
    """
    if not batches:
        raise InputError("concat_batches: the list is empty; expected at least one batch.")
    first = batches[0]
    keys = first.keys()
    for r, batch in enumerate(batches):
        alike = (
            batch.keys() == keys
            and (batch.weights_or_none() is None) == (first.weights_or_none() is None)
            and batch.variable_stride_per_key() == first.variable_stride_per_key()
            and (batch.inverse_indices_or_none() is None) == (first.inverse_indices_or_none() is None)
        )
        if not alike:
            raise InputError(
                f"concat_batches: batch {r} has keys {batch.keys()[:8]}, batch 0 {keys[:8]}, or only one of them has "
                f"weights, variable sizes or inverse indices; expected batches of one kind."
            )
    variable = first.variable_stride_per_key()
    bags_RF = [batch.stride_per_key() for batch in batches]
    lengths_RF = [batch.lengths().split(batch.stride_per_key()) for batch in batches]
    values_RF = [batch.values().split(batch.length_per_key()) for batch in batches]
    features = range(len(keys))
    weights = None
    if first.weights_or_none() is not None:
        weights_RF = [batch.weights().split(batch.length_per_key()) for batch in batches]
        weights = _joined([row[f] for f in features for row in weights_RF], first.weights())
    inverse = None
    if first.inverse_indices_or_none() is not None:
        named = first.inverse_indices()[0]
        columns = []
        before_F = [0] * len(keys)
        for batch, bags_F in zip(batches, bags_RF, strict=True):
            batch_named, index_FB = batch.inverse_indices()
            rows = [batch_named.index(key) for key in named]
            shift = torch.tensor([before_F[keys.index(key)] for key in named]).view(-1, 1).to(index_FB)
            columns.append(index_FB[rows] + shift)
            before_F = [before + bags for before, bags in zip(before_F, bags_F, strict=True)]
        inverse = (list(named), torch.cat(columns, dim=1))
    return KeyedJaggedTensor(
        keys,
        _joined([row[f] for f in features for row in values_RF], first.values()),
        weights,
        _joined([row[f] for f in features for row in lengths_RF], first.lengths()),
        stride=None if variable else sum(batch.stride() for batch in batches),
        stride_per_key_per_rank=[[bags_F[f] for bags_F in bags_RF] for f in features] if variable else None,
        inverse_indices=inverse,
    )


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like[:0]
