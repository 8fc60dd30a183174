"""Columns of each key of a keyed tensor: static, hashable, shared by all batches.

    columns of key f = [offsets[f], offsets[f + 1])          offsets = 0, then running sums of lengths

`Columns` is registered as a constant: `torch.compile` folds the numbers into the graph instead of guarding each one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, final

from tilerec.errors import InputError
from tilerec.sparse.keys import Keys
from tilerec.torch_private import pytree


@final
class Columns:
    """Keys and their widths; immutable. `text` is that of the keys.

    Raises `InputError` unless there is one non-negative width per key.
    """

    __slots__ = ("keys", "lengths", "offsets", "text")

    def __init__(self, keys: Sequence[str], lengths: Sequence[int]) -> None:
        self.keys = Keys.of(keys)
        self.text = self.keys.text
        self.lengths = tuple(lengths)
        if any(isinstance(length, float) for length in self.lengths):
            raise InputError(
                f"KeyedTensor: got widths {list(self.lengths)[:8]} with a float; expected numbers of columns (int). "
                "Pass ints."
            )
        self.offsets = tuple(accumulate(self.lengths, initial=0))
        if len(self.lengths) != len(self.keys):
            raise InputError(
                f"KeyedTensor: got {len(self.lengths)} widths; expected {len(self.keys)}. Pass one width per key."
            )
        if any(length < 0 for length in self.lengths):
            raise InputError(
                f"KeyedTensor: got widths {list(self.lengths)[:8]}; expected none below 0. Pass the number of columns."
            )

    def span(self, key: str) -> tuple[int, int]:
        """Return the first column of `key`, and the column after its last."""
        position = self.keys.position(key)
        return self.offsets[position], self.offsets[position + 1]

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Columns) and self.lengths == other.lengths and self.keys == other.keys
        )

    def __hash__(self) -> int:
        return hash((self.keys, self.lengths))

    def __repr__(self) -> str:
        return f"Columns({list(self.keys)}, {list(self.lengths)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self.keys, self.lengths)


pytree.register_constant(Columns)
