"""Lower bounds on the cost, one for each set of fixed charges. docs/planner-bound.md has the proof.

    Input    the totals of all options (relaxed.py) and the fixed charges F
    Result   for each of the 2 ** F sets: the options that pay no other charge, and a bound
    Cost     one minimum over [T, O], plus one over the options' marks for each set

A set is a choice of charges to pay. Under it, each table uses its cheapest option that pays no other charge, at a price
for memory. The bound is the sum of these options' totals over all ranks, divided by R, plus the charges of the set.

Legend: T tables, O options, S stages, R ranks. rank-ps: ps times R.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilerec.planner.search.instance import Bools, Ints
from tilerec.planner.search.relaxed import NEVER, Dual, Relaxed, least, price_of_limits, with_prices


@dataclass(frozen=True, eq=False)
class Kinds:
    """A set of fixed charges to pay, and the options that pay no others.

    Args:
        usable: [T, O]. charge: ps of the set.
        dual: bound on the sum of totals under the set. Its options may be those of another set.
    """

    usable: Bools
    charge: int
    dual: Dual

    def bound(self, relaxed: Relaxed) -> int:
        """Return a lower bound in ps on every plan that pays these charges or fewer."""
        return _up(self.dual.value + relaxed.base_total, relaxed.instance.ranks) + self.charge


def kinds_of(relaxed: Relaxed) -> list[Kinds]:
    """Return every set of charges that leaves each table an option, the one with the least bound first.

    All sets use the memory prices that are best if all charges are paid: any prices give a valid bound. More than eight
    charges count as one set without a charge.
    """
    instance = relaxed.instance
    charges = len(instance.charge)
    everything = least(np.where(relaxed.usable, relaxed.totals, NEVER), relaxed.memory)
    if everything.short >= 0:
        return []
    if not 0 < charges <= 8:
        return [Kinds(relaxed.usable, 0, everything)]
    priced = with_prices(relaxed.totals, relaxed.memory, everything.prices)
    priced = np.where(relaxed.usable, priced, NEVER)
    marks = (instance.uses * (1 << np.arange(charges))).sum(2)
    # The mark of an option is the set of its charges. For each table, the cheapest option of every mark that occurs.
    seen = np.unique(marks[relaxed.usable]) if instance.tables else np.zeros(0, np.int64)
    cheapest = (
        np.stack([np.where(marks == mark, priced, NEVER).min(1) for mark in seen.tolist()], 1) if len(seen) else None
    )
    gone = price_of_limits(relaxed.memory, everything.prices)
    rough = []
    for paid in range(1 << charges):
        value = 0
        if cheapest is not None:
            inside = (seen & ~paid) == 0
            if not inside.any():
                continue
            best = cheapest[:, inside].min(1)
            if (best >= NEVER).any():
                continue
            value = int(best.sum()) - gone
        charge = sum(int(c) for f, c in enumerate(instance.charge) if paid >> f & 1)
        rough.append((_up(value, relaxed.instance.ranks) + charge, paid, charge, value))
    rough.sort()
    found = []
    for _, paid, charge, value in rough:
        usable = relaxed.usable & ((marks & ~paid) == 0)
        found.append(Kinds(usable, charge, Dual(value, everything.prices, everything.option)))
    return found


def _up(rank_ps: int, ranks: int) -> int:
    return -(-rank_ps // ranks)


def averages(relaxed: Relaxed, option: Ints) -> Ints:
    """Return [S] ps of each stage if the work of these options were spread evenly over all ranks."""
    rows = np.arange(len(option))
    return (relaxed.stage_totals[rows, option].sum(0) + relaxed.base_totals) // relaxed.instance.ranks
