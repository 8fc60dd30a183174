"""A walk by price: the plan of few tables, improved one table at a time by its price.

The search minimizes an estimate. Where hosts are few or uneven, the price of a plan can be 30 % above its estimate, and
another plan can be cheaper. For few tables, the walk prices every way of one table while the others stay, and keeps the
best; then it continues with the next table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tilerec.planner.plan_price import PlanPrice
from tilerec.planner.search.exact import ways_of
from tilerec.planner.search.instance import Instance, Solution, evaluate, fits
from tilerec.planner.search.relaxed import Relaxed

MOST_PIECES = 64  # tables x ranks above which there is no walk
MOST_WAYS = 40  # a table with more ways stays as it is
MOST_PRICED_TABLES = 3200  # tables of all plans priced in one walk: about half a second


def walk_downhill(
    instance: Instance, solution: Solution, priced: PlanPrice, price: Callable[[Solution], PlanPrice]
) -> tuple[Solution, PlanPrice]:
    """Return the solution at the end of the walk, and its price; the given ones if no step lowers the price.

    Args:
        priced: of `solution`.
        price: returns the price of the plan of a solution.
    """
    if instance.tables * instance.ranks > MOST_PIECES:
        return solution, priced
    left = MOST_PRICED_TABLES // instance.tables
    every = np.arange(instance.tables)
    work = instance.cost[every, solution.option].sum(1) + instance.home[every, solution.option].sum(1)
    relaxed = Relaxed(instance)
    for t in np.argsort(-work, kind="stable").tolist():
        for neighbor in _neighbors(relaxed, solution, t):
            if not left:
                return solution, priced
            left -= 1
            found = price(neighbor)
            if not found.over.any() and found.cost_ps < priced.cost_ps:
                solution, priced = neighbor, found
    return solution, priced


def _neighbors(relaxed: Relaxed, solution: Solution, t: int) -> Iterator[Solution]:
    """Yield the solutions within the caps that differ from this one in table `t` alone."""
    instance, ways = relaxed.instance, ways_of(relaxed, t, MOST_WAYS)
    if ways is None:
        return
    rows = {i: shares for i, shares in solution.rows.items() if i != t}
    for o, places in zip(ways.option.tolist(), ways.places, strict=True):
        if (int(solution.option[t]), solution.places[t]) == (o, places):
            continue
        option, placed = solution.option.copy(), list(solution.places)
        option[t], placed[t] = o, places
        found = evaluate(instance, option, placed, rows, solution.bound)
        if fits(instance, found.memory):
            yield found
