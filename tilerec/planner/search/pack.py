"""Putting pieces onto ranks, the largest first: what every rank has, then what hosts have, then single ranks.

Nouns
  packing   where everything lies, with the loads that come of it
  bin       what a piece goes onto: a host, or a rank
  level     what a bin would bear of a stage if pieces were sand; loads are judged in it
  slope     (load / level) ** 7 of a bin and stage: what a little more there does to the sum of 8th powers of loads.
            A piece goes where its own stages meet the least slope

Slopes and sizes are whole numbers below 2 ** 32 and 2 ** 16 in floats: products and their sums are exact, whatever
order a machine adds them in, so every machine packs alike.

Legend: T tables, S stages, M tiers, R ranks, H hosts, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from tilerec.planner.search.instance import PER_MILLE, Instance, Ints, at_home, fits
from tilerec.planner.search.layers import MANY, lay, split
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.work import CALLS, Work

Floats = npt.NDArray[np.float64]

STEEP = float(1 << 20)
STEEPEST = float(1 << 32)
FINE = (1 << 16) - 1
SAND = 4  # less than 1 / SAND of what a table costs its host falls to each rank in any case: its rows can go anywhere


class Rule(Enum):
    """Which piece comes next, and where it goes."""

    TIME = "time"  # by time; memory only has to fit
    BOTH = "both"  # by time and memory, which count alike when full
    MEMORY = "memory"  # by memory, where the least stays free


@dataclass(eq=False)
class Packing:
    """Where everything lies.

    Args:
        option: [T]. places: per table, as in `Solution`.
        memory: [R, M] bytes.
    """

    option: Ints
    places: list[tuple[int, ...]]
    memory: Ints


def pack(
    relaxed: Relaxed, option: Ints, rule: Rule, work: Work, force: bool = False, sand: bool = False
) -> Packing | None:
    """The tables placed with these options, or None if a piece fitted nowhere any more.

    `force`: a single piece that fits nowhere goes where the most is free, beyond the cap.
    `sand`: rows that a host's ranks share out come last.
    """
    instance = relaxed.instance
    every = np.arange(instance.tables)
    cost, memory = instance.cost[every, option], instance.memory[every, option]
    width, pieces = instance.width[every, option], instance.pieces[every, option]
    uniform = instance.everywhere(width)
    on_host = (width > 1) & ~uniform
    bytes_now = instance.base_memory + memory[uniform].sum(0) + instance.home_memory[every, option].sum(0)
    work.spend(5 * CALLS + instance.tables * 1000)
    if not fits(instance, bytes_now):
        return None
    places: list[tuple[int, ...]] = [()] * instance.tables
    single = ~uniform & ~on_host
    # Loads beyond what every rank has alike; the least slow rank's time for a unit of work is 1.
    base = at_home(instance, instance.home[every, option].sum(0))
    base = base - base.min(0)
    done = np.zeros((instance.ranks, instance.stages), np.int64)
    last = on_host & _sand(relaxed, cost) if sand else on_host & False
    # Rows that a host's ranks share out come last: they fill what the others leave.
    for some in (on_host & ~last, single, last):
        for n in np.unique(width[some]).tolist():
            tables = np.flatnonzero(some & (width == n))
            if n == 1:
                bins = _rank_bins(relaxed, base, done, bytes_now)
                if not _fill(bins, tables, cost, memory, pieces, rule, places, work, instance.twins, force):
                    return None
                bytes_now = bins.cap - bins.room + bins.used
                if last.any():
                    for t in tables.tolist():
                        np.add.at(done, np.array(places[t]), cost[t])
                continue
            hosts = np.flatnonzero(instance.host_sizes == n)
            bins = host_bins(relaxed, hosts, base, done, bytes_now)
            if not _fill(bins, tables, cost, memory, pieces, rule, places, work, instance.twins):
                return None
            for t in tables.tolist():
                places[t] = tuple(sorted(int(hosts[b]) for b in places[t]))
                for h in places[t]:
                    done[instance.host_ranks[h]] += cost[t]
                    bytes_now[instance.host_ranks[h]] += memory[t]
    return Packing(np.asarray(option, np.int64), places, bytes_now)


def _sand(relaxed: Relaxed, cost: Ints) -> npt.NDArray[np.bool_]:
    """[T] tables that cost [T, S] a rank itself less than 1 / SAND of what they cost its host on average."""
    own, mean = np.zeros(len(cost), np.int64), np.zeros(len(cost), np.int64)
    for twins in relaxed.instance.twins:
        own += cost[:, twins[0]]
        mean += cost[:, twins[-1]]
    return own * SAND < mean


@dataclass(eq=False)
class _Bins:
    """What pieces go onto.

    Args:
        time: [B, S] ps. slow: [B, S] of the least slow one's time. room, cap, used: [B, M] bytes (`used` at first).
        host: [B] and host_room: [H, M], for caps on hosts; size: [H] bins of a host.
        shared: [S]. allowed: [T, B] or None.
    """

    time: Floats
    slow: Floats
    room: Ints
    cap: Ints
    used: Ints
    host: Ints
    host_room: Ints | None
    size: Ints
    shared: npt.NDArray[np.bool_]
    allowed: npt.NDArray[np.bool_] | None


def _rank_bins(relaxed: Relaxed, base: Ints, work: Ints, bytes_now: Ints) -> _Bins:
    instance = relaxed.instance
    room = np.asfortranarray(instance.cap - bytes_now)  # bins side by side: quick to compare
    capped = bool((instance.host_cap < instance.host_cap.max(initial=0)).any()) or _capped(instance)
    host_room = None
    if capped:
        used = np.zeros_like(instance.host_cap)
        np.add.at(used, instance.host_of, bytes_now)
        host_room = instance.host_cap - used
    return _Bins(
        (base + work * instance.slow // PER_MILLE).astype(np.float64),
        instance.slow / PER_MILLE,
        room,
        room.copy(),
        bytes_now,
        instance.host_of,
        host_room,
        instance.host_sizes,
        instance.shared,
        instance.allowed,
    )


def _capped(instance: Instance) -> bool:
    """Hosts have caps of their own that could matter."""
    together = np.zeros_like(instance.host_cap)
    np.add.at(together, instance.host_of, np.minimum(instance.cap, (1 << 62) // instance.ranks))
    return bool(np.any(instance.host_cap < together))


def host_bins(relaxed: Relaxed, hosts: Ints, base: Ints, work: Ints, bytes_now: Ints) -> _Bins:
    """Hosts that pieces go onto, of `base` [R, S] ps, `work` [R, S] and `bytes_now` [R, M] that ranks have already."""
    instance = relaxed.instance
    time = base + work * instance.slow // PER_MILLE
    ranks = [instance.host_ranks[h] for h in hosts.tolist()]
    room = np.stack([(instance.cap - bytes_now)[r].min(0) for r in ranks])
    if _capped(instance):
        left = np.stack(
            [instance.host_cap[h] - bytes_now[r].sum(0) for h, r in zip(hosts.tolist(), ranks, strict=True)]
        )
        room = np.minimum(room, left // instance.host_sizes[hosts][:, None])
    allowed = None
    if instance.allowed is not None:
        allowed = np.stack([instance.allowed[:, r].all(1) for r in ranks], 1)
    top, mean = np.stack([time[r].max(0) for r in ranks]), np.stack([time[r].sum(0) // len(r) for r in ranks])
    return _Bins(
        np.where(instance.shared, mean, top).astype(np.float64),
        np.stack([instance.slow[r].max(0) for r in ranks]) / PER_MILLE,
        room,
        room.copy(),
        np.stack([bytes_now[r].max(0) for r in ranks]),
        np.arange(len(hosts)),
        None,
        np.ones(len(hosts), np.int64),
        instance.shared,
        allowed,
    )


def _fill(
    bins: _Bins,
    tables: Ints,
    cost: Ints,
    memory: Ints,
    pieces: Ints,
    rule: Rule,
    places: list[tuple[int, ...]],
    work: Work,
    twins: list[list[int]],
    force: bool = False,
) -> bool:
    """Every piece of `tables` onto a bin, the largest first; whether all found one."""
    count = len(bins.time)
    cost, memory, pieces = cost[tables], memory[tables], pieces[tables]
    # Of each stage, and of memory: what a bin has when everything is spread evenly; a single piece may be more.
    level = np.maximum(
        (cost * pieces[:, None]).sum(0) // count + bins.time.sum(0).astype(np.int64) // count, 1
    )
    largest = cost.max(0, initial=0)
    largest[bins.shared] //= bins.size.min()
    level = np.maximum(level, largest)
    for pair in twins:
        level[pair] = level[pair].max()
    roomy = np.maximum(bins.room.max(0), 1)
    whole = int(level.sum())
    weight = np.floor(cost.astype(np.float64))
    if rule is Rule.BOTH:
        # A tier that everything would fill to x of its room counts as x of the whole time.
        fill = np.minimum((memory * pieces[:, None]).sum(0), bins.room.sum(0)).astype(
            np.float64
        ) / np.maximum(bins.room.sum(0), 1)
        as_time = np.floor(memory.astype(np.float64) / roomy * whole * fill)
        weight = np.concatenate([weight, as_time], 1)
    if rule is Rule.MEMORY:
        key = (memory.astype(np.float64) / roomy).max(1)
    else:
        # Added one column after the other: the same sum on every machine.
        key = np.zeros(len(tables))
        for column in range(weight.shape[1]):
            key += weight[:, column]
    scale = np.maximum(weight.max(1, initial=1.0), 1.0)
    vector = np.floor(weight * FINE / scale[:, None])
    state = _Slopes(bins, level.astype(np.float64), roomy.astype(np.float64), rule)
    order = np.argsort(-key, kind="stable")
    cost_list = cost.tolist()
    has_memory = [m for m in range(memory.shape[1]) if memory[:, m].any()]
    first = has_memory[0] if has_memory else 0
    plain = bins.allowed is None and bins.host_room is None
    head, middle, tail = order, order[:0], order[:0]
    if plain and count >= MANY and rule is not Rule.MEMORY and state.slow is None:
        head, middle, tail = split(order, pieces, count)
    for some in (head, tail):
        if some is tail and len(middle):
            where = state.lay(cost[middle], memory[middle], vector[middle])
            if where is None:
                return False
            for t, b in zip(tables[middle].tolist(), where.tolist(), strict=True):
                places[t] = (b,)
        for i in some.tolist():
            work.spend(CALLS + count * cost.shape[1])
            t, k = int(tables[i]), int(pieces[i])
            size = memory[i]
            if rule is Rule.MEMORY:
                m = int((size / roomy).argmax())
                score = bins.room[:, m].astype(np.float64)
            else:
                score = state.slope @ vector[i]
            closed = bins.room[:, first] < size[first]
            for m in has_memory[1:]:
                closed |= bins.room[:, m] < size[m]
            if not plain:
                if bins.allowed is not None:
                    closed |= ~bins.allowed[t]
                if bins.host_room is not None:
                    closed |= (bins.host_room < size).any(1)[bins.host]
            np.putmask(score, closed, np.inf)
            if k == 1:
                b = int(score.argmin())
                if score[b] == np.inf:
                    if not force:
                        return False
                    m = int((size / roomy).argmax())
                    free = bins.room[:, m]
                    if bins.allowed is not None:
                        free = np.where(bins.allowed[t], free, np.iinfo(np.int64).min)
                    b = int(free.argmax())
                chosen = [b]
            else:
                found = _several(score, k, bins, t, size)
                if found is None:
                    return False
                chosen = found
            for b in chosen:
                state.add(b, cost_list[i], size)
            places[t] = tuple(chosen)
    return True


def _several(score: Floats, k: int, bins: _Bins, t: int, size: Ints) -> list[int] | None:
    """The k best bins, all different if there are so many; else each equally often, and the best once more."""
    open_bins = len(score) if bins.allowed is None else int(bins.allowed[t].sum())
    if open_bins == 0:
        return None
    repeat, k = divmod(k, open_bins)
    chosen = (
        []
        if not repeat
        else np.flatnonzero(np.ones(len(score)) if bins.allowed is None else bins.allowed[t]).tolist()
        * repeat
    )
    if repeat:
        if np.any(bins.room[chosen] < size * (repeat + (k > 0))):
            return None
        if bins.host_room is not None:
            return None
    if k:
        edge = float(np.partition(score, k - 1)[k - 1])
        if edge == np.inf:
            return None
        if bins.shared.any() and len(bins.size) > 1:
            best = spread(score, k, bins.host, bins.size).tolist()
        else:
            below = np.flatnonzero(score < edge)
            best = np.concatenate([below, np.flatnonzero(score == edge)[: k - len(below)]]).tolist()
        if bins.host_room is not None:
            counts = np.bincount(bins.host[best], minlength=len(bins.host_room))
            if np.any(counts[:, None] * size > bins.host_room):
                return None
        chosen = chosen + best
    return sorted(chosen)


def spread(score: Floats, k: int, host: Ints, size: Ints) -> Ints:
    """The k bins of the least score, no more of them on one host than must be: pieces of a table share its link."""
    order = np.argsort(score, kind="stable")
    order = order[score[order] < np.inf]
    by_host = np.argsort(host[order], kind="stable")
    counts = np.bincount(host[order], minlength=len(size))
    turn = np.empty(len(order), np.int64)
    turn[by_host] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[np.argsort(turn, kind="stable")[:k]]


class _Slopes:
    """The slopes of all bins, kept up to date: single floats are quicker here than arrays of five."""

    def __init__(self, bins: _Bins, level: Floats, roomy: Floats, rule: Rule) -> None:
        self.bins, self.level, self.roomy = bins, level.tolist(), roomy.tolist()
        self.links = np.flatnonzero(bins.shared).tolist()
        self.own = np.flatnonzero(~bins.shared).tolist()
        self.tiers = bins.room.shape[1] if rule is Rule.BOTH else 0
        count, stages = bins.time.shape
        self.time = bins.time.tolist()
        self.slow = bins.slow.tolist() if np.any(bins.slow != 1.0) else None
        self.slope = np.zeros((count, stages + self.tiers), order="F")
        # Of each host, the slopes of its links, and its bins.
        self.link = [[0.0] * len(self.links) for _ in range(len(bins.size))]
        order = np.argsort(bins.host, kind="stable")
        ends = np.cumsum(np.bincount(bins.host, minlength=len(bins.size)))
        self.members: list[slice | Ints] = [
            slice(int(m[0]), int(m[-1]) + 1) if m[-1] - m[0] == len(m) - 1 else m
            for m in np.split(order, ends[:-1])
        ]
        self.size = bins.size.tolist()
        self.host = bins.host.tolist()
        link_time = np.zeros((len(bins.size), len(self.links)))
        np.add.at(link_time, bins.host, bins.time[:, self.links])
        self.link_time = link_time.tolist()
        self._refresh_all()

    def _refresh_all(self) -> None:
        for b in range(len(self.time)):
            self._refresh(b)
        if self.links:
            for h in range(len(self.size)):
                self._refresh_link(h)

    def add(self, b: int, cost: list[int], size: Ints) -> None:
        """A piece of `cost` [S] ps and `size` [M] bytes lies on bin b."""
        bins, time = self.bins, self.time[b]
        slow = None if self.slow is None else self.slow[b]
        for s in self.own:
            time[s] += cost[s] if slow is None else float(int(cost[s] * slow[s]))
        bins.room[b] -= size
        if bins.host_room is not None:
            bins.host_room[bins.host[b]] -= size
        if self.links:
            link = self.link_time[self.host[b]]
            for i, s in enumerate(self.links):
                link[i] += cost[s] if slow is None else float(int(cost[s] * slow[s]))
            self._refresh_link(self.host[b])
        self._refresh(b)

    def lay(self, cost: Ints, size: Ints, vector: Floats) -> Ints | None:
        """The bin of each of many small pieces, [n, S] ps and [n, M] bytes; None if some find none."""
        bins, time, link = self.bins, np.array(self.time), np.array(self.link_time)
        level, roomy = np.array(self.level), np.array(self.roomy) if self.tiers else None
        where = lay(
            time, link, bins.room, bins.host, bins.size, bins.shared, level, roomy, cost, size, vector
        )
        self.time, self.link_time = time.tolist(), link.tolist()
        self._refresh_all()
        return where

    def _refresh(self, b: int) -> None:
        time, level = self.time[b], self.level
        new = [0.0] * len(level)
        for s in self.own:
            new[s] = _steep(time[s] / level[s])
        if self.slow is not None:
            new = [float(int(x * slow)) for x, slow in zip(new, self.slow[b], strict=True)]
        for i, s in enumerate(self.links):
            new[s] = self.link[self.host[b]][i]
        if self.tiers:
            room = self.bins.room[b].tolist()
            new += [_steep(1.0 - left / most) for left, most in zip(room, self.roomy, strict=True)]
        self.slope[b] = new

    def _refresh_link(self, h: int) -> None:
        time, size, members = self.link_time[h], self.size[h], self.members[h]
        for i, s in enumerate(self.links):
            new = self.link[h][i] = _steep(time[i] / size / self.level[s])
            self.slope[members, s] = new


def _steep(y: float) -> float:
    """y ** 7 in whole 1 / STEEP."""
    y2 = y * y
    return min(float(int(y2 * y2 * y2 * y * STEEP)), STEEPEST)
