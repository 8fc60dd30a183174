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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tilerec.planner.search.instance import PER_MILLE, Bools, Ints
from tilerec.planner.search.relaxed import NEVER, PRICE_BITS, Dual, Relaxed, Resource, least

SLICES = 16
FINEST = 40
FAR = 25  # beyond 1 / FAR from what is known to be possible it is worth it
BISECTIONS = 12
SMALL = 40_000  # tables × options
NARROWED = 4  # times that options are taken out and floors made anew


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
    among the best are left at that. With more than eight charges they are not told apart: one set, nothing charged.
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


def sharpen(relaxed: Relaxed, kinds: Kinds) -> Kinds:
    """The same with the best prices of its own, and the options they choose."""
    dual = least(np.where(kinds.usable, relaxed.totals, NEVER), relaxed.memory)
    if dual.short >= 0:
        # No choice of options stays within memory: there is no such plan.
        return Kinds(kinds.usable, kinds.charge, Dual(NEVER, dual.prices, dual.option))
    return Kinds(
        kinds.usable,
        kinds.charge,
        dual if dual.value >= kinds.dual.value else Dual(kinds.dual.value, dual.prices, dual.option),
    )


def certify(relaxed: Relaxed, kinds: Sequence[Kinds], upper: int) -> int:
    """ps that no plan is below, whatever charges it pays; looks no further than `upper` ps.

    Tables × options beyond SMALL are judged by averages and their largest pieces only: the pieces are small there.
    """
    if not kinds:
        return upper
    stages = _stage_views(relaxed, kinds[0])
    worth = upper - upper // FAR
    # After the likeliest set those that pay most: they allow most, and often have the least certificate. Of the others
    # it is then only asked whether theirs is below that.
    for some in [kinds[0], *sorted(kinds[1:], key=lambda some: -some.charge)]:
        if some.bound(relaxed) < upper:
            upper = min(upper, _certify(relaxed, sharpen(relaxed, some), stages, upper, worth))
    return upper


