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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tilerec.planner.instance import PER_MILLE, Bools, Ints
from tilerec.planner.relaxed import NEVER, Dual, Relaxed, Resource, least

SLICES = 16
BISECTIONS = 9
SMALL = 40_000  # tables × options


@dataclass(frozen=True, eq=False)
class Kinds:
    """A choice of fixed charges to pay, and the options that pay no others.

    Args:
        usable: [T, O]. charge: ps. dual: of the averages under it.
    """

    usable: Bools
    charge: int
    dual: Dual

    def bound(self, relaxed: Relaxed) -> int:
        """ps that no plan of these kinds is below."""
        return _up(self.dual.value + relaxed.base_total, relaxed.instance.ranks) + self.charge


def kinds_of(relaxed: Relaxed) -> list[Kinds]:
    """Every set of charges that leaves each table an option, the one with the least bound first.

    With more than six charges they are not told apart in the bound: one set, nothing charged.
    """
    instance = relaxed.instance
    charges = len(instance.charge)
    found = []
    sets: Iterator[tuple[int, ...]] = iter([tuple(range(charges))])
    if charges <= 6:
        sets = (s for n in range(charges + 1) for s in combinations(range(charges), n))
    for paid in sets:
        refused = [f for f in range(charges) if f not in paid]
        usable = relaxed.usable
        if refused:
            usable = usable & ~instance.uses[:, :, refused].any(2)
        if instance.tables and not usable.any(1).all():
            continue
        charge = int(instance.charge[list(paid)].sum()) if charges <= 6 else 0
        dual = least(np.where(usable, relaxed.totals, NEVER), relaxed.memory)
        if dual.short < 0:
            found.append(Kinds(usable, charge, dual))
    return sorted(found, key=lambda kinds: kinds.bound(relaxed))


def certify(relaxed: Relaxed, kinds: Kinds, upper: int) -> int:
    """ps that no plan of these kinds is below; looks no further than `upper` ps.

    Tables × options beyond SMALL are judged by averages and their largest pieces only: the pieces are small there.
    """
    upper -= kinds.charge
    start = kinds.bound(relaxed) - kinds.charge
    if upper <= start:
        return start + kinds.charge
    small = kinds.usable.size <= SMALL
    views = _views(relaxed, kinds, 5 if small else 0)
    slices = SLICES if small else 1
    top = start
    for step in (8, 256):
        # A view is worth a bisection if it raises the bound at all; asking costs little where it does not.
        for view in views:
            if top < upper and _none_at(
                relaxed, kinds, views, view, min(top + top // step + 1, upper), slices
            ):
                top = _bisect(relaxed, kinds, views, view, top, upper, slices)
    return top + kinds.charge


@dataclass(frozen=True, eq=False)
class _View:
    """Args: piece: [T, O] rank-ps a witness bears at least. floor: [T, O] rank-ps. base: rank-ps. least: of floors."""

    piece: Ints
    floor: Ints
    base: int
    least: int


def _views(relaxed: Relaxed, kinds: Kinds, most: int) -> list[_View]:
    """All stages, and every set of the `most` busiest ones."""
    instance = relaxed.instance
    option = kinds.dual.option
    weight = relaxed.stage_totals[np.arange(len(option)), option].sum(0) + relaxed.base_totals
    order = np.argsort(-weight, kind="stable").tolist()
    busy = [s for s in order if weight[s] * 50 >= weight.sum()][:most]
    sets: list[tuple[int, ...]] = [tuple(range(instance.stages))]
    sets += [tuple(c) for n in range(1, len(busy) + 1) for c in combinations(busy, n)]
    sets = list(dict.fromkeys(tuple(sorted(s)) for s in sets))
    fastest = instance.slow.min(0)
    quick = np.where(kinds.usable, 0, NEVER)
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
        views.append(_View(piece, floor, base, int((floor + quick).min(1, initial=NEVER).sum())))
    return views


def _bisect(
    relaxed: Relaxed, kinds: Kinds, views: Sequence[_View], view: _View, low: int, high: int, slices: int
) -> int:
    """The largest cost, between `low` and `high` ps, that no plan is at or below, as far as this view shows."""
    if _none_at(relaxed, kinds, views, view, high, slices):
        return high
    for _ in range(BISECTIONS):
        middle = (low + high) // 2
        if (high - low) * 1000 <= low or middle == low:
            break
        if _none_at(relaxed, kinds, views, view, middle, slices):
            low = middle
        else:
            high = middle
    return low


def _none_at(
    relaxed: Relaxed, kinds: Kinds, views: Sequence[_View], view: _View, cost: int, slices: int
) -> bool:
    """Proof that no plan costs `cost` ps or less."""
    everything = cost * relaxed.instance.ranks
    small = kinds.usable.copy()
    for other in views:
        small &= other.piece <= everything - other.base - other.least
    if not small.any(1).all():
        return True
    lowest, highest = view.least + view.base, everything
    if lowest > highest:
        return True
    edges = [lowest + (highest - lowest) * i // slices for i in range(slices + 1)]
    prices: Sequence[int] = ()
    # The slices in the middle are the likeliest to hold a plan.
    for i in sorted(range(slices), key=lambda i: abs(2 * i - slices)):
        allowed = small & (view.piece <= everything - edges[i])
        if not allowed.any(1).all():
            continue
        totals = np.where(allowed, relaxed.totals, NEVER)
        resources = [*relaxed.memory]
        if slices > 1:
            resources.append(Resource.of(view.floor, max(edges[i + 1] - view.base, 0)))
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
