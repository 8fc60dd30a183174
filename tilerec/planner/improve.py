"""Exchanging pieces between pairs of ranks, all pairs at once, until loads are level.

Nouns
  pair      a rank that bears much of something and one that bears little of it
  swap      a piece of either against a piece of the other; one of the two may be nothing, then it is a move
  potential what a swap has to lower: sum over stages of level * (load / level) ** p, over the ranks of the pair.
            With the largest loads as levels and p = 8, 16, 32 it comes ever closer to the objective

Only numbers that float64 holds exactly, and sums in a fixed order: every machine takes the same swaps.

Legend: T tables, S stages, M tiers, R ranks, H hosts, P single pieces, Q pairs of a chunk, n pieces looked at per rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilerec.planner.instance import PER_MILLE, Instance, Ints, evaluate, fits
from tilerec.planner.pack import Packing
from tilerec.planner.relaxed import Relaxed

Floats = npt.NDArray[np.float64]

WINDOW = 24  # pieces looked at per rank and round
CHUNK = 400_000  # swaps judged at once


def exchange(relaxed: Relaxed, packing: Packing, rounds: int) -> tuple[Packing, int]:
    """A packing whose objective is not larger, and that objective (without charges), ps."""
    return _Exchange(relaxed, packing).run(rounds)


class _Exchange:
    def __init__(self, relaxed: Relaxed, packing: Packing) -> None:
        instance = self.instance = relaxed.instance
        self.option = packing.option
        every = np.arange(instance.tables)
        self.width = instance.width[every, packing.option]
        self.places = packing.places
        single = np.flatnonzero(self.width == 1)
        counts = np.fromiter((len(packing.places[t]) for t in single.tolist()), np.int64, len(single))
        self.table = np.repeat(single, counts)
        self.rank = np.fromiter(
            (r for t in single.tolist() for r in packing.places[t]), np.int64, int(counts.sum())
        )
        # A last row of nothing: what moves are swapped against.
        cost = instance.cost[self.table, packing.option[self.table]]
        self.cost = np.concatenate([cost, np.zeros((1, instance.stages), np.int64)]).astype(np.float64)
        memory = instance.memory[self.table, packing.option[self.table]]
        self.memory = np.concatenate([memory, np.zeros((1, instance.tiers), np.int64)])
        self.several = np.repeat(counts > 1, counts)
        self.tiers = [m for m in range(instance.tiers) if memory[:, m].any()]
        self.slow = instance.slow / PER_MILLE
        self.sizes = instance.host_sizes.astype(np.float64)
        self.hosts_capped = bool(np.any(instance.host_cap < np.iinfo(np.int64).max))
        self.even = not np.any(instance.slow != PER_MILLE)

    def run(self, rounds: int) -> tuple[Packing, int]:
        instance = self.instance
        best = evaluate(instance, self.option, self.places)
        best_rank = self.rank.copy()
        if len(self.table) and instance.ranks > 1:
            found = best.cost
            self._reload()
            idle = 0
            cycle = instance.stages + 1
            for turn in range(rounds):
                power = 3 + min(turn // (2 * cycle), 2)
                gained = self._round(turn, power)
                if not gained:
                    idle += 1
                    if idle >= cycle:
                        break
                    continue
                idle = 0
                self._reload()
                now = self._objective()
                if now < found:
                    found, best_rank = now, self.rank.copy()
        self.rank = best_rank
        places = list(self.places)
        starts = np.flatnonzero(np.diff(self.table, prepend=-1))
        ranks, ends = self.rank.tolist(), [*starts[1:].tolist(), len(self.table)]
        for t, start, end in zip(self.table[starts].tolist(), starts.tolist(), ends, strict=False):
            places[t] = tuple(sorted(ranks[start:end]))
        after = evaluate(instance, self.option, places)
        assert fits(instance, after.memory), "an exchange left a cap behind"
        return Packing(self.option, places, after.memory), int(after.stage.sum())

    def _reload(self) -> None:
        """Loads and bytes, from where the pieces are."""
        instance = self.instance
        if not hasattr(self, "fixed"):
            # What stays: everything that is no single piece.
            spread: list[tuple[int, ...]] = [() if w == 1 else p for w, p in zip(self.width.tolist(), self.places, strict=True)]
            still = _work(instance, self.option, spread)
            self.fixed, self.fixed_memory = still
        work = self.fixed.copy()
        memory = self.fixed_memory.copy()
        np.add.at(work, self.rank, self.cost[:-1].astype(np.int64))
        np.add.at(memory, self.rank, self.memory[:-1])
        self.time = instance.base_cost + -(-work * instance.slow // PER_MILLE)
        self.bytes = memory
        link = np.zeros((instance.hosts, instance.stages), np.int64)
        np.add.at(link, instance.host_of, self.time)
        self.load = self.time.astype(np.float64)
        for s in np.flatnonzero(instance.shared).tolist():
            self.load[:, s] = np.floor(link[:, s] / self.sizes)[instance.host_of]
        self.room = instance.cap - memory
        if self.hosts_capped:
            # Swaps are decided for all pairs at once: each rank may take its part of what its host has left.
            used = np.zeros_like(instance.host_cap)
            np.add.at(used, instance.host_of, memory)
            left = (instance.host_cap - used) // instance.host_sizes[:, None]
            self.room = np.minimum(self.room, left[instance.host_of])

    def _objective(self) -> int:
        return int(self.load.max(0).astype(np.int64).sum())

    def _round(self, turn: int, power: int) -> bool:
        """One swap for each pair that gains by one; whether any did."""
        instance = self.instance
        stages, ranks = instance.stages, instance.ranks
        top = np.maximum(self.load.max(0), 1.0)
        # What all ranks have alike says nothing about their differences; a level below half the spread would say too much.
        floor = self.load.min(0)
        level = np.maximum(top - floor, 1.0)
        mean = np.floor(self.load).astype(np.int64).sum(0) // ranks
        level = np.maximum(level, np.minimum(top, (mean - floor) * 1.0))
        floor = top - level
        turn_of = turn % (stages + 1)
        key = np.zeros(ranks)
        if turn_of < stages:
            # The stage with the most to gain first.
            s = int(np.argsort(-(top - mean), kind="stable")[turn_of])
            key = self.load[:, s] - floor[s]
        else:
            for s in range(stages):
                key = key + self.load[:, s]
        order = np.argsort(-key, kind="stable")
        half = ranks // 2
        shift = (turn // (stages + 1)) * max(half // 7, 1) % half
        heavy = order[:half]
        light = np.roll(order[::-1][:half], shift)
        slots = self._slots(turn)
        n = slots.shape[1]
        chunk = max(CHUNK // (n * n), 1)
        taken: list[tuple[npt.NDArray[np.int64], ...]] = []
        for start in range(0, half, chunk):
            a, b = heavy[start : start + chunk], light[start : start + chunk]
            taken.append(self._best(a, b, slots, level, floor, power))
        changed = False
        for a, b, give, take in taken:
            from_a = give < len(self.table)
            self.rank[give[from_a]] = b[from_a]
            from_b = take < len(self.table)
            self.rank[take[from_b]] = a[from_b]
            changed |= bool(len(a))
        return changed

    def _slots(self, turn: int) -> Ints:
        """[R, n] pieces of each rank, the last one nothing; a window where there are many."""
        ranks, pieces = self.instance.ranks, len(self.table)
        order = np.argsort(self.rank, kind="stable")
        counts = np.bincount(self.rank, minlength=ranks)
        starts = np.cumsum(counts) - counts
        n = min(int(counts.max()), WINDOW)
        # A window moves on by its length each round, and wraps.
        at = (np.arange(n)[None, :] + (turn * n) * (counts > n)[:, None]) % np.maximum(counts, 1)[:, None]
        slots = order[np.minimum(starts[:, None] + at, max(pieces - 1, 0))]
        slots[np.arange(n)[None, :] >= counts[:, None]] = pieces
        return np.concatenate([slots, np.full((ranks, 1), pieces)], 1)

    def _best(
        self, a: Ints, b: Ints, slots: Ints, level: Floats, floor: Floats, power: int
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """The pairs that gain, and what each of them exchanges."""
        instance, pieces = self.instance, len(self.table)
        give, take = slots[a], slots[b]
        q, n = give.shape
        cost_a, cost_b = self.cost[give], self.cost[take]
        same_host = instance.host_of[a] == instance.host_of[b]
        total = np.zeros((q, n, n))
        before = np.zeros(q)
        for s in range(instance.stages):
            if not (cost_a[:, :, s].any() or cost_b[:, :, s].any()):
                continue
            change = cost_a[:, :, None, s] - cost_b[:, None, :, s]
            less, more = change, change
            if not self.even:
                less = change * self.slow[a, s][:, None, None]
                more = change * self.slow[b, s][:, None, None]
            if instance.shared[s]:
                less = np.where(same_host[:, None, None], 0.0, less / self.sizes[instance.host_of[a]][:, None, None])
                more = np.where(same_host[:, None, None], 0.0, more / self.sizes[instance.host_of[b]][:, None, None])
            on_a, on_b = self.load[a, s] - floor[s], self.load[b, s] - floor[s]
            total += _power((on_a[:, None, None] - less) / level[s], power) * level[s]
            total += _power((on_b[:, None, None] + more) / level[s], power) * level[s]
            before += _power(on_a / level[s], power) * level[s]
            before += _power(on_b / level[s], power) * level[s]
        for m in self.tiers:
            more_bytes = self.memory[give][:, :, None, m] - self.memory[take][:, None, :, m]
            total[(more_bytes > self.room[b, m][:, None, None]) | (-more_bytes > self.room[a, m][:, None, None])] = np.inf
        self._forbid(total, give, b, 2)
        self._forbid(total, take, a, 1)
        flat = total.reshape(q, -1)
        best = flat.argmin(1)
        gains = flat[np.arange(q), best] < before * (1.0 - 1e-9)
        give = give[np.arange(q), best // n][gains]
        take = take[np.arange(q), best % n][gains]
        assert not np.any((give == pieces) & (take == pieces))
        return a[gains], b[gains], give, take

    def _forbid(self, total: Floats, given: Ints, to: Ints, axis: int) -> None:
        """No piece to a rank that its table may not use, or that has another of it."""
        instance, pieces = self.instance, len(self.table)
        if not pieces:
            return
        real = given < pieces
        table = self.table[np.minimum(given, pieces - 1)]
        bad = np.zeros(given.shape, np.bool_)
        if self.several.any():
            there = np.sort(self.rank * instance.tables + self.table)
            asked = to[:, None] * instance.tables + table
            at = np.minimum(np.searchsorted(there, asked), len(there) - 1)
            bad |= there[at] == asked
        if instance.allowed is not None:
            bad |= ~instance.allowed[table, to[:, None]]
        bad &= real
        if bad.any():
            spread = bad[:, :, None] if axis == 2 else bad[:, None, :]
            total[np.broadcast_to(spread, total.shape)] = np.inf


def _power(y: Floats, doublings: int) -> Floats:
    """max(y, 0) ** (2 ** doublings), by squaring."""
    y = np.maximum(y, 0.0)
    for _ in range(doublings):
        y = y * y
    return y


def _work(instance: Instance, option: Ints, places: list[tuple[int, ...]]) -> tuple[Ints, Ints]:
    """[R, S] work and [R, M] bytes of all but the single pieces."""
    every = np.arange(instance.tables)
    width = instance.width[every, option]
    work = np.zeros((instance.ranks, instance.stages), np.int64) + instance.home[every, option].sum(0)
    memory = instance.base_memory.copy()
    uniform = instance.everywhere(width)
    work += instance.cost[every, option][uniform].sum(0)
    memory += instance.memory[every, option][uniform].sum(0)
    for t in np.flatnonzero((width > 1) & ~uniform).tolist():
        for h in places[t]:
            ranks = instance.host_ranks[h]
            work[ranks] += instance.cost[t, option[t]]
            memory[ranks] += instance.memory[t, option[t]]
    return work, memory
