"""The largest piece of each stage: what it costs at least, and which options cost least, by branch and bound.

Of a plan's options, three numbers of each stage are known without its places: the average over ranks, what every rank
bears alike, and the largest piece, which some rank bears on top of that. So

    cost >= sum over s of max(average_s, alike_s + largest_s)  +  charges                                       (1)

A box limits the largest pieces: low_s <= largest_s <= high_s. It leaves the options whose pieces are at most high_s,
and for any weights 0 <= w_s <= 1 the right side of (1) is at least

    sum over s of (1 - w_s) average_s + w_s (alike_s + low_s)                                                   (2)

In a phase of several stages the largest of these counts in (1). In (2) the weights of its stages add up to 1 at most,
and the average is that of its first stage.

(2) is a sum over tables and a constant: each table takes its cheapest option, at a price for memory. Weights and
prices are raised and lowered as long as (2) rises; any of them are right. The box of the least (2) is cut in two at the
stage that (2) underrates most, again and again: no plan costs less than the least (2) of all boxes that are left. The
options found on the way, judged by (1), are what is packed.

Nouns
  head    pieces count that much larger than they are, in quarters: what packing needs to come out level. 4 in a bound

Legend: T tables, O options, S stages, R ranks. rank-ps: ps times R. Weights are whole numbers of 1 / ONE.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilerec.planner.search.bound import Kinds
from tilerec.planner.search.instance import Bools, Ints
from tilerec.planner.search.relaxed import NEVER, PRICE_BITS, Relaxed, Resource, least
from tilerec.planner.search.work import CALLS, Work

BITS = 5
ONE = 1 << BITS
CLIMBS = 8  # changes of all weights in a box
KEPT = 8  # choices of options that are kept
CLOSE = 2000  # boxes within 1 / CLOSE of each other count as equal


@dataclass(frozen=True, eq=False)
class Choice:
    """Options of all tables. Args: option: [T]. average: ps, of all stages, with charges. expected: ps, (1)."""

    option: Ints
    average: int
    expected: int


@dataclass(frozen=True, eq=False)
class _Box:
    """Args: allowed: [T, O]. charge: ps. low: [S] ps. weights: [S]. value: (2), rank-ps * ONE. option,
    expected: what is cheapest there, and (1) of it."""

    allowed: Bools
    charge: int
    low: Ints
    weights: Ints
    prices: tuple[int, ...]
    value: int
    option: Ints
    expected: int


class Boxes:
    """The boxes of an instance's options.

    Args:
        kinds: sets of charges; each begins as one box.
        memory: what options must stay within.
        usable: [T, O] options beside those that `kinds` leave out; None for all.
    """

    def __init__(
        self,
        relaxed: Relaxed,
        kinds: Sequence[Kinds],
        memory: Sequence[Resource],
        usable: Bools | None = None,
        head: int = 4,
    ) -> None:
        instance = self.instance = relaxed.instance
        self.memory, self.ranks = memory, instance.ranks
        self.rows = np.arange(instance.tables)
        stages = range(instance.stages)
        uniform, pieces = relaxed.uniform, relaxed.piece_times
        # Stages of a phase are all weighed against the average of its first.
        first = np.arange(instance.stages)
        for twins in instance.twins:
            first[twins] = twins[0]
        self.mass = [np.ascontiguousarray(relaxed.stage_totals[:, :, s]) for s in first.tolist()]
        self.own = [np.where(uniform, 0, pieces[s]) * head // 4 for s in stages]
        self.off = []  # rank-ps that an option makes every rank bear alike, more than the average
        for s in stages:
            alike = relaxed.least_home[:, :, s] + np.where(uniform, pieces[s], 0)
            self.off.append(alike * self.ranks - self.mass[s])
        self.mass_base, self.base_total = relaxed.base_totals[first], relaxed.base_total
        self.alike_base = instance.base_cost.min(0) * self.ranks
        self.all_mass = relaxed.sums << BITS
        self.each = 5 * CALLS + self.all_mass.size * (2 * instance.stages + 2)  # units of one evaluation
        self.found: list[Choice] = []
        self.count = 0
        self.boxes: list[tuple[int, int, _Box | Kinds]] = []
        for some in kinds:
            if usable is not None:
                some = Kinds(some.usable & usable, some.charge, some.dual)
            self._push(some.dual.value + self.base_total + some.charge * self.ranks << BITS, some)

    def _push(self, value: int, box: _Box | Kinds) -> None:
        heapq.heappush(self.boxes, (value, self.count, box))
        self.count += 1

    def search(self, upper: int, work: Work, dives: bool = False) -> int:
        """ps that no plan is below, as far as it is at most `upper`; `found` has options, the most promising first.

        A second call goes on where the first stopped. `dives`: for options rather than for the bound.
        """
        top = upper * self.ranks << BITS
        dive: _Box | None = None  # a box whose options are better than those it was cut from is cut next
        while self.boxes and self.boxes[0][0] < top and not work.over:
            box = self.boxes[0][2] if dive is None else dive
            cut = self._halves(box)
            if cut is None and dive is None:
                break  # (2) is (1) of its options, as near as weights come
            if cut is None:
                assert dive is not None
                self._push(dive.value, dive)
                dive = None
                continue
            if dive is None:
                heapq.heappop(self.boxes)
            before, dive = NEVER if isinstance(box, Kinds) else box.expected, None
            for start in cut:
                half = self._judged(start, work)
                if dives and half is not None and half.expected < before and half.value < top:
                    if dive is not None:
                        self._push(dive.value, dive)
                    before, dive = half.expected, half
                elif half is not None:
                    self._push(half.value, half)
            if dive is not None and (not self.boxes or work.over):
                self._push(dive.value, dive)
                dive = None
        if dive is not None:
            self._push(dive.value, dive)
        reached = self.boxes[0][0] if self.boxes else top
        return min(-(-reached // (self.ranks << BITS)), upper)

    def _halves(self, box: _Box | Kinds) -> list[_Box] | None:
        """What a box is cut into, not judged yet; None if it cannot be cut. A set of charges begins as one box."""
        if not isinstance(box, Kinds):
            return self._cut(box)
        if not box.usable.any(1).all():
            return []
        zero = np.zeros(len(self.own), np.int64)
        value = box.dual.value + self.base_total + box.charge * self.ranks << BITS
        low = self._tight(box.usable, zero)
        return [_Box(box.usable, box.charge, low, zero, box.dual.prices, value, self.rows, 0)]

    def _tight(self, allowed: Bools, low: Ints) -> Ints:
        """[S] no largest piece is below these: some table has none so small."""
        at_least = [
            int(np.where(allowed, own, NEVER).min(1, initial=NEVER).max(initial=0)) for own in self.own
        ]
        return np.maximum(low, at_least)

    def _judged(self, box: _Box, work: Work) -> _Box | None:
        """The box with the best weights and prices found; None if no plan is in it."""
        allowed, low, weights, prices = box.allowed, box.low, box.weights, box.prices
        total = self.all_mass.copy()
        for s in np.flatnonzero(weights).tolist():
            total += self.off[s] * int(weights[s])
        if self.memory:
            dual = least(np.where(allowed, total >> BITS, NEVER), self.memory, prices, sweeps=1)
            work.spend(self.each * len(self.memory))
            if dual.short >= 0:
                return None
            prices = dual.prices
        value, option = self._at(total, allowed, weights, low, prices)
        work.spend(self.each)
        step, rising = ONE // 2, self._rising(option, low)
        for turn in range(CLIMBS):
            # At first all weights go where (2) rises, later those only that matter.
            steep = np.abs(rising) * 64 > np.abs(rising).max() if turn > 1 else rising != 0
            new = np.clip(weights + np.where(steep, np.sign(rising) * step, 0), 0, ONE)
            for twins in self.instance.twins:
                # Together at most ONE: the steepest first.
                left = ONE
                for s in sorted(twins, key=lambda s: -int(rising[s])):
                    new[s] = min(int(new[s]), left)
                    left -= int(new[s])
            moved = np.flatnonzero(new != weights).tolist()
            if moved:
                then = total.copy()
                for s in moved:
                    then += self.off[s] * int(new[s] - weights[s])
                new_value, new_option = self._at(then, allowed, new, low, prices)
                work.spend(self.each)
                if new_value > value:
                    total, weights, value, option = then, new, new_value, new_option
                    rising = self._rising(option, low)
                    continue
            step //= 2
            if step == 0:
                break
        expected = self._keep(option)
        value += box.charge * self.ranks << BITS
        return _Box(allowed, box.charge, low, weights, prices, max(value, box.value), option, expected)

    def _at(
        self, total: Ints, allowed: Bools, weights: Ints, low: Ints, prices: tuple[int, ...]
    ) -> tuple[int, Ints]:
        """(2) and the options it chooses."""
        constant = (self.base_total << BITS) - int((self.mass_base * weights).sum())
        constant += int(((self.alike_base + low * self.ranks) * weights).sum())
        for resource, price in zip(self.memory, prices, strict=True):
            if price:
                total = total + ((price * resource.used >> PRICE_BITS) << BITS)
                constant -= ((price * resource.limit >> PRICE_BITS) + 1) << BITS
        total = np.where(allowed, total, NEVER << 1)
        option = total.argmin(1)
        return int(total[self.rows, option].sum()) + constant, option

    def _numbers(self, option: Ints) -> tuple[Ints, Ints, Ints]:
        """[S] averages and what all ranks bear alike, rank-ps, and largest pieces, ps."""
        at = self.rows * self.all_mass.shape[1] + option
        mass = np.array([int(m.ravel()[at].sum()) for m in self.mass], np.int64)
        off = np.array([int(m.ravel()[at].sum()) for m in self.off], np.int64)
        largest = np.array([int(own.ravel()[at].max(initial=0)) for own in self.own], np.int64)
        return mass + self.mass_base, mass + off + self.alike_base, largest

    def _rising(self, option: Ints, low: Ints) -> Ints:
        """[S] how (2) changes with the weights, at these options."""
        average, alike, _ = self._numbers(option)
        return alike + low * self.ranks - average

    def _keep(self, option: Ints) -> int:
        """(1) of these options, ps, which are kept if they are among the best."""
        average, alike, largest = self._numbers(option)
        used = self.instance.uses[self.rows, option].any(0)
        charge = int(self.instance.charge[used].sum())
        level = np.maximum(average, alike + largest * self.ranks)
        expected = int(self.instance.longest(level).sum()) // self.ranks + charge
        whole = int(average[self.instance.first].sum()) // self.ranks + charge
        if not any(np.array_equal(choice.option, option) for choice in self.found):
            self.found.append(Choice(option, whole, expected))
            self.found.sort(key=lambda choice: choice.expected)
            del self.found[KEPT:]
        return expected

    def _cut(self, box: _Box) -> list[_Box] | None:
        average, alike, largest = self._numbers(box.option)
        level = np.maximum(average, alike + largest * self.ranks)
        counted = (alike + box.low * self.ranks - average) * box.weights >> BITS
        for twins in self.instance.twins:
            counted[twins] = counted[twins].sum()
        missing = np.where(largest > box.low, level - average - counted, 0)
        s = int(missing.argmax())
        if int(missing[s]) * CLOSE <= int(self.instance.longest(level).sum()):
            return None
        # Between what costs nothing and what was chosen.
        free = max(int(box.low[s]), int(average[s] - alike[s]) // self.ranks)
        edge = min(max((free + int(largest[s])) // 2, int(box.low[s])), int(largest[s]) - 1)
        small = box.allowed & (self.own[s] <= edge)
        halves = []
        if small.any(1).all():
            halves.append(replace(box, allowed=small, low=self._tight(small, box.low)))
        above = self.own[s][box.allowed & (self.own[s] > edge)]
        raised = box.low.copy()
        raised[s] = int(above.min())  # the chosen one's is there
        halves.append(replace(box, low=raised))
        return halves
