"""`build`: the search problem of some tables on a topology, as an `Instance`, and the way back to shardings.

Amounts are computed for one option of all tables at a time, with the formulas of `Model` that `price` uses for given
tilings. If all hosts have one size, the cost of an arrangement equals its price, except for two facts that an instance
does not contain: the column blocks that will share a host, and how traffic is spread over ranges of rows of tables with
ordered ids. There the instance for the search has estimates, and a second instance has lower bounds (`Problem.lower`).

Legend: T tables, O options, S stages, R ranks, F fixed charges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.cost.allowed import Allowed
from tilerec.planner.cost.copies_amounts import add_copies
from tilerec.planner.cost.head_bytes import HeadBytes, head_bytes, read_curve
from tilerec.planner.cost.model import NETWORK_STAGES, Model
from tilerec.planner.cost.option_amounts import CHARGES, OptionAmounts
from tilerec.planner.cost.piece_amounts import PieceAmounts, add_pieces
from tilerec.planner.cost.price import Price, price
from tilerec.planner.cost.realise import sharding_of
from tilerec.planner.cost.ways import MIN_PARTITION, Limits, Option, Way
from tilerec.planner.cost.workload import TableWork, Workload
from tilerec.planner.search.instance import NO_CAP, PICO, Instance, Ints
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


@dataclass(frozen=True, eq=False)
class Problem:
    """An instance, and the tables, options, stages and charges that its numbers stand for.

    Args:
        tables: the tables that are not pinned, in the order of the instance.
        lower: an instance whose costs and bytes no plan is below, in the same order; often the instance itself.
        amounts: those of the instance.
    """

    model: Model
    tables: tuple[TableWork, ...]
    options: tuple[Option, ...]
    instance: Instance
    lower: Instance
    stages: tuple[str, ...]
    charges: tuple[str, ...]
    amounts: OptionAmounts

    def sharding(self, table: int, option: int, places: Sequence[int], shares: Ints | None = None) -> ParameterSharding:
        """Return the sharding of a table with this option and these places.

        Args:
            places: ranks, or hosts, of the pieces; () for all ranks.
            shares: of an uneven split by rows, in units of 1 / SHARE.
        """
        return sharding_of(self.model, table, self.options[option], places, shares, self.amounts.ranges)

    def option_text(self, table: int, option: int) -> str:
        """Return the name of an option of a table. Heads of hot ids have at most the rows that are named."""
        own, work = self.options[option], self.tables[table]
        if own.head and work.skew is not None and not work.skew.ordered:
            own = own._replace(head=min(own.head, len(work.skew.hot) / work.rows))
        return str(own)

    def head_bytes(self, table: int) -> list[HeadBytes]:
        """Return the bytes of a table's step without a head, then with each size of a head."""
        return head_bytes(self.tables[table], self.model.topology)

    def read_curve(self, table: int) -> tuple[tuple[int, float], ...]:
        """Return (rows, share of the table's ids in the first so many rows)."""
        return read_curve(self.tables[table])


def build(
    tables: Sequence[TableWork],
    topology: Topology,
    limits: Mapping[str, Limits] | None = None,
    pinned: Mapping[str, Tiling] | None = None,
    *,
    reserved: Ints | None = None,
    pipeline_depth: int = 1,
    min_partition: int = MIN_PARTITION,
    together: Sequence[Sequence[str]] = (),
) -> Problem:
    """Return the search problem of these tables.

    Args:
        tables: of the model; with distinct names.
        limits: restrictions by table name.
        pinned: given tilings by table name: their cost and memory are base loads.
        reserved: [R, 2] bytes in use before any table is placed, in each memory tier.
        pipeline_depth: number of batches whose ids are routed ahead of the present one.
        min_partition: fewest columns of a column tile, for tables without limits of their own.
        together: groups of names of tables that are placed on the same ranks.

    Raises:
        ConfigError: limits or pins name an unknown table, or limits leave a table no option.
    """
    limits, pinned = dict(limits or {}), dict(pinned or {})
    names = {t.name for t in tables}
    for what, given in (("limits", limits), ("pins", pinned)):
        strange = sorted(set(given) - names)
        if strange:
            raise ConfigError(f"Planner: {what} name {strange[:8]}, which is no table of the model.")
    free = tuple(t for t in tables if t.name not in pinned)
    fixed = [t for t in tables if t.name in pinned]
    # Number of collections and accumulation dtype are those of all tables, for both parts.
    everything = Workload(tables)
    work = everything.part(free) if fixed else everything
    rest = everything.part(fixed)
    model = Model(work, topology, pipeline_depth, beside=rest if fixed else None)
    paid: Price | None = None
    if fixed:
        paid = price([pinned[t.name] for t in fixed], Model(rest, topology, pipeline_depth, beside=work))

    even_room = not fixed and len(set(topology.caps)) == 1 and (reserved is None or not np.any(reserved != reserved[0]))

    def amounts(estimate: OptionAmounts | None) -> OptionAmounts:
        lower = estimate is not None
        allowed = Allowed(model, limits, min_partition, lower=lower, together=together)
        ranges = None if estimate is None else estimate.ranges
        return OptionAmounts(model, allowed, ranges, lower=lower, pinned=bool(fixed), even_room=even_room)

    estimate = amounts(None)
    return problem_of(estimate, None if estimate.exact else amounts(estimate), paid, reserved)


