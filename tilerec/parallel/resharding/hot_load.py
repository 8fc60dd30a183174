"""`HotLoad`: the most frequent ids of a table, counted over all ranks, and the skew that they give the planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tilerec.planner.cost.frequency import bucket_edges
from tilerec.planner.cost.workload import MOST_EXPONENT, Reads, Skew, TableWork, Workload
from tilerec.sharding.hot_counts import FrequentIds

LEAST_COUNT = 4
"""Fewest occurrences of a hot id: rarer ones are among the most frequent by chance."""
_HALVINGS = 16  # of the interval for an exponent: 1e-4


@dataclass(frozen=True)
class HotLoad:
    """The most frequent ids of a table since the counts were last reset.

    Attributes:
        ids: the ids, the most frequent first. counts: occurrences of each of them in the counted batches.
        counted: number of ids in the counted batches.
    """

    ids: tuple[int, ...]
    counts: tuple[int, ...]
    counted: int

    def skew(self, rows: int) -> Skew:
        """Return the skew of a table of `rows` rows: the measured curve, and Zipf's law beyond its last point."""
        shares = np.cumsum(self.counts) / max(self.counted, 1)
        ends = sorted({min(int(edge) - 1, len(self.ids)) for edge in bucket_edges(len(self.ids))} - {0})
        curve = tuple((k, min(1.0, float(shares[k - 1]))) for k in ends)
        if ends[-1] == rows:
            curve = (*curve[:-1], (rows, 1.0))
        return Skew(rows, _exponent(rows, *curve[-1]), curve=curve, hot=self.ids)


def merged(found: Iterable[FrequentIds | None]) -> HotLoad | None:
    """Return the most frequent ids of all ranks; None if no id is known to be frequent."""
    counted = [own for own in found if own is not None]
    ids = np.concatenate([own.ids for own in counted]) if counted else np.zeros(0, np.int64)
    if not len(ids):
        return None
    names, place = np.unique(ids, return_inverse=True)
    counts = np.bincount(place, np.concatenate([own.counts for own in counted])).astype(np.int64)
    most, error = max(len(own.ids) for own in counted), sum(own.error for own in counted)
    sure = np.flatnonzero((counts >= LEAST_COUNT) & (counts >= 10 * error))
    order = sure[np.lexsort((names[sure], -counts[sure]))][:most]
    if not len(order):
        return None
    total = sum(own.counted for own in counted)
    return HotLoad(tuple(names[order].tolist()), tuple(counts[order].tolist()), total)


def of_names(found: Sequence[HotLoad | None]) -> HotLoad | None:
    """Return the counts of a table with several names: those of the name with the most ids."""
    return max((own for own in found if own is not None), key=lambda own: own.counted, default=None)


def _exponent(rows: int, k: int, share: float) -> float:
    """Return the exponent of Zipf's law with which the k most frequent of `rows` ids have this share."""
    low, high = 0.0, float(MOST_EXPONENT)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        law = TableWork("", rows, 1, reads=[Reads(1)], skew=Skew(rows, middle, ordered=True))
        less = float(Workload([law]).share(0, 0, k)) < share
        low, high = (middle, high) if less else (low, middle)
    return low
