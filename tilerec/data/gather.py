"""Selected rows of a column's fields: the parts of batches before they are joined.

Legend: n rows of the source, b selected rows, N ids, M selected ids, I dense features, T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilerec.data.arena import Arena
from tilerec.data.fields import BagIds, Floats, Ints


@dataclass
class BatchPart:
    """Some rows of a batch.

    Attributes:
        dense: float32 [b, I].
        labels: float32 [b, T].
        weights: float32 [b], or None.
        ids: ids by feature.
        sessions: int64 [b], equal for samples of one session; None without sessions.
    """

    dense: Floats
    labels: Floats
    weights: Floats | None = None
    ids: dict[str, BagIds] = field(default_factory=dict)
    sessions: Ints | None = None

    @property
    def rows(self) -> int:
        """b."""
        return len(self.labels)

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        arrays = [self.dense, self.labels, self.weights, self.sessions]
        for bags in self.ids.values():
            arrays += [bags.values, bags.lengths, bags.weights]
        return sum(array.nbytes for array in arrays if array is not None)


class BagSelector:
    """Selects bags of one feature.

    Args:
        bags: the ids of n rows.
        arena: memory of the results.
        scratch: memory of intermediate arrays.
    """

    def __init__(self, bags: BagIds, arena: Arena, scratch: Arena) -> None:
        self._bags, self._arena, self._scratch = bags, arena, scratch
        if bags.lengths is not None:
            self._offsets_n1 = scratch.empty(len(bags.lengths) + 1, np.int64)
            self._offsets_n1[0] = 0
            np.cumsum(bags.lengths, out=self._offsets_n1[1:])

    def select(self, rows_b: Ints) -> BagIds:
        """Return the bags of the rows, in their order."""
        bags, take = self._bags, self._arena.take
        if bags.lengths is None:
            return BagIds(take(bags.values, rows_b), None, None if bags.weights is None else take(bags.weights, rows_b))
        starts_b = self._scratch.take(self._offsets_n1, rows_b)
        lengths_b = take(bags.lengths, rows_b)
        positions_M = positions(starts_b, lengths_b, self._scratch)
        weights_M = None if bags.weights is None else take(bags.weights, positions_M)
        return BagIds(take(bags.values, positions_M), lengths_b, weights_M)


def positions(starts_b: Ints, lengths_b: Ints, scratch: Arena) -> Ints:
    """Return the integers [start, start + length) of each pair, concatenated. (5, 2), (0, 1) -> 5, 6, 0."""
    ends_b = np.cumsum(lengths_b, out=scratch.empty(len(lengths_b), np.int64))
    total = int(ends_b[-1]) if len(ends_b) else 0
    steps_M = scratch.empty(total, np.int64)
    if not total:
        return steps_M
    present_b = lengths_b > 0
    if not present_b.all():
        starts_b, lengths_b, ends_b = starts_b[present_b], lengths_b[present_b], ends_b[present_b]
    # A running sum of steps: 1 within a range, and a jump where the next range begins.
    steps_M.fill(1)
    steps_M[0] = starts_b[0]
    steps_M[ends_b[:-1]] = starts_b[1:] - starts_b[:-1] - lengths_b[:-1] + 1
    return np.cumsum(steps_M, out=steps_M)


def join_bags(parts: list[BagIds], arena: Arena) -> BagIds:
    """Return the bags of consecutive rows as one; a single part stays where it is."""
    if len(parts) == 1:
        return parts[0]
    lengths_n = None
    if any(part.lengths is not None for part in parts):
        # A row group without missing ids has no lengths, another one of the same column may have some.
        lengths_n = arena.joined(
            [np.ones(len(part.values), np.int64) if part.lengths is None else part.lengths for part in parts]
        )
    weights = [part.weights for part in parts if part.weights is not None]
    return BagIds(arena.joined([part.values for part in parts]), lengths_n, arena.joined(weights) if weights else None)
