"""Lower bounds on the cost, one for each set of fixed charges. docs/planner-bound.md has the proof.

    Input    the totals of all options (relaxed.py) and the fixed charges
    Result   for each set of charges that a plan can pay: the options that pay no other charge, and a bound
    Cost     one minimum over [T, O] for each mark, plus one over the marks for each set

A mark is the set of an option's charges; a set is a union of marks. Under a set, each table uses its cheapest option
that pays no other charge, at a price for memory. The bound is the sum of these options' totals over all ranks, divided
by R, plus the charges of the set.

Legend: T tables, O options, S stages, R ranks. rank-ps: ps times R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilerec.planner.search.instance import Bools, Ints
from tilerec.planner.search.relaxed import NEVER, Dual, Relaxed, least, price_of_limits, with_prices

MOST_SETS = 256  # sets of charges, each bounded by itself; of more, one set without a charge is the bound


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

    All sets use the memory prices that are best if all charges are paid: any prices give a valid bound. More than
    MOST_SETS sets count as one set without a charge.
    """
    instance = relaxed.instance
    everything = least(np.where(relaxed.usable, relaxed.totals, NEVER), relaxed.memory)
    if everything.short >= 0:
        return []
    marks = instance.uses @ (1 << np.arange(len(instance.charge)))
    seen = np.flatnonzero(np.bincount(marks[relaxed.usable]))
    sets = _unions(seen.tolist())
    if not instance.charge.any() or not 0 < len(sets) <= MOST_SETS:
        return [Kinds(relaxed.usable, 0, everything)]
    priced = with_prices(relaxed.totals, relaxed.memory, everything.prices)
    priced = np.where(relaxed.usable, priced, NEVER)
    # For each mark, the cheapest option of every table.
    cheapest = np.stack([np.where(marks == mark, priced, NEVER).min(1) for mark in seen.tolist()])
    gone = price_of_limits(relaxed.memory, everything.prices)
    rough = []
    for paid in sets:
        best = cheapest[(seen & ~paid) == 0].min(0)
        if (best >= NEVER).any():
            continue
        value = int(best.sum()) - gone
        charge = sum(int(c) for f, c in enumerate(instance.charge) if paid >> f & 1)
        rough.append((_up(value, instance.ranks) + charge, paid, charge, value))
    rough.sort()
    found = []
    for _, paid, charge, value in rough:
        usable = relaxed.usable & ((marks & ~paid) == 0)
        found.append(Kinds(usable, charge, Dual(value, everything.prices, everything.option)))
    return found


def _unions(marks: Sequence[int]) -> list[int]:
    """Return all unions of some marks, ascending; at least MOST_SETS + 1 of them if there are more than MOST_SETS."""
    found = set(marks)
    for mark in marks:
        found |= {mark | other for other in found}
        if len(found) > MOST_SETS:
            break
    return sorted(found)


def _up(rank_ps: int, ranks: int) -> int:
    return -(-rank_ps // ranks)


def averages(relaxed: Relaxed, option: Ints) -> Ints:
    """Return [S] ps of each stage if the work of these options were spread evenly over all ranks."""
    rows = np.arange(len(option))
    return (relaxed.stage_totals[rows, option].sum(0) + relaxed.base_totals) // relaxed.instance.ranks
