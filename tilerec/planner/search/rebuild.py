"""Taking a few tables out and putting them back better: other options, other places. For few tables per rank.

Nouns
  poured    a table whose rows are split over a host: they are taken to be where the host's ranks bear least, so that
            the host's mean counts (uneven_rows.py pours them); even splits otherwise
  bar       of each stage, what a rank may bear while the tables are out until its phase lasts longer: up to it a load
            costs nothing
  overflow  what a piece adds beyond the bar
  price     of an option: its work averaged over all ranks, its work at home, and its overflow. The average is what
            its room will cost the tables that come later
  key tables  those with a piece on the slowest rank of a stage
  heavy     a table with a piece that is a good part of what a stage takes

Floats here are only added, multiplied and compared one by one in a fixed order, and random numbers come from a
counter: every machine makes the same plan.

Legend: T tables, S stages, M tiers, R ranks, H hosts, J options of a table, B bins (ranks or hosts).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilerec.planner.search.instance import PER_MILLE, Bools, Ints
from tilerec.planner.search.pack import Packing, spread
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.work import CALLS, Work

Floats = npt.NDArray[np.float64]

MOST_STEPS = 5_000
FEW = 64  # bins that are looked at closely
KEPT = 8  # options of a table that are tried
MOST = 16  # tables that are out at once, and one more
SMOOTH = 4.0  # weight of the smooth objective beside the true one
HEAVY = 0.2  # of a stage: a table with so large a piece is taken out more often


class Dice:
    """Numbers that look random and are the same everywhere (a linear congruential generator, Knuth's MMIX)."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, n: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) * n >> 31


@dataclass(frozen=True, eq=False)
class _Choices:
    """Options of one table that lie on bins of one kind.

    Args:
        option: [J]. pieces: [J]. time: [J, S] ps of a piece. memory: [J, M] bytes on a rank that holds one, of which
            at_home: [J, M] on every rank. fair: [J] ps, over all ranks, with home.
        fluid: [J] its rows are poured. fixed: [J, S] ps that each rank of a fluid one bears in any case.
    """

    option: Ints
    pieces: Ints
    time: Floats
    memory: Ints
    at_home: Ints
    fair: Floats
    fluid: Bools
    fixed: Floats


def steps_within(relaxed: Relaxed, work: Work) -> int:
    """How many tables can be put back within some work, which is spent on that."""
    instance = relaxed.instance
    stages = int(instance.first.sum())
    size = instance.ranks * stages
    each = 10 * CALLS + min(size, 2 * FEW * stages) * KEPT * 20 + size * 10
    first = 5 * CALLS * instance.tables
    steps = min(MOST_STEPS, (work.left - first) // each)
    if steps <= 0:
        return 0
    work.spend(first + steps * each)
    return steps


def rebuild(
    relaxed: Relaxed, usable: Bools, packing: Packing, steps: int, seed: int = 1, pour: bool = False
) -> Packing:
    """A packing, after `steps` tables were put back.

    Its objective is not larger. With `pour`, that is so if the rows that it splits over hosts are poured to where
    their ranks bear least.
    """
    return _Rebuild(relaxed, usable, packing, seed, pour).run(steps) if steps else packing


class _Rebuild:
    def __init__(self, relaxed: Relaxed, usable: Bools, packing: Packing, seed: int, pour: bool) -> None:
        instance = self.instance = relaxed.instance
        self.relaxed, self.dice, self.pour = relaxed, Dice(seed), pour
        self.option = packing.option.copy()
        self.places = list(packing.places)
        self.room = instance.cap - packing.memory
        self.capped = bool(np.any(instance.host_cap < np.iinfo(np.int64).max))
        if self.capped:
            used = np.zeros_like(instance.host_cap)
            np.add.at(used, instance.host_of, packing.memory)
            self.host_room = instance.host_cap - used
        # A piece of work x takes x * factor: slow ranks longer, a host's link shared by its ranks.
        self.factor = instance.slow / PER_MILLE
        self.host_factor = np.stack([self.factor[r].max(0) for r in instance.host_ranks])
        self.shared = np.flatnonzero(instance.shared)
        # [R, S] and [H, S] what work that every rank has takes, and what each does at home: where a host's link is
        # shared, the mean of its ranks.
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
        self.mean = np.zeros(
            (instance.hosts, instance.stages)
        )  # [H, S] of a host's ranks, rows poured over it too
        np.add.at(self.mean, instance.host_of, instance.base_cost.astype(np.float64))
        self.mean /= self.sizes
        self.poured = np.zeros(instance.hosts, np.int64)  # tables whose rows are poured over a host
        self.by_host = np.concatenate(instance.host_ranks)
        self.starts = np.cumsum(instance.host_sizes) - instance.host_sizes
        self.alike = np.zeros(instance.stages)
        # The stages that are looked at for pieces on hosts, and on single ranks, which add little to the others.
        self.every = np.arange(instance.stages)
        self.busy = np.flatnonzero(instance.first)
        # What lies where: tables by rank and by host (those of whole hosts), in the order they came.
        self.on_rank: list[dict[int, None]] = [{} for _ in range(instance.ranks)]
        self.on_host: list[dict[int, None]] = [{} for _ in range(instance.hosts)]
        self.singles: list[_Choices | None] = []
        self.hosted: list[list[tuple[Ints, _Choices]]] = []
        self.uniform: list[_Choices | None] = []
        alike: dict[bytes, int] = {}
        for t in range(instance.tables):
            mark = self._mark(t, usable[t])
            if mark in alike:
                for some in (self.singles, self.hosted, self.uniform):
                    some.append(some[alike[mark]])  # type: ignore[arg-type]
            else:
                alike[mark] = t
                self._sort_options(t, usable[t])
            self._shift(t, 1.0)

    def _means_of_hosts(self, factor: Floats) -> tuple[Floats, Floats]:
        """[R, S] factors, in shared stages the mean of the rank's host, and [H, S] those means in all stages."""
        instance = self.instance
        own, mean = factor.copy(), np.zeros((instance.hosts, instance.stages))
        np.add.at(mean, instance.host_of, factor)
        mean /= instance.host_sizes[:, None]
        own[:, self.shared] = mean[instance.host_of][:, self.shared]
        return own, mean

    def _mark(self, t: int, usable: Bools) -> bytes:
        """The same for tables that have the same options, the same of them chosen."""
        instance = self.instance
        counts = (instance.width, instance.pieces, instance.divisible)
        sizes = (instance.cost, instance.home, instance.memory, instance.fixed, instance.home_memory)
        return b"".join(
            [usable.tobytes(), self.option[t].tobytes(), *(x[t].tobytes() for x in (*counts, *sizes))]
        )

    def _sort_options(self, t: int, usable: Bools) -> None:
        instance = self.instance
        width, pieces = instance.width[t], instance.pieces[t]
        fair = self.relaxed.sums[t] / instance.ranks
        # The cheapest on average, and of dearer ones those with smaller pieces.
        order = [o for o in np.argsort(fair, kind="stable").tolist() if usable[o]]
        kept: list[int] = []
        smallest = [np.inf, np.inf, np.inf]
        for o in order:
            everywhere = bool(instance.everywhere(width[o]))
            kind = 0 if width[o] == 1 else 2 if everywhere else 1
            size = float(instance.cost[t, o].sum()) + float(instance.memory[t, o].sum()) / 1e6
            if size >= smallest[kind] or len(kept) >= KEPT:
                continue
            smallest[kind] = size
            kept.append(o)
        if int(self.option[t]) not in kept:
            kept.append(int(self.option[t]))
        everywhere_ = instance.everywhere(width)

        def choices(which: list[int]) -> _Choices | None:
            if not which:
                return None
            index = np.array(which)
            return _Choices(
                index,
                pieces[index],
                instance.cost[t, index].astype(np.float64),
                instance.memory[t, index] + instance.home_memory[t, index],
                instance.home_memory[t, index],
                fair[index],
                instance.divisible[t, index] & self.pour,
                instance.fixed[t, index].astype(np.float64),
            )

        self.singles.append(choices([o for o in kept if width[o] == 1 and pieces[o] <= instance.ranks]))
        self.uniform.append(choices([o for o in kept if everywhere_[o]]))
        hosted = []
        for n in sorted({int(width[o]) for o in kept if width[o] > 1 and not everywhere_[o]}):
            hosts = np.flatnonzero(instance.host_sizes == n)
            some = choices([o for o in kept if width[o] == n and pieces[o] <= len(hosts)])
            if some is not None:
                hosted.append((hosts, some))
        self.hosted.append(hosted)

    def _shift(self, t: int, sign: float) -> None:
        """Adds (1) or takes away (-1) the work of a table as it is placed."""
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
        (self._remember if sign > 0 else self._forget)(t)
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
        fluid = self.pour and bool(instance.divisible[t, o])
        if fluid:
            np.add.at(self.poured, places, int(sign))
        own = more
        if fluid:
            # Its rows go where the host's ranks bear least: they count in the mean alone.
            own = instance.fixed[t, o] * sign * self.host_factor[places]
            own[:, self.shared] = more[:, self.shared]
        for place, added in zip(places.tolist(), own, strict=True):
            self.load[instance.host_ranks[place]] += added

    def _level(self) -> Floats:
        """[R, S] what a rank bears when the rows that are split over its host are poured to where least is."""
        return np.maximum(self.load, self._means()[self.instance.host_of]) if self.pour else self.load

    def _means(self) -> Floats:
        """[H, S] what each of a host's ranks bears at least: nothing is said where nothing is poured."""
        return self.mean * (self.poured > 0)[:, None]

    def _remember(self, t: int) -> None:
        here = self.on_rank if self.instance.width[t, self.option[t]] == 1 else self.on_host
        for place in self.places[t]:
            here[place][t] = None

    def _forget(self, t: int) -> None:
        here = self.on_rank if self.instance.width[t, self.option[t]] == 1 else self.on_host
        for place in self.places[t]:
            here[place].pop(t, None)

    def _hold(self, t: int, sign: int) -> None:
        """Takes (1) or gives back (-1) the room of a table as it is placed."""
        instance = self.instance
        o = int(self.option[t])
        size, home = instance.memory[t, o] * sign, instance.home_memory[t, o] * sign
        width = int(instance.width[t, o])
        if home.any():
            self.room -= home
            if self.capped:
                self.host_room -= home * instance.host_sizes[:, None]
        if instance.everywhere(width):
            self.room -= size
            if self.capped:
                self.host_room -= size * instance.host_sizes[:, None]
            return
        if width == 1:
            places = np.array(self.places[t])
            np.subtract.at(self.room, places, size)
            if self.capped:
                np.subtract.at(self.host_room, instance.host_of[places], size)
            return
        for place in self.places[t]:
            ranks = instance.host_ranks[place]
            self.room[ranks] -= size
            if self.capped:
                self.host_room[place] -= size * len(ranks)

    def _bar(self) -> Floats:
        """[S] what a rank may bear until a phase lasts longer, beside what all ranks have alike."""
        top: Floats = self.load.max(0)
        top = np.maximum(top, self._means().max(0)) if self.pour else top
        for twins in self.instance.twins:
            top[twins] = (top + self.alike)[twins].max() - self.alike[twins]
        return top

    def _objective(self) -> float:
        total = 0.0
        for x in (self._bar() + self.alike)[self.instance.first].tolist():
            total += x
        return total

    def run(self, steps: int) -> Packing:
        instance, dice = self.instance, self.dice
        tables, every = instance.tables, np.arange(instance.tables)
        size = (instance.cost[every, self.option] / np.maximum(self.load.max(0), 1.0)).max(1)
        heavy = np.flatnonzero(size > HEAVY).tolist() or [int(size.argmax())]
        best = self._objective()
        kept = (self.option.copy(), list(self.places))
        done, start = 0, steps
        now = best + SMOOTH * self._smooth()
        while done < steps:
            load, mean, alike, room = self.load.copy(), self.mean.copy(), self.alike.copy(), self.room.copy()
            poured = self.poured.copy()
            host_room = self.host_room.copy() if self.capped else None
            out = self._choose_out(min(2 + dice.below(MOST), tables), heavy)
            was = [(t, int(self.option[t]), self.places[t]) for t in out]
            for t in out:
                self._shift(t, -1.0)
                self._hold(t, -1)
            order = sorted(out, key=lambda t: (-self._size(t), t))
            if dice.below(3) == 0 and len(order) > 1:
                i, j = dice.below(len(order)), dice.below(len(order))
                order[i], order[j] = order[j], order[i]
            fine = all(self._put(t) for t in order)
            done += len(out)
            cost = self._objective() if fine else np.inf
            then = cost + SMOOTH * self._smooth() if fine else np.inf
            # Slightly worse plans are passed through, less and less so.
            slack = best * 0.004 * max(steps - 2 * done, 0) / start
            if then <= now + slack:
                now = then
                if cost < best * (1.0 - 1e-12):
                    best = cost
                    kept = (self.option.copy(), list(self.places))
            else:
                for t in out:
                    self._forget(t)
                for t, o, places in was:
                    self.option[t], self.places[t] = o, places
                    self._remember(t)
                self.load, self.mean, self.alike, self.room = load, mean, alike, room
                self.poured = poured
                if host_room is not None:
                    self.host_room = host_room
        self.option, self.places = kept
        memory = instance.base_memory.copy()
        self.room = instance.cap - memory
        if self.capped:
            self.host_room = np.full_like(instance.host_cap, np.iinfo(np.int64).max // 2)
        for t in range(tables):
            self._hold(t, 1)
        return Packing(self.option, self.places, instance.cap - self.room)

    def _smooth(self) -> float:
        """With each stage's 32nd-power mean over ranks for its largest: falls when one of several slow ranks does."""
        load = self._level()
        top = np.maximum(load.max(0), 1.0)
        y = load / top
        for _ in range(5):
            y = y * y
        # A sum of whole numbers, and roots that IEEE 754 rounds alike everywhere.
        mean = (y * float(1 << 40)).astype(np.int64).sum(0) / (len(y) * float(1 << 40))
        for _ in range(5):
            mean = np.sqrt(mean)
        total = 0.0
        for x in self.instance.longest(top * mean + self.alike).tolist():
            total += x
        return total

    def _size(self, t: int) -> float:
        return float(self.relaxed.sums[t, self.option[t]])

    def _choose_out(self, count: int, heavy: list[int]) -> list[int]:
        """Key tables of one stage, or of some rank, and others at random, most of them heavy."""
        instance, dice = self.instance, self.dice
        load = self._level()
        spread = load.max(0) - load.min(0)
        busy = [s for s in range(instance.stages) if spread[s] > 0]
        out: dict[int, None] = {}
        if busy:
            s = busy[dice.below(len(busy))]
            rank = int(load[:, s].argmax())
            here = self._on(rank, s)
            for _ in range(1 + dice.below(2)):
                if here:
                    out[here[dice.below(len(here))]] = None
            if dice.below(2):
                # And something of a rank that bears little of this stage.
                other = self._on(int(load[:, s].argmin()), s)
                if other:
                    out[other[dice.below(len(other))]] = None
        while len(out) < count:
            out[heavy[dice.below(len(heavy))] if dice.below(4) else dice.below(instance.tables)] = None
        return list(out)

    def _on(self, rank: int, s: int) -> list[int]:
        """Tables that add to a stage of this rank (of its host, where the stage is shared)."""
        instance = self.instance
        host = int(instance.host_of[rank])
        whole = instance.shared[s] or (self.poured[host] > 0 and self.mean[host, s] > self.load[rank, s])
        ranks = instance.host_ranks[host].tolist() if whole else [rank]
        return [*self.on_host[host], *(t for r in ranks for t in self.on_rank[r])]

    def _put(self, t: int) -> bool:
        """The table with the option and places of the least price; False if none fits."""
        instance = self.instance
        bar = self._bar()
        best: float = np.inf
        found: tuple[int, tuple[int, ...]] | None = None
        some = self.uniform[t]
        whole = None if instance.allowed is None else instance.allowed[t]
        if some is not None:
            for j in range(len(some.option)):
                if np.all(self.room >= some.memory[j]) and (
                    not self.capped or np.all(self.host_room >= some.memory[j] * instance.host_sizes[:, None])
                ):
                    price = float(some.fair[j])
                    if price < best:
                        best, found = price, (int(some.option[j]), ())
        room = self.room
        if self.capped:
            room = np.minimum(room, self.host_room[instance.host_of])
        if self.singles[t] is not None:
            best, found = self._cheapest(
                self.singles[t], self.load, self.factor, room, whole, None, bar, best, found
            )
        for hosts, choices in self.hosted[t]:
            load = np.maximum.reduceat(self.load[self.by_host], self.starts)[hosts]
            host_room = np.minimum.reduceat(self.room[self.by_host], self.starts)[hosts]
            if self.capped:
                host_room = np.minimum(
                    host_room, self.host_room[hosts] // instance.host_sizes[hosts][:, None]
                )
            allowed = (
                None if whole is None else np.logical_and.reduceat(whole[self.by_host], self.starts)[hosts]
            )
            best, found = self._cheapest(
                choices, load, self.host_factor[hosts], host_room, allowed, hosts, bar, best, found
            )
        if found is None:
            return False
        self.option[t], self.places[t] = found
        self._shift(t, 1.0)
        self._hold(t, 1)
        return not self.capped or bool(np.all(self.host_room >= 0))

    def _cheapest(
        self,
        choices: _Choices | None,
        load: Floats,
        factor: Floats,
        room: Ints,
        allowed: Bools | None,
        hosts: Ints | None,
        bar: Floats,
        best: float,
        found: tuple[int, tuple[int, ...]] | None,
    ) -> tuple[float, tuple[int, tuple[int, ...]] | None]:
        assert choices is not None
        fits = (choices.at_home <= self.room.min(0)).all(1)
        hopeful = np.flatnonzero((choices.fair < best) & fits)
        if not len(hopeful):
            return best, found
        if len(load) > 2 * FEW:
            closed = (room < choices.memory[hopeful].min(0)).any(1)
            if allowed is not None:
                closed |= ~allowed
            some = self._few(choices, hopeful, load, factor, bar, closed)
            load, factor, room = load[some], factor[some], room[some]
            allowed = None if allowed is None else allowed[some]
            hosts_or_ranks = some if hosts is None else hosts[some]
        else:
            hosts_or_ranks = np.arange(len(load)) if hosts is None else hosts
        stages = self.busy if hosts is None else self.every
        load, factor, bar = load[:, stages], factor[:, stages], bar[stages]
        # [S, J, B], added up over stages one after the other.
        time = choices.time[hopeful].T[stages][:, :, None]
        more = time * factor.T[:, None, :]
        y = load.T[:, None, :] + more
        if not self.pour:
            mean = load
        elif hosts is None:
            # A piece on one rank of a host: the mean rises by its part of it.
            mean = self._means()[self.instance.host_of[hosts_or_ranks]][:, stages]
            y = np.maximum(y, mean.T[:, None, :] + more * self.part[stages][:, :, hosts_or_ranks])
        else:
            mean = self._means()[hosts_or_ranks]
            fluid = choices.fluid[hopeful][None, :, None]
            fixed = choices.fixed[hopeful].T[:, :, None] * factor.T[:, None, :]
            poured = np.maximum(load.T[:, None, :] + fixed, self.mean[hosts_or_ranks].T[:, None, :] + more)
            y = np.where(fluid, poured, np.maximum(y, mean.T[:, None, :] + more))
        over = np.maximum(y - bar[:, None, None], 0.0).sum(0)
        # Where nothing overflows, steep decides (how much it adds to the sum of 4th powers); else the overflow.
        level = np.maximum(bar, 1.0)
        y /= level[:, None, None]
        y *= y
        y *= y
        x = (np.maximum(load, mean) if self.pour else load) / level
        x *= x
        x *= x
        steep = ((y - x.T[:, None, :]) * level[:, None, None]).sum(0)
        rank_by = over + steep * 1e-3
        closed = (choices.memory[hopeful][:, None, :] > room[None]).any(2)
        if allowed is not None:
            closed |= ~allowed[None]
        rank_by[closed] = np.inf
        for i, j in enumerate(hopeful.tolist()):
            if choices.fair[j] >= best:
                continue
            k = int(choices.pieces[j])
            if k == 1:
                where = [int(rank_by[i].argmin())]
            elif hosts is None and self.linked:
                where = spread(
                    rank_by[i], k, self.instance.host_of[hosts_or_ranks], self.instance.host_sizes
                ).tolist()
            else:
                where = np.argsort(rank_by[i], kind="stable")[:k].tolist()
            if len(where) < k or rank_by[i, where[-1]] == np.inf:
                continue
            last = where[-1]
            price = float(choices.fair[j]) + float(over[i, where].max()) + 1e-4 * float(steep[i, last])
            if price < best:
                best = price
                found = (int(choices.option[j]), tuple(sorted(hosts_or_ranks[where].tolist())))
        return best, found

    def _few(
        self, choices: _Choices, hopeful: Ints, load: Floats, factor: Floats, bar: Floats, closed: Bools
    ) -> Ints:
        """The bins that overflow least with the largest piece, or the smallest, of those looked at."""
        size = choices.time[hopeful].sum(1)
        count = max(FEW, 2 * int(choices.pieces[hopeful].max()))
        kept = np.zeros(len(load), np.bool_)
        for j in {int(size.argmax()), int(size.argmin())}:
            y = load + choices.time[hopeful[j]] * factor
            over = np.maximum(y - bar, 0.0)
            level = np.maximum(bar, 1.0)
            y /= level
            y *= y
            y *= y
            y *= level * 1e-3
            key = np.zeros(len(load))
            for s in range(load.shape[1]):
                key += over[:, s]
                key += y[:, s]
            key[closed] = np.inf
            kept[np.argsort(key, kind="stable")[:count]] = True
        return np.flatnonzero(kept)
