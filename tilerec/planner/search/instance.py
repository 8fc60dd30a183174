"""`Instance`: the search problem as arrays: the cost and the memory of every option of every table, and the ranks'
caps.

Nouns
  option  one way to cut one table, into `pieces` of one `width`
  piece   a part of a table that is placed as a whole: on one rank (width 1), on all ranks of a host (width n, for a
          host of n ranks), or on every rank (width R). Each rank that holds the piece bears its `cost` and its `memory`
  place   the rank (width 1) or the host (width n) of a piece
  home    the cost and the memory of an option on every rank, wherever its pieces are: the work on the rank's own batch
  reach   of a rank and a stage: the part of `home` that the rank bears. Parts differ between hosts of different sizes
  stage   the work of a rank between two collectives. It lasts as long as its slowest rank
  phase   stages that run side by side, such as the two directions of a link. The step waits for the longest one
  twins   the stages of a phase with several stages
  share   the part of a table's rows in one piece, in units of 1 / SHARE. Shares are even unless a solution has others

The objective is the sum over phases of the longest stage, plus fixed charges. `evaluate` defines it.

Legend: T tables, O options (padded), S stages, M memory tiers (0 device, 1 host), R ranks, H hosts, F fixed charges.
Times are picoseconds and memory is bytes, all int64. Sums are exact in any order, so every machine decides alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tilerec.errors import ConfigError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

SHARE_BITS = 20
SHARE = 1 << SHARE_BITS
PER_MILLE = 1000
PICO = 1e12  # picoseconds per second
NO_CAP = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, eq=False)
class Instance:
    """Tables with their options, and the ranks that can hold them.

    Args:
        names: T distinct strings. They break ties, so the order of tables has no effect.
        width: [T, O] number of ranks that hold each piece: 1, n (a host of n ranks) or R; 0 if the table lacks the
            option. With one host, n = R means every rank.
        pieces: [T, O] number of pieces; 1 if the width is R. Pieces are on distinct ranks (hosts) if there are enough,
            otherwise each rank (host) holds equally many, or one more.
        cost: [T, O, S] ps that one piece adds to a stage on each rank that holds it.
        home: [T, O, S] ps that the option adds to a stage on every rank, before the factor `reach`.
        memory: [T, O, M] bytes of one piece on each rank that holds it.
        home_memory: [T, O, M] bytes that the option takes on every rank, in addition to its pieces.
        least_memory: [T, O, M] lower bound in bytes on each piece of a divisible option, however its rows are split;
            None: `memory`.
        cap: [R, M] bytes of each rank.
        host_of: [R] index of each rank's host, 0 to H - 1.
        uses, charge: [T, O, F] and [F]: ps added once to the objective if the option of any table uses them.
        shared: [S] True for the network link of a host. Each rank of the host takes the mean of the ranks' times.
        host_cap: [H, M] bytes that the ranks of a host hold together; NO_CAP for none.
        slow: [R, S] per mille: a rank takes cost * slow / 1000 for its pieces, rounded up.
        phase: [S] stages with equal numbers form a phase; None: each stage is a phase.
        reach: [R, S] per mille: a rank takes home * reach / 1000 at home, rounded up.
        base_cost, base_memory: [R, S] ps and [R, M] bytes before any table is placed, without `slow` and `reach`.
        allowed: [T, R] ranks that may hold pieces of a table (for a host: all its ranks); None for all. Options of
            width R ignore it.
        divisible: [T, O] True if the option is a split by rows whose shares may be uneven (`Solution.rows`). Its width
            is 1, or it has one piece of a larger width, and each rank of the piece has a share.
        fixed: [T, O, S] ps of `cost` that each share of a divisible option takes whatever its size. The rest is
            proportional to the share.

    Raises:
        ConfigError: shapes do not match, a number is negative, a width fits no host, or names are equal.
    """

    names: Sequence[str]
    width: Ints
    pieces: Ints
    cost: Ints
    home: Ints
    memory: Ints
    cap: Ints
    host_of: Ints
    uses: Bools = None  # type: ignore[assignment]
    charge: Ints = None  # type: ignore[assignment]
    shared: Bools = None  # type: ignore[assignment]
    host_cap: Ints = None  # type: ignore[assignment]
    phase: Ints = None  # type: ignore[assignment]
    slow: Ints = None  # type: ignore[assignment]
    reach: Ints = None  # type: ignore[assignment]
    base_cost: Ints = None  # type: ignore[assignment]
    base_memory: Ints = None  # type: ignore[assignment]
    allowed: Bools | None = None
    divisible: Bools = None  # type: ignore[assignment]
    fixed: Ints = None  # type: ignore[assignment]
    home_memory: Ints = None  # type: ignore[assignment]
    least_memory: Ints = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        tables, options = _array(self.width).shape if _array(self.width).ndim == 2 else (-1, -1)
        stages, tiers = _array(self.cost).shape[-1], _array(self.memory).shape[-1]
        ranks = len(self.host_of)
        if ranks == 0 or tables < 0:
            raise ConfigError("Instance: it needs a rank, and a width for each table and option.")
        hosts = int(np.max(self.host_of)) + 1
        charges = 0 if self.charge is None else len(self.charge)
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "width": ((tables, options), None),
            "pieces": ((tables, options), None),
            "cost": ((tables, options, stages), None),
            "home": ((tables, options, stages), None),
            "memory": ((tables, options, tiers), None),
            "cap": ((ranks, tiers), None),
            "host_of": ((ranks,), None),
            "uses": ((tables, options, charges), False),
            "charge": ((charges,), 0),
            "shared": ((stages,), False),
            "phase": ((stages,), np.arange(stages)),
            "host_cap": ((hosts, tiers), NO_CAP),
            "slow": ((ranks, stages), PER_MILLE),
            "reach": ((ranks, stages), PER_MILLE),
            "base_cost": ((ranks, stages), 0),
            "base_memory": ((ranks, tiers), 0),
            "divisible": ((tables, options), False),
            "fixed": ((tables, options, stages), 0),
            "home_memory": ((tables, options, tiers), 0),
            "least_memory": ((tables, options, tiers), self.memory),
        }
        for name, (shape, default) in shapes.items():
            kind = np.bool_ if name in ("uses", "shared", "divisible") else np.int64
            value = getattr(self, name)
            array = np.broadcast_to(default, shape).astype(kind) if value is None else np.asarray(value)
            if array.dtype != kind or array.shape != shape:
                raise ConfigError(
                    f"Instance: {name} is {array.dtype} {array.shape}; it must be {np.dtype(kind)} {shape}."
                )
            if kind is np.int64 and array.size and int(array.min()) < (1 if name == "slow" else 0):
                raise ConfigError(f"Instance: {name} holds {int(array.min())}, which is below its range.")
            object.__setattr__(self, name, array)
        if np.any(self.fixed > self.cost):
            raise ConfigError("Instance: fixed is a part of cost, and above it somewhere.")
        if self.allowed is not None and (self.allowed.shape != (tables, ranks) or self.allowed.dtype != np.bool_):
            raise ConfigError(
                f"Instance: allowed is {self.allowed.dtype} {self.allowed.shape}; it must be bool {(tables, ranks)}."
            )
        object.__setattr__(self, "names", tuple(self.names))
        if len(self.names) != tables or len(set(self.names)) != tables:
            raise ConfigError(f"Instance: {tables} tables need as many different names.")
        sizes = np.bincount(self.host_of, minlength=hosts)
        if not np.all(sizes):
            raise ConfigError(f"Instance: host {int(np.argmin(sizes))} has no rank.")
        strange = self.there & ~np.isin(self.width, [1, *sizes.tolist(), ranks])
        if np.any(strange):
            t, o = np.argwhere(strange)[0]
            raise ConfigError(
                f"Table '{self.names[t]}': option {o} has width {self.width[t, o]}; no host has so many ranks."
            )
        wrong = self.there & (
            (self.pieces < 1)
            | ((self.width == ranks) & (ranks > 1) & (self.pieces != 1))
            | (self.divisible & (self.width > 1) & (self.pieces != 1))
        )
        if np.any(wrong):
            t, o = np.argwhere(wrong)[0]
            raise ConfigError(
                f"Table '{self.names[t]}': option {o} has {self.pieces[t, o]} pieces; it must be from 1, and 1 on "
                "every rank or in an uneven split of more than single ranks."
            )

    @property
    def tables(self) -> int:
        return len(self.names)

    @property
    def ranks(self) -> int:
        return len(self.host_of)

    @property
    def stages(self) -> int:
        return int(self.cost.shape[2])

    @property
    def tiers(self) -> int:
        return int(self.memory.shape[2])

    @property
    def hosts(self) -> int:
        return len(self.host_cap)

    @cached_property
    def there(self) -> Bools:
        """[T, O] True if the table has the option."""
        return self.width > 0

    @cached_property
    def host_ranks(self) -> tuple[Ints, ...]:
        """The ranks of each host, ascending."""
        order = np.argsort(self.host_of, kind="stable")
        return tuple(np.split(order, np.cumsum(np.bincount(self.host_of))[:-1]))

    @cached_property
    def even(self) -> bool:
        """True if all ranks are equally fast, with their pieces and at home."""
        return bool(np.all(self.slow == PER_MILLE) and np.all(self.reach == PER_MILLE))

    @cached_property
    def host_sizes(self) -> Ints:
        """[H] ranks of each host."""
        return np.bincount(self.host_of).astype(np.int64)

    @cached_property
    def twins(self) -> list[list[int]]:
        """The stages of each phase that has several."""
        phases: dict[int, list[int]] = {}
        for s, phase in enumerate(self.phase.tolist()):
            phases.setdefault(phase, []).append(s)
        return [stages for stages in phases.values() if len(stages) > 1]

    @cached_property
    def first(self) -> Bools:
        """[S] True for the first stage of each phase."""
        found = np.ones(self.stages, np.bool_)
        for twins in self.twins:
            found[twins[1:]] = False
        return found

    def longest(self, stage: Any) -> Any:
        """Return [..., S] with the longest stage of each phase in place of its first stage, and 0 for the others."""
        if not self.twins:
            return stage
        found = stage.copy()
        for twins in self.twins:
            found[..., twins[0]] = stage[..., twins].max(-1)
            found[..., twins[1:]] = 0
        return found

    def everywhere(self, width: Any) -> Any:
        """Return True if a piece of this width is on every rank (with one rank, all pieces are single)."""
        return (width == self.ranks) & (self.ranks > 1)

    def by_host(self, values: Any) -> Any:
        """Return [H, ·] sums of [R, ·] over the ranks of each host."""
        sums = np.zeros((self.hosts, *values.shape[1:]), values.dtype)
        np.add.at(sums, self.host_of, values)
        return sums

    def charge_of(self, option: Ints) -> int:
        """Return the fixed charges in ps of options [T]."""
        used = self.uses[np.arange(self.tables), option].any(0)
        return int(self.charge[used].sum())

    @cached_property
    def capped(self) -> bool:
        """True if some host has a cap of its own."""
        return bool(np.any(self.host_cap < NO_CAP))

    def take(self, order: Ints) -> Instance:
        """Return the instance with the tables `order`, in this order."""
        if np.array_equal(order, np.arange(self.tables)):
            return self
        per_table = (
            "width", "pieces", "cost", "home", "memory", "uses", "divisible", "allowed", "fixed", "home_memory",
            "least_memory",
        )  # fmt: skip
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in per_table:
            given[name] = None if given[name] is None else given[name][order]
        given["names"] = tuple(self.names[t] for t in order.tolist())
        return Instance(**given)


def _array(value: Any) -> npt.NDArray[Any]:
    array = np.asarray(value)
    return array if array.ndim else array[None]


class Status(Enum):
    """The outcome of a search."""

    FOUND = "found"
    NONE_FOUND = "none found"  # there may be a plan
    NONE_EXISTS = "none exists"  # `Solution.proof` is the reason


@dataclass(frozen=True)
class Proof:
    """The reason why no plan exists.

    Args:
        tier: the memory tier that is too small; -1 if every arrangement was tried.
        short: missing bytes in this tier: over all ranks, or for one piece of `table` on the rank with the largest cap.
        table: a table of which no option fits on any rank; None if the sum over tables is too large.
    """

    tier: int
    short: int
    table: str | None = None


@dataclass(frozen=True, eq=False)
class Solution:
    """The options and places of all tables, with their cost.

    Args:
        status: unless it is FOUND, all fields but `bound` and `proof` are empty.
        option: [T] option of each table.
        places: for each table, the ranks (width 1) or hosts (width n) of its pieces; () if it is on every rank.
        rows: shares of the tables with uneven shares: one for each piece (width 1), or for each rank of the host or of
            the world. They add up to SHARE.
        cost: the objective in ps. bound: lower bound in ps on the cost of every plan.
        stage: [S] ps of the slowest rank. load: [R, S] ps. memory: [R, M] bytes.
        others: further arrangements within all caps that cost more, the cheapest first.
    """

    status: Status
    option: Ints
    places: tuple[tuple[int, ...], ...]
    rows: Mapping[int, Ints]
    cost: int
    bound: int
    stage: Ints
    load: Ints
    memory: Ints
    proof: Proof | None = None
    others: tuple[Solution, ...] = ()

    @property
    def gap(self) -> float:
        """Largest possible distance of the cost above the optimum, as a part of the bound."""
        return (self.cost - self.bound) / self.bound if self.bound else (0.0 if self.cost == 0 else float("inf"))


def evaluate(
    instance: Instance,
    option: Ints,
    places: Sequence[Sequence[int]],
    rows: Mapping[int, Ints] | None = None,
    bound: int = 0,
) -> Solution:
    """Return an arrangement with its cost, by the definition. FOUND does not include caps (see `fits`)."""
    rows = {} if rows is None else rows
    work, memory = work_of(instance, option, places, rows)
    load = loads(instance, work)
    stage = load.max(0)
    cost = int(instance.longest(stage).sum()) + instance.charge_of(option)
    return Solution(
        Status.FOUND,
        np.asarray(option, np.int64),
        tuple(tuple(where) for where in places),
        dict(rows),
        cost,
        bound,
        stage,
        load,
        memory,
    )


def work_of(
    instance: Instance, option: Ints, places: Sequence[Sequence[int]], rows: Mapping[int, Ints]
) -> tuple[Ints, Ints]:
    """Return [R + 1, S] ps of work in the form that `loads` takes, and [R, M] bytes in use, base memory included."""
    every = np.arange(instance.tables)
    width = instance.width[every, option]
    uneven = np.zeros(instance.tables, np.bool_)
    uneven[list(rows)] = True
    whole = np.zeros((instance.ranks + 1, instance.stages), np.int64)
    work = whole[:-1]
    memory = instance.base_memory + instance.home_memory[every, option].sum(0)
    whole[-1] = instance.home[every, option].sum(0)
    uniform = np.flatnonzero(instance.everywhere(width) & ~uneven)
    work += instance.cost[uniform, option[uniform]].sum(0)
    memory += instance.memory[uniform, option[uniform]].sum(0)
    single = np.flatnonzero((width == 1) & ~uneven)
    tables, ranks = flat_places(single, places)
    np.add.at(work, ranks, instance.cost[tables, option[tables]])
    np.add.at(memory, ranks, instance.memory[tables, option[tables]])
    on_hosts = np.flatnonzero((width > 1) & ~instance.everywhere(width) & ~uneven)
    if len(on_hosts):
        tables, hosts = flat_places(on_hosts, places)
        host_work = np.zeros((instance.hosts, instance.stages), np.int64)
        host_memory = np.zeros((instance.hosts, instance.tiers), np.int64)
        np.add.at(host_work, hosts, instance.cost[tables, option[tables]])
        np.add.at(host_memory, hosts, instance.memory[tables, option[tables]])
        work += host_work[instance.host_of]
        memory += host_memory[instance.host_of]
    for t, shares in rows.items():
        o = int(option[t])
        where = parts_of(instance, t, o, places[t])
        fixed = instance.fixed[t, o]
        np.add.at(work, where, fixed + portion((instance.cost[t, o] - fixed) * len(shares), shares))
        np.add.at(memory, where, portion(instance.memory[t, o] * len(shares), shares))
    return whole, memory


def loads(instance: Instance, work: Ints) -> Ints:
    """Return [R, S] ps that each rank takes in each stage.

    Args:
        work: [R + 1, S] ps of the pieces on each rank; the last row is the `home` of all tables. `slow`, `reach` and
            `base_cost` are not applied yet.
    """
    load = at_home(instance, work[-1]) + -(-work[:-1] * instance.slow // PER_MILLE)
    if instance.shared.any():
        link = -(-instance.by_host(load[:, instance.shared]) // instance.host_sizes[:, None])
        load[:, instance.shared] = link[instance.host_of]
    return load


def at_home(instance: Instance, home: Ints) -> Ints:
    """Return [..., R, S] ps that ranks take whatever they hold: `base_cost`, and `home` [..., S] of all tables."""
    home = home[..., None, :]
    own = home if instance.even else -(-home * instance.reach // PER_MILLE)
    base: Ints = instance.base_cost + own
    return base


def alike(instance: Instance, load: Ints) -> Ints:
    """Return [S] ps that all ranks have in common in a load [R, S]; equal for all stages of a phase."""
    least: Ints = load.min(0)
    for twins in instance.twins:
        least[twins] = least[twins].min()
    return least


def fits(instance: Instance, memory: Ints) -> bool:
    """Return True if [R, M] bytes are within every cap of ranks and hosts."""
    return bool(np.all(memory <= instance.cap)) and bool(np.all(instance.by_host(memory) <= instance.host_cap))


def parts_of(instance: Instance, table: int, option: int, places: Sequence[int]) -> Ints:
    """Return the ranks of the shares of a divisible option, in the order of shares."""
    width = int(instance.width[table, option])
    if width == 1:
        return np.asarray(places, np.int64)
    return np.arange(instance.ranks) if not len(places) else instance.host_ranks[places[0]]


def portion(whole: Ints, shares: Ints) -> Ints:
    """Return [parts, ·]: `whole` [·] in proportion to `shares` [parts], each rounded up."""
    high, low = whole >> SHARE_BITS, whole & (SHARE - 1)
    return shares[:, None] * high + -(-shares[:, None] * low >> SHARE_BITS)


def flat_places(tables: Ints, places: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return a table and a place for each piece of these tables."""
    some = [places[t] for t in tables.tolist()]
    counts = np.fromiter(map(len, some), np.int64, len(some))
    flat = np.fromiter(chain.from_iterable(some), np.int64, int(counts.sum()))
    return np.repeat(tables, counts), flat
