"""Local search: exchange pieces between pairs of ranks, or pairs of hosts, in all pairs at once.

    Input    a packing
    Changes  the ranks of single pieces; options, and pieces on whole hosts or on every rank, stay
    Keeps    no rank and no host exceeds its memory; the best packing so far is the result
    Stops    after a number of rounds, when a full cycle of rounds gains nothing, or when the cost is low enough
    Cost     R / 2 pairs x n ** 2 swaps x S stages per round

Each round pairs the ranks with the highest load of one stage with those of the lowest, and every pair makes its best
swap. The next round takes the next stage.

Nouns
  pair       a rank with a high load and a rank with a low load
  swap       one piece of each rank of a pair changes its rank. One of the two may be absent: then it is a move
  split      of a pair: a new assignment of a few pieces of both ranks to the two
  potential  of a pair: the sum over stages of level * (load / level) ** p, over both ranks. A swap must lower it. With
             the largest loads as levels and p = 8, 16, 32 it approaches the objective

All numbers are exact in float64, or are summed in a fixed order. So every machine makes the same swaps.

Legend: T tables, S stages, M memory tiers, R ranks, H hosts, P single pieces, Q pairs of a chunk, n pieces per rank
that a round considers, G and K what a rank of a pair may give and take: pieces, or a split and nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tilerec.planner.search.instance import (
    PER_MILLE,
    Bools,
    Floats,
    Instance,
    Ints,
    alike,
    at_home,
    evaluate,
    fits,
    work_of,
)
from tilerec.planner.search.pack import Packing, host_bins
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.work import CALLS, Work

Amounts = Floats | Ints

SWAP_PIECES = 24  # pieces per rank that a round of swaps considers
SWAP_PIECES_OF_MANY_RANKS = 8  # the same from MANY_RANKS on: more rounds of fewer swaps gain more per unit of work
MANY_RANKS = 512
SPLIT_PIECES = 5  # pieces per rank that a round of splits considers: up to 2 ** 10 splits of a pair
SWAPS_PER_CHUNK = 400_000  # swaps judged in one array
SPLITS_UP_TO_RANKS = 16  # splits are tried on at most so many ranks, where a rank holds few pieces
IDLE_REPAIRS = 16  # consecutive rounds without a swap after which a repair ends


def exchange(relaxed: Relaxed, packing: Packing, rounds: int, enough: int, work: Work) -> tuple[Packing, int]:
    """Return a packing whose objective is not larger, and that objective in ps, without fixed charges.

    Args:
        rounds: most rounds.
        enough: ps at which the search ends.
    """
    return _Exchange(relaxed, packing, work).run(rounds, enough)


def exchange_hosts(relaxed: Relaxed, packing: Packing, rounds: int, work: Work) -> Packing:
    """Return a packing with pieces on whole hosts exchanged between hosts of one size; single pieces stay."""
    instance, option = relaxed.instance, packing.option
    width = instance.width[np.arange(instance.tables), option]
    for n in np.unique(instance.host_sizes[instance.host_sizes > 1]).tolist():
        tables = np.flatnonzero((width == n) & ~instance.everywhere(width))
        hosts = np.flatnonzero(instance.host_sizes == n)
        if not len(tables) or len(hosts) == 1:
            continue
        there = _as_ranks(relaxed, packing, tables, hosts)
        at = [tuple(np.searchsorted(hosts, packing.places[t]).tolist()) for t in tables.tolist()]
        start = Packing(np.zeros(len(tables), np.int64), at, there.instance.base_memory)
        found, _ = exchange(there, start, rounds, 0, work)
        places = list(packing.places)
        for t, where in zip(tables.tolist(), found.places, strict=True):
            places[t] = tuple(hosts[list(where)].tolist())
        packing = Packing(option, places, work_of(instance, option, places, {})[1])
    return packing


def _as_ranks(relaxed: Relaxed, packing: Packing, tables: Ints, hosts: Ints) -> Relaxed:
    """Return an instance whose ranks are these hosts, with the loads of all tables but `tables`.

    A piece of `tables` on a whole host is a single piece there.
    """
    instance, option = relaxed.instance, packing.option[tables]
    rest = list(packing.places)
    for t in tables.tolist():
        rest[t] = ()
    work, bytes_now = work_of(instance, packing.option, rest, {})
    base = at_home(instance, work[-1])
    base = base - alike(instance, base)
    bins = host_bins(relaxed, hosts, base, work[:-1], bytes_now)
    cost = instance.cost[tables, option][:, None]
    one = Instance(
        [instance.names[t] for t in tables.tolist()],
        np.ones((len(tables), 1), np.int64),
        instance.pieces[tables, option][:, None],
        cost,
        np.zeros_like(cost),
        instance.memory[tables, option][:, None],
        np.maximum(bins.room, 0),
        np.arange(len(hosts)),
        slow=(bins.slow * PER_MILLE).astype(np.int64),
        base_cost=bins.time.astype(np.int64),
        phase=instance.phase,
        allowed=None if bins.allowed is None else bins.allowed[tables],
    )
    return Relaxed(one)


def repair(relaxed: Relaxed, packing: Packing, rounds: int, work: Work) -> Packing | None:
    """Return a packing within all caps, starting from one that may exceed them; None if exchanges do not succeed."""
    return _Exchange(relaxed, packing, work).repair(rounds)


class _Exchange:
    """The places of single pieces, and the loads and free memory that follow.

    table, rank: [P] of each piece. cost, memory: [P + 1, S] and [P + 1, M], the last row being no piece. time: [R, S]
    ps of each rank. load: the same, with the mean of a host in stages that its ranks share. room: [R, M] free bytes.
    several: [P] the table has several single pieces, which must stay on distinct ranks.
    """

    def __init__(self, relaxed: Relaxed, packing: Packing, work: Work) -> None:
        instance = self.instance = relaxed.instance
        self.relaxed = relaxed
        self.option, self.work = packing.option, work
        every = np.arange(instance.tables)
        self.width = instance.width[every, packing.option]
        self.places = packing.places
        single = np.flatnonzero(self.width == 1)
        counts = np.fromiter((len(packing.places[t]) for t in single.tolist()), np.int64, len(single))
        self.table = np.repeat(single, counts)
        self.rank = np.fromiter((r for t in single.tolist() for r in packing.places[t]), np.int64, int(counts.sum()))
        # The last row is no piece: a move is a swap against it.
        cost = instance.cost[self.table, packing.option[self.table]]
        self.cost = np.concatenate([cost, np.zeros((1, instance.stages), np.int64)]).astype(np.float64)
        memory = instance.memory[self.table, packing.option[self.table]]
        self.memory = np.concatenate([memory, np.zeros((1, instance.tiers), np.int64)])
        self.several = np.repeat(counts > 1, counts)
        self.tiers = [m for m in range(instance.tiers) if memory[:, m].any()]
        self.slow = instance.slow / PER_MILLE
        self.sizes = instance.host_sizes.astype(np.float64)
        # The work and memory of everything but single pieces.
        spread = [() if w == 1 else p for w, p in zip(self.width.tolist(), self.places, strict=True)]
        work_apart, self.fixed_memory = work_of(instance, self.option, spread, {})
        self.fixed, self.base = work_apart[:-1], at_home(instance, work_apart[-1])
        self.repairing = False
        self.linked = bool(instance.shared.any()) and instance.hosts > 1
        self.splitting = instance.ranks <= SPLITS_UP_TO_RANKS
        self.between = False  # the ranks of each pair of this round are on two hosts

    def run(self, rounds: int, enough: int) -> tuple[Packing, int]:
        """Exchange pieces; return the best packing and its cost in ps, without fixed charges."""
        instance = self.instance
        best_rank = self.rank.copy()
        if len(self.table) and instance.ranks > 1:
            self._reload()
            found = self._objective()
            idle = 0
            cycle = (1 + self.splitting) * (1 + self.linked) * (instance.stages + 1)
            for turn in range(rounds):
                if found <= enough or self.work.over:
                    break
                power = 3 + min(turn // cycle, 2)
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
        after = evaluate(instance, self.option, self._placed())
        assert fits(instance, after.memory), "an exchange left a cap behind"
        cost = int(instance.longest(after.stage).sum())
        return Packing(self.option, list(after.places), after.memory), cost

    def repair(self, rounds: int) -> Packing | None:
        """Exchange pieces until no cap is exceeded; return None if that does not succeed."""
        self.repairing, self.linked, self.splitting = True, False, True
        if not len(self.table) or self.instance.ranks == 1:
            return None
        self._reload()
        idle = 0
        for turn in range(rounds):
            if self.room.min() >= 0:
                places = self._placed()
                after = evaluate(self.instance, self.option, places)
                return Packing(self.option, places, after.memory) if fits(self.instance, after.memory) else None
            idle = 0 if self._round(turn, 3) else idle + 1
            if idle >= IDLE_REPAIRS or self.work.over:
                break
            self._reload()
        return None

    def _placed(self) -> list[tuple[int, ...]]:
        """Return the places of all tables, from the present ranks of single pieces."""
        places = list(self.places)
        starts = np.flatnonzero(np.diff(self.table, prepend=-1))
        ranks, ends = self.rank.tolist(), [*starts[1:].tolist(), len(self.table)]
        for t, start, end in zip(self.table[starts].tolist(), starts.tolist(), ends, strict=False):
            places[t] = tuple(sorted(ranks[start:end]))
        return places

    def _reload(self) -> None:
        """Recompute loads and free memory from the present ranks of single pieces."""
        instance = self.instance
        work = self.fixed.copy()
        memory = self.fixed_memory.copy()
        np.add.at(work, self.rank, self.cost[:-1].astype(np.int64))
        np.add.at(memory, self.rank, self.memory[:-1])
        self.time = self.base + -(-work * instance.slow // PER_MILLE)
        self.bytes = memory
        link = instance.by_host(self.time)
        self.load = self.time.astype(np.float64)
        for s in np.flatnonzero(instance.shared).tolist():
            self.load[:, s] = np.floor(link[:, s] / self.sizes)[instance.host_of]
        self.room = instance.cap - memory
        self.there = np.sort(self.rank * instance.tables + self.table)
        if instance.capped:
            # All pairs swap at once, so each rank may use only its part of the free memory of its host.
            left = (instance.host_cap - instance.by_host(memory)) // instance.host_sizes[:, None]
            self.room = np.minimum(self.room, left[instance.host_of])

    def _objective(self) -> int:
        """Return the time of a step in ps, without fixed charges."""
        return int(self.instance.longest(self.load.max(0)).astype(np.int64).sum())

    def _round(self, turn: int, power: int) -> bool:
        """Make the best swap, or split, of each pair; return True if any pair gained by one."""
        instance = self.instance
        ranks = instance.ranks
        top = np.maximum(self.load.max(0), 1.0)
        # Levels are above the load that all ranks have in common.
        floor = self.load.min(0)
        for twins in instance.twins:
            top[twins], floor[twins] = top[twins].max(), floor[twins].min()
        level = np.maximum(top - floor, 1.0)
        mean = np.floor(self.load).astype(np.int64).sum(0) // ranks
        level = np.maximum(level, np.minimum(top, (mean - floor) * 1.0))
        floor = top - level
        # In every second round the ranks of a pair share a host, so the load of the host's link does not change.
        inside = self.linked and turn % 2 == 0
        heavy, light = self._pairs(turn, inside, top - mean, floor)
        self.between = self.linked and not inside
        if not len(heavy):
            return False
        judge = _Judge(self, level, floor, power)
        swap_pieces = SWAP_PIECES_OF_MANY_RANKS if instance.ranks >= MANY_RANKS else SWAP_PIECES
        split = self.splitting and turn // (1 + self.linked) % 2 == 1
        slots = self._slots(turn, SPLIT_PIECES if split else swap_pieces)
        n = slots.shape[1]
        if split:
            # A split assigns the pieces of both ranks.
            n = 2 ** min(2 * (n - 1), 2 * SPLIT_PIECES)
        chunk = max(SWAPS_PER_CHUNK // (n if split else n * n), 1)
        self.work.spend(
            30 * CALLS + len(self.table) * 400 + len(heavy) * (n if split else n * n) * int(instance.first.sum()) * 4
        )
        moved, to = [], []
        for start in range(0, len(heavy), chunk):
            a, b = heavy[start : start + chunk], light[start : start + chunk]
            pieces, where = self._splits(a, b, slots, judge) if split else self._swaps(a, b, slots, judge)
            moved.append(pieces)
            to.append(where)
        pieces = np.concatenate(moved)
        self.rank[pieces] = np.concatenate(to)
        return bool(len(pieces))

    def _pairs(self, turn: int, inside: bool, spread: Floats, floor: Floats) -> tuple[Ints, Ints]:
        """Return the first and the second rank of each pair: high loads with low ones, by one stage per step.

        Stages take turns, the most uneven one first; the last turn is by the sum of all stages.

        Args:
            inside: both ranks of a pair are on one host.
            spread: [S] largest load above the mean. floor: [S] ps that levels start from.
        """
        instance = self.instance
        stages, ranks = instance.stages, instance.ranks
        step = turn // ((1 + self.splitting) * (1 + self.linked))
        phase = step % (stages + 1)
        key = np.zeros(ranks)
        if self.repairing:
            for m in self.tiers:
                key = np.maximum(key, self.bytes[:, m] / np.maximum(instance.cap[:, m], 1))
        elif phase < stages:
            s = int(np.argsort(-spread, kind="stable")[phase])
            key = self.load[:, s] - floor[s]
        else:
            for s in range(stages):
                key = key + self.load[:, s]
        order = np.argsort(-key, kind="stable")
        if inside:
            # The first rank of a host with its last one, the second with the last but one …
            order = order[np.argsort(instance.host_of[order], kind="stable")]
            sizes = instance.host_sizes
            starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
            at = np.arange(ranks) - starts
            size = np.repeat(sizes, sizes)
            first = at < size // 2
            other = starts + size - 1 - at
            if (step // (stages + 1)) % 2:
                other = starts + (size + 1) // 2 + at
            return order[first], order[other[first]]
        half = ranks // 2
        shift = step if self.repairing else step // (stages + 1)
        return order[:half], np.roll(order[::-1][: ranks - half], shift * max(half // 7, 1))[:half]

    def _slots(self, turn: int, window: int) -> Ints:
        """Return [R, n] pieces of each rank that the round considers; the last column is no piece."""
        ranks, pieces = self.instance.ranks, len(self.table)
        order = np.argsort(self.rank, kind="stable")
        counts = np.bincount(self.rank, minlength=ranks)
        starts = np.cumsum(counts) - counts
        n = min(int(counts.max()), window)
        # Of more pieces, each round considers the next `window` ones.
        at = (np.arange(n)[None, :] + (turn * n) * (counts > n)[:, None]) % np.maximum(counts, 1)[:, None]
        slots = order[np.minimum(starts[:, None] + at, max(pieces - 1, 0))]
        slots[np.arange(n)[None, :] >= counts[:, None]] = pieces
        return np.concatenate([slots, np.full((ranks, 1), pieces)], 1)

    def _swaps(self, a: Ints, b: Ints, slots: Ints, judge: _Judge) -> tuple[Ints, Ints]:
        """Return the pieces of the best swap of each pair that gains by one, and their new ranks."""
        give, take = slots[a], slots[b]
        q, n = give.shape
        cost, memory = self.cost.T, self.memory.T
        total = judge.pair(a, b, cost[:, give], cost[:, take], memory[:, give], memory[:, take])
        total[np.broadcast_to(self._stuck(give, b)[:, :, None], total.shape)] = np.inf
        total[np.broadcast_to(self._stuck(take, a)[:, None, :], total.shape)] = np.inf
        flat = total.reshape(q, -1)
        best = flat.argmin(1)
        gains = flat[np.arange(q), best] < flat[:, -1] * (1.0 - 1e-9)
        give, take = give[np.arange(q), best // n], take[np.arange(q), best % n]
        if self.between:
            off = self.cost[give] - self.cost[take]
            gains = self._agreed(a, b, gains, flat[:, -1] - flat[np.arange(q), best], off, judge)
        give, take = give[gains], take[gains]
        real_give, real_take = give < len(self.table), take < len(self.table)
        pieces = np.concatenate([give[real_give], take[real_take]])
        return pieces, np.concatenate([b[gains][real_give], a[gains][real_take]])

    def _agreed(self, a: Ints, b: Ints, gains: Bools, gain: Floats, off: Floats, judge: _Judge) -> Bools:
        """Return [Q] pairs that gain even after the better swaps that use the same hosts' links.

        Args:
            gains: [Q] pairs that gain by their swap alone. gain: [Q] how much.
            off: [Q, S] ps that go from a to b.
        """
        host = self.instance.host_of
        kept = np.zeros(len(gains), np.bool_)
        order = np.lexsort((-gain, host[a]))
        order = order[gains[order]]
        first = np.flatnonzero(np.diff(host[a[order]], prepend=-1))
        turn = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
        own = gain - judge.links(a, b, off)
        for k in range(int(turn.max(initial=-1)) + 1):
            some = order[turn == k]
            some = some[own[some] + judge.links(a[some], b[some], off[some]) > 0.0]
            kept[some] = True
            judge.shift(a[some], b[some], off[some])
        return kept

    def _splits(self, a: Ints, b: Ints, slots: Ints, judge: _Judge) -> tuple[Ints, Ints]:
        """Return the pieces that change their rank by the best split of each pair that gains, and their new ranks."""
        nothing = len(self.table)
        on_a, on_b = slots[a][:, :-1], slots[b][:, :-1]
        on_a = np.where(self._stuck(on_a, b), nothing, on_a)
        on_b = np.where(self._stuck(on_b, a), nothing, on_b)
        both = np.concatenate([on_a, on_b], 1)
        q, n = both.shape
        sets = (np.arange(1 << n)[:, None] >> np.arange(n)[None, :] & 1).astype(np.float64)
        # Sums of whole numbers below 2 ** 53 are exact in any order.
        was = np.arange(n) < on_a.shape[1]
        cost, memory = self.cost.T[:, both], self.memory.T[:, both].astype(np.float64)
        off = cost[:, :, was].sum(2)[:, :, None] - cost @ sets.T
        bytes_off = memory[:, :, was].sum(2)[:, :, None] - memory @ sets.T
        zero = np.zeros((1, q, 1))
        total = judge.pair(a, b, off, zero.repeat(len(off), 0), bytes_off, zero.repeat(len(bytes_off), 0))[:, :, 0]
        best = total.argmin(1)
        still = (1 << on_a.shape[1]) - 1
        gains = total[np.arange(q), best] < total[:, still] * (1.0 - 1e-9)
        if self.between:
            gain = total[:, still] - total[np.arange(q), best]
            gains = self._agreed(a, b, gains, gain, off[:, np.arange(q), best].T, judge)
        to = np.where(sets[best] > 0, a[:, None], b[:, None])
        change = (both < nothing) & gains[:, None] & (to != np.where(was, a[:, None], b[:, None]))
        return both[change], to[change]

    def _stuck(self, given: Ints, to: Ints) -> Bools:
        """Return [Q, n] pieces that may not go to rank `to`: it is not allowed, or holds a piece of the table."""
        instance, pieces = self.instance, len(self.table)
        table = self.table[np.minimum(given, pieces - 1)]
        bad = np.zeros(given.shape, np.bool_)
        if self.several.any():
            wanted = to[:, None] * instance.tables + table
            at = np.minimum(np.searchsorted(self.there, wanted), len(self.there) - 1)
            bad |= self.there[at] == wanted
        if instance.allowed is not None:
            bad |= ~instance.allowed[table, to[:, None]]
        return bad & (given < pieces)


class _Judge:
    """Computes the potential of pairs after a swap.

    Args:
        level: [S] ps above `floor` that loads are relative to. floor: [S] ps that does not count.
        power: loads are raised to the power of 2 ** power.
    """

    def __init__(self, state: _Exchange, level: Floats, floor: Floats, power: int) -> None:
        self.state, self.level, self.floor, self.power = state, level, floor, power
        instance = state.instance
        self.shared = np.flatnonzero(instance.shared)
        # [H, shared stages] ps of the hosts' links.
        self.link = state.load[:, self.shared][[ranks[0] for ranks in instance.host_ranks]]

    def links(self, a: Ints, b: Ints, off: Floats) -> Floats:
        """Return [Q] the loss of potential of the links of two hosts, when [Q, S] ps go from a to b."""
        gone = off[:, self.shared]
        level, floor = self.level[self.shared], self.floor[self.shared]
        less = np.zeros(len(a))
        for rank, sign in ((a, -1.0), (b, 1.0)):
            now = self.link[self.state.instance.host_of[rank]] - floor
            then = now + sign * gone * self._part(rank)
            change = (_power(now / level, self.power) - _power(then / level, self.power)) * level
            for column in range(len(self.shared)):
                less += change[:, column]
        return less

    def shift(self, a: Ints, b: Ints, off: Floats) -> None:
        """Record that [Q, S] ps go from a to b."""
        host = self.state.instance.host_of
        np.subtract.at(self.link, host[a], off[:, self.shared] * self._part(a))
        np.add.at(self.link, host[b], off[:, self.shared] * self._part(b))

    def _part(self, rank: Ints) -> Floats:
        state = self.state
        return state.slow[rank][:, self.shared] / state.sizes[state.instance.host_of[rank]][:, None]

    def pair(self, a: Ints, b: Ints, give: Floats, take: Floats, bytes_give: Amounts, bytes_take: Amounts) -> Floats:
        """Return [Q, G, K] potentials after a has given one of G and taken one of K; infinite beyond a cap.

        In a repair, the potential is one of memory: bytes beyond caps dominate.

        Args:
            give, take: [S, Q, G] and [S, Q, K] ps. bytes_give, bytes_take: [M, Q, G] and [M, Q, K].
        """
        state = self.state
        instance = state.instance
        total = np.zeros((len(a), give.shape[2], take.shape[2]))
        if state.repairing:
            for m in state.tiers:
                for rank, sign in ((a, -1.0), (b, 1.0)):
                    cap = np.maximum(state.bytes[rank, m] + state.room[rank, m], 1)
                    y = _after(state.bytes[rank, m] / cap, sign / cap, bytes_give[m], bytes_take[m])
                    total += np.maximum(y - 1.0, 0.0) * 1000.0 + _power(y, 3)
            return total
        if instance.ranks == 2:
            one = np.ones(instance.stages)
            tops = [np.maximum(*self._loads(a, b, give, take, s, one, one - 1.0)) for s in range(instance.stages)]
            total += instance.longest(np.stack(tops, 3)).sum(3)
        else:
            for s in range(instance.stages):
                if give[s].any() or take[s].any():
                    for load in self._loads(a, b, give, take, s, self.level, self.floor):
                        load = _power(load, self.power)
                        load *= self.level[s]
                        total += load
        for m in state.tiers:
            on, off = bytes_give[m], bytes_take[m]
            # Only these pairs have a swap beyond a cap.
            full = (on.max(1) - off.min(1) > state.room[b, m]) | (off.max(1) - on.min(1) > state.room[a, m])
            some = np.flatnonzero(full)
            gone = on[some][:, :, None] - off[some][:, None, :]
            beyond = (gone > state.room[b[some], m][:, None, None]) | (-gone > state.room[a[some], m][:, None, None])
            total[some] = np.where(beyond, np.inf, total[some])
        return total

    def _loads(
        self, a: Ints, b: Ints, give: Floats, take: Floats, s: int, level: Floats, floor: Floats
    ) -> Iterator[Floats]:
        """Yield [Q, G, K] loads of a, then of b, in one stage after the swap: above `floor`, relative to `level`."""
        state, instance = self.state, self.state.instance
        same_host = instance.host_of[a] == instance.host_of[b]
        for rank, sign in ((a, -1.0), (b, 1.0)):
            scale = np.full(len(rank), sign / level[s])
            if not instance.even:
                scale *= state.slow[rank, s]
            if instance.shared[s]:
                # A swap inside a host does not change its link; else each of its ranks bears a part.
                scale *= np.where(same_host, 0.0, 1.0 / state.sizes[instance.host_of[rank]])
            yield _after((state.load[rank, s] - floor[s]) / level[s], scale, give[s], take[s])


def _after(now: Floats, scale: Floats, give: Amounts, take: Amounts) -> Floats:
    """Return [Q, G, K] now + scale * (give - take).

    Args:
        now, scale: [Q]. give, take: [Q, G] and [Q, K].
    """
    most: Floats = (now[:, None] + scale[:, None] * give)[:, :, None] - (scale[:, None] * take)[:, None, :]
    return most


def _power(y: Floats, doublings: int) -> Floats:
    """Return max(y, 0) ** (2 ** doublings), by squaring."""
    y = np.maximum(y, 0.0)
    for _ in range(doublings):
        y *= y
    return y