def _certify(relaxed: Relaxed, kinds: Kinds, stages: list[_Stages], upper: int, worth: int) -> int:
    """As `certify`, for one set of charges; a bound below `worth` ps is worth a closer look."""
    upper -= kinds.charge
    top = start = kinds.bound(relaxed) - kinds.charge
    if upper <= start:
        return upper + kinds.charge
    views, costs = _seen(kinds.usable, stages)
    for _ in range(NARROWED):
        # What no plan of cost `upper` or less has is out; floors are then the least of what is left.
        left = kinds.usable & (costs <= upper * relaxed.instance.ranks)
        if not left.any(1).all():
            return upper + kinds.charge
        if np.array_equal(left, kinds.usable):
            break
        kinds = Kinds(left, kinds.charge, kinds.dual)
        views, costs = _seen(left, stages)
    slices = SLICES if kinds.usable.size <= SMALL else 1
    for step in (0, 8, 256):
        # A view is worth a bisection if it raises the bound at all; asking costs little where it does not.
        for view in views:
            goal = min(top + top // step + 1, upper) if step else upper
            if top < upper and _none_at(relaxed, kinds, costs, view, goal, slices):
                top = _bisect(relaxed, kinds, costs, view, goal, upper, slices) if goal < upper else upper
                stages.remove(view.stages)
                stages.insert(0, view.stages)
    poor = slices > 1 and top + kinds.charge < worth
    for view in [view for view in views if poor and view.stages is stages[0]]:
        # The view that told most, once more in thinner slices.
        goal = min(top + top // 1000 + 1, upper)
        if top < upper and _none_at(relaxed, kinds, costs, view, goal, FINEST):
            top = _bisect(relaxed, kinds, costs, view, goal, upper, FINEST) if goal < upper else upper
    return top + kinds.charge


def _seen(usable: Bools, all_stages: list[_Stages]) -> tuple[list[_View], Ints]:
    """The views, where these options are left; and [T, O] rank-ps that a plan with an option costs at least.

    That is by whichever view says most.
    """
    barred = np.where(usable, 0, NEVER)
    views, costs = [], np.zeros_like(barred)
    for stages in all_stages:
        floor = stages.floor + barred
        own = floor.min(1, initial=NEVER)
        least_floor = int(own.sum())
        # Of its own table the option's floor counts, of the others the least one.
        np.maximum(costs, stages.piece + floor + (stages.base + least_floor - own[:, None]), out=costs)
        views.append(_View(stages, least_floor))
    return views, costs


@dataclass(frozen=True, eq=False)
class _Stages:
    """A view. Args: piece: [T, O] rank-ps a witness bears at least. floor: [T, O] rank-ps. base: rank-ps."""

    piece: Ints
    floor: Ints
    base: int


@dataclass(frozen=True, eq=False)
class _View:
    """A view under a set of charges. Args: stages: the view. least: rank-ps, of floors, without the base."""

    stages: _Stages
    least: int


def _stage_views(relaxed: Relaxed, kinds: Kinds) -> list[_Stages]:
    """All stages, and every set of the five busiest ones."""
    instance = relaxed.instance
    most = 5 if kinds.usable.size <= SMALL else 0
    option = kinds.dual.option
    weight = relaxed.stage_totals[np.arange(len(option)), option].sum(0) + relaxed.base_totals
    order = np.argsort(-weight, kind="stable").tolist()
    busy = [s for s in order if weight[s] * 50 >= weight.sum()][:most]
    sets: list[tuple[int, ...]] = [tuple(range(instance.stages))]
    sets += [tuple(c) for n in range(1, len(busy) + 1) for c in combinations(busy, n)]
    sets = list(dict.fromkeys(tuple(sorted(s)) for s in sets))
    fastest = instance.slow.min(0)
    views = []
    for chosen in sets:
        inside = np.zeros(instance.stages, np.bool_)
        inside[list(chosen)] = True
        piece, floor = np.zeros_like(instance.width), np.zeros_like(instance.width)
        base = 0
        for s in range(instance.stages):
            if inside[s]:
                own = relaxed.piece_times[s]
                home = instance.home[:, :, s] * fastest[s] // PER_MILLE
                piece += own
                floor += home * instance.ranks + np.where(relaxed.uniform, own * instance.ranks, 0)
                base += int(instance.base_cost[:, s].min()) * instance.ranks
            else:
                floor += relaxed.stage_totals[:, :, s]
                base += int(relaxed.base_totals[s])
        piece = np.where(relaxed.uniform, 0, piece * instance.ranks)
        views.append(_Stages(piece, floor, base))
    return views


def _bisect(
    relaxed: Relaxed, kinds: Kinds, costs: Ints, view: _View, low: int, high: int, slices: int
) -> int:
    """The largest cost, between `low` and `high` ps, that no plan is at or below, as far as this view shows."""
    if _none_at(relaxed, kinds, costs, view, high, slices):
        return high
    for _ in range(BISECTIONS):
        middle = (low + high) // 2
        if (high - low) * 2000 <= low or middle == low:
            break
        if _none_at(relaxed, kinds, costs, view, middle, slices):
            low = middle
        else:
            high = middle
    return low


def _none_at(relaxed: Relaxed, kinds: Kinds, costs: Ints, view: _View, cost: int, slices: int) -> bool:
    """Proof that no plan costs `cost` ps or less."""
    everything = cost * relaxed.instance.ranks
    small = kinds.usable & (costs <= everything)
    if not small.any(1).all():
        return True
    lowest, highest = view.least + view.stages.base, everything
    if lowest > highest:
        return True
    edges = [lowest + (highest - lowest) * i // slices for i in range(slices + 1)]
    prices: Sequence[int] = ()
    # The slices in the middle are the likeliest to hold a plan.
    for i in sorted(range(slices), key=lambda i: abs(2 * i - slices)):
        allowed = small & (view.stages.piece <= everything - edges[i])
        if not allowed.any(1).all():
            continue
        totals = np.where(allowed, relaxed.totals, NEVER)
        resources = [*relaxed.memory]
        if slices > 1:
            resources.append(Resource.of(view.stages.floor, max(edges[i + 1] - view.stages.base, 0)))
        dual = least(totals, resources, prices)
        if dual.short < 0 and dual.value + relaxed.base_total <= everything:
            return False
        prices = dual.prices
    return True


def _up(rank_ps: int, ranks: int) -> int:
    return -(-rank_ps // ranks)


def averages(relaxed: Relaxed, option: Ints) -> Ints:
    """[S] ps that each stage takes when these options' work is spread evenly."""
    rows = np.arange(len(option))
    return (relaxed.stage_totals[rows, option].sum(0) + relaxed.base_totals) // relaxed.instance.ranks
