"""Homes that send each distinct id of a feature once, by the runtime's rule (sharding/distinct_ids.py).

Each home decides for itself, by the share of the table's cells that other ranks look up for it. Most homes of a feature
decide alike; the others are listed. The owner of a whole table is one of them: nothing of it travels there.

Legend: F features, K parts of a layout, R ranks, X lookups of unusual homes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilerec.planner.cost.model import Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.workload import Bools, Ints
from tilerec.sharding.layout import SharedLayout, reader


class Unusual(NamedTuple):
    """Lookups of homes that decide otherwise than most homes of the feature, [X] each.

    Args:
        part, home: whose ids, and of which part. owner: the rank that looks up. entry: number of (part, owner).
    """

    part: Ints
    home: Ints
    owner: Ints
    entry: Ints


def sent_once(
    model: Model, layout: SharedLayout, e_part: Ints, e_owner: Ints, slot: Ints, cells: Floats
) -> tuple[Bools, Unusual]:
    """Return [F] True for features whose distinct ids most homes send once each, and the lookups of the others.

    Args:
        e_part, e_owner: part and owner of each entry, in the order of parts. slot, cells: [K] of the parts.
    """
    work, ranks = model.workload, model.ranks
    features = len(work.bags)
    none = np.zeros(0, np.int64)
    usual, nothing = np.zeros(features, np.bool_), Unusual(none, none, none, none)
    if layout.alone or ranks == 1 or not model.may_send_once.any():
        return usual, nothing
    # Owners read their own part; ranks without one read everything from others.
    keys, which = np.unique(slot[e_part] * ranks + e_owner, return_inverse=True)
    own = np.bincount(which.reshape(-1), cells[e_part], len(keys))
    feature, rank = keys // ranks, keys % ranks
    whole = np.bincount(slot, cells, features)
    once = model.sent_once(feature, (whole[feature] - own) / whole[feature])
    others = model.sent_once(np.arange(features), 1.0)
    owners = np.bincount(feature, minlength=features)
    for_once = np.bincount(feature, once, features) + (ranks - owners) * others
    usual = for_once * 2.0 > ranks
    homes = [
        (int(f), int(r)) for f, r in zip(feature[once != usual[feature]], rank[once != usual[feature]], strict=True)
    ]
    for f in np.flatnonzero((others != usual) & (owners < ranks)).tolist():
        homes += [(f, r) for r in sorted(set(range(ranks)).difference(rank[feature == f].tolist()))]
    return usual, _lookups(layout, homes, slot, e_part, e_owner) if homes else nothing


def _lookups(
    layout: SharedLayout, homes: list[tuple[int, int]], slot: Ints, e_part: Ints, e_owner: Ints
) -> Unusual:  # fmt: skip
    """Return the lookups of (feature, home)."""
    first = np.searchsorted(slot, np.arange(len(layout.slots) + 1)).tolist()  # parts are in the order of slots
    entry = np.searchsorted(e_part, np.arange(len(slot) + 1)).tolist()
    found = []
    for f, home in homes:
        for p in range(first[f], first[f + 1]):
            owner = reader(layout.parts[p].owners, home, layout.topology)
            found.append((p, home, owner, entry[p] + int(np.flatnonzero(e_owner[entry[p] : entry[p + 1]] == owner)[0])))
    return Unusual(*np.array(found, np.int64).reshape(-1, 4).T)
