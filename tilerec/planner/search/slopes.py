"""`Slopes`: what a little more work on a bin costs, by stage, updated piece by piece.

The slope of a bin and a stage is (load / level) ** 7: the derivative of the sum of 8th powers of loads. A piece is
placed where the sum of slopes, weighted by the piece's own stages, is least.

Slopes are whole numbers below 2 ** 32 and weights whole numbers below 2 ** 16, both in float64. Their products and sums
are exact in any order, so every machine places pieces alike.

One by one, pieces take T x B steps, too slow for 10,000 tables on 1,024 ranks. A layer places B / BINS_PER_LAYER pieces
at once, for T x BINS_PER_LAYER evaluations of one bin and one sort of the bins per layer. The largest and the smallest
pieces are placed one by one: the first determine the loads, the last even them out.

Legend: S stages, M memory tiers, H hosts, B bins, n pieces.
"""

from __future__ import annotations

import numpy as np

from tilerec.planner.search.bins import Bins
from tilerec.planner.search.instance import Floats, Ints

LAYERS_FROM_BINS = 1024  # least number of bins for which layers are used
SINGLE_FIRST_PER_BIN = 2  # largest pieces per bin that are placed one by one before the layers
SINGLE_LAST_PER_BIN = 8  # smallest pieces per bin that are placed one by one after the layers
BINS_PER_LAYER = 16  # one of BINS_PER_LAYER bins receives a piece in each layer
STEEP = float(1 << 20)  # slopes are whole multiples of 1 / STEEP
STEEPEST = float(1 << 32)  # largest slope, in 1 / STEEP


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
            slice(int(m[0]), int(m[-1]) + 1) if m[-1] - m[0] == len(m) - 1 else m for m in np.split(order, ends[:-1])
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
        """Place many small pieces in layers; return the bin of each, or None if a layer finds too few bins with room.

        Each of the least loaded bins receives one piece per layer. Pieces are in descending order of size.

        Args:
            cost: [n, S] ps. size: [n, M] bytes.
            vector: [n, S (+ M)] weights of the slopes for each piece, whole numbers below 2 ** 16.
        """
        bins, links, level = self.bins, self.links, np.array(self.level)
        time, link = np.array(self.time), np.array(self.link_time)
        found = np.empty(len(cost), np.int64)
        length = max(len(time) // BINS_PER_LAYER, 1)
        for start in range(0, len(cost), length):
            some = slice(start, start + length)
            y = time / level
            y[:, links] = (link / bins.size[:, None])[bins.host] / level[links]
            if self.tiers:
                y = np.concatenate([y, 1.0 - bins.room / np.array(self.roomy)], 1)
            # Whole numbers below 2 ** 32 and 2 ** 16: products and sums are exact.
            score = _slopes(y) @ np.floor(vector[some].sum(0) / len(vector[some]))
            score[(bins.room < size[some].max(0)).any(1)] = np.inf
            chosen = np.argsort(score, kind="stable")[: len(cost[some])]
            if score[chosen[-1]] == np.inf:
                return None
            found[some] = chosen
            time[chosen] += cost[some]
            np.add.at(link, bins.host[chosen], cost[some][:, links].astype(np.float64))
            bins.room[chosen] -= size[some]
        self.time, self.link_time = time.tolist(), link.tolist()
        self._refresh_all()
        return found

    def _refresh_all(self) -> None:
        """Compute all slopes at once, as `_refresh` and `_refresh_link` do."""
        bins, level = self.bins, np.array(self.level)
        new = _slopes(np.array(self.time) / level)
        if self.slow is not None:
            new = np.trunc(new * np.array(self.slow))
        if self.links:
            link = _slopes(np.array(self.link_time) / bins.size[:, None] / level[self.links])
            self.link = link.tolist()
            new[:, self.links] = link[bins.host]
        self.slope[:, : len(level)] = new
        if self.tiers:
            self.slope[:, len(level) :] = _slopes(1.0 - bins.room / np.array(self.roomy))

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
    """Return y ** 7 in whole multiples of 1 / STEEP; `_slopes` for one Python float."""
    y2 = y * y
    return min(float(int(y2 * y2 * y2 * y * STEEP)), STEEPEST)


def _slopes(y: Floats) -> Floats:
    """Return y ** 7 in whole multiples of 1 / STEEP."""
    y2 = y * y
    return np.minimum(np.trunc(y2 * y2 * y2 * y * STEEP), STEEPEST)


def split_for_layers(order: Ints, pieces: Ints, bins: int) -> tuple[Ints, Ints, Ints]:
    """Return tables in their order: those placed one by one first, those in layers, those placed one by one last.

    Args:
        order: tables, the largest first. pieces: number of pieces by table; only tables of one piece go into layers.
    """
    at = np.arange(len(order))
    in_layers = (at >= SINGLE_FIRST_PER_BIN * bins) & (at < len(order) - SINGLE_LAST_PER_BIN * bins)
    in_layers &= pieces[order] == 1
    first = int(in_layers.argmax()) if in_layers.any() else len(order)
    return order[:first], order[in_layers], order[first:][~in_layers[first:]]
