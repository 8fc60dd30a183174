"""First-fit-decreasing placement: given the option of every table, place its pieces, the largest first.

    Input    the option of each table, and a `PackingOrder`
    Changes  nothing that exists: the result is a new `Packing`
    Keeps    no rank and no host exceeds its memory (except with `force`)
    Stops    when all pieces are placed, or when one piece fits nowhere
    Cost     B x S operations per piece; for 1,024 or more bins, most pieces go in layers (slopes.py)

Pieces on every rank come first, since they have no choice. Single pieces that take most of a rank's memory come next,
as they fit nowhere once each rank holds something. Pieces that occupy whole hosts follow; other single pieces are last.
A piece goes where its own stages meet the least slope (slopes.py). With `divisible_last`, tables whose rows can move
between the ranks of their host come after all others, and fill the gaps.

Nouns
  packing  the places of all pieces
  bin      a rank or a host (bins.py)
  level    [S] ps of a stage if everything were spread evenly; loads are relative to it

Legend: T tables, S stages, M memory tiers, R ranks, H hosts, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from tilerec.planner.search.bins import Bins, host_bins, rank_bins
from tilerec.planner.search.instance import Bools, Floats, Instance, Ints, at_home, fits, flat_places
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.slopes import LAYERS_FROM_BINS, Slopes, split_for_layers
from tilerec.planner.search.work import CALLS, Work

LARGEST_WEIGHT = (1 << 16) - 1  # weights of slopes are whole numbers up to it
LARGE_PIECE_QUARTERS = 3  # a piece is large if it takes more than so many quarters of the roomiest rank's memory
DIVISIBLE_PART = 4  # a table counts as divisible if less than 1 / DIVISIBLE_PART of its cost stays on each rank


class PackingOrder(Enum):
    """The order of pieces, and the bin that each one gets."""

    TIME = "time"  # longest first, onto the bin of least slope; memory only has to fit
    BOTH = "both"  # by time and memory, which weigh the same where both would be full; bin of least slope
    MEMORY = "memory"  # by memory, onto the bin with least room


@dataclass(eq=False)
class Packing:
    """The places of all pieces.

    Args:
        option: [T] option of each table. places: ranks or hosts by table, as in `Solution`.
        memory: [R, M] bytes in use.
    """

    option: Ints
    places: list[tuple[int, ...]]
    memory: Ints


def pack(
    relaxed: Relaxed,
    option: Ints,
    order: PackingOrder,
    work: Work,
    force: bool = False,
    divisible_last: bool = False,
) -> Packing | None:
    """Return the tables placed with these options; None if a piece fits nowhere.

    Args:
        force: place a single piece that fits nowhere onto the rank with most free memory, beyond its cap.
        divisible_last: place tables whose rows can move between the ranks of a host after all others.
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
    single = ~uniform & ~on_host
    # Loads beyond those that all ranks have in common.
    base = at_home(instance, instance.home[every, option].sum(0))
    base = base - base.min(0)
    done = np.zeros((instance.ranks, instance.stages), np.int64)
    last = on_host & _mostly_divisible(instance, cost) if divisible_last else on_host & False
    filling = _Filling(instance, cost, memory, pieces, order, work)
    places = filling.places
    large = single & (memory * 4 > (instance.cap - bytes_now).max(0) * LARGE_PIECE_QUARTERS).any(1)
    for some in (large, on_host & ~last, single & ~large, last):
        for n in np.unique(width[some]).tolist():
            tables = np.flatnonzero(some & (width == n))
            if n == 1:
                bins = rank_bins(relaxed, base, done, bytes_now)
                free = bins.room.copy()
                if not filling.fill(bins, tables, force):
                    return None
                bytes_now = bytes_now + free - bins.room
                own, at = flat_places(tables, places)
                np.add.at(done, at, cost[own])
                continue
            hosts = np.flatnonzero(instance.host_sizes == n)
            if not filling.fill(host_bins(relaxed, hosts, base, done, bytes_now), tables):
                return None
            for t in tables.tolist():
                places[t] = tuple(sorted(int(hosts[b]) for b in places[t]))
                for h in places[t]:
                    done[instance.host_ranks[h]] += cost[t]
                    bytes_now[instance.host_ranks[h]] += memory[t]
    return Packing(np.asarray(option, np.int64), places, bytes_now)


def _mostly_divisible(instance: Instance, cost: Ints) -> Bools:
    """Return [T] tables of which a rank bears less than 1 / DIVISIBLE_PART of the mean cost whatever rows it holds.

    Args:
        cost: [T, S] ps, in a view of `fractional_view`: the first stage of a pair is the fixed part, the last the mean.
    """
    own, mean = np.zeros(len(cost), np.int64), np.zeros(len(cost), np.int64)
    for twins in instance.twins:
        own += cost[:, twins[0]]
        mean += cost[:, twins[-1]]
    return own * DIVISIBLE_PART < mean


