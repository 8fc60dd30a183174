"""`solve`: a plan for an instance, with a bound on how far it is from the best.

    1  what cannot be: a proof by memory alone (relaxed.py)
    2  few tables on few ranks: every arrangement (exact.py)
    3  which charges to pay, and how fine to cut: options for all tables at once, with a bound (bound.py, boxes.py)
    4  where pieces go: the largest first (pack.py), exchanged between pairs of ranks or hosts (exchange.py)
    5  a few tables taken out and put back (rebuild.py), where tables x ranks are few or the effort is above 1
    6  rows that may be uneven: flowing (uneven_rows.py)
    7  the rest of the work: a better bound (boxes.py)

Work is counted in units (work.py), never in seconds, and tables are taken in the order of their names: the same
instance gives the same plan on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from tilerec.planner.search.bound import Kinds, kinds_of
from tilerec.planner.search.boxes import Boxes, Choice
from tilerec.planner.search.exact import enumerate_all
from tilerec.planner.search.exchange import exchange, exchange_hosts, repair
from tilerec.planner.search.fractional_rows import poured
from tilerec.planner.search.granularity import choose
from tilerec.planner.search.instance import Instance, Ints, Proof, Solution, Status, evaluate, fits
from tilerec.planner.search.pack import Packing, Rule, pack
from tilerec.planner.search.rebuild import rebuild, steps_within
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.uneven_rows import flow
from tilerec.planner.search.work import Work

UNITS = 1_600_000_000  # of work, for an effort of 1
FEW_UNITS = 2_600_000_000  # and where tables x ranks are at most LARGE: a unit is less time there
# Room for a largest piece, in quarters of it, and whether rows over hosts are preferred (they fill gaps).
HEADS = (*tuple((head, False) for head in (4, 5, 3)), (4, True), (6, False), (5, True))
HEADS += tuple((head, False) for head in (8, 12, 16, 24, 48, 200))
# Where tables x ranks are more than MIDDLING, and more than LARGE.
SOME_HEADS = ((5, True), (6, False), (4, False), (10, True), (24, False))
FEW_HEADS = ((4, True), (8, True), (24, False))
SETS = 4  # of charges, those of the least bounds, that options of one width are chosen under
CHOICES = 2  # of options, the most promising ones that one head leads to, that are packed
# How pieces are made to fit where they do not: smaller ones (at most 1 / thrift of a rank's free memory), then options
# that leave some 64ths of the memory free.
LADDER = ((1, 0), (2, 0), (4, 0), (10, 0), (4, 2), (10, 4), (30, 8))
GOOD = 120  # a plan within 1 / GOOD of the bound is not searched on
MIXED, ALIKE = 4, 50  # two packings within 1 / ALIKE are mixed
MIDDLING, FAIR = 1 << 16, 40  # and within 1 / FAIR where tables x ranks are more
LARGE, PASSABLE = 1 << 20, 25  # or 1 / PASSABLE; pieces that do not fit are not exchanged until they do
IDLE, GAIN = 8, 2000  # where so many attempts in a row gain less than 1 / GAIN it is left at that
NEAR = 200  # and one within 1 / NEAR not even polished
ROUNDS, POLISH = 40, 2  # of exchanges between ranks; times that ranks and hosts take turns
RAISES, WORTH = 8, 500  # times that a bound is raised, as long as one raises it by 1 / WORTH
HOST_ROUNDS = 20  # of exchanges between hosts
TURNS = 6  # times that the best packings are rebuilt
TASTED, POURED = 60, 600  # steps of pouring: of packings that may become the best plan, and of that
MUCH = 8  # rows over hosts are packed as if poured if they are more than 1 / MUCH of the work
FEW_TABLES, FEW_RANKS = 7, 4
OTHERS = 4  # further arrangements that are kept for `Solution.others`
PART = 60  # units that a part of an enumeration takes, by rank and stage
WORST = 1 << 61


def solve(instance: Instance, *, effort: int = 1, work: Work | None = None, prove: bool = True) -> Solution:
    """A plan within all caps, its cost, and a bound that no plan's cost is below.

    Args:
        effort: each step doubles the work. 0: the first plan that fits, with a loose bound.
        work: what the search may do at most; what it does is spent there.
        prove: raise the bound with what work is left; else it is what the search needed.
    """
    order = np.array(sorted(range(instance.tables), key=instance.names.__getitem__), np.int64)
    found = _Search(instance.take(order), effort, work, prove).run()
    if found.status is not Status.FOUND:
        return found
    others = tuple(_in_order(instance, order, other) for other in found.others)
    return replace(_in_order(instance, order, found), others=others)


def _in_order(instance: Instance, order: Ints, found: Solution) -> Solution:
    """A solution of `instance.take(order)` as one of `instance`."""
    option = np.empty_like(found.option)
    option[order] = found.option
    places: list[tuple[int, ...]] = [()] * instance.tables
    for i, t in enumerate(order.tolist()):
        places[t] = found.places[i]
    rows = {int(order[i]): shares for i, shares in found.rows.items()}
    return evaluate(instance, option, places, rows, found.bound)


def lower_bound(instance: Instance, cost: int) -> int:
    """ps that no plan of an instance is below, at most `cost`: that of a plan that there is."""
    relaxed = Relaxed(instance)
    kinds = kinds_of(relaxed)
    bound = kinds[0].bound(relaxed) if kinds else 0
    boxes = Boxes(relaxed, kinds, relaxed.memory)
    for _ in range(RAISES):
        before = bound
        if cost > bound + bound // NEAR:
            bound = max(bound, boxes.search(cost, Work(UNITS // RAISES)))
        if bound <= before + before // WORTH:
            break
    return min(bound, cost)


class _Search:
    def __init__(self, instance: Instance, effort: int, work: Work | None, prove: bool = True) -> None:
        self.instance, self.relaxed = instance, Relaxed(instance)
        self.any, self.harder, self.prove = effort == 0, effort > 1, prove
        self.middling = instance.tables * instance.ranks > MIDDLING
        self.large = instance.tables * instance.ranks > LARGE
        self.whole = (UNITS if self.large else FEW_UNITS) << max(effort - 1, 0)
        self.work = Work(self.whole) if work is None else work.part(self.whole)
        self.size = instance.ranks * instance.stages
        self.heads = FEW_HEADS if self.large else SOME_HEADS if self.middling else HEADS
        self.best: Solution | None = None
        self.boxed = False  # boxes were searched for options
        self.bound = 0  # ps that no plan is below
        self.seen: set[bytes] = set()  # options that were packed
        self.found: list[Solution] = []  # the best ones, the cheapest first
        self.starts: list[tuple[int, Packing]] = []  # what was made of them, and its cost with charges

    def run(self) -> Solution:
        proof = self.relaxed.impossible()
        if proof is not None:
            return _nothing(Status.NONE_EXISTS, proof)
        kinds = kinds_of(self.relaxed)
        wide = max(kinds, key=lambda some: int(some.usable.sum()), default=None)
        self.bound = kinds[0].bound(self.relaxed) if kinds else 0
        complete = self._enumerate(self.whole // 4)
        if not complete:
            boxes = Boxes(self.relaxed, kinds, self.relaxed.memory)
            if wide is not None:
                self._start(kinds, wide, boxes)
            if not self.any and (self.harder or not self.middling):
                self._rebuild()
                complete = self._enumerate(self.whole // 2)
        if self.best is None:
            return (
                _nothing(Status.NONE_EXISTS, Proof(-1, 0)) if complete else _nothing(Status.NONE_FOUND, None)
            )
        if self.any:
            return self.best
        best = self.best = flow(self.instance, self.best, POURED, self.work.part(self.whole // 8))
        if complete:
            self.bound = best.cost
        elif self.prove and best.cost > self.bound + self.bound // NEAR:
            work = self.work.part(self.whole // (12 if self.good else 2 if self.middling else 4))
            self.bound = max(self.bound, boxes.search(best.cost, work))
        others = tuple(one for one in self.found if one.cost > best.cost)
        found = evaluate(self.instance, best.option, best.places, best.rows, min(self.bound, best.cost))
        return replace(found, others=others)

    @property
    def cost(self) -> int:
        return WORST if self.best is None else self.best.cost

    @property
    def good(self) -> bool:
        near = FAIR if self.middling else GOOD
        if self.large:
            near = PASSABLE
        return self.cost <= self.bound + self.bound // near or (self.any and self.best is not None)

    def _start(self, kinds: Sequence[Kinds], wide: Kinds, boxes: Boxes) -> None:
        """Packs options of every fineness, as long as a finer or coarser one may be better."""
        quarters = 3 if self.middling else 2 if self.prove else 1
        work, idle = self.work.part(self.whole * quarters // 4), 0
        for head, sand in self.heads:
            packed, before = False, self.cost
            for choice in self._choices(wide, boxes, head, sand, work):
                if choice.option.tobytes() in self.seen or choice.average >= self.cost:
                    packed = True
                    continue
                self.seen.add(choice.option.tobytes())
                packed = self._try(choice, work, sand) or packed
                if self.good:
                    return
            if packed and before < WORST:
                idle = 0 if self.cost < before - before // GAIN else idle + 1
            if idle == IDLE or work.over:
                break
        if self.starts and not self.good and not self.large:
            self._of_one_width(kinds, work)
            self._mix()

    def _of_one_width(self, kinds: Sequence[Kinds], work: Work) -> None:
        """Packs all tables on single ranks, or all over hosts: few tables of both kinds leave ranks uneven."""
        width = self.instance.width
        for some in (width > 1, width == 1):
            alike = self.relaxed.usable & some
            alike = np.where(alike.any(1, keepdims=True), alike, self.relaxed.usable)
            paid = [replace(each, usable=each.usable & alike) for each in kinds]
            paid = [each for each in paid if each.usable.any(1).all()][:SETS]
            choices = (choose(self.relaxed, each, 4, 1, 0, work) for each in paid)
            found = min((c for c in choices if c is not None), key=lambda c: c.expected, default=None)
            if found is not None and found.average < self.cost and found.option.tobytes() not in self.seen:
                self.seen.add(found.option.tobytes())
                self._try(found, work, False)

    def _choices(self, wide: Kinds, boxes: Boxes, head: int, sand: bool, work: Work) -> Iterator[Choice]:
        """Options of the least expected costs, ever easier to fit until something is packed."""
        relaxed, tried, third = self.relaxed, len(self.starts), work.left // 3
        for thrift, slack in LADDER:
            if not self.boxed and not self.any and not self.middling and not sand:
                self.boxed = True
                bound = boxes.search(self.cost, work.part(self.whole // 8), True)
                self.bound = max(self.bound, bound)
                yield from boxes.found[:CHOICES]
            if len(self.starts) == tried:
                choice = choose(relaxed, wide, head, thrift, slack, work, sand)
                if choice is not None:
                    yield choice
            if len(self.starts) > tried or (work.over and thrift > 1):
                return
            if self.best is None and work.left < third and not self.any and thrift > 1:
                work.spend(work.left)  # what does not fit after two thirds of the work does not fit
                return

    def _try(self, choice: Choice, work: Work, sand: bool) -> bool:
        """Packs options and polishes that; whether they could be packed."""
        view = self._view(choice.option)
        packing = self._pack(choice.option, view, work, sand)
        if packing is None:
            return False
        enough = choice.average - self._charge(choice.option)
        enough = enough + enough // NEAR if view is self.relaxed else 0
        self._polish(view, packing, enough, work.part(self.whole // 8))
        return True

    def _charge(self, option: Ints) -> int:
        used = self.instance.uses[np.arange(self.instance.tables), option].any(0)
        return int(self.instance.charge[used].sum())

    def _polish(self, view: Relaxed, packing: Packing, enough: int, work: Work) -> None:
        """Pieces exchanged between ranks and between hosts in turn; one more packing to start from."""
        found = 0
        for _ in range(0 if self.any else POLISH):
            packing, found = exchange(view, packing, ROUNDS, enough, work)
            if found <= enough:
                break
            packing = exchange_hosts(view, packing, HOST_ROUNDS, work)
        self.starts.append((self._offer(packing, found + self._charge(packing.option)), packing))

    def _rebuild(self) -> None:
        """From the best of each fineness: from the best one alone, some plans are never reached."""
        starts = sorted(self.starts, key=lambda start: start[0])
        work = self.work.part(self.work.left - self.whole * (5 if self.prove else 1) // 16)
        part, idle = work.left // TURNS, 0
        for turn in range(TURNS):
            if not starts or idle == IDLE or self.good or work.over:
                return
            # The best one in every second turn, as it is by now; the others in between.
            _, packing = starts[(turn + 1) // 2 % len(starts)]
            if turn % 2 == 0:
                _, packing = min(self.starts, key=lambda start: start[0])
            before, pour = self.cost, turn % 3 != 1
            used = self.instance.uses[np.arange(self.instance.tables), packing.option].any(0)
            usable = self.relaxed.usable & ~(self.instance.uses & ~used).any(2)
            steps = steps_within(self.relaxed, work.part(part))
            again = rebuild(self.relaxed, usable, packing, steps, turn, pour)
            self._polish(self._view(again.option), again, 0, work.part(part // 4))
            idle = 0 if self.cost < before - before // GAIN else idle + 1

    def _mix(self) -> None:
        """Every MIXED-th table cut as in the second best packing: equal tables need not be cut alike."""
        starts = sorted(self.starts, key=lambda start: start[0])
        if len(starts) == 1 or starts[1][0] > starts[0][0] + starts[0][0] // ALIKE:
            return
        option, other = starts[0][1].option.copy(), starts[1][1].option
        some = np.flatnonzero(option != other)[::MIXED]
        option[some] = other[some]
        self._try(Choice(option, 0, 0), self.work, False)

    @cached_property
    def poured(self) -> Relaxed:
        return poured(self.instance)

    def _view(self, option: Ints) -> Relaxed:
        """What options are packed by: as if rows over hosts were poured, where they are much."""
        instance, every = self.instance, np.arange(self.instance.tables)
        fluid = instance.divisible[every, option] & (instance.width[every, option] > 1)
        work = instance.cost[every, option].sum(1) * self.relaxed.copies[every, option]
        return self.poured if int(work[fluid].sum()) * MUCH > int(work.sum()) else self.relaxed

    def _pack(self, option: Ints, relaxed: Relaxed, work: Work, sand: bool) -> Packing | None:
        rules = (Rule.BOTH, Rule.TIME) if relaxed.tight(option) else (Rule.TIME, Rule.BOTH)
        sand = sand and not relaxed.tight(option, 3)
        for rule in (*rules, Rule.MEMORY):
            packing = pack(relaxed, option, rule, work, sand=sand)
            if packing is not None or work.over:
                return packing
        if self.large:
            return None
        for rule in (*rules, Rule.MEMORY):
            forced = pack(relaxed, option, rule, work, force=True)
            packing = None if forced is None else repair(relaxed, forced, 200, work)
            if packing is not None or work.over:
                return packing
        return None

    def _enumerate(self, units: int) -> bool:
        """Whether every arrangement was judged, so that the best one is known to be."""
        instance = self.instance
        if instance.tables > FEW_TABLES or instance.ranks > FEW_RANKS or not self.relaxed.usable.any(1).all():
            return False
        parts = self.work.part(units).left // (PART * self.size)
        found = enumerate_all(self.relaxed, self.cost, parts)
        if found is None:
            return False
        self.work.spend((parts - found.left) * PART * self.size)
        if found.option is not None:
            self.best = evaluate(instance, found.option, found.places)
        return found.complete and not bool(np.any(instance.divisible & self.relaxed.possible))

    def _offer(self, packing: Packing, expected: int) -> int:
        """The cost of a packing, which is kept if it is the best one so far. `expected`: ps, once rows are poured."""
        new = evaluate(self.instance, packing.option, packing.places)
        assert fits(self.instance, new.memory), "a packing beyond a cap"
        if not self.any and expected < self.cost:
            new = flow(self.instance, new, TASTED, self.work.part(self.whole // 20))
        if new.cost < self.cost:
            self.best = new
        if all(new.cost != known.cost for known in self.found):
            self.found = sorted([*self.found, new], key=lambda one: one.cost)[:OTHERS]
        return new.cost


def _nothing(status: Status, proof: Proof | None) -> Solution:
    none = np.zeros(0, np.int64)
    return Solution(status, none, (), {}, 0, 0, none, none.reshape(0, 0), none.reshape(0, 0), proof)
