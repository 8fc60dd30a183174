"""Uneven row splits of all tables at once: rows flow from ranks where they are dear to ranks where they are cheap.

Nouns
  share     the part of a table that a rank has; shares of a table add up to 1
  price     of a share: what more of it would add to the slowest ranks, by stage. Of each stage the ranks have weights,
            (load / largest load) ** 32 or so, that add up to 1: the smooth face of a maximum
  team      tables that are split over the same ranks. At first they are split alike, which takes far fewer shares
  flow      shares that are dearer than their table's average shrink, cheaper ones grow, all tables together; a step
            that does not lead down is taken back and the next one is shorter

Floats here are added in the order in which they lie, multiplied and compared one by one: every machine makes the same
shares, and whole numbers decide what they are worth.

Legend: S stages, M tiers, R ranks, H hosts, n shares, G tables that are split.
"""

from __future__ import annotations

import math
from copy import copy

import numpy as np
import numpy.typing as npt

from tilerec.planner.search.instance import (
    PER_MILLE,
    SHARE,
    Instance,
    Ints,
    Solution,
    at_home,
    evaluate,
    fits,
    parts_of,
    work_of,
)
from tilerec.planner.search.work import CALLS, Work

Floats = npt.NDArray[np.float64]

LEAST = 1e-6  # of a table: shares do not get smaller
FULL = 0.98  # of a cap: from here on memory has a price
FIRST, LAST = 0.5, 1e-6  # the largest and the smallest step, as a part of a share
GROW, SHRINK = 1.5, 0.5  # of a step that led down, and of one that did not
POWERS = (4, 5, 6)  # weights are loads to the power of 2 ** these, one after the other


def flow(instance: Instance, found: Solution, steps: int, work: Work) -> Solution:
    """`found` or a better one, whose divisible tables are split unevenly, after at most so many steps.

    A linear program would find the best shares; this comes close without one.
    """
    tables, places = ([], []) if work.over else _movable(instance, found)
    if not tables:
        return found
    flowing = _Flow(instance, found, tables, places)
    if not found.rows:
        alike = flowing.together()
        flowing.share = alike.run(steps, work)[alike.team]
    shares = np.split(flowing.run(steps, work), flowing.ends[:-1])
    rows = {**found.rows, **{t: _whole(own) for t, own in zip(tables, shares, strict=True)}}
    new = evaluate(instance, found.option, found.places, rows, found.bound)
    return new if new.cost < found.cost and fits(instance, new.memory) else found


def _movable(instance: Instance, found: Solution) -> tuple[list[int], list[Ints]]:
    every = np.arange(instance.tables)
    tables, places = [], []
    for t in np.flatnonzero(instance.divisible[every, found.option]).tolist():
        where = parts_of(instance, t, int(found.option[t]), found.places[t])
        if 1 < len(where) == len(np.unique(where)):
            tables.append(t)
            places.append(where)
    return tables, places


