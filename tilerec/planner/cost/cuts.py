"""Where rows are cut: how many ranges there are, how uneven traffic is shared out, and shares as whole rows.

Legend: T tables, k pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilerec.planner.cost.workload import Ints, Workload
from tilerec.planner.search.instance import SHARE


def even_pieces(rows: Any, parts: int) -> Ints:
    """How many ranges `ceil_chunks` makes of rows: 5 rows in 4 parts are 2, 2, 1: three."""
    rows = np.asarray(rows, np.int64)
    return -(-rows // -(-rows // parts))


def row_cuts(workload: Workload, tables: Ints, pieces: int) -> Ints:
    """[T, k + 1] cuts of tables whose traffic is uneven: each piece has (share of traffic + share of rows) = 2 / k.

    So no piece has more than twice its part of either.
    """
    rows = workload.rows[tables][:, None]
    wanted = np.arange(1, pieces)[None, :] * (2.0 / pieces)
    low = np.zeros((len(tables), pieces - 1), np.int64)
    high = np.broadcast_to(rows, low.shape).copy()
    while np.any(low < high):
        middle = (low + high) // 2
        enough = workload.share(tables[:, None], 0, middle) + middle / rows >= wanted
        high = np.where(enough, middle, high)
        low = np.where(enough, low, np.minimum(middle + 1, high))
    edges = np.zeros((len(tables), 1), np.int64)
    return np.concatenate([edges, low, rows], axis=1)


def sizes_of_shares(rows: int, shares: Ints) -> list[int]:
    """Whole rows of each piece, in proportion to shares of 1 / SHARE that add up to SHARE."""
    ends = [int(end) * rows // SHARE for end in np.cumsum(shares).tolist()]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
