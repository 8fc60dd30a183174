"""Enumeration of every arrangement of few tables on few ranks: the optimum, or a proof that no plan exists.

    Input    an instance with at most 7 tables on 4 ranks (solve.py), and the cost of a known plan
    Changes  batches of parts, which grow by one table at a time, depth first
    Keeps    every arrangement below the best known cost extends some part that has not been dropped
    Stops    when all parts are judged or dropped, or after a number of steps
    Cost     one step per part; W ** T parts at worst, if nothing is dropped

A part is dropped if its cost plus the least cost of the remaining tables is not below the best known cost, or if it
exceeds a memory cap. All rows are split evenly here.

Nouns
  way   one option of a table, with the places of its pieces
  part  a way for each of the first tables, with the loads that follow
  rest  least cost, work and bytes of the tables that a part does not contain yet

Legend: T tables, W ways of a table, N parts, R ranks, S stages, M tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tilerec.planner.search.instance import PER_MILLE, Ints, at_home
from tilerec.planner.search.relaxed import NEVER, Relaxed, least, price_of_limits, with_prices

PARTS_PER_BATCH = 4096  # parts that grow together
PARTS_PER_DESCENT = 512  # most promising parts of a batch that grow by the next table before the others do
MOST_CHARGES = 10  # fixed charges of an instance that can be enumerated


@dataclass(frozen=True, eq=False)
class Ways:
    """The ways of one table.

    Args:
        option: [W]. places: W tuples of ranks or hosts.
        work: [W, R + 1, S] ps of each rank; the last row is the work at home. memory: [W, R, M] bytes.
        charges: [W] the fixed charges in use, as bits.
    """

    option: Ints
    places: list[tuple[int, ...]]
    work: Ints
    memory: Ints
    charges: Ints


def ways_of(relaxed: Relaxed, table: int, at_most: int) -> Ways | None:
    """Return all ways of a table, or None if there are more than `at_most`."""
    instance = relaxed.instance
    options, work, memory, bits = [], [], [], []
    places: list[tuple[int, ...]] = []
    for o in np.flatnonzero(relaxed.usable[table]).tolist():
        width, pieces = int(instance.width[table, o]), int(instance.pieces[table, o])
        where: list[tuple[int, ...]] = [()]
        ranks_of = [np.arange(instance.ranks)]
        if not instance.everywhere(width):
            if width == 1:
                ranks_of = [np.array([r]) for r in range(instance.ranks)]
                bins = list(range(instance.ranks))
            else:
                ranks_of = list(instance.host_ranks)
                bins = np.flatnonzero(instance.host_sizes == width).tolist()
            if instance.allowed is not None:
                bins = [b for b in bins if instance.allowed[table, ranks_of[b]].all()]
            repeat, once = divmod(pieces, len(bins))
            where = [tuple(sorted([*bins * repeat, *more])) for more in combinations(bins, once)]
        if len(places) + len(where) > at_most:
            return None
        for place in where:
            w = np.zeros((instance.ranks + 1, instance.stages), np.int64)
            w[-1] = instance.home[table, o]
            b = np.zeros((instance.ranks, instance.tiers), np.int64)
            b += instance.home_memory[table, o]
            for i in place or (0,):
                w[ranks_of[i]] += instance.cost[table, o]
                b[ranks_of[i]] += instance.memory[table, o]
            options.append(o)
            places.append(place)
            work.append(w)
            memory.append(b)
            bits.append(sum(1 << f for f in np.flatnonzero(instance.uses[table, o]).tolist()))
    return Ways(np.array(options), places, np.stack(work), np.stack(memory), np.array(bits, np.int64))


def enumerate_all(relaxed: Relaxed, below: int, steps: int, ways_at_most: int = 400) -> Enumeration | None:
    """Return the best arrangement that costs less than `below` ps.

    Args:
        steps: most parts to judge.
        ways_at_most: None is returned if a table has more ways.
    """
    if len(relaxed.instance.charge) > MOST_CHARGES:
        return None
    ways = []
    for t in range(relaxed.instance.tables):
        some = ways_of(relaxed, t, ways_at_most)
        if some is None:
            return None
        ways.append(some)
    found = Enumeration(relaxed, ways, below, steps)
    found.grow()
    return found


class Enumeration:
    """The growing parts, and the best arrangement below a known cost.

    option, places: the arrangement; `option` is None if none was found. cost: ps. complete: every arrangement was
    judged, or proved to be no better. left: remaining steps.
    """

    def __init__(self, relaxed: Relaxed, ways: list[Ways], below: int, steps: int) -> None:
        self.relaxed, self.instance = relaxed, relaxed.instance
        # The largest tables come first, so that hopeless parts are dropped early.
        size = [int(w.work.sum((1, 2)).max()) for w in ways]
        self.order = sorted(range(len(ways)), key=lambda t: (-size[t], t))
        self.ways = [ways[t] for t in self.order]
        self.cost, self.left = below, steps
        self.option: Ints | None = None
        self.places: list[tuple[int, ...]] = []
        self.complete = False
        charge = self.instance.charge.tolist()
        self.charge = np.array(
            [sum(c for f, c in enumerate(charge) if b >> f & 1) for b in range(1 << len(charge))], np.int64
        )
        self._rests()

    def _rests(self) -> None:
        """Compute the total of each way, with and without memory prices, and the rest at each depth."""
        relaxed, instance = self.relaxed, self.instance
        dual = least(relaxed.totals, relaxed.memory)
        paid = with_prices(relaxed.totals, relaxed.memory, dual.prices)
        self.gone = price_of_limits(relaxed.memory, dual.prices)
        self.plain, self.priced, homes = (
            [x[t, w.option] for t, w in zip(self.order, self.ways, strict=True)]
            for x in (relaxed.totals, paid, instance.home)
        )
        bytes_ = [w.memory.sum(1) for w in self.ways]
        self.rest = []
        for d in range(len(self.ways) + 1):
            self.rest.append(
                (
                    sum(int(p.min()) for p in self.plain[d:]),
                    sum(int(p.min()) for p in self.priced[d:]),
                    sum((h.min(0) for h in homes[d:]), np.zeros(instance.stages, np.int64)),
                    sum((b.min(0) for b in bytes_[d:]), np.zeros(instance.tiers, np.int64)),
                )
            )

    def grow(self) -> None:
        """Judge all arrangements, or as many as the steps allow."""
        instance = self.instance
        work = np.zeros((1, instance.ranks + 1, instance.stages), np.int64)
        memory = instance.base_memory[None].copy()
        none = np.zeros((1, 2), np.int64)
        self.complete = self._grow(0, work, memory, none[:, 0], none, none[:, :0])

    def _grow(self, depth: int, work: Ints, memory: Ints, bits: Ints, sums: Ints, chosen: Ints) -> bool:
        """Grow N parts by all remaining tables; return False if the steps did not suffice.

        Args:
            depth: number of tables in the parts. work: [N, R + 1, S]. memory: [N, R, M]. bits: [N] charges.
            sums: [N, 2] totals in rank-ps, without and with memory prices. chosen: [N, depth] ways.
        """
        if depth == len(self.ways):
            cost = self._costs(work).sum(1) + self.charge[bits]
            i = int(cost.argmin())
            if cost[i] < self.cost:
                self.cost = int(cost[i])
                self._keep(chosen[i])
            return True
        ways = self.ways[depth]
        count = len(ways.option)
        for start in range(0, len(work), max(PARTS_PER_BATCH // count, 1)):
            part = slice(start, start + max(PARTS_PER_BATCH // count, 1))
            n = len(work[part])
            if self.left < n * count:
                self.left = 0
                return False
            self.left -= n * count
            new_memory = (memory[part, None] + ways.memory[None]).reshape(n * count, *memory.shape[1:])
            keep = (new_memory <= self.instance.cap).all((1, 2))
            rest_plain, rest_priced, rest_home, rest_bytes = self.rest[depth + 1]
            free = np.minimum(self.relaxed.limits, NEVER) - (new_memory - self.instance.base_memory).sum(1)
            keep &= (free >= rest_bytes).all(1)
            if self.instance.capped:
                together = np.zeros((n * count, *self.instance.host_cap.shape), np.int64)
                for r, h in enumerate(self.instance.host_of.tolist()):
                    together[:, h] += new_memory[:, r]
                keep &= (together <= self.instance.host_cap).all((1, 2))
            new_work = (work[part, None] + ways.work[None]).reshape(n * count, *work.shape[1:])
            new_bits = (bits[part, None] | ways.charges[None]).reshape(-1)
            step = np.stack([self.plain[depth], self.priced[depth]], 1)
            new_sums = (sums[part, None] + step[None]).reshape(-1, 2)
            charge = self.charge[new_bits]
            ranks = self.instance.ranks
            base = self.relaxed.base_total
            at_least = new_work.copy()
            at_least[:, -1] += rest_home
            floor = self._costs(at_least).sum(1) + charge
            floor = np.maximum(floor, (new_sums[:, 0] + rest_plain + base + ranks - 1) // ranks + charge)
            floor = np.maximum(floor, (new_sums[:, 1] + rest_priced + base - self.gone + ranks - 1) // ranks + charge)
            keep &= floor < self.cost
            index = np.flatnonzero(keep)
            if not len(index):
                continue
            index = index[np.argsort(floor[index], kind="stable")]
            grown = np.concatenate([chosen[part].repeat(count, 0), np.tile(np.arange(count), n)[:, None]], 1)
            for first in range(0, len(index), PARTS_PER_DESCENT):
                some = index[first : first + PARTS_PER_DESCENT]
                some = some[floor[some] < self.cost]
                if len(some) and not self._grow(
                    depth + 1, new_work[some], new_memory[some], new_bits[some], new_sums[some], grown[some]
                ):
                    return False
        return True

    def _costs(self, work: Ints) -> Ints:
        """Return [N, S] ps of the slowest rank in each stage, of [N, R + 1, S] work."""
        instance = self.instance
        load = at_home(instance, work[:, -1]) + -(-work[:, :-1] * instance.slow // PER_MILLE)
        for s in np.flatnonzero(instance.shared).tolist():
            for ranks in instance.host_ranks:
                load[:, ranks, s] = -(-load[:, ranks, s].sum(1, keepdims=True) // len(ranks))
        found: Ints = self.instance.longest(load.max(1))
        return found

    def _keep(self, chosen: Ints) -> None:
        """Record the arrangement of these ways [T] as the best one."""
        tables = len(self.ways)
        self.option = np.zeros(tables, np.int64)
        places: list[tuple[int, ...]] = [()] * tables
        for t, ways, i in zip(self.order, self.ways, chosen.tolist(), strict=True):
            self.option[t] = ways.option[i]
            places[t] = ways.places[i]
        self.places = places
