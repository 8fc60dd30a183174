"""Records and tables for tests of sorts."""

from __future__ import annotations

import torch
from torch import Tensor

from tilerec.ops.update.triton.sort import (
    PER_TABLE,
    Record,
)


def tables_of(rows: list[int], dim: int) -> Tensor:
    numbers = torch.zeros(len(rows), PER_TABLE, dtype=torch.int64)
    numbers[1:, 0] = torch.tensor(rows[:-1]).cumsum(0) if len(rows) > 1 else 0
    numbers[:, 1] = dim
    return numbers


def record_of(
    ids: Tensor, offsets: Tensor, rows: list[int], bags: list[tuple[int, int]], total: int, mean: bool = False,
    weights: Tensor | None = None,
) -> Record:  # fmt: skip
    """Feature f reads table f; its bags are `bags[f]` (first, count); gradient rows have 2 columns."""
    firsts = torch.tensor([0, *rows]).cumsum(0).tolist()
    features = [
        [firsts[f], rows[f], start, count, 100 * f, 2, int(mean), max(count - 1, 1).bit_length() - 1]
        for f, (start, count) in enumerate(bags)
    ]
    numbers = torch.tensor(features).reshape(-1)
    return Record(torch.zeros(1000), ids, offsets, weights, numbers, len(bags), mean, total, 1)