class _Filling:
    """Places pieces of tables onto bins of one kind after another, and records their places.

    Args:
        cost: [T, S] ps, memory: [T, M] bytes of a piece. pieces: [T] their number.
    """

    def __init__(
        self, instance: Instance, cost: Ints, memory: Ints, pieces: Ints, order: PackingOrder, work: Work
    ) -> None:
        self.cost, self.memory, self.pieces = cost, memory, pieces
        self.order, self.work, self.twins = order, work, instance.twins
        self.places: list[tuple[int, ...]] = [()] * instance.tables

    def fill(self, bins: Bins, tables: Ints, force: bool = False) -> bool:
        """Place every piece of `tables`, the largest first; return False if one of them fits nowhere."""
        count, by_memory = len(bins.time), self.order is PackingOrder.MEMORY
        cost, memory, pieces = self.cost[tables], self.memory[tables], self.pieces[tables]
        level = self._level(bins, cost, pieces)
        roomy = np.maximum(bins.room.max(0), 1)
        key, vector = self._weights(bins, cost, memory, pieces, int(level.sum()), roomy)
        state = Slopes(
            bins,
            level.astype(np.float64),
            roomy.astype(np.float64),
            with_memory=self.order is PackingOrder.BOTH,
        )
        order = np.argsort(-key, kind="stable")
        cost_list = cost.tolist()
        tiers = [m for m in range(memory.shape[1]) if memory[:, m].any()]
        plain = bins.allowed is None and bins.host_room is None
        head, middle, tail = order, order[:0], order[:0]
        if plain and count >= LAYERS_FROM_BINS and not by_memory and state.slow is None:
            head, middle, tail = split_for_layers(order, pieces, count)
        for some in (head, tail):
            if some is tail and len(middle):
                where = state.add_layers(cost[middle], memory[middle], vector[middle])
                if where is None:
                    return False
                for t, b in zip(tables[middle].tolist(), where.tolist(), strict=True):
                    self.places[t] = (b,)
            for i in some.tolist():
                self.work.spend(CALLS + count * cost.shape[1])
                t, k, size = int(tables[i]), int(pieces[i]), memory[i]
                if by_memory:
                    score = bins.room[:, int((size / roomy).argmax())].astype(np.float64)
                else:
                    score = state.slope @ vector[i]
                np.putmask(score, _closed(bins, t, size, tiers), np.inf)
                if k == 1:
                    b = int(score.argmin())
                    if score[b] == np.inf:
                        if not force:
                            return False
                        b = _roomiest(bins, t, int((size / roomy).argmax()))
                    chosen = [b]
                else:
                    found = bins.least(score, k, t, size)
                    if found is None:
                        return False
                    chosen = found
                for b in chosen:
                    state.add(b, cost_list[i], size)
                self.places[t] = tuple(chosen)
        return True

    def _level(self, bins: Bins, cost: Ints, pieces: Ints) -> Ints:
        """Return [S] ps of a stage: the even load of a bin, or the largest piece if that is more."""
        count = len(bins.time)
        level = np.maximum((cost * pieces[:, None]).sum(0) // count + bins.time.sum(0).astype(np.int64) // count, 1)
        largest = cost.max(0, initial=0)
        largest[bins.shared] //= bins.size.min()
        level = np.maximum(level, largest)
        for pair in self.twins:
            level[pair] = level[pair].max()
        return level

    def _weights(
        self, bins: Bins, cost: Ints, memory: Ints, pieces: Ints, whole: int, roomy: Ints
    ) -> tuple[Floats, Floats]:
        """Return the sort key of each piece, the largest first, and the weights of slopes, [n, S (+ M)]."""
        weight = np.floor(cost.astype(np.float64))
        if self.order is PackingOrder.BOTH:
            # A tier that all pieces would fill to a part x of its room counts as x of the whole time.
            fill = np.minimum((memory * pieces[:, None]).sum(0), bins.room.sum(0)).astype(np.float64) / np.maximum(
                bins.room.sum(0), 1
            )
            as_time = np.floor(memory.astype(np.float64) / roomy * whole * fill)
            weight = np.concatenate([weight, as_time], 1)
        if self.order is PackingOrder.MEMORY:
            key = (memory.astype(np.float64) / roomy).max(1)
        else:
            # Added column by column: the same sum on every machine.
            key = np.zeros(len(cost))
            for column in range(weight.shape[1]):
                key += weight[:, column]
        scale = np.maximum(weight.max(1, initial=1.0), 1.0)
        return key, np.floor(weight * LARGEST_WEIGHT / scale[:, None])


def _closed(bins: Bins, table: int, size: Ints, tiers: list[int]) -> Bools:
    """Return [B] bins that cannot hold a piece of `size` [M] bytes; `tiers` are those that any piece uses."""
    first = tiers[0] if tiers else 0
    closed: Bools = bins.room[:, first] < size[first]
    for m in tiers[1:]:
        closed |= bins.room[:, m] < size[m]
    if bins.allowed is not None:
        closed |= ~bins.allowed[table]
    if bins.host_room is not None:
        closed |= np.logical_or.reduce(bins.host_room < size, 1)[bins.host]
    return closed


def _roomiest(bins: Bins, table: int, tier: int) -> int:
    """Return the allowed bin with most free memory in a tier."""
    free = bins.room[:, tier]
    if bins.allowed is not None:
        free = np.where(bins.allowed[table], free, np.iinfo(np.int64).min)
    return int(free.argmax())
