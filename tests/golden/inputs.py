"""Inputs of the golden runs: integers of SplitMix64, the same under every release of numpy and torch.

Floats are small multiples of 1/8, which every dtype of a table holds exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tilerec import KeyedJaggedTensor

_WORD = 0xFFFFFFFFFFFFFFFF


class Numbers:
    """A stream of integers (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014)."""

    def __init__(self, *seed: int) -> None:
        self._state = 0
        for part in seed:
            self._state = (self._state * 0x100000001B3 + part + 1) & _WORD
            self.below(2)

    def below(self, limit: int) -> int:
        """Return the next integer from 0 up to `limit`, which is not included."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _WORD
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
        return (z ^ (z >> 31)) % limit

    def eighths(self, *shape: int, most: int = 16) -> Tensor:
        """Return fp32 multiples of 1/8 from `-most / 8` to `most / 8`."""
        count = 1
        for size in shape:
            count *= size
        return (torch.tensor([self.below(2 * most + 1) - most for _ in range(count)]) / 8).reshape(shape)

    def ids(self, count: int, rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return `count` row numbers; half of them are among the first few rows."""
        drawn = [self.below(max(1, rows // 4) if self.below(2) else rows) for _ in range(count)]
        return torch.tensor(drawn, dtype=dtype)


def batch(
    rows: Mapping[str, int],
    samples: int,
    *seed: int,
    weighted: bool = False,
    variable: bool = False,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """Return features of `samples` bags with 0 to 4 ids each.

    Args:
        rows: key -> number of rows that its ids lie in.
        weighted: with one weight per id, a multiple of 1/8.
        variable: with a number of bags for each key, and inverse indices.
    """
    numbers = Numbers(*seed)
    keys = list(rows)
    bags = [1 + numbers.below(samples) if variable and samples else samples for _ in keys]
    lengths = [[numbers.below(5) if numbers.below(4) else 0 for _ in range(count)] for count in bags]
    values = [numbers.ids(sum(own), rows[key], dtype) for key, own in zip(keys, lengths, strict=True)]
    total = sum(map(len, values))
    inverse = [[numbers.below(max(1, count)) for _ in range(samples)] for count in bags]
    return KeyedJaggedTensor(
        keys,
        torch.cat(values),
        numbers.eighths(total) if weighted else None,
        torch.tensor([length for own in lengths for length in own], dtype=torch.int64),
        stride=None if variable else samples,
        stride_per_key_per_rank=[[count] for count in bags] if variable else None,
        inverse_indices=(keys, torch.tensor(inverse, dtype=torch.int64).reshape(len(keys), samples))
        if variable
        else None,
    )


def columns(features: Sequence[str], count: int, *seed: int) -> dict[str, Tensor]:
    """Return dense values `[count]` by feature."""
    numbers = Numbers(*seed)
    return {feature: numbers.eighths(count) for feature in features}
