"""Positions where an id may be: its bucket, its first slot, and the slots probed after that.

Terms and formulas as in `definition.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilerec.ops.hash.checks import raise_wrong_bucket

_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
SECOND = 0x9E3779B97F4A7C15 - 2**64  # xor mask that turns `mixed` into the input of a second hash
_LOW = 0xFFFFFFFF


def shifted(values_N: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (values_N >> bits) & ((1 << (64 - bits)) - 1)


def mixed(ids_N: Tensor) -> Tensor:
    """Return a bijective hash of the ids."""
    mixed_N = (ids_N ^ shifted(ids_N, 30)) * _MULTIPLIERS[0]
    mixed_N = (mixed_N ^ shifted(mixed_N, 27)) * _MULTIPLIERS[1]
    return mixed_N ^ shifted(mixed_N, 31)


def high(mixed_N: Tensor, count: int) -> Tensor:
    """Map the upper 32 bits to [0, count), count <= 2**31: the bucket."""
    return (shifted(mixed_N, 32) * count) >> 32


def low(mixed_N: Tensor, count: int) -> Tensor:
    """Map the lower 32 bits to [0, count): the first slot."""
    return ((mixed_N & _LOW) * count) >> 32


def local_buckets(op: str, ids_N: Tensor, mixed_N: Tensor, first: int, held: int, buckets: int) -> Tensor:
    """Return bucket numbers relative to the first held bucket; raise an error for an id of another bucket."""
    bucket_N = high(mixed_N, buckets) - first
    wrong = ((bucket_N < 0) | (bucket_N >= held)).nonzero()
    if wrong.shape[0]:
        at = int(wrong[0, 0])
        raise_wrong_bucket(op, at, int(ids_N[at]), int(bucket_N[at]) + first, first, held, buckets)
    return bucket_N


def window_of(start: int, slots: int, max_probe: int) -> list[int]:
    """Return slots in the order of probing. start 2 of 4 slots, 3 probes -> [2, 3, 0]"""
    end = start + min(max_probe, slots)
    return [*range(start, min(end, slots)), *range(end - slots)]


def by_bucket(bucket_N: Tensor) -> Iterator[tuple[int, list[int]]]:
    """Yield each used bucket with its positions, in ascending order."""
    order = torch.sort(bucket_N, stable=True).indices.tolist()
    bucket = bucket_N.tolist()
    for found, positions in itertools.groupby(order, key=bucket.__getitem__):
        yield found, list(positions)


def tensor_like(values: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return the values as a tensor on the device of another tensor."""
    return torch.tensor(values, dtype=dtype, device=like.device)
