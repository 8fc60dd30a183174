"""`ServedTables`: the tables of consecutive lookups, checked once.

A lookup of one sample in 26 tables takes 2 us in native code. Checks of each table's device, shape, dtype and strides
in Python take ten times as long. Tables of a served model do not change, so a list of them keeps the outcome.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class ServedTables(list[Tensor]):
    """A list of tables' rows that remembers what a backend computed from them.

    Args:
        weights: rows of each table, as in `definition.py`.

    Attributes:
        on_cpu: whether all are plain tensors in host memory.
        layouts: a backend's results, by its own keys; valid while `unmoved()`.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__(weights)
        self.on_cpu = all(weight.is_cpu and type(weight) in (Tensor, nn.Parameter) for weight in weights)
        self.layouts: dict[Any, Any] = {}
        self._pointers = tuple(map(Tensor.data_ptr, weights)) if self.on_cpu else ()

    def holds(self, weights: Sequence[Tensor]) -> bool:
        """Return True if these are the same tensor objects."""
        return len(self) == len(weights) and all(map(operator.is_, self, weights))

    def unmoved(self) -> bool:
        """Return True if the tensors still have the memory that they had at first.

        A tensor gets other memory by `tensor.data = other`, for example. Other memory has another address, as the list
        keeps its tensors, and they their old memory until then.
        """
        return self._pointers == tuple(map(Tensor.data_ptr, self))
