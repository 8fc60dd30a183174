"""The relaxed problem: places are ignored, and only sums over all ranks count. Its minimum bounds the cost from below.

    Input    an instance
    Result   `Relaxed`: the total work and the total memory of every option, and the options that fit at all;
             `least`: the least sum of totals under limits on memory, by Lagrangian prices
    Cost     `least`: about ten minima over [T, O] for each resource

Nouns
  total     rank-ps: the work of an option, summed over ranks and stages. The sum of a plan's totals, divided by R, is
            at most its cost
  resource  a limited sum over tables: the bytes of a memory tier
  price     rank-ps per unit of a resource, in 1 / 2 ** PRICE_BITS. Every price >= 0 gives a valid bound; the best price
            gives the tightest one
  unit      of a resource: so many bytes that price * units fits into int64. Use is rounded down and limits are rounded
            up, which can only lower the bound

On slow ranks the same work takes longer. An average over ranks therefore weighs stage s of rank r by 1 / slow, so that
work counts equally wherever it is placed.

Legend: T tables, O options, S stages, M tiers, R ranks, H hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tilerec.planner.search.instance import PER_MILLE, Bools, Instance, Ints, Proof

PRICE_BITS = 10  # prices are multiples of 1 / 2 ** PRICE_BITS rank-ps per unit
FACTOR_BITS = 10  # weights of stages are multiples of 1 / 2 ** FACTOR_BITS
UNIT_BITS = 32  # most bits of a limit in units
NEWTON_STEPS = 40  # steps to the best price of a resource; about ten suffice
NEVER = 1 << 60  # rank-ps of an option that must not be chosen; the sum of a few does not overflow


@dataclass(frozen=True, eq=False)
class Resource:
    """A limit on the sum over tables of what their options use.

    Args:
        used: [T, O] units. limit: units.
    """

    used: Ints
    limit: int

    @staticmethod
    def of(used: Ints, limit: int) -> Resource:
        """Return the resource in units such that the limit has at most UNIT_BITS bits."""
        shift = max(limit.bit_length() - UNIT_BITS, 0)
        return Resource(np.minimum(used >> shift, 1 << (UNIT_BITS + 1)), (limit >> shift) + 1)


@dataclass(frozen=True, eq=False)
class Dual:
    """A lower bound on the sum of totals.

    Args:
        value: rank-ps. prices: one per resource. option: [T] the cheapest options at these prices.
        short: index of a resource whose limit every choice of options exceeds; -1 if there is none.
    """

    value: int
    prices: tuple[int, ...]
    option: Ints
    short: int = -1


def least(totals: Ints, resources: Sequence[Resource], prices: Sequence[int] = (), sweeps: int = 2) -> Dual:
    """Return the largest bound min_o sum(totals + price * used) - price * limit over prices, one price after the other.

    As a function of one price, the bound is concave and piecewise linear. Its maximum is where tangents from both sides
    meet, and about ten of them find it exactly.

    Args:
        totals: [T, O] rank-ps; NEVER for options that are not allowed.
        prices: to start from; () for 0.
        sweeps: passes over all resources.
    """
    now = list(prices) if prices else [0] * len(resources)
    value, option = _at(totals, resources, now)
    best = Dual(value, tuple(now), option)
    active = [i for i, r in enumerate(resources) if now[i] or _sum(r.used, option) > r.limit]
    for sweep in range(sweeps):
        before = best.value
        for i in active if sweep else range(len(resources)):
            best = _climb(totals, resources, best, i)
            if best.short >= 0:
                return best
        if len(resources) == 1 or best.value == before:
            break
    return best


def _climb(totals: Ints, resources: Sequence[Resource], best: Dual, i: int) -> Dual:
    """Return the bound with the best price of resource `i` and the present prices of the others."""
    resource = resources[i]
    others = [0 if j == i else p for j, p in enumerate(best.prices)]
    priced, constant = with_prices(totals, resources, others), price_of_limits(resources, others)
    rows = np.arange(len(totals))

    def seen(price: int) -> tuple[int, int, int, Ints]:
        """Return the bound, totals, use and options at a price."""
        at = priced + (price * resource.used >> PRICE_BITS) if price else priced
        option = at.argmin(1)
        bound = int(at[rows, option].sum()) - (price * resource.limit >> PRICE_BITS) - (price > 0)
        return bound, int(priced[rows, option].sum()), _sum(resource.used, option), option

    low = seen(0)
    top, price, option = low[0], 0, low[3]
    if low[2] > resource.limit:
        frugal = np.where(totals >= NEVER, NEVER, resource.used).argmin(1)
        high = (0, int(priced[rows, frugal].sum()), _sum(resource.used, frugal), frugal)
        if high[2] > resource.limit:
            return Dual(best.value, best.prices, frugal, i)
        option = frugal
        for _ in range(NEWTON_STEPS):
            step = ((high[1] - low[1]) << PRICE_BITS) // max(low[2] - high[2], 1)
            new = seen(max(step, 0))
            if new[0] > top:
                top, price = new[0], max(step, 0)
            if new[2] > resource.limit:
                if new[2] == low[2]:
                    break
                low = new
            else:
                option = new[3]
                if new[2] == high[2]:
                    break
                high = new
    if top - constant <= best.value:
        return Dual(best.value, best.prices, option) if len(resources) == 1 else best
    prices = tuple(price if j == i else p for j, p in enumerate(best.prices))
    return Dual(top - constant, prices, option)


def _at(totals: Ints, resources: Sequence[Resource], prices: Sequence[int]) -> tuple[int, Ints]:
    """Return the bound in rank-ps and its options at these prices."""
    priced = with_prices(totals, resources, prices)
    option = priced.argmin(1)
    return _sum(priced, option) - price_of_limits(resources, prices), option


def with_prices(totals: Ints, resources: Sequence[Resource], prices: Sequence[int]) -> Ints:
    """Return [T, O] totals plus price * use of the resources."""
    for resource, price in zip(resources, prices, strict=True):
        if price:
            totals = totals + (price * resource.used >> PRICE_BITS)
    return totals


def price_of_limits(resources: Sequence[Resource], prices: Sequence[int]) -> int:
    """Return the rank-ps that a bound subtracts for the limits of the resources, rounded up."""
    return sum((p * r.limit >> PRICE_BITS) + 1 for r, p in zip(resources, prices, strict=True) if p)


def _sum(used: Ints, option: Ints) -> int:
    return int(used[np.arange(len(option)), option].sum())


class Relaxed:
    """The sums over ranks of an instance, and the options that fit into memory at all.

    everywhere: [T, O] options with a piece on every rank. uniform: those of them whose shares are even. copies: [T, O]
    ranks that hold a piece, counted once per piece.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.everywhere: Bools = np.asarray(instance.everywhere(instance.width))
        self.uniform: Bools = self.everywhere & ~instance.divisible
        self.copies: Ints = instance.pieces * instance.width
        self.factor, self.home_factor, self.base_totals = _weights(instance)

    @cached_property
    def stage_totals(self) -> Ints:
        """[T, O, S] rank-ps of an option in each stage."""
        mass = self.copies[:, :, None] * self.instance.cost
        if np.any(self.factor != 1 << FACTOR_BITS):
            mass = mass * self.factor >> FACTOR_BITS
        home = self.instance.ranks * self.instance.home
        if np.any(self.home_factor != 1 << FACTOR_BITS):
            home = home * self.home_factor >> FACTOR_BITS
        mass += home
        return mass

    @cached_property
    def least_home(self) -> Ints:
        """[T, O, S] ps that an option adds at home to the rank of least reach."""
        ours = self.instance
        return ours.home if ours.even else ours.home * ours.reach.min(0) // PER_MILLE

    @cached_property
    def sums(self) -> Ints:
        """[T, O] rank-ps of an option, over the first stage of each phase: averages of the others are not higher."""
        return self.stage_totals[:, :, self.instance.first].sum(2)

    @cached_property
    def totals(self) -> Ints:
        """[T, O] rank-ps; NEVER where the option cannot be used."""
        return np.where(self.usable, self.sums, NEVER)

    @cached_property
    def divisible_totals(self) -> Ints:
        """[T, O] rank-ps of an option's rows that can move between the ranks of a host, or between all ranks."""
        ours = self.instance
        shares = np.where(ours.divisible & (ours.width > 1), self.copies, 0)
        return shares * (ours.cost - ours.fixed).sum(2)

    @cached_property
    def piece_times(self) -> list[Ints]:
        """For each stage, [T, O] least ps that a piece adds to a rank: on a link that a host's ranks share, a part."""
        ours = self.instance
        times = []
        for s, fastest in enumerate(ours.slow.min(0).tolist()):
            own = ours.cost[:, :, s] * fastest // PER_MILLE
            if ours.shared[s]:
                # Uneven shares over all ranks may put all rows of a host on one of its ranks.
                alone = (ours.width == 1) | (ours.divisible & self.everywhere)
                own = np.where(alone, own // int(ours.host_sizes.max()), own)
            times.append(own)
        return times

    @cached_property
    def base_total(self) -> int:
        """rank-ps of the base load."""
        return int(self.base_totals[self.instance.first].sum())

    @cached_property
    def room(self) -> Ints:
        """[R, M] free bytes; below 0 if the base memory exceeds the cap."""
        ours = self.instance
        return np.minimum(ours.cap, (1 << 62) // ours.ranks) - ours.base_memory

    @cached_property
    def host_room(self) -> Ints:
        """[H, M] free bytes of a host, under its own cap and those of its ranks."""
        ours = self.instance
        return np.minimum(ours.by_host(self.room), ours.host_cap - ours.by_host(ours.base_memory))

    @cached_property
    def limits(self) -> list[int]:
        """Free bytes of each tier, over all hosts."""
        return [int(x) for x in self.host_room.sum(0)]

    @cached_property
    def bytes(self) -> Ints:
        """[T, O, M] bytes over all ranks."""
        ours = self.instance
        return self.copies[:, :, None] * ours.memory + ours.ranks * ours.home_memory

    def is_tight(self, option: Ints, quarters: int = 2) -> bool:
        """Return True if options [T] take more than so many quarters of a memory tier."""
        held = self.bytes[np.arange(len(option)), option].sum(0)
        return any(int(h) * 4 > limit * quarters for h, limit in zip(held, self.limits, strict=True))

    @cached_property
    def memory(self) -> list[Resource]:
        """Resources of the tiers that some choice of options would exceed."""
        kept = []
        for m, limit in enumerate(self.limits):
            most = np.where(self.usable, self.bytes[:, :, m], 0).max(1, initial=0)
            if int(most.sum()) > limit >= 0:
                kept.append(Resource.of(self.bytes[:, :, m], limit))
        return kept

    @cached_property
    def usable(self) -> Bools:
        """[T, O] True if the table has the option, and an even piece of it fits on some rank (some host, all ranks)."""
        return self._fitting(self.instance.memory + self.instance.home_memory)

    @cached_property
    def possible(self) -> Bools:
        """[T, O] True if some split of the rows, even or not, fits."""
        return self._fitting(self.least)

    @cached_property
    def _apart(self) -> Ints:
        """[T, O] pieces on distinct ranks; a further piece forms one tile with a piece on the same rank."""
        ours = self.instance
        ranks = ours.ranks if ours.allowed is None else ours.allowed.sum(1)[:, None]
        return np.where(ours.width == 1, np.minimum(ours.pieces, ranks), ours.pieces)

    @cached_property
    def _least_at_home(self) -> Ints:
        """[T, O, M] least bytes on every rank in addition to pieces, however rows are split."""
        ours = self.instance
        unlike = ours.divisible | (self._apart < ours.pieces)
        return np.where(unlike[:, :, None], 0, ours.home_memory)

    @cached_property
    def least(self) -> Ints:
        """[T, O, M] least bytes of the largest piece, however rows are split."""
        ours = self.instance
        size = np.where(ours.divisible[:, :, None], ours.least_memory, ours.memory)
        return size + self._least_at_home

    @cached_property
    def least_bytes(self) -> Ints:
        """[T, O, M] least bytes over all ranks, however rows are split."""
        ours, home = self.instance, self._least_at_home
        return (self._apart * ours.width)[:, :, None] * (self.least - home) + ours.ranks * home

    def _fitting(self, sizes: Ints) -> Bools:
        """Return [T, O] options of which a piece of `sizes` [T, O, M] bytes fits, on ranks that the table may use."""
        ours, width = self.instance, self.instance.width
        per_host = np.stack([self.room[ranks].min(0) for ranks in ours.host_ranks])
        per_host = np.minimum(per_host, self.host_room // ours.host_sizes[:, None])
        usable = ours.there.copy()
        for m in range(ours.tiers):
            size = sizes[:, :, m]
            single = min(int(self.room[:, m].max()), int(self.host_room[:, m].max()))
            most = np.full(width.shape, single)
            for n in np.unique(ours.host_sizes[ours.host_sizes > 1]).tolist():
                most[width == n] = per_host[ours.host_sizes == n, m].max()
            most[self.everywhere] = per_host[:, m].min()
            # One of several uneven shares is at least as large as an even one; it may be on the roomiest rank.
            usable &= size <= np.where(ours.divisible, single, most)
        if ours.allowed is not None:
            whole = np.stack([ours.allowed[:, ranks].all(1) for ranks in ours.host_ranks], 1)
            one = np.logical_or.reduce(ours.allowed, 1)
            usable &= ~((width == 1) & ~self.everywhere & ~one[:, None])
            for n in np.unique(ours.host_sizes[ours.host_sizes > 1]).tolist():
                here = (width == n) & ~self.everywhere
                some = np.logical_or.reduce(whole[:, ours.host_sizes == n], 1)
                usable &= ~(here & ~some[:, None])
        return usable

    def impossible(self) -> Proof | None:
        """Return a proof, from memory alone, that no plan exists; None if there is no such proof."""
        ours = self.instance
        for room in (self.room, self.host_room):
            if np.any(room < 0):
                tier = int(room.min(0).argmin())
                return Proof(tier, -int(room[:, tier].min()))
        stuck = np.flatnonzero(~self.possible.any(1))
        if len(stuck):
            t = int(stuck[0])
            there = ours.there[t]
            if not there.any():
                return Proof(0, 0, ours.names[t])
            # The option with the least shortage, in the tier where it is largest.
            lack = self.least[t] - self.room.max(0)
            lack[~there] = NEVER
            o = int(lack.max(1).argmin())
            tier = int(lack[o].argmax())
            return Proof(tier, max(int(lack[o, tier]), 0), ours.names[t])
        needs = np.where(self.possible[:, :, None], self.least_bytes, NEVER)
        for m, limit in enumerate(self.limits):
            need = int(needs[:, :, m].min(1, initial=NEVER).sum()) if ours.tables else 0
            if need > limit:
                return Proof(m, need - limit)
        if ours.tiers > 1 and ours.tables:
            need = int(np.where(self.possible, self.least_bytes.sum(2), NEVER).min(1).sum())
            if need > sum(self.limits):
                return Proof(0, need - sum(self.limits))
        return None


def _weights(instance: Instance) -> tuple[Ints, Ints, Ints]:
    """Return [S] factors on work and on work at home, in 1 / 2 ** FACTOR_BITS, and [S] rank-ps of the base load.

    For weights u_rs >= 0, the slowest rank takes at least sum_r u_rs load_rs / sum_r u_rs. With u = 1 / slow, work x
    counts at least K x with K = min_r u_rs slow_rs / 1000, wherever it is placed. In a shared stage, the ranks of a
    host have equal weights. Work at home counts sum_r u_rs reach_rs / 1000.
    """
    ranks, scale = instance.ranks, 1 << 20
    factors, homes, bases = [], [], []
    for s in range(instance.stages):
        slow = instance.slow[:, s]
        weigh = slow
        if instance.shared[s]:
            weigh = np.array([slow[r].min() for r in instance.host_ranks])[instance.host_of]
        u = scale * PER_MILLE // weigh
        k = int((u * slow).min()) // PER_MILLE
        all_u = int(u.sum())
        factors.append((ranks * k << FACTOR_BITS) // all_u)
        reached = int((u * instance.reach[:, s]).sum())
        homes.append((reached << FACTOR_BITS) // (PER_MILLE * all_u))
        bases.append(sum(int(a) * int(b) for a, b in zip(u, instance.base_cost[:, s], strict=True)) * ranks // all_u)
    return np.array(factors, np.int64), np.array(homes, np.int64), np.array(bases, np.int64)
