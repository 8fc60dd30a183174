"""Branch and bound over the options of all tables: a lower bound on the cost, and the options that promise most.

    Input    sets of charges with the options that they allow (bound.py), each one a first box
    Changes  a priority queue of boxes
    Keeps    every plan's options lie in some box of the queue, or cost at least as much as a known plan
    Stops    when the least value of all boxes reaches a given cost, when the best box cannot be cut, or when the work
             is spent
    Cost     2 S + 2 operations per option and table, for each of up to CLIMBS evaluations of a box

Three numbers of each stage follow from the options of a plan, without its places: the average over ranks, the load that
all ranks have in common, and the largest piece, which some rank bears in addition to it. Therefore

    cost >= sum over s of max(average_s, common_s + largest_s)  +  charges                                      (1)

A box limits the largest pieces: low_s <= largest_s <= high_s. It allows the options whose pieces are at most high_s.
For any weights 0 <= w_s <= 1, the right side of (1) is at least

    sum over s of (1 - w_s) average_s + w_s (common_s + low_s)                                                  (2)

In a phase with several stages, the largest one counts in (1). In (2), the weights of its stages add up to at most 1,
and the average is that of its first stage.

(2) is a sum over tables, plus a constant. Its minimum is the cheapest option of each table, at a price for memory. Any
weights and any prices >= 0 give a valid bound; they are changed as long as (2) rises. The box with the least (2) is cut
into two, at the stage where (2) falls furthest below (1). No plan costs less than the least (2) of all boxes. `found`
keeps the options of the boxes with the least (1), which `solve` packs.

Legend: T tables, O options, S stages, R ranks. rank-ps: ps times R. Weights are whole multiples of 1 / ONE.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tilerec.planner.search.bound import Kinds
from tilerec.planner.search.instance import Bools, Ints
from tilerec.planner.search.relaxed import NEVER, PRICE_BITS, Relaxed, Resource, least
from tilerec.planner.search.work import CALLS, Work

WEIGHT_BITS = 5
ONE = 1 << WEIGHT_BITS  # the weight 1
CLIMBS = 8  # changes of the weights of a box
CHOICES_KEPT = 8  # choices of options that are kept
CUT_PART = 2000  # a box is not cut if (2) is within 1 / CUT_PART of (1)


@dataclass(frozen=True, eq=False)
class Choice:
    """The options of all tables.

    Args:
        option: [T]. average: ps, the sum over stages of the average over ranks, plus charges.
        expected: ps of (1).
    """

    option: Ints
    average: int
    expected: int


class _Numbers(NamedTuple):
    """The numbers of one option per table: [S] averages and common loads in rank-ps, [S] largest pieces in ps."""

    average: Ints
    alike: Ints
    largest: Ints


@dataclass(frozen=True, eq=False)
class _Box:
    """A box with the best weights and prices found.

    Args:
        allowed: [T, O] options in the box. charge: ps of its fixed charges. low: [S] ps, least largest piece.
        weights: [S] in 1 / ONE. prices: of memory, in 1 / 2 ** PRICE_BITS.
        value: (2) in rank-ps * ONE. option: [T] options of (2). numbers: those of `option`. expected: (1) of `option`,
            in ps.
    """

    allowed: Bools
    charge: int
    low: Ints
    weights: Ints
    prices: tuple[int, ...]
    value: int
    option: Ints
    numbers: _Numbers | None
    expected: int


class Boxes:
    """The boxes of an instance's options. `found`: the choices of the least (1) so far, the best one first.

    Args:
        kinds: sets of charges; each one is a first box.
        memory: limits on the options' bytes.
    """

    def __init__(self, relaxed: Relaxed, kinds: Sequence[Kinds], memory: Sequence[Resource]) -> None:
        instance = self.instance = relaxed.instance
        self.memory, self.ranks = memory, instance.ranks
        self.rows = np.arange(instance.tables)
        stages = range(instance.stages)
        uniform, pieces = relaxed.uniform, relaxed.piece_times
        # The stages of a phase are compared with the average of its first stage.
        first = np.arange(instance.stages)
        for twins in instance.twins:
            first[twins] = twins[0]
        self.first, self.stage_totals = first, relaxed.stage_totals
        # [O, T] ps of a piece that some ranks hold: minima over O need a third of the time of those over [T, O].
        by_option = np.ascontiguousarray(uniform.T)
        self.own_by_option = [np.where(by_option, 0, pieces[s].T) for s in stages]
        self.off = []  # [T, O] rank-ps of an option that all ranks have in common, beyond its average
        for s in stages:
            alike = relaxed.least_home[:, :, s] + np.where(uniform, pieces[s], 0)
            alike *= self.ranks
            alike -= self.stage_totals[:, :, first[s]]
            self.off.append(np.ascontiguousarray(alike))
        self.mass_base, self.base_total = relaxed.base_totals[first], relaxed.base_total
        self.alike_base = instance.base_cost.min(0) * self.ranks
        self.all_mass = relaxed.sums << WEIGHT_BITS
        self.each = 5 * CALLS + self.all_mass.size * (2 * instance.stages + 2)  # units of one evaluation
        self.found: list[Choice] = []
        self.count = 0
        self.boxes: list[tuple[int, int, _Box | Kinds]] = []
        for some in kinds:
            self._push(some.dual.value + self.base_total + some.charge * self.ranks << WEIGHT_BITS, some)

    def _push(self, value: int, box: _Box | Kinds) -> None:
        heapq.heappush(self.boxes, (value, self.count, box))
        self.count += 1

    def search(self, upper: int, work: Work, dives: bool = False) -> int:
        """Return a lower bound in ps on the cost of every plan, at most `upper`. A second call continues the first.

        Args:
            upper: ps of a known plan.
            dives: search for options rather than for the bound: after a cut, go on with a half that promises more.
        """
        top = upper * self.ranks << WEIGHT_BITS
        dive: _Box | None = None  # the box to cut next, if not the one of least value
        while self.boxes and self.boxes[0][0] < top and not work.over:
            box = self.boxes[0][2] if dive is None else dive
            cut = self._halves(box)
            if cut is None and dive is None:
                break  # (2) is close to (1) for its options, so a cut would not raise it
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
        return min(-(-reached // (self.ranks << WEIGHT_BITS)), upper)

    def _halves(self, box: _Box | Kinds) -> list[_Box] | None:
        """Return the halves of a box, without weights, or the first box of a set of charges; None if it stays whole."""
        if not isinstance(box, Kinds):
            return self._cut(box)
        if not box.usable.any(1).all():
            return []
        zero = np.zeros(len(self.off), np.int64)
        value = box.dual.value + self.base_total + box.charge * self.ranks << WEIGHT_BITS
        low = self._tight(box.usable, zero)
        return [_Box(box.usable, box.charge, low, zero, box.dual.prices, value, self.rows, None, 0)]

    def _tight(self, allowed: Bools, low: Ints) -> Ints:
        """Return [S] ps, raised to the smallest piece of the table whose smallest piece is largest."""
        there = np.ascontiguousarray(allowed.T)
        smallest = (np.where(there, own, NEVER).min(0, initial=NEVER) for own in self.own_by_option)
        return np.maximum(low, [int(own.max(initial=0)) for own in smallest])

    def _judged(self, box: _Box, work: Work) -> _Box | None:
        """Return the box with the best weights and prices found; None if none of its options fit into memory."""
        allowed, low, weights, prices = box.allowed, box.low, box.weights, box.prices
        total = self.all_mass.copy()
        for s in np.flatnonzero(weights).tolist():
            total += self.off[s] * int(weights[s])
        if self.memory:
            dual = least(np.where(allowed, total >> WEIGHT_BITS, NEVER), self.memory, prices, sweeps=1)
            work.spend(self.each * len(self.memory))
            if dual.short >= 0:
                return None
            prices = dual.prices
        value, option = self._at(total, allowed, weights, low, prices)
        work.spend(self.each)
        step, rising = ONE // 2, self._rising(option, low)
        for turn in range(CLIMBS):
            # At first all weights change in the direction in which (2) rises, later only the most effective ones.
            steep = np.abs(rising) * 64 > np.abs(rising).max() if turn > 1 else rising != 0
            new = np.clip(weights + np.where(steep, np.sign(rising) * step, 0), 0, ONE)
            for twins in self.instance.twins:
                # Weights of a phase add up to at most ONE; the most effective ones come first.
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
        numbers = self._numbers(option)
        expected = self._keep(option, numbers)
        value += box.charge * self.ranks << WEIGHT_BITS
        return _Box(allowed, box.charge, low, weights, prices, max(value, box.value), option, numbers, expected)

    def _at(self, total: Ints, allowed: Bools, weights: Ints, low: Ints, prices: tuple[int, ...]) -> tuple[int, Ints]:
        """Return (2) in rank-ps * ONE, and its options [T]."""
        constant = (self.base_total << WEIGHT_BITS) - int((self.mass_base * weights).sum())
        constant += int(((self.alike_base + low * self.ranks) * weights).sum())
        for resource, price in zip(self.memory, prices, strict=True):
            if price:
                total = total + ((price * resource.used >> PRICE_BITS) << WEIGHT_BITS)
                constant -= ((price * resource.limit >> PRICE_BITS) + 1) << WEIGHT_BITS
        total = np.where(allowed, total, NEVER << 1)
        option = total.argmin(1)
        return int(total.take(self._at_options(option)).sum()) + constant, option

    def _numbers(self, option: Ints) -> _Numbers:
        """Return the numbers of one option per table."""
        at, by_option = self._at_options(option), option * len(self.rows) + self.rows
        mass = self.stage_totals[self.rows, option].sum(0)[self.first]
        off = np.array([int(m.take(at).sum()) for m in self.off], np.int64)
        largest = np.array([int(own.take(by_option).max(initial=0)) for own in self.own_by_option], np.int64)
        return _Numbers(mass + self.mass_base, mass + off + self.alike_base, largest)

    def _rising(self, option: Ints, low: Ints) -> Ints:
        """Return [S] rank-ps: the derivative of (2) by the weights, at these options."""
        at = self._at_options(option)
        off = np.array([int(m.take(at).sum()) for m in self.off], np.int64)
        return off + self.alike_base + low * self.ranks - self.mass_base

    def _at_options(self, option: Ints) -> Ints:
        """Return [T] positions of options in a flat [T, O] array."""
        return self.rows * self.all_mass.shape[1] + option

    def _keep(self, option: Ints, numbers: _Numbers) -> int:
        """Return (1) of these options in ps, and keep them in `found` if they are among the best."""
        average, alike, largest = numbers
        charge = self.instance.charge_of(option)
        level = np.maximum(average, alike + largest * self.ranks)
        expected = int(self.instance.longest(level).sum()) // self.ranks + charge
        whole = int(average[self.instance.first].sum()) // self.ranks + charge
        if not any(np.array_equal(choice.option, option) for choice in self.found):
            self.found.append(Choice(option, whole, expected))
            self.found.sort(key=lambda choice: choice.expected)
            del self.found[CHOICES_KEPT:]
        return expected

    def _cut(self, box: _Box) -> list[_Box] | None:
        """Return the halves of a box: one with smaller pieces in one stage, one in which a larger piece exists."""
        average, alike, largest = self._numbers(box.option) if box.numbers is None else box.numbers
        level = np.maximum(average, alike + largest * self.ranks)
        counted = (alike + box.low * self.ranks - average) * box.weights >> WEIGHT_BITS
        for twins in self.instance.twins:
            counted[twins] = counted[twins].sum()
        missing = np.where(largest > box.low, level - average - counted, 0)
        s = int(missing.argmax())
        if int(missing[s]) * CUT_PART <= int(self.instance.longest(level).sum()):
            return None
        # The edge is half way between the largest piece that costs nothing and that of the present options.
        free = max(int(box.low[s]), int(average[s] - alike[s]) // self.ranks)
        edge = min(max((free + int(largest[s])) // 2, int(box.low[s])), int(largest[s]) - 1)
        own = self.own_by_option[s].T
        small = box.allowed & (own <= edge)
        halves = []
        if small.any(1).all():
            halves.append(replace(box, allowed=small, low=self._tight(small, box.low)))
        above = own[box.allowed & (own > edge)]
        raised = box.low.copy()
        raised[s] = int(above.min())  # not empty: the largest piece of the present options is above
        halves.append(replace(box, low=raised))
        return halves
