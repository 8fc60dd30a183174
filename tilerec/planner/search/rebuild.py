"""Large-neighborhood search: take a few tables out of a packing, and put them back with other options and places.

    Input    a packing, and the options that each table may use
    Changes  options and places of up to LARGEST_ROUND + 1 tables per round
    Keeps    no rank and no host exceeds its memory; the best packing so far is the result
    Stops    after a given number of tables has been put back
    Cost     O(J x S x B) operations per table (see `steps_within`); for few tables per rank

A round takes out tables of the slowest rank of some stage, and random others, mostly heavy ones. They come back one by
one, the largest first, each with the option and the places of the least price. A round that leads to a slightly worse
packing is kept at first, less and less so; other rounds are undone.

Nouns
  bar       [S] ps that a rank can bear in each stage without a longer step, while the tables are out
  overflow  ps that a piece adds beyond the bar
  price     of an option: its work averaged over all ranks, plus its overflow. The average stands for the room that
            later tables lose
  heavy     a table with a piece that is a large part of a stage

Floats are added, multiplied and compared one by one in a fixed order, and random numbers come from a counter. So every
machine makes the same plan.

Legend: T tables, O options, S stages, M memory tiers, R ranks, H hosts, J options of a table, B bins (ranks or hosts).
"""

from __future__ import annotations

import numpy as np

from tilerec.planner.search.bins import spread_over_hosts
from tilerec.planner.search.instance import Bools, Floats, Ints
from tilerec.planner.search.option_choices import OPTIONS_PER_TABLE, Choices, choices_of_tables
from tilerec.planner.search.pack import Packing
from tilerec.planner.search.rebuild_state import Candidates, RebuildState
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.work import CALLS, Work

MOST_TABLES_PUT_BACK = 5_000  # tables put back in one call
# Times that each table is put back in one call: of few tables, the same arrangements come back. 100 times left plans up
# to 0.07 % dearer, 400 times none (docs/log.md).
MOST_TIMES_PUT_BACK = 400
BINS_JUDGED = 64  # bins for which a piece is priced exactly, out of more than twice as many
LARGEST_ROUND = 16  # a round takes out 2 to LARGEST_ROUND + 1 tables
SMOOTH_WEIGHT = 4.0  # weight of the smooth objective beside the true one
HEAVY_PART = 0.2  # a table is heavy if one piece takes more than this part of a stage
WORSE_PART = 0.004  # at first, a round may worsen the objective by this part of it
STEEP_WEIGHT = 1e-3  # weight of the 4th powers of loads beside the overflow, to choose between bins
STEEP_PRICE = 1e-4  # and in the price, to choose between options


class Dice:
    """Pseudorandom numbers that are the same on every machine (a linear congruential generator, Knuth's MMIX)."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, n: int) -> int:
        """Return a number in 0 to n - 1."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) * n >> 31


