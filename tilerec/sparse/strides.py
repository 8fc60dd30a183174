"""Strides of a variable batch: the number of bags by key and rank.

Glossary
    stride      bags of one key, i.e. its batch size
    counts_FR   bags of key f from rank r; a batch of a single process has R = 1
    per_key     counts summed over ranks [F]
    bag_offsets start of each key's bags in the flat lengths [F + 1]

Counts are host numbers, since shapes depend on them. As a pytree leaf they are one int64 tensor on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from tilerec.errors import InputError


@final
class Strides:
    """Bags per key and rank; immutable. At least one of the two forms is given."""

    __slots__ = ("_counts", "_tensor_FR")

    def __init__(self, counts: tuple[tuple[int, ...], ...] | None, tensor_FR: Tensor | None = None) -> None:
        self._counts = counts
        # A compiled program takes the tensor, so it is made before: numbers would be guarded one by one.
        if tensor_FR is None and counts is not None and not torch.compiler.is_compiling():
            tensor_FR = torch.tensor(counts, dtype=torch.int64).view(len(counts), len(counts[0]) if counts else 0)
        self._tensor_FR = tensor_FR

    @staticmethod
    def checked(keys: int, counts: Tensor | Sequence[Sequence[int]]) -> Strides:
        """Check a caller's [F][R] counts and return them as strides.

        Raises `InputError` unless there is one row per key, and rows have one width and no negative counts.
        """
        rows = counts.tolist() if isinstance(counts, Tensor) else counts
        if any(isinstance(row, (int, float)) for row in rows):
            raise InputError(
                "stride_per_key_per_rank: got numbers; expected one list per key with a batch size per rank. Write "
                "[[3], [2]] for one rank."
            )
        if any(isinstance(count, float) for row in rows for count in row):
            raise InputError("stride_per_key_per_rank: got floats; expected whole batch sizes. Pass ints.")
        table = tuple(tuple(int(count) for count in row) for row in rows)
        if len(table) != keys:
            raise InputError(
                f"stride_per_key_per_rank: got {len(table)} rows; expected {keys}. Pass one list of batch sizes per "
                "key."
            )
        if len({len(row) for row in table}) > 1:
            raise InputError(
                "stride_per_key_per_rank: got rows of different lengths; expected one batch size per rank for every "
                "key. Pass 0 for ranks without a batch."
            )
        if any(count < 0 for row in table for count in row):
            raise InputError(
                "stride_per_key_per_rank: got a negative batch size; expected 0 or more. Correct the counts."
            )
        return Strides(table)

    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Return the number of bags by key and rank."""
        if self._counts is not None:
            return self._counts
        assert self._tensor_FR is not None, "strides hold numbers or a tensor"
        counts = tuple(tuple(row) for row in self._tensor_FR.tolist())
        if not torch.compiler.is_compiling():
            self._counts = counts
        return counts

    def tensor(self) -> Tensor:
        """Return the number of bags by key and rank, int64 [F, R] on the CPU."""
        if self._tensor_FR is not None:
            return self._tensor_FR
        counts = self.counts()
        return torch.tensor(counts, dtype=torch.int64).view(len(counts), len(counts[0]) if counts else 0)

    def per_key(self) -> list[int]:
        """Return the number of bags by key [F]."""
        return [sum(row) for row in self.counts()]

    def bag_offsets(self) -> list[int]:
        """Return the start of each key's bags, and the end of the last [F + 1]."""
        return list(accumulate(self.per_key(), initial=0))

    def select(self, indices: Sequence[int]) -> Strides:
        """Return the strides of the keys at `indices`."""
        counts = self.counts()
        return Strides(tuple(counts[index] for index in indices))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strides) and self.counts() == other.counts()

    __hash__ = None  # type: ignore[assignment]