def problem_of(
    estimate: OptionAmounts, bound: OptionAmounts | None, paid: Price | None, reserved: Ints | None
) -> Problem:
    """Return the problem for the tables of `estimate.model`.

    Args:
        estimate: amounts for the search, still empty.
        bound: amounts for the bound, still empty; None if the estimates are exact.
        paid: price of the tables whose tilings are given; None if there are none.
        reserved: [R, 2] bytes.
    """
    model, tables = estimate.model, estimate.work.tables
    _fill(estimate, bound)
    instance, charges = _instance(estimate, paid, reserved)
    lower = instance if bound is None else _instance(bound, paid, reserved)[0]
    return Problem(model, tables, estimate.options, instance, lower, model.stages, charges, estimate)


def _fill(estimate: OptionAmounts, bound: OptionAmounts | None) -> None:
    """Fill in the amounts of all options; those of a bound that equal the estimates are copied."""
    alike = bound is not None and np.array_equal(estimate.there, bound.there)
    for o, option in enumerate(estimate.options):
        pieces = _add(estimate, o, option)
        if bound is not None and alike and not option.head and estimate.as_in_bound(option):
            bound.take(estimate, o)
            if pieces is None:
                bound.take_memory(estimate, o)
            else:
                pieces.add_placed(bound)
        elif bound is not None:
            own = _add(bound, o, option)
            if own is not None:
                own.add_placed(bound)
        if pieces is not None:
            pieces.add_placed(estimate)


def _add(amounts: OptionAmounts, o: int, option: Option) -> PieceAmounts | None:
    """Add the amounts of an option; return those of its pieces, if any, without the parts that `add_placed` adds."""
    tables = np.flatnonzero(amounts.there[:, o])
    if not len(tables):
        return None
    if option.way is not Way.COPIES:
        return add_pieces(amounts, o, option, tables)
    add_copies(amounts, o, tables)
    return None


def _instance(amounts: OptionAmounts, paid: Price | None, reserved: Ints | None) -> tuple[Instance, tuple[str, ...]]:
    """Return the instance of filled in amounts, and the names of its charges."""
    there, topology = amounts.there, amounts.topology
    width, pieces = (
        np.where(there, np.array(each, np.int64), absent)
        for each, absent in (
            ([option.width for option in amounts.options], 0),
            ([option.pieces for option in amounts.options], 1),
        )
    )
    single = [o for o, option in enumerate(amounts.options) if option.width == 1]
    base_cost, base_memory = _base(amounts, paid, reserved)
    charge, certain = _charges(amounts, frozenset() if paid is None else _charges_paid_by(paid))
    base_cost[:, 0] += certain
    keep = [f for f in range(len(CHARGES)) if charge[f]]
    phase = np.arange(len(amounts.stages))
    for name, twin in amounts.twins.items():
        phase[twin] = amounts.stage(name)
        # The sums of a host cost all its ranks the same, however rows are split.
        amounts.fixed[:, :, twin] = amounts.cost[:, :, twin]
    np.minimum(amounts.fixed, amounts.cost, out=amounts.fixed)
    between = np.array([s in NETWORK_STAGES for s in amounts.stages])
    factors = amounts.host_factors.factors
    instance = Instance(
        names=amounts.work.names,
        width=width,
        pieces=pieces,
        cost=amounts.cost,
        home=amounts.home,
        memory=amounts.memory,
        home_memory=amounts.home_memory,
        least_memory=amounts.least_memory,
        cap=np.array(topology.caps, np.int64),
        host_of=np.array([topology.host_of(r) for r in range(amounts.ranks)], np.int64),
        uses=amounts.uses[:, :, keep],
        charge=charge[keep],
        shared=between & (topology.nic == "host"),
        slow=factors("cost", amounts.cost[:, single].sum((0, 1))),
        reach=factors("home", amounts.home[:, single].sum((0, 1))),
        host_cap=np.full((amounts.hosts, 2), NO_CAP, np.int64),
        base_cost=base_cost,
        base_memory=base_memory,
        allowed=amounts.allowed.on,
        divisible=amounts.divisible,
        fixed=amounts.fixed,
        phase=phase,
    )
    return instance, tuple(CHARGES[f] for f in keep)