class _Flow:
    def __init__(self, instance: Instance, found: Solution, tables: list[int], places: list[Ints]) -> None:
        self.instance = instance
        counts = np.array([len(where) for where in places])
        self.ends = np.cumsum(counts)
        self.group = np.repeat(np.arange(len(tables)), counts)
        # Tables on the same ranks are a team; [n] the place of a share among those of its team.
        first: dict[bytes, int] = {}
        rows = [first.setdefault(where.tobytes(), t) for t, where in enumerate(places)]
        starts = self.ends - counts
        self.team = np.arange(len(self.group)) - np.repeat(starts - starts[rows], counts)
        self.rank = np.concatenate(places)
        option = found.option[tables]
        moving = instance.cost[tables, option] - instance.fixed[tables, option]
        whole = (moving * counts[:, None])[self.group]
        bytes_ = (instance.memory[tables, option] * counts[:, None])[self.group]
        own = [
            found.rows[t] / SHARE if t in found.rows else np.full(n, 1.0 / n)
            for t, n in zip(tables, counts.tolist(), strict=True)
        ]
        self.share = np.concatenate(own)
        work, memory = work_of(instance, found.option, found.places, found.rows)
        # A host's link: each of its ranks bears its part of what any of them puts there.
        self.sizes = instance.host_sizes[instance.host_of].astype(np.float64)
        slow = instance.slow / PER_MILLE
        # Stages in which shares take time; the loads of the others stay as they are.
        self.stages = np.flatnonzero(whole.any(0)).tolist()
        self.time = (whole * slow[self.rank])[:, self.stages]
        self.bytes = bytes_ / np.maximum(instance.cap[self.rank], 1)
        base = at_home(instance, work[-1])
        self.rest = base + work[:-1] * slow
        for s in np.flatnonzero(instance.shared).tolist():
            self.rest[:, s] = self._means(self.rest[:, s])
        self._still(self.rest)
        self.rest = (base + work[:-1] * slow)[:, self.stages] - self._sums(self.time * self.share[:, None])
        self.held = memory / np.maximum(instance.cap, 1) - self._sums(self.bytes * self.share[:, None])
        self.tiers = np.flatnonzero(self.bytes.any(0)).tolist()
        self.each = self._units()

    def _still(self, load: Floats) -> None:
        """What shares do not change, of [R, S] loads.

        floor: by moving stage, [R] what a rank takes in the other stages of its phase. still: ps of phases that have
        no moving stage.
        """
        moving = set(self.stages)
        phases = [twins for twins in self.instance.twins if moving & set(twins)]
        self.floor = {
            s: load[:, [other for other in twins if other not in moving]].max(1, initial=0.0)
            for twins in phases
            for s in moving & set(twins)
        }
        top = load.max(0)
        top[[*self.stages, *(s for twins in phases for s in twins)]] = 0.0
        self.still = float(np.cumsum(self.instance.longest(top))[-1])

    def _units(self) -> int:
        """Units of a step."""
        ours = self.instance
        return 10 * CALLS + (len(self.share) + ours.ranks) * 15 * (len(self.stages) + ours.tiers)

    def together(self) -> _Flow:
        """The same with one table in place of all those on the same ranks."""
        one = copy(self)
        own, place = np.unique(self.team, return_inverse=True)
        one.rank, one.group, one.share = self.rank[own], self.group[own], self.share[own]
        one.group = np.unique(one.group, return_inverse=True)[1]
        one.time, one.bytes = (
            np.zeros((len(own), self.time.shape[1])),
            np.zeros((len(own), self.bytes.shape[1])),
        )
        np.add.at(one.time, place, self.time)
        np.add.at(one.bytes, place, self.bytes)
        one.team = place
        one.each = one._units()
        return one

    def _sums(self, values: Floats) -> Floats:
        """[R, ·] of [n, ·], added up in their order."""
        ranks, columns = self.instance.ranks, values.shape[1]
        at = self.rank[:, None] * columns + np.arange(columns)
        sums: Floats = np.bincount(at.ravel(), values.ravel(), ranks * columns).astype(np.float64)
        return sums.reshape(ranks, columns)

    def _means(self, values: Floats) -> Floats:
        """[R] of [R]: the mean of a rank's host."""
        host = self.instance.host_of
        mean: Floats = np.bincount(host, values)[host] / self.sizes
        return mean

    def run(self, steps: int, work: Work) -> Floats:
        steps = min(steps, work.left // self.each)
        best, kept = np.inf, self.share
        share, step = self.share, FIRST
        for power in POWERS:
            true, smooth, price = self._judged(share, power)
            for _ in range(steps // len(POWERS)):
                if true < best:
                    best, kept = true, share
                new = self._moved(share, price, step)
                if new is None:
                    break  # all prices are alike
                work.spend(self.each)
                then_true, then, then_price = self._judged(new, power)
                if then < smooth:
                    share, true, smooth, price = new, then_true, then, then_price
                    step = min(step * GROW, FIRST)
                else:
                    step *= SHRINK
                    if step < LAST:
                        break
            step = max(step, LAST * 16)
            if true < best:
                best, kept = true, share
        return kept

    def _moved(self, share: Floats, price: Floats, step: float) -> Floats | None:
        """[n] shares after one step against their prices; None where all prices are alike."""
        mean = np.bincount(self.group, price * share)
        off = price - mean[self.group]
        # Dear tables set the pace: others' steps are as much smaller as their prices are.
        pace = np.bincount(self.group, np.abs(off) * share)
        scale = float(np.cumsum(pace)[-1]) / len(pace)
        if scale <= 0.0:
            return None
        new = np.maximum(share * (1.0 - np.clip(off * (step / scale), -0.5, 0.5)), LEAST)
        moved: Floats = new / np.bincount(self.group, new)[self.group]
        over = np.any(self.held + self._sums(self.bytes * moved[:, None]) > 1.0, 1)
        if over.any():
            # A table with a share on a rank beyond its cap stays as it is.
            stays = np.bincount(self.group, over.take(self.rank))[self.group]
            moved = np.where(stays > 0, share, moved)
        return moved

    def _judged(self, share: Floats, power: int) -> tuple[float, float, Floats]:
        """The objective (infinite beyond a cap), its smooth face, and the [n] prices of shares."""
        instance = self.instance
        load = self.rest + self._sums(self.time * share[:, None])
        held = self.held + self._sums(self.bytes * share[:, None])
        true, smooth, price = self.still, 0.0, np.zeros(len(share))
        for column, s in enumerate(self.stages):
            own = self._means(load[:, column]) if instance.shared[s] else load[:, column]
            floor = self.floor.get(s)
            own = own if floor is None else np.maximum(own, floor)
            top = float(own.max())
            true += top
            if top > 0.0:
                y = own / top
                for _ in range(power):
                    y = y * y
                total = float(np.cumsum(y)[-1])
                weight = y / total
                total /= len(y)
                for _ in range(power):
                    total = math.sqrt(total)
                smooth += top * total
                weight = weight if floor is None else np.where(own > floor, weight, 0.0)
                if instance.shared[s]:
                    weight = self._means(weight)
                price += weight[self.rank] * self.time[:, column]
        full = float(held[:, self.tiers].max()) if self.tiers else 0.0
        if full > FULL:
            for m in self.tiers:
                y = np.maximum((held[:, m] - FULL) / (1.0 - FULL), 0.0)
                smooth += float(np.cumsum(y * y)[-1]) * true * 0.01
                price += (y * (0.02 * true / (1.0 - FULL)))[self.rank] * self.bytes[:, m]
        return true if full <= 1.0 else math.inf, smooth, price


def _whole(share: Floats) -> Ints:
    """Shares in units of 1 / SHARE; what rounding leaves goes to the largest."""
    units = np.floor(share * SHARE).astype(np.int64)
    units[int(units.argmax())] += SHARE - int(units.sum())
    return units
