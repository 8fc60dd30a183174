"""Gradient descent on the row shares of all tables at once: rows move from slow ranks to fast ones.

    Input    a solution, some of whose tables are split by rows
    Changes  the shares of their rows; options and places stay
    Keeps    the shares of a table add up to 1, and no rank exceeds its memory
    Stops    after a number of steps, when all prices are equal, or when steps have become too short
    Cost     about 15 operations per step for each share and each rank, in each stage

A linear program would find the best shares. This comes close, without a solver. In each step, the shares whose price is
above the mean price of their table shrink, and the others grow. A step that does not lower the objective is undone, and
the next one is shorter.

Nouns
  share      the part of a table's rows on a rank
  objective  the sum over stages of the slowest rank's load. The smooth objective has a p-norm over ranks in its place
  price      of a share: the derivative of the smooth objective. Each rank has a weight of about
             (load / largest load) ** p in each stage, and the weights of a stage add up to 1
  team       tables that are split over the same ranks. At first they have equal shares, so there are far fewer shares

Floats are added in a fixed order, and otherwise multiplied and compared one by one. So every machine computes the same
shares, and the cost of the result is computed with whole numbers.

Legend: S stages, M tiers, R ranks, H hosts, n shares, G tables that are split.
"""

from __future__ import annotations

import math
from copy import copy

import numpy as np

from tilerec.planner.search.instance import (
    PER_MILLE,
    SHARE,
    Floats,
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

LEAST_SHARE = 1e-6
FULL_PART = 0.98  # memory has a price above this part of a cap
LONGEST_STEP, SHORTEST_STEP = 0.5, 1e-6  # relative changes of a share
STEP_GROWTH, STEP_SHRINKAGE = 1.5, 0.5  # factors on the next step, after a step that helped and after others
POWERS = (4, 5, 6)  # the norms are 2 ** POWERS, one after the other


def flow(instance: Instance, found: Solution, steps: int, work: Work) -> Solution:
    """Return `found`, or a cheaper solution in which divisible tables have uneven shares.

    Args:
        steps: most steps; once for teams, and once for single tables.
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
    """Return the divisible tables whose shares are on distinct ranks, and these ranks."""
    every = np.arange(instance.tables)
    tables, places = [], []
    for t in np.flatnonzero(instance.divisible[every, found.option]).tolist():
        where = parts_of(instance, t, int(found.option[t]), found.places[t])
        if 1 < len(where) == len(np.unique(where)):
            tables.append(t)
            places.append(where)
    return tables, places


class _Flow:
    """Shares [n] of some tables, and the loads that follow.

    rank, group: [n] rank and table of each share. team: [n] index of the share in its team. time: [n, moving stages]
    ps, bytes: [n, M] parts of caps, of the whole table on that rank. rest: [R, moving stages] ps and held: [R, M] parts
    of caps without the shares. stages: the moving ones, in which shares take time.
    """

    def __init__(self, instance: Instance, found: Solution, tables: list[int], places: list[Ints]) -> None:
        self.instance = instance
        counts = np.array([len(where) for where in places])
        self.ends = np.cumsum(counts)
        self.group = np.repeat(np.arange(len(tables)), counts)
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
        self.sizes = instance.host_sizes[instance.host_of].astype(np.float64)
        slow = instance.slow / PER_MILLE
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
        """Compute the parts of [R, S] loads that shares do not change.

        floor: by moving stage, [R] ps of the other stages of its phase. still: ps of the phases without a moving stage.
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
        """Return the units of work of a step."""
        ours = self.instance
        return 10 * CALLS + (len(self.share) + ours.ranks) * 15 * (len(self.stages) + ours.tiers)

    def together(self) -> _Flow:
        """Return a flow with one table in place of each team."""
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
        """Return [R, ·] sums of [n, ·] over the shares of each rank, in their order."""
        ranks, columns = self.instance.ranks, values.shape[1]
        at = self.rank[:, None] * columns + np.arange(columns)
        sums: Floats = np.bincount(at.ravel(), values.ravel(), ranks * columns).astype(np.float64)
        return sums.reshape(ranks, columns)

    def _means(self, values: Floats) -> Floats:
        """Return [R] the mean over the ranks of each rank's host."""
        host = self.instance.host_of
        mean: Floats = np.bincount(host, values)[host] / self.sizes
        return mean

    def run(self, steps: int, work: Work) -> Floats:
        """Return [n] the best shares after at most so many steps."""
        steps = min(steps, work.left // self.each)
        best, kept = np.inf, self.share
        share, step = self.share, LONGEST_STEP
        for power in POWERS:
            true, smooth, price = self._judged(share, power)
            for _ in range(steps // len(POWERS)):
                if true < best:
                    best, kept = true, share
                new = self._moved(share, price, step)
                if new is None:
                    break  # all prices are equal
                work.spend(self.each)
                then_true, then, then_price = self._judged(new, power)
                if then < smooth:
                    share, true, smooth, price = new, then_true, then, then_price
                    step = min(step * STEP_GROWTH, LONGEST_STEP)
                else:
                    step *= STEP_SHRINKAGE
                    if step < SHORTEST_STEP:
                        break
            step = max(step, SHORTEST_STEP * 16)
            if true < best:
                best, kept = true, share
        return kept

    def _moved(self, share: Floats, price: Floats, step: float) -> Floats | None:
        """Return [n] shares after one step against their prices; None if all prices are equal."""
        mean = np.bincount(self.group, price * share)
        off = price - mean[self.group]
        # The step of a table is proportional to the spread of its prices.
        pace = np.bincount(self.group, np.abs(off) * share)
        scale = float(np.cumsum(pace)[-1]) / len(pace)
        if scale <= 0.0:
            return None
        new = np.maximum(share * (1.0 - np.clip(off * (step / scale), -0.5, 0.5)), LEAST_SHARE)
        moved: Floats = new / np.bincount(self.group, new)[self.group]
        over = np.any(self.held + self._sums(self.bytes * moved[:, None]) > 1.0, 1)
        if over.any():
            # A table with a share on a rank that would exceed its cap keeps its shares.
            stays = np.bincount(self.group, over.take(self.rank))[self.group]
            moved = np.where(stays > 0, share, moved)
        return moved

    def _judged(self, share: Floats, power: int) -> tuple[float, float, Floats]:
        """Return the objective (infinite beyond a cap), the smooth objective, and [n] the prices of shares."""
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
        if full > FULL_PART:
            for m in self.tiers:
                y = np.maximum((held[:, m] - FULL_PART) / (1.0 - FULL_PART), 0.0)
                smooth += float(np.cumsum(y * y)[-1]) * true * 0.01
                price += (y * (0.02 * true / (1.0 - FULL_PART)))[self.rank] * self.bytes[:, m]
        return true if full <= 1.0 else math.inf, smooth, price


def _whole(share: Floats) -> Ints:
    """Return shares in units of 1 / SHARE; the largest one takes the rounding error."""
    units = np.floor(share * SHARE).astype(np.int64)
    units[int(units.argmax())] += SHARE - int(units.sum())
    return units
