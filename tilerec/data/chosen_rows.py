"""`ChosenRows`: the rows of a window in the order of its batches, taken from one column at a time.

One native call copies a column into all parts of batches, and hashes ids on their way. A call per part took 11 us of
Python, which was a seventh of the time of a reader.

Legend: n rows of the column, b rows of one part, M rows of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilerec.data.pooled_memory import empty, tensor_of
from tilerec.ops.hash.definition import take_items_


class RowHash(NamedTuple):
    """The way from ids to rows in [first_row, rows), by `hash_rows`."""

    rows: int
    first_row: int


@final
class ChosenRows:
    """Rows that parts of batches take from every column of a window.

    Attributes:
        by_part: int64 [b] for each part: numbers of its rows, each in [0, n).
        counts: b of each part.
    """

    def __init__(self, by_part: Sequence[npt.NDArray[np.int64]]) -> None:
        self.by_part = by_part
        self.counts = [len(rows_b) for rows_b in by_part]
        rows_M = np.concatenate([np.zeros(0, np.int64), *by_part])
        # With 32 bits, they and a column of 2**17 ids fit the second cache of 2 MB.
        narrow = not len(rows_M) or rows_M.max() < 2**31
        self._rows_M = torch.from_numpy(rows_M.astype(np.int32) if narrow else rows_M)

    def take(
        self, values_n: npt.NDArray[Any], outs: Sequence[Tensor], starts: Sequence[int], row_hash: RowHash | None = None
    ) -> None:
        """Copy the rows of a column to outs[p] from starts[p] on, for each part p; with `row_hash` rows of the ids."""
        rows, first_row = row_hash or (0, 0)
        take_items_(tensor_of(values_n), self._rows_M, self.counts, outs, starts, rows=rows, first_row=first_row)

    def pieces(self, values_n: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the rows of a column for each part."""
        found = [empty(count, values_n.dtype) for count in self.counts]
        self.take(values_n, [torch.from_numpy(piece_b) for piece_b in found], [0] * len(found))
        return found
