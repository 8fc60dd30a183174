"""`RowLocation`: rows of a lookup that are not in the leaves of their tables, but in cache lines, for example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

LookupLayout = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Arguments `tables`, `keys`, `means` and `batches` of `pooled_lookup`."""


class RowLocation(Protocol):
    """Reads the rows of one batch where they are.

    `updates`: the batch's update is still to come, so its rows should stay where they are.
    """

    @property
    def starts(self) -> Sequence[int]:
        """Per feature of a sequence lookup, the position of its first id."""

    def pooled_lookup(self, layout: LookupLayout, dtype: torch.dtype, *, updates: bool) -> tuple[Tensor, Tensor]:
        """Return the output and the ticket of `pooled_lookup`."""

    def sequence_lookup(self, dtype: torch.dtype, *, updates: bool) -> tuple[Tensor, Tensor]:
        """Return the output and the ticket of `sequence_lookup`."""

    def sample_weight_grad(
        self, grad: Tensor, layout: LookupLayout, saved_rows: Sequence[Tensor] | None, *, updates: bool
    ) -> Tensor:
        """Return `sample_weight_grad` of the batch, [N]. `saved_rows`: copies of each feature's rows, read instead."""

    def copies(self, features: Sequence[int], *, updates: bool) -> list[Tensor]:
        """Return copies of the rows of these features, one per id."""
