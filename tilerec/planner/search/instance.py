"""The planner's problem in numbers: what each way of cutting each table costs, and what a rank can hold.

Nouns
  option    one way to cut one table: `pieces` of one `width`
  piece     what lies together: on one rank (width 1), on all ranks of a host (width n, a host of n ranks), or on every
            rank (width R). Each rank that holds a piece bears the piece's `cost` and `memory`
  place     where a piece lies: a rank (width 1) or a host (width n)
  home      what an option costs every rank, wherever its pieces lie: work on that rank's own batch, and its memory
  reach     of a rank and stage: the part of `home` that the rank bears, where hosts of several sizes bear unlike parts
  phase     stages that end together: each lasts as long as its slowest rank, and the step waits for the longest
  share     a row split's piece as a part of the table, in units of 1 / SHARE; even unless a solution differs

Legend: T tables, O options (padded), S stages, M memory tiers (0 device, 1 host), R ranks, H hosts, F fixed charges.
Times are picoseconds, memory is bytes, all int64: sums are exact in any order, so every machine decides alike.
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

SHARE_BITS = 20
SHARE = 1 << SHARE_BITS
PER_MILLE = 1000
NO_CAP = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, eq=False)
class Instance:
    """What there is to decide.

    Args:
        names: T strings, all different; ties are broken by them, so the order of tables does not matter.
        width: [T, O] ranks that hold each piece: 1, n (hosts of n ranks only) or R; 0 where there is no such option.
            On one host, n = R means every rank.
        pieces: [T, O] how many of them. They lie on different ranks (hosts) where there are enough, else evenly
            repeated; 1 where the width is R.
        cost: [T, O, S] ps that one piece adds to a stage on each rank that holds it.
        home: [T, O, S] ps that the option adds to a stage on every rank, times the rank's reach.
        memory: [T, O, M] bytes of one piece on each rank that holds it.
        home_memory: [T, O, M] bytes that the option takes on every rank, beside those of its pieces.
        least_memory: [T, O, M] of a divisible option, bytes that no split of its rows is below, per piece; `memory` if
            None.
        cap: [R, M] bytes.
        host_of: [R] the host of each rank, 0 … H - 1.
        uses, charge: [T, O, F] and [F]: ps added once to the objective if any table's option uses it.
        shared: [S] the stage is a host's network link: what its ranks put on it is added up and divided by their
            number, and each of them takes that long.
        host_cap: [H, M] bytes that the ranks of a host hold together; NO_CAP for none.
        slow: [R, S] per mille: for what lies on it a rank takes cost * slow / 1000, rounded up.
        phase: [S] stages with the same number are one phase; None if each is one of its own.
        reach: [R, S] per mille: at home a rank takes home * reach / 1000, rounded up.
        base_cost, base_memory: [R, S], [R, M]: what is there already; neither `slow` nor `reach` is applied to it.
        allowed: [T, R] the ranks that a table's pieces may lie on (a host: all its ranks), but for options of width
            R; None for all.
        divisible: [T, O] the option is a split by rows whose pieces may be made uneven (`Solution.rows`): width 1, or
            one piece of a larger width, whose parts are then the ranks.
        fixed: [T, O, S] ps of `cost` that a part of a divisible option takes however few rows it has; the rest goes
            with its share.

    Raises:
        ConfigError: shapes that do not go together, a negative number, a width that no host has, equal names.
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
        if self.allowed is not None and (
            self.allowed.shape != (tables, ranks) or self.allowed.dtype != np.bool_
        ):
            raise ConfigError(
                f"Instance: allowed is {self.allowed.dtype} {self.allowed.shape}; it must be "
                f"bool {(tables, ranks)}."
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
        """[T, O] there is such an option."""
        return self.width > 0

    @cached_property
    def host_ranks(self) -> tuple[Ints, ...]:
        """The ranks of each host, ascending."""
        order = np.argsort(self.host_of, kind="stable")
        return tuple(np.split(order, np.cumsum(np.bincount(self.host_of))[:-1]))

    @cached_property
    def even(self) -> bool:
        """Whether work takes all ranks alike: what lies on them, and what they do at home."""
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
        """[S] whether a stage is the first of its phase."""
        found = np.ones(self.stages, np.bool_)
        for twins in self.twins:
            found[twins[1:]] = False
        return found

    def longest(self, stage: Any) -> Any:
        """[..., S] of each phase the longest stage's, of [..., S]: the others count as 0."""
        if not self.twins:
            return stage
        found = stage.copy()
        for twins in self.twins:
            found[..., twins[0]] = stage[..., twins].max(-1)
            found[..., twins[1:]] = 0
        return found

    def everywhere(self, width: Any) -> Any:
        """Whether a piece of this width lies on every rank (on one rank, all are single)."""
        return (width == self.ranks) & (self.ranks > 1)

    def take(self, order: Ints) -> Instance:
        """The same with the tables `order`."""
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
    """What a search ended with."""

    FOUND = "found"
    NONE_FOUND = "none found"  # there may be a plan
    NONE_EXISTS = "none exists"  # `Solution.proof` is the reason


@dataclass(frozen=True)
class Proof:
    """Why no plan exists.

    Args:
        tier: the memory tier that is short, -1 if every arrangement was tried.
        short: bytes missing there: over all ranks, or for one piece of `table` on the rank with the largest cap.
        table: the table no option of which fits anywhere; None if it is the sum that does not fit.
    """

    tier: int
    short: int
    table: str | None = None


@dataclass(frozen=True, eq=False)
class Solution:
    """Where everything lies, and what that costs.

    Args:
        status: the fields below but `bound` and `proof` are empty unless FOUND.
        option: [T] the option of each table.
        places: for each table the ranks (width 1) or hosts (width n) of its pieces; () where every rank has it.
        rows: of the tables whose pieces are uneven, their shares: for each piece (width 1), or for each rank of the
            host or of the world. They add up to SHARE.
        cost: the objective, ps. bound: no plan costs less, ps.
        stage: [S] the slowest rank's ps. load: [R, S]. memory: [R, M] bytes.
        others: further arrangements within all caps, dearer ones, the cheapest first.
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
        """How far the cost can be above the least possible, as a part of the bound."""
        return (
            (self.cost - self.bound) / self.bound if self.bound else (0.0 if self.cost == 0 else float("inf"))
        )


def evaluate(
    instance: Instance,
    option: Ints,
    places: Sequence[Sequence[int]],
    rows: Mapping[int, Ints] | None = None,
    bound: int = 0,
) -> Solution:
    """Return an arrangement with its cost, by the definition. FOUND does not include caps (see `fits`)."""
    rows = {} if rows is None else rows
    every = np.arange(instance.tables)
    work, memory = work_of(instance, option, places, rows)
    load = loads(instance, work)
    stage = load.max(0)
    used = instance.uses[every, option].any(0)
    cost = int(instance.longest(stage).sum()) + int(instance.charge[used].sum())
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
    """[R + 1, S] ps of work, as `loads` takes it, and [R, M] bytes with what was there."""
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
    tables, ranks = _flat(single, places)
    np.add.at(work, ranks, instance.cost[tables, option[tables]])
    np.add.at(memory, ranks, instance.memory[tables, option[tables]])
    on_hosts = np.flatnonzero((width > 1) & ~instance.everywhere(width) & ~uneven)
    if len(on_hosts):
        tables, hosts = _flat(on_hosts, places)
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
    """[R, S] how long each rank takes.

    Args:
        work: [R + 1, S] ps of the pieces on each rank, and in the last row `home` of all tables. `slow`, `reach` and
            `base_cost` come on top.
    """
    load = at_home(instance, work[-1]) + -(-work[:-1] * instance.slow // PER_MILLE)
    if instance.shared.any():
        link = np.zeros((instance.hosts, int(instance.shared.sum())), np.int64)
        np.add.at(link, instance.host_of, load[:, instance.shared])
        link = -(-link // instance.host_sizes[:, None])
        load[:, instance.shared] = link[instance.host_of]
    return load


def at_home(instance: Instance, home: Ints) -> Ints:
    """[..., R, S] ps that ranks take whatever lies on them: `base_cost`, and `home` [..., S] ps of all tables."""
    home = home[..., None, :]
    own = home if instance.even else -(-home * instance.reach // PER_MILLE)
    base: Ints = instance.base_cost + own
    return base


def alike(instance: Instance, load: Ints) -> Ints:
    """[S] ps that every rank bears alike of [R, S]; the same for all stages of a phase."""
    least: Ints = load.min(0)
    for twins in instance.twins:
        least[twins] = least[twins].min()
    return least


def fits(instance: Instance, memory: Ints) -> bool:
    """Whether [R, M] bytes are within every cap."""
    if np.any(memory > instance.cap):
        return False
    together = np.zeros_like(instance.host_cap)
    np.add.at(together, instance.host_of, memory)
    return bool(np.all(together <= instance.host_cap))


def parts_of(instance: Instance, table: int, option: int, places: Sequence[int]) -> Ints:
    """The ranks that shares of a divisible option belong to, in their order."""
    width = int(instance.width[table, option])
    if width == 1:
        return np.asarray(places, np.int64)
    return np.arange(instance.ranks) if not len(places) else instance.host_ranks[places[0]]


def portion(whole: Ints, shares: Ints) -> Ints:
    """[parts, ·] of `whole` [·], in proportion to `shares`, each rounded up."""
    high, low = whole >> SHARE_BITS, whole & (SHARE - 1)
    return shares[:, None] * high + -(-shares[:, None] * low >> SHARE_BITS)


def _flat(tables: Ints, places: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    some = [places[t] for t in tables.tolist()]
    counts = np.fromiter(map(len, some), np.int64, len(some))
    flat = np.fromiter(chain.from_iterable(some), np.int64, int(counts.sum()))
    return np.repeat(tables, counts), flat
