"""Many small pieces at once: each of the ranks that bear least gets one of them, again and again.

Nouns
  layer     as many pieces, the next in order of size, as a part of the ranks get one each
  state     what ranks bear so far; slopes of all of them are made anew for each layer (see pack.py)

Legend: S stages, M tiers, H hosts, B bins (ranks), L shared stages, n pieces.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilerec.planner.search.instance import Ints

Floats = npt.NDArray[np.float64]

MANY = 1024  # bins from which on it pays
FIRST = 2  # pieces per bin that are placed one by one before, the largest
LAST = 8  # and after, the smallest: they even out what layers leave
LAYER = 16  # 1 / LAYER of the bins get a piece of each layer
STEEP = float(1 << 20)
STEEPEST = float(1 << 32)


def lay(
    time: Floats,
    link: Floats,
    room: Ints,
    host: Ints,
    size: Ints,
    shared: npt.NDArray[np.bool_],
    level: Floats,
    roomy: Floats | None,
    cost: Ints,
    memory: Ints,
    vector: Floats,
) -> Ints | None:
    """The bin of each piece, in the order given; None if some layer finds too few bins with room.

    Args:
        time: [B, S] ps, link: [H, L] ps of a host's bins together, room: [B, M] bytes: all kept up to date.
        host: [B]. size: [H] bins of a host. shared: [S].
        level: [S] ps. roomy: [M] bytes, where memory counts like time.
        cost: [n, S] ps and memory: [n, M] bytes of the pieces. vector: [n, S (+ M)] whole numbers below 2 ** 16, what
            slopes are multiplied with.
    """
    links = np.flatnonzero(shared)
    found = np.empty(len(cost), np.int64)
    length = max(len(time) // LAYER, 1)
    for start in range(0, len(cost), length):
        some = slice(start, start + length)
        y = time / level
        y[:, links] = (link / size[:, None])[host] / level[links]
        if roomy is not None:
            y = np.concatenate([y, 1.0 - room / roomy], 1)
        # Whole numbers below 2 ** 32 and 2 ** 16: exact products and sums.
        score = steep(y) @ np.floor(vector[some].sum(0) / len(vector[some]))
        score[(room < memory[some].max(0)).any(1)] = np.inf
        chosen = np.argsort(score, kind="stable")[: len(cost[some])]
        if score[chosen[-1]] == np.inf:
            return None
        found[some] = chosen
        time[chosen] += cost[some]
        np.add.at(link, host[chosen], cost[some][:, links].astype(np.float64))
        room[chosen] -= memory[some]
    return found


def steep(y: Floats) -> Floats:
    """y ** 7 in whole 1 / STEEP."""
    y2 = y * y
    return np.minimum(np.trunc(y2 * y2 * y2 * y * STEEP), STEEPEST)


def split(order: Ints, pieces: Ints, bins: int) -> tuple[Ints, Ints, Ints]:
    """Tables in their order: those placed one by one first, those laid in layers, those placed one by one after."""
    at = np.arange(len(order))
    laid = (at >= FIRST * bins) & (at < len(order) - LAST * bins) & (pieces[order] == 1)
    first = int(laid.argmax()) if laid.any() else len(order)
    return order[:first], order[laid], order[first:][~laid[first:]]
