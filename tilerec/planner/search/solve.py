"""`solve`: a plan for an instance, and a lower bound on the cost of every plan.

    Input    an `Instance`
    Changes  nothing that exists: the result is a new `Solution`
    Keeps    the best plan so far is within all memory caps; the bound is at most its cost
    Stops    when the plan is close enough to the bound, or when the work is spent
    Cost     at most `UNITS` or `FEW_UNITS` units of work, doubled by each further step of effort

The passes, in this order:

    1  proof by memory alone that no plan exists (relaxed.py)
    2  few tables on few ranks: every arrangement (exact.py)
    3  options of all tables at once, with a bound: fixed charges (bound.py), fineness of cuts (granularity.py,
       boxes.py)
    4  places: the largest piece first (pack.py), then exchanges between pairs of ranks or hosts (exchange.py)
    5  a few tables taken out and put back (rebuild.py), if tables x ranks are few or the effort is above 1
    6  uneven shares of rows (uneven_rows.py)
    7  a tighter bound with the remaining work (boxes.py)

Work is counted in units (work.py), never in seconds. Tables are processed in the order of their names. So the same
instance gives the same plan on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from tilerec.planner.search.bound import Kinds, kinds_of
from tilerec.planner.search.boxes import Boxes, Choice
from tilerec.planner.search.exact import enumerate_all
from tilerec.planner.search.exchange import exchange, exchange_hosts, repair
from tilerec.planner.search.fractional_rows import fractional_view
from tilerec.planner.search.granularity import choose
from tilerec.planner.search.instance import Instance, Ints, Proof, Solution, Status, evaluate, fits
from tilerec.planner.search.pack import Packing, PackingOrder, pack
from tilerec.planner.search.rebuild import rebuild, steps_within
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.uneven_rows import flow
from tilerec.planner.search.work import Work

UNITS = 1_600_000_000  # units of work for an effort of 1
FEW_UNITS = 1_900_000_000  # the same if tables x ranks are at most LARGE, where a unit takes less time
MIDDLING = 1 << 16  # tables x ranks above which less is tried
LARGE = 1 << 20  # tables x ranks above which even less is tried, and pieces that do not fit are not repaired

# Attempts to choose options: (head in quarters of the largest piece, prefer rows that can move inside a host).
HEADS = (*tuple((head, False) for head in (4, 5, 3)), (4, True), (6, False), (5, True))
HEADS += tuple((head, False) for head in (8, 12, 16, 24, 48, 200))
MIDDLING_HEADS = ((5, True), (6, False), (4, False), (10, True), (24, False))
LARGE_HEADS = ((6, False), (5, False), (4, True))
LARGE_TIGHT_HEADS = ((5, False), (6, False), (4, True))  # if the cheapest options fill more than half of the memory
# Attempts to make options fit into memory: (thrift, slack). A piece takes at most 1 / thrift of a rank's free memory,
# and options leave `slack` 64ths of it free.
LADDER = ((1, 0), (2, 0), (4, 0), (10, 0), (4, 2), (10, 4), (30, 8))
CHARGE_SETS_TRIED = 4  # sets of fixed charges, those of the least bounds, tried for options of one width
BOX_CHOICES_PACKED = 2  # choices of options from `Boxes` that are packed

# The search ends once the cost is within 1 / GOOD_PART of the bound.
GOOD_PART, MIDDLING_GOOD_PART, LARGE_GOOD_PART = 120, 40, 24
NEAR_PART = 200  # exchanges end, and the bound is not raised, within 1 / NEAR_PART of the bound
IDLE_ATTEMPTS = 8  # a pass ends after so many consecutive attempts that each gain less than 1 / GAIN_PART
GAIN_PART = 2000
# A large search ends at coarser options, unless they save more than 1 / COARSER_PART of the distance between the best
# plan and the average of its options: larger pieces leave ranks less even.
COARSER_PART = 4

EXCHANGE_ROUNDS = 32  # rounds of exchanges between ranks
HOST_EXCHANGE_ROUNDS = 20  # rounds of exchanges between hosts
EXCHANGE_TURNS = 2  # turns of exchanges between ranks, then between hosts
REPAIR_ROUNDS = 200  # rounds of exchanges that bring a packing within its caps
REBUILDS = 3  # calls of `rebuild`
FLOW_STEPS_PER_PACKING = 60  # steps of `flow` on a packing that may become the best plan
FLOW_STEPS_OF_BEST = 600  # steps of `flow` on the best plan
DIVISIBLE_WORK_PART = 8  # `fractional_view` is used if divisible rows are more than 1 / DIVISIBLE_WORK_PART of work
MIXED_STRIDE = 4  # `_mix` takes the cut of every fourth table from the second best packing
MIXED_PART = 50  # two packings are mixed if their costs differ by less than 1 / MIXED_PART

ENUMERATED_TABLES, ENUMERATED_RANKS = 7, 4  # most tables and ranks for which every arrangement is tried
UNITS_PER_PART = 60  # units that a part of an enumeration takes, by rank and stage
BOUND_RAISES = 8  # attempts of `lower_bound` to raise the bound
RAISE_PART = 500  # it ends when an attempt raises the bound by less than 1 / RAISE_PART
OTHERS_KEPT = 4  # further arrangements in `Solution.others`
WORST = 1 << 61  # ps: the cost while there is no plan


def solve(instance: Instance, *, effort: int = 1, work: Work | None = None, prove: bool = True) -> Solution:
    """Return a plan within all caps, its cost, and a lower bound on the cost of every plan.

    Args:
        effort: each step doubles the work. 0: the first plan that fits, with a loose bound.
        work: budget of the search; None: as much as the effort allows.
        prove: raise the bound with the remaining work. If False, the bound is the one that the search needed.
    """
    order = np.array(sorted(range(instance.tables), key=instance.names.__getitem__), np.int64)
    found = _Search(instance.take(order), effort, work, prove).run()
    if found.status is not Status.FOUND:
        return found
    others = tuple(_in_order(instance, order, other) for other in found.others)
    return replace(_in_order(instance, order, found), others=others)


def _in_order(instance: Instance, order: Ints, found: Solution) -> Solution:
    """Return a solution of `instance.take(order)` as a solution of `instance`."""
    option = np.empty_like(found.option)
    option[order] = found.option
    places: list[tuple[int, ...]] = [()] * instance.tables
    for i, t in enumerate(order.tolist()):
        places[t] = found.places[i]
    rows = {int(order[i]): shares for i, shares in found.rows.items()}
    return evaluate(instance, option, places, rows, found.bound)


def lower_bound(instance: Instance, cost: int) -> int:
    """Return a lower bound in ps on the cost of every plan, at most `cost`: the cost of a known plan."""
    relaxed = Relaxed(instance)
    kinds = kinds_of(relaxed)
    bound = kinds[0].bound(relaxed) if kinds else 0
    boxes = Boxes(relaxed, kinds, relaxed.memory)
    for _ in range(BOUND_RAISES):
        before = bound
        if cost > bound + bound // NEAR_PART:
            bound = max(bound, boxes.search(cost, Work(UNITS // BOUND_RAISES)))
        if bound <= before + before // RAISE_PART:
            break
    return min(bound, cost)


class _Search:
    """The state of a search.

    best: the best plan so far; None before the first. bound: ps, a lower bound on the cost of every plan. seen: options
    that have been packed. found: the best plans, the cheapest first. starts: packings with their costs in ps, charges
    included, from which `rebuild` starts. boxed: `Boxes` has been searched for options. average: ps of the options of
    the last plan that became the best one.
    """

    def __init__(self, instance: Instance, effort: int, work: Work | None, prove: bool = True) -> None:
        self.instance, self.relaxed = instance, Relaxed(instance)
        self.any, self.harder, self.prove = effort == 0, effort > 1, prove
        self.middling = instance.tables * instance.ranks > MIDDLING
        self.large = instance.tables * instance.ranks > LARGE
        self.whole = (UNITS if self.large else FEW_UNITS) << max(effort - 1, 0)
        self.work = Work(self.whole) if work is None else work.part(self.whole)
        self.size = instance.ranks * instance.stages
        self.heads = LARGE_HEADS if self.large else MIDDLING_HEADS if self.middling else HEADS
        self.best: Solution | None = None
        self.boxed = False
        self.bound = self.average = 0
        self.seen: set[bytes] = set()
        self.found: list[Solution] = []
        self.starts: list[tuple[int, Packing]] = []

    def run(self) -> Solution:
        """Run all passes."""
        proof = self.relaxed.impossible()
        if proof is not None:
            return _nothing(Status.NONE_EXISTS, proof)
        kinds = self.kinds
        wide = max(kinds, key=lambda some: int(some.usable.sum()), default=None)
        self.bound = kinds[0].bound(self.relaxed) if kinds else 0
        complete = self._enumerate(self.whole // 4)
        if not complete:
            if wide is not None:
                self._start(wide)
            if not self.any and (self.harder or not self.middling):
                self._rebuild()
                complete = self._enumerate(self.whole // 2)
        if self.best is None:
            return _nothing(Status.NONE_EXISTS, Proof(-1, 0)) if complete else _nothing(Status.NONE_FOUND, None)
        if self.any:
            return self.best
        steps = FLOW_STEPS_PER_PACKING if self.large else FLOW_STEPS_OF_BEST
        best = self.best = flow(self.instance, self.best, steps, self.work.part(self.whole // 8))
        if complete:
            self.bound = best.cost
        elif self.prove and best.cost > self.bound + self.bound // NEAR_PART:
            work = self.work.part(self.whole // (12 if self.good else 2 if self.middling else 4))
            self.bound = max(self.bound, self.boxes.search(best.cost, work))
        others = tuple(one for one in self.found if one.cost > best.cost)
        found = evaluate(self.instance, best.option, best.places, best.rows, min(self.bound, best.cost))
        return replace(found, others=others)

    @cached_property
    def kinds(self) -> list[Kinds]:
        """The sets of fixed charges."""
        return kinds_of(self.relaxed)

    @cached_property
    def boxes(self) -> Boxes:
        """The boxes of all options; a large search without a proof needs none."""
        return Boxes(self.relaxed, self.kinds, self.relaxed.memory)

    @property
    def cost(self) -> int:
        """ps of the best plan so far."""
        return WORST if self.best is None else self.best.cost

    @property
    def good(self) -> bool:
        """True if the best plan is close enough to the bound, or if any plan will do."""
        near = MIDDLING_GOOD_PART if self.middling else GOOD_PART
        if self.large:
            near = LARGE_GOOD_PART
        return self.cost <= self.bound + self.bound // near or (self.any and self.best is not None)

    def _start(self, wide: Kinds) -> None:
        """Choose and pack options, from coarse to fine, until further attempts gain nothing.

        Args:
            wide: the set of charges that leaves most options.
        """
        quarters = 3 if self.middling else 2 if self.prove else 1
        work, idle = self.work.part(self.whole * quarters // 4), 0
        tight = self.large and self.relaxed.is_tight(wide.dual.option)
        for head, divisible in LARGE_TIGHT_HEADS if tight else self.heads:
            packed, before = False, self.cost
            for choice in self._choices(wide, head, divisible, work):
                if self._in_vain(choice):
                    return
                if choice.option.tobytes() in self.seen or choice.average >= self.cost:
                    packed = True
                    continue
                self.seen.add(choice.option.tobytes())
                cost = self.cost
                packed = self._try(choice, work, divisible) or packed
                if self.cost < cost:
                    self.average = choice.average
                if self.good:
                    return
            if packed and before < WORST:
                idle = 0 if self.cost < before - before // GAIN_PART else idle + 1
            if idle == IDLE_ATTEMPTS or work.over:
                break
        if self.starts and not self.good and not self.large:
            self._of_one_width(work)
            self._mix()

    def _in_vain(self, choice: Choice) -> bool:
        """Return True if options of a large search save too little beside those of the best plan."""
        saved = self.average - choice.average
        return self.large and 0 <= saved * COARSER_PART < self.cost - self.average

    def _of_one_width(self, work: Work) -> None:
        """Pack all tables on single ranks, then all on whole hosts.

        Few tables of both kinds on the same ranks cannot be spread evenly.
        """
        width = self.instance.width
        for some in (width > 1, width == 1):
            alike = self.relaxed.usable & some
            alike = np.where(alike.any(1, keepdims=True), alike, self.relaxed.usable)
            paid = [replace(each, usable=each.usable & alike) for each in self.kinds]
            paid = [each for each in paid if each.usable.any(1).all()][:CHARGE_SETS_TRIED]
            choices = (choose(self.relaxed, each, 4, 1, 0, work) for each in paid)
            found = min((c for c in choices if c is not None), key=lambda c: c.expected, default=None)
            if found is not None and found.average < self.cost and found.option.tobytes() not in self.seen:
                self.seen.add(found.option.tobytes())
                self._try(found, work, False)

    def _choices(self, wide: Kinds, head: int, divisible: bool, work: Work) -> Iterator[Choice]:
        """Yield options of the least expected cost, each easier to fit into memory, until one has been packed."""
        relaxed, tried, third = self.relaxed, len(self.starts), work.left // 3
        for thrift, slack in LADDER:
            if not self.boxed and not self.any and not self.middling and not divisible:
                self.boxed = True
                # Without a proof fewer choices are packed, and an eighth of the whole would leave too little for them.
                bound = self.boxes.search(self.cost, work.part(self.whole // (8 if self.prove else 32)), True)
                self.bound = max(self.bound, bound)
                yield from self.boxes.found[:BOX_CHOICES_PACKED]
            if len(self.starts) == tried:
                choice = choose(relaxed, wide, head, thrift, slack, work, divisible)
                if choice is not None:
                    yield choice
            if len(self.starts) > tried or (work.over and thrift > 1):
                return
            if self.best is None and work.left < third and not self.any and thrift > 1:
                work.spend(work.left)  # two thirds of the work are spent and nothing fits: give up
                return

    def _try(self, choice: Choice, work: Work, divisible: bool) -> bool:
        """Pack options and improve the packing; return False if they could not be packed."""
        view = self._view(choice.option)
        packing = self._pack(choice.option, view, work, divisible)
        if packing is None:
            return False
        enough = choice.average - self.instance.charge_of(choice.option)
        enough = enough + enough // NEAR_PART if view is self.relaxed else 0
        self._polish(view, packing, enough, work.part(self.whole // 8))
        return True

    def _polish(self, view: Relaxed, packing: Packing, enough: int, work: Work) -> None:
        """Exchange pieces between ranks and between hosts in turn, and keep the packing as a start.

        Args:
            enough: ps without charges, at which exchanges end.
        """
        found = 0
        for _ in range(0 if self.any else EXCHANGE_TURNS):
            packing, found = exchange(view, packing, EXCHANGE_ROUNDS, enough, work)
            if found <= enough:
                break
            packing = exchange_hosts(view, packing, HOST_EXCHANGE_ROUNDS, work)
        charge = self.instance.charge_of(packing.option)
        self.starts.append((self._offer(packing, found + charge), packing))

    def _rebuild(self) -> None:
        """Run `rebuild` from several packings; from the best one alone, some plans are never reached."""
        starts = sorted(self.starts, key=lambda start: start[0])
        work = self.work.part(self.work.left - self.whole * (5 if self.prove else 1) // 16)
        part, idle = work.left // REBUILDS, 0
        for turn in range(REBUILDS):
            if not starts or idle == IDLE_ATTEMPTS or self.good or work.over:
                return
            # Every second turn starts from the best packing at that time; the turns in between from the others.
            _, packing = starts[(turn + 1) // 2 % len(starts)]
            if turn % 2 == 0:
                _, packing = min(self.starts, key=lambda start: start[0])
            before, fractional = self.cost, turn % 3 != 1
            used = self.instance.uses[np.arange(self.instance.tables), packing.option].any(0)
            usable = self.relaxed.usable & ~(self.instance.uses & ~used).any(2)
            steps = steps_within(self.relaxed, work.part(part))
            again = rebuild(self.relaxed, usable, packing, steps, turn, fractional)
            self._polish(self._view(again.option), again, 0, work.part(part // 4))
            idle = 0 if self.cost < before - before // GAIN_PART else idle + 1

    def _mix(self) -> None:
        """Cut every MIXED_STRIDE-th table as in the second best packing, and pack that.

        `choose` cuts equal tables alike. A mixture of two cuts can be more even: without it, the plan of Merlin's
        "colossal" model is 1.7 points further above the bound (benchmarks/planner.py).
        """
        starts = sorted(self.starts, key=lambda start: start[0])
        if len(starts) == 1 or starts[1][0] > starts[0][0] + starts[0][0] // MIXED_PART:
            return
        option, other = starts[0][1].option.copy(), starts[1][1].option
        some = np.flatnonzero(option != other)[::MIXED_STRIDE]
        option[some] = other[some]
        self._try(Choice(option, 0, 0), self.work, False)

    @cached_property
    def fractional(self) -> Relaxed:
        """The instance with rows that can move between the ranks of a host."""
        return fractional_view(self.instance)

    def _view(self, option: Ints) -> Relaxed:
        """Return the view in which options are packed: the fractional one if divisible rows are much of the work."""
        instance, every = self.instance, np.arange(self.instance.tables)
        fluid = instance.divisible[every, option] & (instance.width[every, option] > 1)
        work = instance.cost[every, option].sum(1) * self.relaxed.copies[every, option]
        return self.fractional if int(work[fluid].sum()) * DIVISIBLE_WORK_PART > int(work.sum()) else self.relaxed

    def _pack(self, option: Ints, relaxed: Relaxed, work: Work, divisible: bool) -> Packing | None:
        """Pack options in one order after another; return None if none succeeds, also with repairs."""
        orders = [PackingOrder.TIME, PackingOrder.BOTH, PackingOrder.MEMORY]
        if self.large or relaxed.is_tight(option):
            orders[:2] = orders[1::-1]
        last = divisible and not relaxed.is_tight(option, 3)
        for order in orders:
            packing = pack(relaxed, option, order, work, divisible_last=last)
            if packing is not None or work.over:
                return packing
        if self.large:
            return None
        for order in orders:
            forced = pack(relaxed, option, order, work, force=True)
            packing = None if forced is None else repair(relaxed, forced, REPAIR_ROUNDS, work)
            if packing is not None or work.over:
                return packing
        return None

    def _enumerate(self, units: int) -> bool:
        """Try every arrangement of few tables; return True if the best plan is proved to be optimal."""
        instance = self.instance
        if (
            instance.tables > ENUMERATED_TABLES
            or instance.ranks > ENUMERATED_RANKS
            or not self.relaxed.usable.any(1).all()
        ):
            return False
        parts = self.work.part(units).left // (UNITS_PER_PART * self.size)
        found = enumerate_all(self.relaxed, self.cost, parts)
        if found is None:
            return False
        self.work.spend((parts - found.left) * UNITS_PER_PART * self.size)
        if found.option is not None:
            self.best = evaluate(instance, found.option, found.places)
        return found.complete and not bool(np.any(instance.divisible & self.relaxed.possible))

    def _offer(self, packing: Packing, expected: int) -> int:
        """Return the cost of a packing in ps, and keep it as `best` if it is the cheapest one.

        Args:
            expected: its cost in ps once its divisible rows have moved.
        """
        new = evaluate(self.instance, packing.option, packing.places)
        assert fits(self.instance, new.memory), "a packing beyond a cap"
        if not self.any and expected < self.cost:
            new = flow(self.instance, new, FLOW_STEPS_PER_PACKING, self.work.part(self.whole // 20))
        if new.cost < self.cost:
            self.best = new
        if all(new.cost != known.cost for known in self.found):
            self.found = sorted([*self.found, new], key=lambda one: one.cost)[:OTHERS_KEPT]
        return new.cost


def _nothing(status: Status, proof: Proof | None) -> Solution:
    none = np.zeros(0, np.int64)
    return Solution(status, none, (), {}, 0, 0, none, none.reshape(0, 0), none.reshape(0, 0), proof)