def _charges(amounts: OptionAmounts, paid: frozenset[str]) -> tuple[Ints, int]:
    """Return [F] the charges in ps, and the sum of those that every plan pays, which become a base load.

    Args:
        paid: charges that pinned tables pay already.
    """
    model, there = amounts.model, amounts.there
    talks = int(amounts.work.talks.max()) if len(amounts.work.names) else 0
    output = float(sum(amounts.output.tolist()))
    calls = model.call * amounts.work.collections
    # Number of collectives of each charge, in the order of CHARGES.
    seconds = [
        3 * calls, calls, 2 * calls, calls, 4 * calls, 2 * calls, talks * calls,
        float(model.rates.copied(0.5 * output)),
    ]  # fmt: skip
    charge = np.floor(np.array(seconds) * PICO).astype(np.int64)
    for f in range(len(CHARGES)):
        if CHARGES[f] in paid or not (amounts.uses[:, :, f] & there).any():
            charge[f] = 0
    certain = 0
    for f in range(len(CHARGES)):
        if charge[f] and (amounts.uses[:, :, f] | ~there).all(1).any():
            certain += int(charge[f])
            charge[f] = 0
    return charge, certain


_CHARGES_OF_TRAFFIC = {
    "rows": ("exchange",),
    "replica gradients": ("replicas", "replica rows"),
    "replica shares": ("replica shares",),
    "replica gradients, dense": ("replicas", "dense replicas"),
    "dense gradients": ("dense replicas",),
    "rows in host": ("hosts",),
    "row sums": ("row sums",),
}


def _charges_paid_by(priced: Price) -> frozenset[str]:
    """Return the charges that a price contains."""
    sent = (name for name, amount in priced.sent.items() if np.any(amount > 0))
    return frozenset(charge for name in sent for charge in _CHARGES_OF_TRAFFIC.get(name, ()))


def _base(amounts: OptionAmounts, paid: Price | None, reserved: Ints | None) -> tuple[Ints, Ints]:
    """Return [R, S] ps and [R, 2] bytes of every rank before any table is placed.

    They are the constants of a step, the output of a home, reserved memory, and the price of pinned tables.
    """
    model, work, ranks = amounts.model, amounts.work, amounts.ranks
    memory = np.zeros((ranks, 2), np.int64) if reserved is None else np.array(reserved, np.int64)
    if memory.shape != (ranks, 2):
        raise ConfigError(f"Planner: reserved has shape {memory.shape}, wanted {(ranks, 2)}.")
    rows = amounts.least_bags * work.dim * float(work.wide)
    at_home = 2.0 * amounts.output + rows + amounts.least_payload * (1 + model.depth)
    memory[:, model.tier] += int(float(sum(at_home.tolist())))
    if paid is None:
        return _constant(amounts), memory
    cost = np.zeros((ranks, len(amounts.stages)), np.int64)
    for name, seconds in paid.stages.items():
        cost[:, amounts.stages.index(name)] += np.floor(seconds * PICO).astype(np.int64)
    cost[:, 0] += int(paid.calls * PICO)
    return cost, memory + paid.memory


def _constant(amounts: OptionAmounts) -> Ints:
    """Return [R, S] ps of a step without tables: its overhead and its header."""
    model, topology, ranks = amounts.model, amounts.topology, amounts.ranks
    constant = np.zeros((ranks, len(amounts.stages)), np.int64)
    on_host = np.array([len(topology.ranks_of(topology.host_of(r))) for r in range(ranks)], np.float64)
    near, far = 4.0 * (on_host - 1.0), 4.0 * (ranks - on_host)
    header = model.rates.exchanged(near, near)
    once = (model.speeds.step + model.call) * amounts.work.collections
    constant[:, 0] = np.floor((once + header) * PICO).astype(np.int64)
    if amounts.hosts > 1:  # otherwise no byte leaves the host
        # On a card that ranks share, their mean counts, which is the same on each of them.
        away = model.rates.exchanged(far, far, network=True)
        constant[:, amounts.stage(NETWORK_STAGES[0])] += np.floor(away * PICO).astype(np.int64)
    return constant
