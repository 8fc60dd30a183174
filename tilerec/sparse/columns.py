"""Which columns of a keyed tensor belong to which key: static, hashable, shared by every batch.

    columns of key f = [offsets[f], offsets[f + 1])          offsets = 0, then running sums of lengths

Registered as a constant: `torch.compile` folds the numbers into the graph instead of guarding each of them.
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
    """Keys with the width of each; immutable.

    Raises `InputError` unless there is one non-negative width per key.
    """

    __slots__ = ("keys", "lengths", "offsets")

    def __init__(self, keys: Sequence[str], lengths: Sequence[int]) -> None:
        self.keys = Keys.of(keys)
        self.lengths = tuple(lengths)
        if any(isinstance(length, float) for length in self.lengths):
            raise InputError(
                f"KeyedTensor: widths {list(self.lengths)[:8]} hold a fraction; wanted whole numbers of columns (int)."
            )
        self.offsets = tuple(accumulate(self.lengths, initial=0))
        if len(self.lengths) != len(self.keys):
            raise InputError(
                f"KeyedTensor: {len(self.lengths)} widths for {len(self.keys)} keys; wanted one width per key."
            )
        if any(length < 0 for length in self.lengths):
            raise InputError(f"KeyedTensor: widths {list(self.lengths)[:8]} hold a negative one.")

    def span(self, key: str) -> tuple[int, int]:
        """First column of `key` and the one after its last."""
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
