"""Placement of many small pieces in layers: each of the least loaded ranks receives one piece per layer.

`pack` places pieces one by one, each onto the best bin: T x B steps, too slow for 10,000 tables on 1,024 ranks. A layer
places B / BINS_PER_LAYER pieces at once.

    Input    pieces in descending order of size, and bins with their loads and rooms
    Changes  the loads and rooms of the bins
    Keeps    no bin exceeds its room; a bin receives at most one piece per layer
    Stops    when all pieces are placed, or when a layer finds too few bins with room
    Cost     T x BINS_PER_LAYER evaluations of one bin, plus one sort of the bins per layer

The largest and the smallest pieces are placed one by one: the first determine the loads, the last even them out.

Legend: S stages, M memory tiers, H hosts, B bins (ranks), L shared stages, n pieces.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilerec.planner.search.bins import Bins
from tilerec.planner.search.instance import Ints

Floats = npt.NDArray[np.float64]

LAYERS_FROM_BINS = 1024  # least number of bins for which layers are used
SINGLE_FIRST_PER_BIN = 2  # largest pieces per bin that are placed one by one before the layers
SINGLE_LAST_PER_BIN = 8  # smallest pieces per bin that are placed one by one after the layers
BINS_PER_LAYER = 16  # one of BINS_PER_LAYER bins receives a piece in each layer
STEEP = float(1 << 20)  # slopes are whole multiples of 1 / STEEP
STEEPEST = float(1 << 32)  # largest slope, in 1 / STEEP


def place_layers(
    bins: Bins,
    time: Floats,
    link: Floats,
    level: Floats,
    roomy: Floats | None,
    cost: Ints,
    memory: Ints,
    vector: Floats,
) -> Ints | None:
    """Return the bin of each piece, in the order given; None if a layer finds too few bins with room.

    Args:
        bins: `room` is updated.
        time: [B, S] ps of each bin; updated. link: [H, L] ps of a host's bins together; updated.
        level: [S] ps of a stage if everything were spread evenly.
        roomy: [M] bytes of the bin with most room, if memory counts like time; else None.
        cost: [n, S] ps and memory: [n, M] bytes of the pieces.
        vector: [n, S (+ M)] weights of the slopes for each piece, whole numbers below 2 ** 16.
    """
    links = np.flatnonzero(bins.shared)
    room, host = bins.room, bins.host
    found = np.empty(len(cost), np.int64)
    length = max(len(time) // BINS_PER_LAYER, 1)
    for start in range(0, len(cost), length):
        some = slice(start, start + length)
        y = time / level
        y[:, links] = (link / bins.size[:, None])[host] / level[links]
        if roomy is not None:
            y = np.concatenate([y, 1.0 - room / roomy], 1)
        # Whole numbers below 2 ** 32 and 2 ** 16: products and sums are exact.
        score = slopes_of(y) @ np.floor(vector[some].sum(0) / len(vector[some]))
        score[(room < memory[some].max(0)).any(1)] = np.inf
        chosen = np.argsort(score, kind="stable")[: len(cost[some])]
        if score[chosen[-1]] == np.inf:
            return None
        found[some] = chosen
        time[chosen] += cost[some]
        np.add.at(link, host[chosen], cost[some][:, links].astype(np.float64))
        room[chosen] -= memory[some]
    return found


def slopes_of(y: Floats) -> Floats:
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
