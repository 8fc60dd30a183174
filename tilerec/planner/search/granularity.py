"""How fine to cut: options for all tables at once, by price, under a limit on the size of pieces per stage.

Nouns
  limit     of each stage, the largest piece that is allowed
  head      how much room a largest piece needs for packing to come out level: its size times this
  level     of a stage, what packing is expected to reach: the average, or what all ranks bear plus the largest piece
            times the head, if that is more

The cheapest options on average have pieces too large to lie level. Lowering the limit of the stage where that costs
most, again and again, trades averages for evenness; the least sum of levels wins.

Legend: T tables, O options, S stages, M tiers, R ranks.
"""

from __future__ import annotations

import numpy as np

from tilerec.planner.search.bound import Kinds, averages
from tilerec.planner.search.boxes import Choice
from tilerec.planner.search.instance import Bools
from tilerec.planner.search.relaxed import NEVER, Relaxed, Resource, least
from tilerec.planner.search.work import CALLS, Work

STEPS = 24  # limits lowered
STALE = 8  # of these, without a gain
BONUS = 16  # rows that a host's ranks share out fill gaps: they count 1 / BONUS less


def choose(
    relaxed: Relaxed, kinds: Kinds, head: int, thrift: int, slack: int, work: Work, sand: bool = False
) -> Choice | None:
    """Options of the least expected cost.

    Args:
        head: in 1 / 4. thrift: pieces of at most 1 / thrift of a rank's free memory, where a table has any so small.
        sand: prefer rows that a host's ranks share out, unless memory is nearly full.
        slack: 64ths of every tier's memory that options must leave free, where they can.
    """
    instance = relaxed.instance
    rows = np.arange(instance.tables)
    own = relaxed.piece_times
    small = _thrifty(relaxed, kinds.usable, thrift)
    memory = [Resource(r.used, r.limit * (64 - slack) // 64) for r in relaxed.memory]
    best: Choice | None = None
    base = instance.base_cost.min(0)
    totals = relaxed.totals
    # Rows over hosts are hard to fit where memory is short.
    if sand and not relaxed.tight(least(np.where(small, totals, NEVER), memory).option, 3):
        totals = totals - relaxed.sand // BONUS
    stale, stuck = 0, np.zeros(instance.stages, np.bool_)
    for _ in range(STEPS):
        work.spend(4 * CALLS + small.size * (6 + 20 * len(memory)))
        dual = least(np.where(small, totals, NEVER), memory)
        if dual.short >= 0:
            break
        option = dual.option
        # Of a phase, its first stage: the others show where pieces lie, not how fine they are.
        average = averages(relaxed, option) * instance.first
        alone = ~relaxed.everywhere[rows, option]
        largest = np.array([int(x[rows, option][alone].max(initial=0)) for x in own])
        alike = relaxed.least_home[rows, option].sum(0) + instance.cost[rows, option][~alone].sum(0) + base
        level = np.maximum(average, (alike + largest * head // 4) * instance.first)
        charge = int(instance.charge[instance.uses[rows, option].any(0)].sum())
        found = Choice(option, int(average.sum()) + charge, int(level.sum()) + charge)
        if best is None or found.expected < best.expected:
            best, stale = found, 0
        else:
            stale += 1
        if stale == STALE or found.average >= best.expected:
            break
        excess = np.where(stuck, 0, level - average)
        s = int(excess.argmax())
        if excess[s] * 500 <= level.sum():
            break
        limit = min(int(largest[s]) * 7 // 8, int(largest[s]) - 1)
        less = small & ((own[s] <= limit) | relaxed.everywhere)
        left = np.logical_or.reduce(less, 1)
        # Tables that have nothing smaller keep what they have; then this stage's largest piece is one of theirs.
        stuck[s] |= not left.all()
        small = np.where(left[:, None], less, small)
    return best


def _thrifty(relaxed: Relaxed, usable: Bools, thrift: int) -> Bools:
    instance = relaxed.instance
    small = usable.copy()
    if thrift > 1:
        for m in range(instance.tiers):
            room = int(relaxed.room[:, m].max())
            small &= (instance.memory[:, :, m] * thrift <= room) | relaxed.everywhere
    return np.where(small.any(1, keepdims=True), small, usable)
