"""`RebuildState`: loads, free memory and places of a packing, while `rebuild` takes tables out and puts them back.

Nouns
  fractional table  a table whose rows are split over one host. Its rows are taken to lie where the ranks of the host
                    have least work, so only the host's mean load counts (uneven_rows.py finds such a split later)
  bar               [S] ps that a rank can bear in each stage, while the tables are out, without a longer step

Legend: T tables, S stages, M memory tiers, R ranks, H hosts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilerec.planner.search.instance import PER_MILLE, Bools, Floats, Instance, Ints, work_of
from tilerec.planner.search.pack import Packing


class Snapshot(NamedTuple):
    """State before tables are taken out. placed: (table, option, places) of these tables."""

    load: Floats
    mean: Floats
    alike: Floats
    room: Ints
    fractional_tables: Ints
    host_room: Ints | None
    placed: list[tuple[int, int, tuple[int, ...]]]


class Candidates(NamedTuple):
    """Bins that a table can be placed on.

    place: [B] ranks or hosts. load: [B, S] ps. factor: [B, S] on the cost of a piece. room: [B, M] free bytes.
    allowed: [B] bins that may hold the table; None for all.
    """

    place: Ints
    load: Floats
    factor: Floats
    room: Ints
    allowed: Bools | None

    def take(self, some: Ints) -> Candidates:
        """Return only these bins."""
        allowed = None if self.allowed is None else self.allowed[some]
        return Candidates(self.place[some], self.load[some], self.factor[some], self.room[some], allowed)


class RebuildState:
    """A packing, with its loads and its free memory.

    option: [T] and places: as in `Packing`. load: [R, S] ps of each rank, without `alike`. alike: [S] ps that every
    rank bears. mean: [H, S] ps, the mean of a host's ranks with fractional tables included. room: [R, M] free bytes.
    host_room: [H, M] free bytes under the caps of hosts, if any. fractional_tables: [H] number of such tables.
    on_rank, on_host: tables with a piece there, in order of arrival.

    Args:
        fractional: treat tables whose rows are split over one host as fractional; else their rows are split evenly.
    """

    def __init__(self, instance: Instance, packing: Packing, fractional: bool) -> None:
        self.instance, self.fractional = instance, fractional
        self.option = packing.option.copy()
        self.places = list(packing.places)
        self.room = instance.cap - packing.memory
        if instance.capped:
            self.host_room = instance.host_cap - instance.by_host(packing.memory)
        # A piece of cost x takes x * factor on a rank: more on slow ranks, a part of it on a link that ranks share.
        self.factor = instance.slow / PER_MILLE
        self.host_factor = np.stack([self.factor[r].max(0) for r in instance.host_ranks])
        self.shared = np.flatnonzero(instance.shared)
        # Factors [R, S] and [H, S] on the cost of a piece that every rank holds, and on work at home. Where the ranks
        # of a host share a link, the factor is their mean.
        self.slow, self.host_slow = self._means_of_hosts(self.factor)
        self.reach, self.host_reach = self._means_of_hosts(instance.reach / PER_MILLE)
        self.factor[:, self.shared] /= instance.host_sizes[instance.host_of][:, None]
        part = np.ones_like(self.factor)
        part /= instance.host_sizes[instance.host_of][:, None]
        part[:, self.shared] = 1.0
        self.part = part.T[:, None, :]
        self.load = np.zeros((instance.ranks, instance.stages)) + instance.base_cost
        for s in self.shared.tolist():
            for ranks in instance.host_ranks:
                self.load[ranks, s] = float(instance.base_cost[ranks, s].sum()) / len(ranks)
        self.linked = bool(len(self.shared))
        self.sizes = instance.host_sizes[:, None].astype(np.float64)
        self.mean = instance.by_host(instance.base_cost.astype(np.float64)) / self.sizes
        self.fractional_tables = np.zeros(instance.hosts, np.int64)
        self.by_host = np.concatenate(instance.host_ranks)
        self.starts = np.cumsum(instance.host_sizes) - instance.host_sizes
        self.alike = np.zeros(instance.stages)
        self.on_rank: list[dict[int, None]] = [{} for _ in range(instance.ranks)]
        self.on_host: list[dict[int, None]] = [{} for _ in range(instance.hosts)]
        for t in range(instance.tables):
            self.shift(t, 1.0)

    def _means_of_hosts(self, factor: Floats) -> tuple[Floats, Floats]:
        """Return [R, S] factors, which in shared stages are the mean of the rank's host, and the means [H, S]."""
        instance = self.instance
        own, mean = factor.copy(), instance.by_host(factor) / instance.host_sizes[:, None]
        own[:, self.shared] = mean[instance.host_of][:, self.shared]
        return own, mean

    def shift(self, t: int, sign: float) -> None:
        """Add (1) or subtract (-1) the load of a table with its current option and places."""
        instance = self.instance
        o = int(self.option[t])
        cost = instance.cost[t, o] * sign
        home = instance.home[t, o] * sign
        if instance.even:
            self.alike += home
        else:
            self.load += home * self.reach
            self.mean += home * self.host_reach
        width = int(instance.width[t, o])
        if instance.everywhere(width):
            if instance.even:
                self.alike += cost
            else:
                self.load += cost * self.slow
                self.mean += cost * self.host_slow
            return
        (self.remember if sign > 0 else self.forget)(t)
        places = np.array(self.places[t])
        if width == 1:
            more = cost * self.factor[places]
            host = instance.host_of[places]
            part = more / self.sizes[host]
            if self.linked:
                part[:, self.shared] = more[:, self.shared]
            np.add.at(self.mean, host, part)
            if self.linked:
                self.load[:, self.shared] = self.mean[instance.host_of][:, self.shared]
                more[:, self.shared] = 0.0
            np.add.at(self.load, places, more)
            return
        more = cost * self.host_factor[places]
        np.add.at(self.mean, places, more)
        fluid = self.fractional and bool(instance.divisible[t, o])
        if fluid:
            np.add.at(self.fractional_tables, places, int(sign))
        own = more
        if fluid:
            # Its rows can move between the ranks of the host: on a rank, only the fixed part counts.
            own = instance.fixed[t, o] * sign * self.host_factor[places]
            own[:, self.shared] = more[:, self.shared]
        for place, added in zip(places.tolist(), own, strict=True):
            self.load[instance.host_ranks[place]] += added

    def level(self) -> Floats:
        """Return [R, S] ps of each rank after fractional rows have moved to the ranks with least work."""
        return np.maximum(self.load, self.means()[self.instance.host_of]) if self.fractional else self.load

    def means(self) -> Floats:
        """Return [H, S] ps that some rank of a host bears at least; 0 for hosts without fractional tables."""
        return self.mean * (self.fractional_tables > 0)[:, None]

    def remember(self, t: int) -> None:
        here = self.on_rank if self.instance.width[t, self.option[t]] == 1 else self.on_host
        for place in self.places[t]:
            here[place][t] = None

    def forget(self, t: int) -> None:
        here = self.on_rank if self.instance.width[t, self.option[t]] == 1 else self.on_host
        for place in self.places[t]:
            here[place].pop(t, None)

    def hold(self, t: int, sign: int) -> None:
        """Take (1) or give back (-1) the memory of a table with its current option and places."""
        instance = self.instance
        o = int(self.option[t])
        size, home = instance.memory[t, o] * sign, instance.home_memory[t, o] * sign
        width = int(instance.width[t, o])
        if home.any():
            self.room -= home
            if instance.capped:
                self.host_room -= home * instance.host_sizes[:, None]
        if instance.everywhere(width):
            self.room -= size
            if self.instance.capped:
                self.host_room -= size * instance.host_sizes[:, None]
            return
        if width == 1:
            places = np.array(self.places[t])
            np.subtract.at(self.room, places, size)
            if self.instance.capped:
                np.subtract.at(self.host_room, instance.host_of[places], size)
            return
        for place in self.places[t]:
            ranks = instance.host_ranks[place]
            self.room[ranks] -= size
            if self.instance.capped:
                self.host_room[place] -= size * len(ranks)

    def bar(self) -> Floats:
        """Return [S] ps that a rank can bear, beside `alike`, before a phase lasts longer."""
        top: Floats = self.load.max(0)
        top = np.maximum(top, self.means().max(0)) if self.fractional else top
        for twins in self.instance.twins:
            top[twins] = (top + self.alike)[twins].max() - self.alike[twins]
        return top

    def objective(self) -> float:
        """Return the time of a step in ps, without fixed charges."""
        total = 0.0
        for x in (self.bar() + self.alike)[self.instance.first].tolist():
            total += x
        return total

    def smooth_objective(self) -> float:
        """Return the objective with the 32nd-power mean over ranks in place of the maximum.

        It also falls if only one of several slow ranks becomes faster.
        """
        load = self.level()
        top = np.maximum(load.max(0), 1.0)
        y = load / top
        for _ in range(5):
            y = y * y
        # A sum of whole numbers, and square roots, are the same on every machine (IEEE 754).
        mean = (y * float(1 << 40)).astype(np.int64).sum(0) / (len(y) * float(1 << 40))
        for _ in range(5):
            mean = np.sqrt(mean)
        total = 0.0
        for x in self.instance.longest(top * mean + self.alike).tolist():
            total += x
        return total

    def tables_on(self, rank: int, s: int) -> list[int]:
        """Return the tables that add to a stage of this rank, or of its host if the host's ranks share the stage."""
        instance = self.instance
        host = int(instance.host_of[rank])
        whole = instance.shared[s] or (self.fractional_tables[host] > 0 and self.mean[host, s] > self.load[rank, s])
        ranks = instance.host_ranks[host].tolist() if whole else [rank]
        return [*self.on_host[host], *(t for r in ranks for t in self.on_rank[r])]

    def take_out(self, tables: list[int]) -> Snapshot:
        """Remove the load and the memory of these tables; return the state before."""
        before = Snapshot(
            self.load.copy(),
            self.mean.copy(),
            self.alike.copy(),
            self.room.copy(),
            self.fractional_tables.copy(),
            self.host_room.copy() if self.instance.capped else None,
            [(t, int(self.option[t]), self.places[t]) for t in tables],
        )
        for t in tables:
            self.shift(t, -1.0)
            self.hold(t, -1)
        return before

    def put_in(self, t: int, option: int, places: tuple[int, ...]) -> bool:
        """Place a table that is out; return False if this exceeds the cap of a host."""
        self.option[t], self.places[t] = option, places
        self.shift(t, 1.0)
        self.hold(t, 1)
        return not self.instance.capped or bool(np.all(self.host_room >= 0))

    def undo(self, before: Snapshot) -> None:
        """Return to the state before `take_out`."""
        for t, _, _ in before.placed:
            self.forget(t)
        for t, option, places in before.placed:
            self.option[t], self.places[t] = option, places
            self.remember(t)
        self.load, self.mean, self.alike, self.room = before.load, before.mean, before.alike, before.room
        self.fractional_tables = before.fractional_tables
        if before.host_room is not None:
            self.host_room = before.host_room

    def fits_everywhere(self, size: Ints) -> bool:
        """Return True if every rank has room for a piece of `size` [M] bytes."""
        if not np.all(self.room >= size):
            return False
        return not self.instance.capped or bool(np.all(self.host_room >= size * self.instance.host_sizes[:, None]))

    def host_candidates(self, hosts: Ints, allowed: Bools | None) -> Candidates:
        """Return hosts as bins: each with the load of its slowest rank and the room of its fullest one.

        Args:
            allowed: [R] ranks that may hold the table; None for all.
        """
        load = np.maximum.reduceat(self.load[self.by_host], self.starts)[hosts]
        room = np.minimum.reduceat(self.room[self.by_host], self.starts)[hosts]
        if self.instance.capped:
            room = np.minimum(room, self.host_room[hosts] // self.instance.host_sizes[hosts][:, None])
        whole = None
        if allowed is not None:
            whole = np.logical_and.reduceat(allowed[self.by_host], self.starts)[hosts]
        return Candidates(hosts, load, self.host_factor[hosts], room, whole)

    def packing(self) -> Packing:
        """Return the packing with its memory."""
        return Packing(self.option, self.places, work_of(self.instance, self.option, self.places, {})[1])