def steps_within(relaxed: Relaxed, work: Work) -> int:
    """Return the number of tables that can be put back within some work, and spend that work."""
    instance = relaxed.instance
    stages = int(instance.first.sum())
    size = instance.ranks * stages
    each = 10 * CALLS + min(size, 2 * BINS_JUDGED * stages) * OPTIONS_PER_TABLE * 20 + size * 10
    first = 5 * CALLS * instance.tables
    steps = min(MOST_TABLES_PUT_BACK, MOST_TIMES_PUT_BACK * instance.tables, (work.left - first) // each)
    if steps <= 0:
        return 0
    work.spend(first + steps * each)
    return steps


def rebuild(
    relaxed: Relaxed, usable: Bools, packing: Packing, steps: int, seed: int = 1, fractional: bool = False
) -> Packing:
    """Return a packing whose objective is not larger, after `steps` tables were put back.

    Args:
        usable: [T, O] options that tables may change to.
        seed: of the random choices.
        fractional: judge rows that are split over a host as if they lay where its ranks have least work. The objective
            is then not larger in that sense.
    """
    return _Rebuild(relaxed, usable, packing, seed, fractional).run(steps) if steps else packing


class _Rebuild:
    def __init__(self, relaxed: Relaxed, usable: Bools, packing: Packing, seed: int, fractional: bool) -> None:
        instance = self.instance = relaxed.instance
        self.relaxed, self.dice, self.fractional = relaxed, Dice(seed), fractional
        self.state = RebuildState(instance, packing, fractional)
        self.choices = choices_of_tables(relaxed, usable, packing.option, fractional)
        # Pieces on hosts are priced in every stage; pieces on ranks in the first of each phase, as they add little to
        # the others.
        self.every_stage = np.arange(instance.stages)
        self.first_stages = np.flatnonzero(instance.first)

    def run(self, steps: int) -> Packing:
        """Put back `steps` tables, in rounds, and return the best packing."""
        instance, dice, state = self.instance, self.dice, self.state
        tables, every = instance.tables, np.arange(instance.tables)
        size = (instance.cost[every, state.option] / np.maximum(state.load.max(0), 1.0)).max(1)
        heavy = np.flatnonzero(size > HEAVY_PART).tolist() or [int(size.argmax())]
        best = state.objective()
        kept = (state.option.copy(), list(state.places))
        done = 0
        now = best + SMOOTH_WEIGHT * state.smooth_objective()
        while done < steps:
            out = self._choose_out(min(2 + dice.below(LARGEST_ROUND), tables), heavy)
            before = state.take_out(out)
            order = sorted(out, key=lambda t: (-float(self.relaxed.sums[t, state.option[t]]), t))
            if dice.below(3) == 0 and len(order) > 1:
                i, j = dice.below(len(order)), dice.below(len(order))
                order[i], order[j] = order[j], order[i]
            complete = all(self._put_back(t) for t in order)
            done += len(out)
            cost = state.objective() if complete else np.inf
            then = cost + SMOOTH_WEIGHT * state.smooth_objective() if complete else np.inf
            slack = best * WORSE_PART * max(steps - 2 * done, 0) / steps
            if then <= now + slack:
                now = then
                if cost < best * (1.0 - 1e-12):
                    best = cost
                    kept = (state.option.copy(), list(state.places))
            else:
                state.undo(before)
        state.option, state.places = kept
        return state.packing()

    def _choose_out(self, count: int, heavy: list[int]) -> list[int]:
        """Return tables to take out: of the slowest and the fastest rank of a random stage, and random others."""
        instance, dice, state = self.instance, self.dice, self.state
        load = state.level()
        spread = load.max(0) - load.min(0)
        busy = [s for s in range(instance.stages) if spread[s] > 0]
        out: dict[int, None] = {}
        if busy:
            s = busy[dice.below(len(busy))]
            here = state.tables_on(int(load[:, s].argmax()), s)
            for _ in range(1 + dice.below(2)):
                if here:
                    out[here[dice.below(len(here))]] = None
            if dice.below(2):
                other = state.tables_on(int(load[:, s].argmin()), s)
                if other:
                    out[other[dice.below(len(other))]] = None
        while len(out) < count:
            out[heavy[dice.below(len(heavy))] if dice.below(4) else dice.below(instance.tables)] = None
        return list(out)

    def _put_back(self, t: int) -> bool:
        """Place a table with the option and places of the least price; return False if none fits."""
        instance, state, choices = self.instance, self.state, self.choices[t]
        bar = state.bar()
        best: float = np.inf
        found: tuple[int, tuple[int, ...]] | None = None
        whole = None if instance.allowed is None else instance.allowed[t]
        if choices.uniform is not None:
            some = choices.uniform
            for j in range(len(some.option)):
                price = float(some.fair[j])
                if price < best and state.fits_everywhere(some.memory[j]):
                    best, found = price, (int(some.option[j]), ())
        if choices.single is not None:
            room = state.room
            if instance.capped:
                room = np.minimum(room, state.host_room[instance.host_of])
            bins = Candidates(np.arange(instance.ranks), state.load, state.factor, room, whole)
            best, found = self._cheapest(choices.single, bins, False, bar, best, found)
        for hosts, some in choices.hosted:
            bins = state.host_candidates(hosts, whole)
            best, found = self._cheapest(some, bins, True, bar, best, found)
        return found is not None and state.put_in(t, *found)

    def _cheapest(
        self,
        choices: Choices,
        bins: Candidates,
        on_hosts: bool,
        bar: Floats,
        best: float,
        found: tuple[int, tuple[int, ...]] | None,
    ) -> tuple[float, tuple[int, tuple[int, ...]] | None]:
        """Return the least price and its option and places, if it is below `best`; else `best` and `found`."""
        fits = (choices.at_home <= bins.room.min(0)).all(1)
        hopeful = np.flatnonzero((choices.fair < best) & fits)
        if not len(hopeful):
            return best, found
        if len(bins.load) > 2 * BINS_JUDGED:
            closed = (bins.room < choices.memory[hopeful].min(0)).any(1)
            if bins.allowed is not None:
                closed |= ~bins.allowed
            bins = bins.take(_few(choices, hopeful, bins.load, bins.factor, bar, closed))
        over, steep = self._judged(choices, hopeful, bins, on_hosts, bar)
        score = over + steep * STEEP_WEIGHT
        closed = (choices.memory[hopeful][:, None, :] > bins.room[None]).any(2)
        if bins.allowed is not None:
            closed |= ~bins.allowed[None]
        score[closed] = np.inf
        for i, j in enumerate(hopeful.tolist()):
            if choices.fair[j] >= best:
                continue
            k = int(choices.pieces[j])
            if k == 1:
                where = [int(score[i].argmin())]
            elif not on_hosts and self.state.linked:
                host_of = self.instance.host_of[bins.place]
                where = spread_over_hosts(score[i], k, host_of, self.instance.host_sizes).tolist()
            else:
                where = np.argsort(score[i], kind="stable")[:k].tolist()
            if len(where) < k or score[i, where[-1]] == np.inf:
                continue
            price = float(choices.fair[j]) + float(over[i, where].max())
            price += STEEP_PRICE * float(steep[i, where[-1]])
            if price < best:
                best = price
                found = (int(choices.option[j]), tuple(sorted(bins.place[where].tolist())))
        return best, found

    def _judged(
        self, choices: Choices, hopeful: Ints, bins: Candidates, on_hosts: bool, bar: Floats
    ) -> tuple[Floats, Floats]:
        """Return, [J, B] in ps, the overflow of a piece on each bin, and the growth of the 4th powers of loads."""
        stages = self.every_stage if on_hosts else self.first_stages
        load, factor, bar = bins.load[:, stages], bins.factor[:, stages], bar[stages]
        # [S, J, B], added up over stages one after the other.
        more = choices.time[hopeful].T[stages][:, :, None] * factor.T[:, None, :]
        y = load.T[:, None, :] + more
        state, base = self.state, load
        if self.fractional and not on_hosts:
            # A piece on one rank raises the mean of its host by a part of its time.
            mean = state.means()[self.instance.host_of[bins.place]][:, stages]
            y = np.maximum(y, mean.T[:, None, :] + more * state.part[stages][:, :, bins.place])
            base = np.maximum(load, mean)
        elif self.fractional:
            mean = state.means()[bins.place]
            fixed = choices.fixed[hopeful].T[:, :, None] * factor.T[:, None, :]
            moved = np.maximum(load.T[:, None, :] + fixed, state.mean[bins.place].T[:, None, :] + more)
            even = np.maximum(y, mean.T[:, None, :] + more)
            y = np.where(choices.fluid[hopeful][None, :, None], moved, even)
            base = np.maximum(load, mean)
        over: Floats = np.maximum(y - bar[:, None, None], 0.0).sum(0)
        level = np.maximum(bar, 1.0)
        y /= level[:, None, None]
        y *= y
        y *= y
        x = base / level
        x *= x
        x *= x
        steep: Floats = ((y - x.T[:, None, :]) * level[:, None, None]).sum(0)
        return over, steep


def _few(choices: Choices, hopeful: Ints, load: Floats, factor: Floats, bar: Floats, closed: Bools) -> Ints:
    """Return the bins that overflow least with the largest piece, and those that do with the smallest piece."""
    size = choices.time[hopeful].sum(1)
    count = max(BINS_JUDGED, 2 * int(choices.pieces[hopeful].max()))
    kept = np.zeros(len(load), np.bool_)
    level = np.maximum(bar, 1.0)[:, None]
    for j in {int(size.argmax()), int(size.argmin())}:
        # [S, B], added up over stages one after the other.
        y = np.ascontiguousarray((load + choices.time[hopeful[j]] * factor).T)
        over = np.maximum(y - bar[:, None], 0.0)
        y = y / level
        y *= y
        y *= y
        y *= level * STEEP_WEIGHT
        y += over
        key = y.sum(0)
        key[closed] = np.inf
        kept[np.argsort(key, kind="stable")[:count]] = True
    return np.flatnonzero(kept)
