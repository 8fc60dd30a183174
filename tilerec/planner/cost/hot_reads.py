"""`HotReads`: how often the copies of hot rows are read, for tables whose tilings have heads (`spec/hot_rows.py`).

Nouns
  rank of an id  its position by frequency, from 0. Of an ordered table, the id itself. Of other tables, its position in
                 `Skew.hot`. Without such a list, the hot ids of a tiling are taken for the most frequent ones
  head           rows [rows, rows + h) of a table in formulas, as in `Tiling.held`. Its reads leave the other rows

Legend: T tables, L tables with a law, B buckets of ranks (frequency.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from tilerec.planner.cost.frequency import FrequencyLaws, Ints
from tilerec.planner.cost.portable import Floats
from tilerec.spec.tile import Tiling

if TYPE_CHECKING:
    from tilerec.planner.cost.workload import Workload


class HotReads(NamedTuple):
    """Heads of the tables of a workload.

    Args:
        rows: [T] hot rows; 0: no head. inside: [B, L] hot ids of each bucket, of tables with a law.
    """

    rows: Ints
    inside: Floats

    @staticmethod
    def most_frequent(work: Workload, rows: Ints) -> HotReads:
        """Return heads of the `rows` [T] most frequent ids."""
        laws = work.laws
        return HotReads(rows, np.clip(rows[laws.tables] + 1.0 - laws.edges[:-1, None], 0.0, laws.counts))

    @staticmethod
    def of(work: Workload, tilings: Sequence[Tiling]) -> HotReads:
        """Return the heads of tilings, in the order of the workload."""
        rows = np.array([0 if tiling.head is None else len(tiling.head.hot) for tiling in tilings], np.int64)
        found = HotReads.most_frequent(work, rows)
        for t in np.flatnonzero((rows > 0) & (work.laws.position >= 0)).tolist():
            head, skew = tilings[t].head, work.tables[t].skew
            assert head is not None
            assert skew is not None
            if skew.ordered or skew.hot:
                found.inside[:, work.laws.position[t]] = _in_buckets(work, t, head.hot.ids)
        return found

    def cold(self, laws: FrequencyLaws) -> Floats:
        """Return [B, L] the part of each bucket's ids that is not hot."""
        return 1.0 - self.inside / np.maximum(laws.counts, 1.0)


def _in_buckets(work: Workload, t: int, ids: npt.NDArray[np.int64]) -> Floats:
    """Return [B] the number of some ids of a table in each bucket. Ids of unknown rank count as others of the mean."""
    skew, laws = work.tables[t].skew, work.laws
    assert skew is not None
    ranks, unknown = ids, 0
    if not skew.ordered:
        order = work.hot_order(t)
        names = np.asarray(skew.hot)[order]
        at = np.minimum(np.searchsorted(names, ids), len(names) - 1)
        known = names[at] == ids
        ranks, unknown = order[at[known]], int((~known).sum())
    counts = laws.counts[:, laws.position[t]]
    bucket = np.searchsorted(laws.edges, ranks + 1.0, side="right") - 1
    found = np.bincount(bucket[bucket < len(counts)], minlength=len(counts)).astype(np.float64)
    if unknown:
        others = counts - np.clip(len(skew.hot) + 1.0 - laws.edges[:-1], 0.0, counts)
        found += others * (unknown / max(1.0, float(work.rows[t]) - len(skew.hot)))
    return np.minimum(found, counts)
