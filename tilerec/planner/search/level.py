"""Uneven row splits: more rows where a rank bears less, so that what pieces left uneven comes out level.

One divisible table after the other is taken off its ranks and poured back like water: up to a common height over the
average of each stage, no rank beyond its memory. A pour that does not lower the objective is taken back.

Legend: S stages, M tiers, R ranks, P parts of a table (the ranks its shares lie on).
"""

from __future__ import annotations

import numpy as np

from tilerec.planner.search.instance import (
    SHARE,
    Instance,
    Ints,
    Solution,
    evaluate,
    fits,
    loads,
    parts_of,
    portion,
    work_of,
)
from tilerec.planner.search.work import CALLS, Work

HEIGHT_BITS = 12  # heights are in 1 / 4096 of a stage's average


def level(instance: Instance, found: Solution, tables: int, work: Work) -> Solution:
    """`found` or a better one whose divisible tables are split unevenly; looks at the `tables` largest ones."""
    every = np.arange(instance.tables)
    movable = np.flatnonzero(instance.divisible[every, found.option])
    if not len(movable) or instance.ranks == 1:
        return found
    width = instance.width[every, found.option]
    size = (instance.cost[every, found.option].sum(1) * width)[movable]
    rows = dict(found.rows)
    done, memory = work_of(instance, found.option, found.places, rows)
    load = loads(instance, done)
    best = int(load.max(0).sum())
    for t in movable[np.argsort(-size, kind="stable")][:tables].tolist():
        o = int(found.option[t])
        where = parts_of(instance, t, o, found.places[t])
        parts = len(where)
        if parts < 2 or len(np.unique(where)) < parts:
            continue
        if not work.spend(20 * CALLS + instance.ranks * instance.stages * 250):
            break
        # What each part takes whatever its rows stays where it is.
        moving = instance.cost[t, o] - instance.fixed[t, o]
        whole, bytes_ = moving * parts, instance.memory[t, o] * parts
        if t in rows:
            own, held = portion(whole, rows[t]), portion(bytes_, rows[t])
        else:
            own, held = np.tile(moving, (parts, 1)), np.tile(instance.memory[t, o], (parts, 1))
        done[where] -= own
        memory[where] -= held
        shares = _pour(instance, loads(instance, done), memory, where, whole, bytes_)
        if shares is not None:
            new, new_held = portion(whole, shares), portion(bytes_, shares)
            done[where] += new
            memory[where] += new_held
            cost = int(loads(instance, done).max(0).sum())
            if cost < best and fits(instance, memory):
                rows[t], best = shares, cost
                continue
            done[where] -= new
            memory[where] -= new_held
        done[where] += own
        memory[where] += held
    if len(rows) == len(found.rows) and all(rows[t] is found.rows.get(t) for t in rows):
        return found
    return evaluate(instance, found.option, found.places, rows, found.bound)


def _pour(
    instance: Instance, all_load: Ints, all_memory: Ints, where: Ints, whole: Ints, bytes_: Ints
) -> Ints | None:
    """[P] shares that fill up the ranks `where`; None if their memory does not hold the table.

    Args:
        all_load, all_memory: [R, S] ps and [R, M] bytes without the table. whole, bytes_: [S] and [M] of all of it.
    """
    parts = len(where)
    load, memory = all_load[where], all_memory[where]
    # Other ranks' loads are heights that cost nothing to reach.
    others = np.ones(instance.ranks, np.bool_)
    others[where] = False
    free = all_load[others].max(0, initial=0)
    room = np.full(parts, SHARE)
    for m in np.flatnonzero(bytes_).tolist():
        left = np.clip(instance.cap[where, m] - memory[:, m], 0, int(bytes_[m]))
        room = np.minimum(room, (left * (SHARE >> 12) // int(bytes_[m])) << 12)
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
