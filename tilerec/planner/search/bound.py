"""The certificate: a number that no plan's cost is below. docs/planner-bound.md has the proof.

Nouns
  witness   a rank that holds some piece: it bears the piece on top of what every rank bears
  view      a set of stages. The cost of a plan is at least: over the stages of the view the witness's load, over the
            others the average. Each view gives a bound; all stages together are the plain case
  floor     rank-ps: in a view, what a plan makes every rank bear, plus the averages of the other stages
  slice     an interval of floors. A plan's floor lies in one: with a high floor only small pieces are left, and a low
            floor leaves few options that spread over all ranks

Legend: T tables, O options, S stages, R ranks. rank-ps: ps times R.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilerec.planner.search.instance import Bools, Ints
from tilerec.planner.search.relaxed import NEVER, PRICE_BITS, Dual, Relaxed, least


@dataclass(frozen=True, eq=False)
class Kinds:
    """A choice of fixed charges to pay, and the options that pay no others.

    Args:
        usable: [T, O]. charge: ps. dual: of the averages under it; its options may be those of another set.
    """

    usable: Bools
    charge: int
    dual: Dual

    def bound(self, relaxed: Relaxed) -> int:
        """ps that no plan of these kinds is below."""
        return _up(self.dual.value + relaxed.base_total, relaxed.instance.ranks) + self.charge


def kinds_of(relaxed: Relaxed) -> list[Kinds]:
    """Every set of charges that leaves each table an option, the one with the least bound first.

    The prices that are best with all charges paid bound every set, with one pass over the tables; sets that cannot be
    among the best are left at that. More than eight charges count as one set, and nothing is charged.
    """
    instance = relaxed.instance
    charges = len(instance.charge)
    everything = least(np.where(relaxed.usable, relaxed.totals, NEVER), relaxed.memory)
    if everything.short >= 0:
        return []
    if not 0 < charges <= 8:
        return [Kinds(relaxed.usable, 0, everything)]
    priced = relaxed.totals
    for resource, price in zip(relaxed.memory, everything.prices, strict=True):
        priced = priced + (price * resource.used >> PRICE_BITS) if price else priced
    priced = np.where(relaxed.usable, priced, NEVER)
    marks = (instance.uses * (1 << np.arange(charges))).sum(2)
    # Of each table, the cheapest option of every mark that occurs: a set allows the marks within it.
    seen = np.unique(marks[relaxed.usable]) if instance.tables else np.zeros(0, np.int64)
    cheapest = (
        np.stack([np.where(marks == mark, priced, NEVER).min(1) for mark in seen.tolist()], 1)
        if len(seen)
        else None
    )
    gone = sum(
        (p * r.limit >> PRICE_BITS) + 1 for r, p in zip(relaxed.memory, everything.prices, strict=True) if p
    )
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
    """[S] ps that each stage takes when these options' work is spread evenly."""
    rows = np.arange(len(option))
    return (relaxed.stage_totals[rows, option].sum(0) + relaxed.base_totals) // relaxed.instance.ranks
