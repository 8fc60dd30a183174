"""Choice of options for all tables at once: how finely each table is cut, before any piece has a place.

The options with the least average cost have few large pieces, which cannot be spread evenly. Finer options cost more on
average, in ids and messages. This pass finds a compromise.

    Input    the options that each table may use
    Changes  a limit on the size of a piece for each stage, downwards only
    Keeps    each step's options are the cheapest ones under the limits, within all memory
    Stops    after MOST_LIMITS steps, STALE_STEPS of them without a gain, or when a finer cut cannot help
    Cost     one minimum over [T, O] per step (`least`)

Nouns
  limit  of a stage: the longest piece in ps that is allowed
  head   room in quarters of a piece: packing needs it to place the largest piece of a stage
  level  of a stage: the load that packing is expected to reach. It is the average over ranks, or the load that all
         ranks have in common plus the largest piece times the head, whichever is more

The options with the least sum of levels are the result.

Legend: T tables, O options, S stages, M tiers, R ranks.
"""

from __future__ import annotations

import numpy as np

from tilerec.planner.search.bound import Kinds, averages
from tilerec.planner.search.boxes import Choice
from tilerec.planner.search.instance import Bools
from tilerec.planner.search.relaxed import NEVER, Relaxed, Resource, least
from tilerec.planner.search.work import CALLS, Work

MOST_LIMITS = 24  # limits lowered in one call
STALE_STEPS = 8  # consecutive limits lowered without a gain, before the call ends
DIVISIBLE_BONUS = 16  # rows that can move inside a host cost 1 / DIVISIBLE_BONUS less, as they fill gaps


def choose(
    relaxed: Relaxed,
    kinds: Kinds,
    head: int,
    thrift: int,
    slack: int,
    work: Work,
    prefer_divisible: bool = False,
) -> Choice | None:
    """Return the options with the least sum of levels; None if no options fit into memory.

    Args:
        kinds: options that may be used.
        head: room for the largest piece of a stage, in quarters of the piece.
        thrift: a piece takes at most 1 / thrift of a rank's free memory, if the table has such an option.
        slack: 64ths of each memory tier that the options leave free, if possible.
        prefer_divisible: prefer rows that can move between the ranks of a host, unless memory is nearly full.
    """
    instance = relaxed.instance
    rows = np.arange(instance.tables)
    own = relaxed.piece_times
    small = _thrifty(relaxed, kinds.usable, thrift)
    memory = [Resource(r.used, r.limit * (64 - slack) // 64) for r in relaxed.memory]
    best: Choice | None = None
    base = instance.base_cost.min(0)
    totals = relaxed.totals
    # Pieces on whole hosts are hard to place if memory is short.
    if prefer_divisible and not relaxed.is_tight(least(np.where(small, totals, NEVER), memory).option, 3):
        totals = totals - relaxed.divisible_totals // DIVISIBLE_BONUS
    stale, stuck = 0, np.zeros(instance.stages, np.bool_)
    for _ in range(MOST_LIMITS):
        work.spend(4 * CALLS + small.size * (6 + 20 * len(memory)))
        dual = least(np.where(small, totals, NEVER), memory)
        if dual.short >= 0:
            break
        option = dual.option
        # Only the first stage of a phase counts: the others depend on places, not on how fine pieces are.
        average = averages(relaxed, option) * instance.first
        alone = ~relaxed.everywhere[rows, option]
        largest = np.array([int(x[rows, option][alone].max(initial=0)) for x in own])
        alike = relaxed.least_home[rows, option].sum(0) + instance.cost[rows, option][~alone].sum(0) + base
        level = np.maximum(average, (alike + largest * head // 4) * instance.first)
        charge = instance.charge_of(option)
        found = Choice(option, int(average.sum()) + charge, int(level.sum()) + charge)
        if best is None or found.expected < best.expected:
            best, stale = found, 0
        else:
            stale += 1
        if stale == STALE_STEPS or found.average >= best.expected:
            break
        excess = np.where(stuck, 0, level - average)
        s = int(excess.argmax())
        if excess[s] * 500 <= level.sum():
            break
        limit = min(int(largest[s]) * 7 // 8, int(largest[s]) - 1)
        less = small & ((own[s] <= limit) | relaxed.everywhere)
        left = np.logical_or.reduce(less, 1)
        # Tables without a finer option keep theirs, and the stage's largest piece is then one of them: it is stuck.
        stuck[s] |= not left.all()
        small = np.where(left[:, None], less, small)
    return best


def _thrifty(relaxed: Relaxed, usable: Bools, thrift: int) -> Bools:
    """Return [T, O] options whose pieces take at most 1 / thrift of the free memory; all of a table that has none."""
    instance = relaxed.instance
    small = usable.copy()
    if thrift > 1:
        for m in range(instance.tiers):
            room = int(relaxed.room[:, m].max())
            small &= (instance.memory[:, :, m] * thrift <= room) | relaxed.everywhere
    return np.where(small.any(1, keepdims=True), small, usable)
