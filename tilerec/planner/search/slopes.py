"""`Slopes`: what a little more work on a bin costs, by stage, updated piece by piece.

The slope of a bin and a stage is (load / level) ** 7: the derivative of the sum of 8th powers of loads. A piece is
placed where the sum of slopes, weighted by the piece's own stages, is least.

Slopes are whole numbers below 2 ** 32 and weights whole numbers below 2 ** 16, both in float64. Their products and sums
are exact in any order, so every machine places pieces alike.

Legend: S stages, M memory tiers, H hosts, B bins, n pieces.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilerec.planner.search.bins import Bins
from tilerec.planner.search.instance import Ints
from tilerec.planner.search.layers import STEEP, STEEPEST, place_layers

Floats = npt.NDArray[np.float64]


class Slopes:
    """Loads and slopes of all bins. Rows are updated with Python floats, which is faster than arrays of five numbers.

    Args:
        level: [S] ps of a stage if everything were spread evenly.
        roomy: [M] bytes of the bin with most room.
        with_memory: slopes for the memory tiers as well, after those of the stages.
    """

    def __init__(self, bins: Bins, level: Floats, roomy: Floats, *, with_memory: bool) -> None:
        self.bins, self.level, self.roomy = bins, level.tolist(), roomy.tolist()
        self.links = np.flatnonzero(bins.shared).tolist()
        self.own = np.flatnonzero(~bins.shared).tolist()
        self.tiers = bins.room.shape[1] if with_memory else 0
        count, stages = bins.time.shape
        self.time = bins.time.tolist()
        self.slow = bins.slow.tolist() if np.any(bins.slow != 1.0) else None
        self.slope = np.zeros((count, stages + self.tiers), order="F")
        # By host: the slopes of its links, and its bins.
        self.link = [[0.0] * len(self.links) for _ in range(len(bins.size))]
        order = np.argsort(bins.host, kind="stable")
        ends = np.cumsum(np.bincount(bins.host, minlength=len(bins.size)))
        self.members: list[slice | Ints] = [
            slice(int(m[0]), int(m[-1]) + 1) if m[-1] - m[0] == len(m) - 1 else m
            for m in np.split(order, ends[:-1])
        ]
        self.size = bins.size.tolist()
        self.host = bins.host.tolist()
        link_time = np.zeros((len(bins.size), len(self.links)))
        np.add.at(link_time, bins.host, bins.time[:, self.links])
        self.link_time = link_time.tolist()
        self._refresh_all()

    def add(self, b: int, cost: list[int], size: Ints) -> None:
        """Add a piece of `cost` [S] ps and `size` [M] bytes to bin b."""
        bins, time = self.bins, self.time[b]
        slow = None if self.slow is None else self.slow[b]
        for s in self.own:
            time[s] += cost[s] if slow is None else float(int(cost[s] * slow[s]))
        bins.room[b] -= size
        if bins.host_room is not None:
            bins.host_room[bins.host[b]] -= size
        if self.links:
            link = self.link_time[self.host[b]]
            for i, s in enumerate(self.links):
                link[i] += cost[s] if slow is None else float(int(cost[s] * slow[s]))
            self._refresh_link(self.host[b])
        self._refresh(b)

    def add_layers(self, cost: Ints, size: Ints, vector: Floats) -> Ints | None:
        """Place many small pieces at once, and return the bin of each; None if some layer finds too little room.

        Args:
            cost: [n, S] ps. size: [n, M] bytes. vector: as in `place_layers`.
        """
        time, link = np.array(self.time), np.array(self.link_time)
        roomy = np.array(self.roomy) if self.tiers else None
        where = place_layers(self.bins, time, link, np.array(self.level), roomy, cost, size, vector)
        self.time, self.link_time = time.tolist(), link.tolist()
        self._refresh_all()
        return where

    def _refresh_all(self) -> None:
        for b in range(len(self.time)):
            self._refresh(b)
        if self.links:
            for h in range(len(self.size)):
                self._refresh_link(h)

    def _refresh(self, b: int) -> None:
        time, level = self.time[b], self.level
        new = [0.0] * len(level)
        for s in self.own:
            new[s] = _slope(time[s] / level[s])
        if self.slow is not None:
            new = [float(int(x * slow)) for x, slow in zip(new, self.slow[b], strict=True)]
        for i, s in enumerate(self.links):
            new[s] = self.link[self.host[b]][i]
        if self.tiers:
            room = self.bins.room[b].tolist()
            new += [_slope(1.0 - left / most) for left, most in zip(room, self.roomy, strict=True)]
        self.slope[b] = new

    def _refresh_link(self, h: int) -> None:
        time, size, members = self.link_time[h], self.size[h], self.members[h]
        for i, s in enumerate(self.links):
            new = self.link[h][i] = _slope(time[i] / size / self.level[s])
            self.slope[members, s] = new


def _slope(y: float) -> float:
    """Return y ** 7 in whole multiples of 1 / STEEP; `slopes_of` for one Python float."""
    y2 = y * y
    return min(float(int(y2 * y2 * y2 * y * STEEP)), STEEPEST)
