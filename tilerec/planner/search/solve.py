"""`solve`: a plan for an instance, with a bound on how far it is from the best.

    1  what cannot be: a proof by memory alone (relaxed.py)
    2  which fixed charges to pay: every set of them, the most promising first (bound.py)
    3  how fine to cut: options for all tables at once (granularity.py)
    4  where pieces go: the largest first (pack.py), exchanged between pairs of ranks (improve.py)
    5  few tables: some taken out and put back (rebuild.py); very few: every arrangement (exact.py)
    6  rows that may be uneven: levelled (level.py)
    7  the certificate (bound.py)

Budgets are counted in steps, never in seconds, and tables are taken in the order of their names: the same instance
gives the same plan on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from tilerec.planner.search.bound import Kinds, averages, certify, kinds_of, sharpen
from tilerec.planner.search.exact import enumerate_all
from tilerec.planner.search.flow import flow
from tilerec.planner.search.granularity import choose
from tilerec.planner.search.improve import exchange, repair
from tilerec.planner.search.instance import Instance, Ints, Proof, Solution, Status, evaluate, fits
from tilerec.planner.search.level import level
from tilerec.planner.search.pack import Packing, Rule, pack
from tilerec.planner.search.poured import poured
from tilerec.planner.search.rebuild import rebuild
from tilerec.planner.search.relaxed import Relaxed

HEADS = (5, 4, 6, 8, 12, 16, 24, 48, 200)  # room for a largest piece, in quarters of it
FEW_HEADS = (5, 4, 3)  # where pieces are many
# How pieces are made to fit where they do not: smaller ones, then options that hold less in all.
LADDER = ((1, 0), (2, 0), (4, 0), (10, 0), (4, 2), (10, 4), (30, 8))
TINY = 1 << 8  # tables × ranks up to which options are changed one by one, and all is packed afresh
FLIPPED = 300  # such packings
MIDDLING = 1 << 16  # tables × ranks beyond which one good packing has to do
LARGE = 1 << 20  # and beyond which it is not polished for long
REFINED = 120_000  # steps of that times ranks, of middling instances far from their bound
REBUILT = 64  # tables up to which every granularity is rebuilt from
SETS = 2  # of charges that are tried
GOOD = 100  # a plan within 1 / GOOD of the bound is not searched on
NEAR = 200  # and one within 1 / NEAR not even polished
POOR = 20  # a set of charges whose first plan is more than 1 / POOR above the best one is left at that
TASTED, POURED = 60, 240  # steps of pouring: of plans within 1 / PROMISING of the best one, and of that
PROMISING = 5
MUCH = 8  # rows over hosts are packed as if poured if they are more than 1 / MUCH of the work
FEW_TABLES, FEW_RANKS, FEW_PARTS = 7, 4, 4_000_000
MIXED, ALIKE = (
    4,
    50,
)  # every MIXED-th table is cut as in the second best plan, if that is within 1 / ALIKE of the best
FAIR = 25  # and within 1 / FAIR where tables × ranks are beyond MIDDLING
WORST = 1 << 61


def solve(instance: Instance, *, effort: int = 1) -> Solution:
    """A plan within all caps, its cost, and a bound that no plan's cost is below.

    Args:
        effort: 1 as fast as it goes; each step doubles the work of steps 3 to 5.
    """
    order = np.array(sorted(range(instance.tables), key=instance.names.__getitem__), np.int64)
    found = _Search(instance.take(order), max(effort, 1)).run()
    if found.status is not Status.FOUND:
        return found
    option = np.empty_like(found.option)
    option[order] = found.option
    places: list[tuple[int, ...]] = [()] * instance.tables
    for i, t in enumerate(order.tolist()):
        places[t] = found.places[i]
    rows = {int(order[i]): shares for i, shares in found.rows.items()}
    return evaluate(instance, option, places, rows, found.bound)


def lower_bound(instance: Instance, cost: int) -> int:
    """ps that no plan of an instance is below, at most `cost`; looked for as hard as a plan of that cost is worth."""
    relaxed = Relaxed(instance)
    return certify(relaxed, kinds_of(relaxed), cost)


class _Search:
    def __init__(self, instance: Instance, effort: int) -> None:
        self.instance, self.relaxed, self.effort = instance, Relaxed(instance), effort
        self.middling = instance.tables * instance.ranks > MIDDLING
        self.large = instance.tables * instance.ranks > LARGE
        self.best: Solution | None = None
        self.least = 0  # ps that no plan is below
        self.certified: int | None = None  # the same by certificate, once it was asked for
        self.seen: set[bytes] = set()  # options that were packed, under whatever charges
        self.starts: list[tuple[int, Packing, Kinds]] = []  # what was made of them, and its cost with charges

    def run(self) -> Solution:
        proof = self.relaxed.impossible()
        if proof is not None:
            return _nothing(Status.NONE_EXISTS, proof)
        kinds = kinds_of(self.relaxed)
        self.least = kinds[0].bound(self.relaxed) if kinds else 0
        complete = self._enumerate(FEW_PARTS // 4)
        if not complete:
            for some in self._in_turn(kinds):
                if some.bound(self.relaxed) < self._hopeless():
                    self._search(sharpen(self.relaxed, some))
            if self.middling and not self.large and self.effort == 1 and self.best is not None:
                self._refine(kinds)
            complete = self._enumerate(FEW_PARTS * self.effort)
        if self.best is None:
            return (
                _nothing(Status.NONE_EXISTS, Proof(-1, 0)) if complete else _nothing(Status.NONE_FOUND, None)
            )
        best = self.best = flow(self.instance, self.best, POURED)
        best = self.best = level(self.instance, best, 16 if self.middling else 64)
        if complete:
            bound = best.cost
        elif self.certified is not None:
            bound = min(self.certified, best.cost)
        else:
            bound = certify(self.relaxed, kinds, best.cost)
        return evaluate(self.instance, best.option, best.places, best.rows, bound)

    def _in_turn(self, kinds: list[Kinds]) -> list[Kinds]:
        """The sets of charges to try: all first (what a plan does not use is not paid), then those of least bound."""
        if not kinds:
            return []
        whole = max(kinds, key=lambda some: int(some.usable.sum()))
        most = 1 + SETS * self.effort
        if self.middling and self.effort == 1:
            # What charges could save, and whether that is worth another search.
            most = 2 if (whole.bound(self.relaxed) - self.least) * GOOD > self.least else 1
        return list(dict.fromkeys([whole, *kinds]))[:most]

    def _hopeless(self) -> int:
        """ps: a set of charges whose bound is higher will not lead to a better plan, unless it packs much better."""
        if self.best is None:
            return WORST
        if self.cost <= self.least + self.least // GOOD:
            return 0
        return self.least + (self.cost - self.least) // 2

    @property
    def cost(self) -> int:
        return WORST if self.best is None else self.best.cost

    def _search(self, kinds: Kinds) -> None:
        bound = kinds.bound(self.relaxed)
        good, fair = bound + bound // GOOD, bound + bound // FAIR
        starts: list[tuple[int, Packing]] = []
        for head in FEW_HEADS if self.middling and self.effort == 1 else HEADS:
            for option, average in self._options(kinds, head):
                if average + kinds.charge >= self.cost:
                    break
                if option.tobytes() in self.seen:
                    continue
                self.seen.add(option.tobytes())
                view = self._view(option)
                packing = self._pack(option, view)
                if packing is None:
                    continue
                rounds, near = (36, GOOD) if self.large else (40, NEAR)
                enough = average + average // near if view is self.relaxed else 0
                packing, cost = exchange(view, packing, rounds * self.effort, enough)
                worth = self._offer(packing, self.middling)
                starts.append((cost, packing))
                self.starts.append((worth, packing, kinds))
                break
            if len(starts) == 1 and self.starts[-1][0] > self.cost + self.cost // POOR:
                return
            if self.cost <= good or (self.middling and self.cost <= fair and self.effort == 1):
                return
        if (self.middling and self.effort == 1) or not starts:
            return
        if self.instance.tables * self.instance.ranks <= TINY:
            # From the best one, and from what is cheapest on average.
            first = pack(self.relaxed, kinds.dual.option, Rule.TIME)
            roots = [min(starts, key=lambda start: start[0])[1], *([] if first is None else [first])]
            for root in roots:
                self._flip(kinds, *exchange(self.relaxed, root, 20))
        # From the best of each granularity: from the best one alone, some plans are never reached.
        steps = 300 * self.effort
        some = sorted(starts, key=lambda start: start[0])
        some = some[: (3 if self.instance.tables > REBUILT else 8) * self.effort]
        for i, (_, packing) in enumerate(some):
            pour = i % 3 == 2
            again = rebuild(self.relaxed, kinds.usable, packing, steps, i, pour)
            self._offer(again, pour)
            again, _ = exchange(self.relaxed, again, 40)
            self._offer(again)
            if self.cost <= good:
                return

    def _flip(self, kinds: Kinds, packing: Packing, cost: int) -> None:
        """The best change of one table's option, everything packed afresh, as long as one is better.

        Rebuilding leaves most tables where they are; here one that is whole instead of split moves all others.
        """
        relaxed, left = self.relaxed, FLIPPED * self.effort
        better = True
        while better and left > 0:
            better, before = False, packing.option
            for t, o in np.argwhere(kinds.usable).tolist():
                option = before.copy()
                option[t] = o
                if o == before[t] or int(averages(relaxed, option).sum()) >= cost:
                    continue
                left -= 1
                new = pack(relaxed, option, Rule.TIME)
                if new is None:
                    continue
                then = int(evaluate(self.instance, option, new.places).stage.sum())
                if then < cost + cost // POOR:
                    new, then = exchange(relaxed, new, 20)
                if then < cost:
                    packing, cost, better = new, then, True
        self._offer(packing)

    def _refine(self, kinds: list[Kinds]) -> None:
        """Rebuilds the best packing of many tables, unless it is close enough to what the certificate says."""
        bound = self.certified = certify(self.relaxed, kinds, self.cost)
        if not self.starts or self.cost <= bound + bound // FAIR:
            return
        _, packing, some = self._mixed(sorted(self.starts, key=lambda start: start[0]))
        again = rebuild(
            self.relaxed, some.usable, packing, min(1500, REFINED // self.instance.ranks), 0, True
        )
        self._offer(again, True)
        again, _ = exchange(self._view(again.option), again, 40)
        self._offer(again, True)

    def _mixed(self, starts: list[tuple[int, Packing, Kinds]]) -> tuple[int, Packing, Kinds]:
        """The best start, or the best two's options mixed: equal tables need not be cut alike."""
        worth, packing, some = starts[0]
        if len(starts) == 1 or starts[1][0] > worth + worth // ALIKE:
            return starts[0]
        option, other = packing.option.copy(), starts[1][1].option
        some_tables = np.flatnonzero(option != other)[::MIXED]
        option[some_tables] = other[some_tables]
        view = self._view(option)
        mixed = self._pack(option, view)
        if mixed is None:
            return starts[0]
        mixed, _ = exchange(view, mixed, 120)
        then = self._offer(mixed, True)
        return (then, mixed, some) if then < worth + worth // GOOD else starts[0]

    def _options(self, kinds: Kinds, head: int) -> Iterator[tuple[Ints, int]]:
        """Options and their average cost, ever easier to fit."""
        for thrift, slack in LADDER:
            choice = choose(self.relaxed, kinds, head, thrift, slack)
            if choice is not None:
                yield choice.option, choice.average

    @cached_property
    def poured(self) -> Relaxed:
        return Relaxed(poured(self.instance))

    def _view(self, option: Ints) -> Relaxed:
        """What options are packed by: as if rows over hosts were poured, where they are much and pouring is tried."""
        instance, every = self.instance, np.arange(self.instance.tables)
        if not self.middling or self.large:
            return self.relaxed
        fluid = instance.divisible[every, option] & (instance.width[every, option] > 1)
        work = instance.cost[every, option].sum(1) * self.relaxed.copies[every, option]
        return self.poured if int(work[fluid].sum()) * MUCH > int(work.sum()) else self.relaxed

    def _pack(self, option: Ints, relaxed: Relaxed) -> Packing | None:
        instance = self.instance
        held = relaxed.bytes[np.arange(instance.tables), option].sum(0)
        tight = any(int(h) * 2 > limit for h, limit in zip(held, relaxed.limits, strict=True))
        rules = (Rule.BOTH, Rule.TIME) if tight else (Rule.TIME, Rule.BOTH)
        for rule in rules:
            packing = pack(relaxed, option, rule)
            if packing is not None:
                return packing
        if self.large:
            return None
        packing = pack(relaxed, option, Rule.MEMORY)
        for rule in (*rules, Rule.MEMORY):
            if packing is not None:
                return packing
            forced = pack(relaxed, option, rule, force=True)
            packing = None if forced is None else repair(relaxed, forced, 200 * self.effort)
        return packing

    def _enumerate(self, parts: int) -> bool:
        """Whether every arrangement was judged, so that the best one is known to be."""
        instance = self.instance
        if instance.tables > FEW_TABLES or instance.ranks > FEW_RANKS:
            return False
        found = enumerate_all(self.relaxed, self.cost, parts)
        if found is None:
            return False
        if found.option is not None:
            self.best = evaluate(instance, found.option, found.places)
        return found.complete and not bool(np.any(instance.divisible & self.relaxed.usable))

    def _offer(self, packing: Packing, pour: bool = False) -> int:
        """The cost of a packing, which is kept if it is the best one so far."""
        new = evaluate(self.instance, packing.option, packing.places)
        assert fits(self.instance, new.memory), "a packing beyond a cap"
        if pour and not self.large and new.cost < self.cost + self.cost // PROMISING:
            new = flow(self.instance, new, TASTED)
        if new.cost < self.cost:
            self.best = new
        return new.cost


def _nothing(status: Status, proof: Proof | None) -> Solution:
    none = np.zeros(0, np.int64)
    return Solution(status, none, (), {}, 0, 0, none, none.reshape(0, 0), none.reshape(0, 0), proof)
