"""Row ranges of a split: their number, their cuts if traffic is uneven, and shares in whole rows.

Legend: T tables, k pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilerec.planner.cost.workload import Ints, Workload
from tilerec.planner.search.instance import SHARE


def even_pieces(rows: Any, parts: int) -> Ints:
    """Return the number of ranges that `ceil_chunks` makes: of 5 rows in 4 parts, three (2, 2 and 1 rows)."""
    rows = np.asarray(rows, np.int64)
    return -(-rows // -(-rows // parts))


def row_cuts(workload: Workload, tables: Ints, pieces: int) -> Ints:
    """Return [T, k + 1] cuts such that each piece has a share of the traffic plus a share of the rows of 2 / k.

    So no piece has more than twice the mean of either. For tables with ordered ids, whose traffic is uneven.
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
    """Return the whole rows of each piece, in proportion to `shares`, which add up to SHARE."""
    ends = [int(end) * rows // SHARE for end in np.cumsum(shares).tolist()]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
