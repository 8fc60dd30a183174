"""Uneven row splits: more rows where a rank bears less, so that what pieces left uneven comes out level.

One divisible table after the other is taken off its ranks and poured back like water: up to a common height over the
average of each stage, no rank beyond its memory. A pour that does not lower the objective is taken back.

Legend: S stages, M tiers, R ranks, P parts of a table (the ranks its shares lie on).
"""

from __future__ import annotations

import numpy as np

from tilerec.planner.instance import SHARE, Instance, Ints, Solution, evaluate, fits, parts_of, portion

HEIGHT_BITS = 12  # heights are in 1 / 4096 of a stage's average


def level(instance: Instance, found: Solution, tables: int) -> Solution:
    """`found` or a better one whose divisible tables are split unevenly; looks at the `tables` largest ones."""
    every = np.arange(instance.tables)
    movable = np.flatnonzero(instance.divisible[every, found.option])
    if not len(movable) or instance.ranks == 1:
        return found
    width = instance.width[every, found.option]
    work = (instance.cost[every, found.option].sum(1) * width)[movable]
    for t in movable[np.argsort(-work, kind="stable")][:tables].tolist():
        where = parts_of(instance, t, int(found.option[t]), found.places[t])
        if len(np.unique(where)) < len(where) or len(where) < 2:
            continue
        shares = _pour(instance, found, t, where)
        if shares is None:
            continue
        new = evaluate(instance, found.option, found.places, {**found.rows, t: shares}, found.bound)
        if new.cost < found.cost and fits(instance, new.memory):
            found = new
    return found


def _pour(instance: Instance, found: Solution, t: int, where: Ints) -> Ints | None:
    """[P] shares that fill up the ranks `where`; None if their memory does not hold the table."""
    o = int(found.option[t])
    parts = len(where)
    was = found.rows.get(t)
    whole, bytes_ = instance.cost[t, o] * parts, instance.memory[t, o] * parts
    shares = np.full(parts, SHARE // parts) if was is None else was
    load = found.load[where] - portion(whole, shares) * instance.slow[where] // 1000
    memory = found.memory[where] - portion(bytes_, shares)
    # Other ranks' loads are heights that cost nothing to reach.
    others = np.ones(instance.ranks, np.bool_)
    others[where] = False
    free = found.load[others].max(0, initial=0)
    room = np.full(parts, SHARE)
    for m in np.flatnonzero(bytes_).tolist():
        room = np.minimum(
            room, ((instance.cap[where, m] - memory[:, m]) * (SHARE >> 8) // int(bytes_[m])) << 8
        )
    room = np.maximum(room, 0)
    if int(room.sum()) < SHARE:
        return None
    stages = np.flatnonzero(whole)
    per = np.maximum(whole * instance.slow[where] // 1000, 1)
    mean = load.sum(0) // parts + whole // parts

    def filled(height: int) -> Ints:
        got = room
        for s in stages.tolist():
            top = max(int(mean[s]) + (int(mean[s]) * height >> HEIGHT_BITS), int(free[s]))
            # (top - load) / per, in 1 / SHARE, without leaving int64.
            space = np.clip(top - load[:, s], 0, per[:, s])
            got = np.minimum(got, (space << 12) // per[:, s] << 8)
        return got

    low, high = -(1 << HEIGHT_BITS), 1 << (HEIGHT_BITS + 8)
    if int(filled(high).sum()) < SHARE:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if int(filled(middle).sum()) >= SHARE:
            high = middle
        else:
            low = middle
    shares = filled(high)
    # What is too much, off the fullest shares, evenly.
    over = int(shares.sum()) - SHARE
    order = np.argsort(-shares, kind="stable")
    for i in order.tolist():
        less = min(-(-over * int(shares[i]) // max(int(shares.sum()), 1)), over, int(shares[i]))
        shares[i] -= less
        over -= less
    while over > 0:
        i = int(shares.argmax())
        less = min(over, int(shares[i]))
        shares[i] -= less
        over -= less
    return shares
