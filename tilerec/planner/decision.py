"""`Decision`: the result of the search for a request, and the plan that follows from it.

    request  ──build──►  problem  ──together, max_ranks──►  instance  ──solve──►  solution  ──price──►  plan, report

The search minimizes an estimated cost. It equals the price of the plan's tilings if all hosts are alike; otherwise it
is close to the price. The price is decisive: if the price puts a rank over its cap, the search runs again with less
memory. The report states the price.

Legend: T tables that are not pinned, in the problem's order; G tables of the instance, co-located tables being one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.colocation import merge_colocated
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.cuts import sizes_of_shares
from tilerec.planner.cost.options import Problem, build
from tilerec.planner.cost.ways import Way
from tilerec.planner.cost.workload import TableWork
from tilerec.planner.plan_price import PlanPrice, work_with_sharding
from tilerec.planner.plan_price import priced as price_of
from tilerec.planner.request import PlanRequest
from tilerec.planner.search.instance import SHARE, Instance, Ints, Proof, Solution, Status, evaluate
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.solve import UNITS, lower_bound, solve
from tilerec.planner.search.work import Work
from tilerec.planner.tables import PlannedTable
from tilerec.sharding.strategies import STRATEGIES, row_wise, table_row_wise
from tilerec.spec.cache import CacheParams
from tilerec.spec.plan import (
    HOST_KERNELS,
    KERNELS_IN_USE,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tilerec.spec.topology import Topology, launcher_local_size

MOST_PROPORTIONAL_TABLES = 8  # most tables whose rows are split in proportion to the ranks' memory
PRICING_STEPS = 5_000  # options are priced to 1 / PRICING_STEPS, as ranges of whole rows differ in size
NEAR = 500  # a price within 1 / NEAR of the search's cost is accepted without trying other solutions
EFFORTS_TRIED = 3  # efforts tried until a plan fits
SEARCHES_WITHIN_CAPS = 6  # searches with less memory, if the price of a solution is over a cap


@dataclass(frozen=True, eq=False)
class Decision:
    """Result of a search.

    Args:
        pins: shardings of pinned tables, by key.
        row: [T] index of the instance's table that contains each of the problem's tables.
        solution: solution of the instance. There is a plan only if its status is FOUND.
        bound: lower bound in ps on the price of every plan made of the problem's options.
        priced: price of the plan; None without a plan.
        offload: True if the plan did not fit into device memory alone, so host memory was tried, too.
        by_caps: keys of `pins` added by the search: tables whose rows are split in proportion to the ranks' memory.
    """

    request: PlanRequest
    pins: dict[str, ParameterSharding]
    problem: Problem
    instance: Instance
    row: Ints
    solution: Solution
    bound: int = 0
    priced: PlanPrice | None = None
    offload: bool = False
    by_caps: frozenset[str] = frozenset()

    @property
    def found(self) -> bool:
        return self.solution.status is Status.FOUND

    def option(self, table: int) -> int:
        """Return the chosen option of a table of the problem."""
        return int(self.solution.option[self.row[table]])

    def places(self, table: int) -> tuple[int, ...]:
        """Return the ranks, or hosts, of the table's pieces; () for all ranks."""
        return self.solution.places[self.row[table]]

    def shares(self, table: int) -> Ints | None:
        """Return the row shares of an uneven split by rows; None for other splits."""
        return self.solution.rows.get(int(self.row[table]))

    def shardings(self) -> dict[str, ParameterSharding]:
        """Return the sharding of every table, by key, in the request's order."""
        free = {work.name: t for t, work in enumerate(self.problem.tables)}
        found: dict[str, ParameterSharding] = {}
        for table in self.request.tables:
            limits = self.request.limits_of(table.key)
            if table.key in self.pins:
                pin = replace(self.pins[table.key], data_type=table.data_type)
                given = limits is not None and limits.sharding is not None
                found[table.key] = (
                    pin if given else _with_table_fields(pin, table, limits, self.request.topology)
                )
                continue
            t = free[table.key]
            o = self.option(t)
            made = self.problem.sharding(t, o, self.places(t), self.shares(t))
            finished = _with_table_fields(made, table, limits, self.request.topology)
            if self.problem.options[o].cached:
                finished = _behind_a_cache(finished, self.problem.tables[t], limits)
            found[table.key] = finished
        return found

    def plan(self) -> ShardingPlan:
        """Return the plan, without its report."""
        topology = self.request.topology
        shardings = self.shardings() if self.priced is None else self.priced.shardings
        paths = dict.fromkeys(path for table in self.request.tables for path, _ in table.names)
        modules = {path: EmbeddingModuleShardingPlan() for path in paths}
        for table in self.request.tables:
            for path, name in table.names:
                modules[path][name] = shardings[table.key]
        return ShardingPlan(modules, topology.world_size, topology.host_ranks)


def decide(request: PlanRequest, *, quick: Work | None = None) -> Decision:
    """Search for a plan.

    Args:
        quick: limit of work; the search then returns the first plan that fits, with a loose bound. None: full search.

    Raises:
        ConfigError: constraints leave a table without options.
    """
    pins = request.pins()
    for key, sharding in pins.items():
        _check_kernel(request.by_key[key], sharding, request.limits_of(key))
    found = _searched_or_quick(request, pins, False, quick)
    if (
        not found.found
        and found.solution.status is not Status.NONE_EXISTS
        and len(set(request.topology.memory_caps)) > 1
    ):
        found = _with_proportional_rows(found, quick)
    if found.found or not request.may_offload():
        return found
    # The tables do not fit into device memory: try host memory behind caches, unless constraints forbid it.
    return _searched_or_quick(request, pins, True, quick)


def _searched_or_quick(
    request: PlanRequest, pins: dict[str, ParameterSharding], offload: bool, quick: Work | None
) -> Decision:
    """Return `_searched`; if a full search finds no plan, the result of a quick search, as used for remedies."""
    found = _searched(request, pins, offload, quick)
    if quick is None and found.solution.status is Status.NONE_FOUND:
        first = _searched(request, pins, offload, Work(UNITS))
        found = first if first.found else found
    return found


def _searched(
    request: PlanRequest, pins: dict[str, ParameterSharding], offload: bool, quick: Work | None
) -> Decision:
    """Build the problem, search for a solution, and price it."""
    problem = build_problem(request, pins, offload)
    instance, row = merge_colocated(_with_restrictions(request, problem.instance), request.groups(pins))
    if not instance.tables:
        nothing = evaluate(instance, np.zeros(0, np.int64), ())
        return _of_pins_only(Decision(request, pins, problem, instance, row, nothing, offload=offload))
    apart = problem.lower is not problem.instance
    lower = (
        merge_colocated(_with_restrictions(request, problem.lower), request.groups(pins))[0]
        if apart
        else instance
    )
    first = _solved(request, instance, quick, prove=not apart)
    if first.status is Status.NONE_EXISTS and apart and Relaxed(lower).impossible() is None:
        first = replace(first, status=Status.NONE_FOUND, proof=None)
    decision = Decision(request, pins, problem, instance, row, first, offload=offload)
    decision = _within_caps(decision, quick, prove=not apart)
    if decision.priced is None or quick is not None:
        return decision
    bound = lower_bound(lower, decision.priced.cost_ps) if apart else first.bound
    # The bound assumes even ranges of rows. Ranges of whole rows differ slightly, so uneven ones may cost less.
    return replace(decision, bound=min(bound - bound // PRICING_STEPS, decision.priced.cost_ps))


def _solved(request: PlanRequest, instance: Instance, quick: Work | None, *, prove: bool) -> Solution:
    """Solve the instance. If no solution is found, try again with twice and four times the work, unless `quick`.

    prove: compute the bound as well, since the caller uses it.
    """
    if quick is not None:
        return solve(instance, effort=0, work=quick)
    for more in range(EFFORTS_TRIED):
        solution = solve(instance, effort=request.effort + more, prove=prove)
        if solution.status is not Status.NONE_FOUND:
            break
    return solution


def _with_proportional_rows(none: Decision, quick: Work | None) -> Decision:
    """Split the rows of the largest tables in proportion to the free memory of each rank.

    For ranks with different amounts of memory, if even pieces do not fit. Returns `none` if this does not fit either.
    """
    request, problem = none.request, none.problem
    free = (none.instance.cap - none.instance.base_memory)[:, problem.model.tier]
    # Co-located tables, and tables with fewer max_ranks, cannot be split over all ranks on their own.
    ranks, grouped = (
        request.topology.world_size,
        {key for group in request.groups(none.pins) for key in group},
    )
    most = {key: limits.max_ranks or ranks for key, limits in request.constraints.items()}
    everyone = [
        work
        for t, work in enumerate(problem.tables)
        if work.name not in grouped
        and most.get(work.name, ranks) >= ranks
        and any(
            option.way is Way.ROWS and option.width == ranks and problem.lower.there[t, o]
            for o, option in enumerate(problem.options)
        )
    ]
    order = sorted(everyone, key=lambda work: (-work.rows * work.dim, work.name))
    if free.min() < 0 or not free.any():
        return none
    parts = np.array([int(f) * SHARE // int(free.sum()) for f in free.tolist()], np.int64)
    parts[int(free.argmax())] += SHARE - int(parts.sum())
    pins = dict(none.pins)
    for work in order[:MOST_PROPORTIONAL_TABLES]:
        sizes = sizes_of_shares(work.rows, parts)
        held = [(rank, size) for rank, size in zip(range(ranks), sizes, strict=True) if size]
        tiling = row_wise(
            work.name, work.rows, work.dim, [r for r, _ in held], request.topology, sizes=[n for _, n in held]
        )
        pins[work.name] = ParameterSharding(ShardingType.ROW_WISE, ranks=[r for r, _ in held], tiling=tiling)
        found = _searched(request, pins, False, quick)
        if found.priced is not None:
            lower = merge_colocated(_with_restrictions(request, problem.lower), request.groups(none.pins))[0]
            bound = 0 if quick is not None else lower_bound(lower, found.priced.cost_ps)
            return replace(found, bound=bound, by_caps=frozenset(pins).difference(none.pins))
    return none


def _within_caps(decision: Decision, quick: Work | None, *, prove: bool) -> Decision:
    """Return the decision with its price; search again while the price puts ranks over their caps.

    The search has exact bytes for even ranges of rows only, and counts uneven ranges in proportion to their rows. The
    bytes it missed in one solution are deducted from every rank's memory in the next search.
    """
    instance = decision.instance
    missed = np.zeros_like(instance.base_memory)
    for _ in range(SEARCHES_WITHIN_CAPS):
        if not decision.found:
            return decision
        decision = _without_empty_ranges(decision)
        priced = price_of(decision.request, decision.shardings())
        if not priced.over.any():
            return _of_lowest_price(_with_even_rows(replace(decision, priced=priced)))
        less = np.maximum(priced.memory - decision.solution.memory + missed, 0)
        missed = np.maximum(missed, less + (less >> 4))  # 1/16 more, as the next plan will differ
        again = replace(instance, base_memory=instance.base_memory + missed)
        solution = _solved(decision.request, again, quick, prove=prove)
        if solution.status is not Status.FOUND:
            # This search had less memory than the ranks have, so it proves nothing.
            solution = replace(solution, status=Status.NONE_FOUND, proof=None)
        decision = replace(decision, solution=solution)
    return replace(decision, solution=replace(decision.solution, status=Status.NONE_FOUND, proof=None))


def _without_empty_ranges(decision: Decision) -> Decision:
    """Use even ranges for co-located tables if an uneven range of one of them would be empty."""
    solution, tables = decision.solution, decision.problem.tables
    row_counts: dict[int, list[int]] = {}
    for t, row in enumerate(decision.row.tolist()):
        if row in solution.rows:
            row_counts.setdefault(row, []).append(tables[t].rows)
    rows = {
        row: shares
        for row, shares in solution.rows.items()
        if len(row_counts[row]) == 1
        or all(min(sizes_of_shares(count, shares)) > 0 for count in row_counts[row])
    }
    if len(rows) == len(solution.rows):
        return decision
    even = evaluate(decision.instance, solution.option, solution.places, rows, solution.bound)
    return replace(decision, solution=even)


def _with_even_rows(decision: Decision) -> Decision:
    """Use even ranges of rows if their price is lower: the search only estimates the cost of uneven ranges."""
    solution, priced = decision.solution, decision.priced
    assert priced is not None
    if not solution.rows or priced.cost_ps <= solution.cost + solution.cost // NEAR:
        return decision
    even = replace(solution, rows={})
    other = replace(
        decision,
        solution=even,
        priced=price_of(decision.request, replace(decision, solution=even).shardings()),
    )
    assert other.priced is not None
    return other if not other.priced.over.any() and other.priced.cost_ps < priced.cost_ps else decision


def _of_lowest_price(decision: Decision) -> Decision:
    """Return the solution of lowest price.

    Other solutions are priced only if the price of the best one is above the cost that the search estimated.
    """
    best = decision
    for other in decision.solution.others:
        assert best.priced is not None
        near = best.priced.cost_ps <= best.solution.cost + best.solution.cost // NEAR
        if near or other.cost >= best.priced.cost_ps:
            break
        found = _without_empty_ranges(
            replace(decision, solution=replace(other, bound=decision.solution.bound))
        )
        found = replace(found, priced=price_of(decision.request, found.shardings()))
        assert found.priced is not None
        if not found.priced.over.any() and found.priced.cost_ps < best.priced.cost_ps:
            best = found
    return best


def _of_pins_only(decision: Decision) -> Decision:
    """Return the decision for a request whose tables are all pinned: the pins are the plan, if they fit."""
    priced = price_of(decision.request, decision.shardings())
    if not priced.over.any():
        return replace(decision, bound=priced.cost_ps, priced=priced)
    over = priced.over.max(0)
    tier = int(over.argmax())
    none = replace(decision.solution, status=Status.NONE_EXISTS, proof=Proof(tier, int(over[tier])))
    return replace(decision, solution=none)


def build_problem(request: PlanRequest, pins: dict[str, ParameterSharding], offload: bool = False) -> Problem:
    """Return the request's tables with their options, and the memory in use before the search.

    `offload` as in `PlanRequest.limits`.
    """
    topology = request.topology
    reserved = np.zeros((topology.world_size, 2), np.int64)
    reserved[:, 1 if topology.compute_device == "cpu" else 0] = request.reserved_bytes()
    tilings = {key: sharding.tiling for key, sharding in pins.items() if sharding.tiling is not None}
    works = [
        work_with_sharding(work, pins[work.name]) if work.name in pins else work for work in request.works()
    ]
    return build(
        works,
        topology,
        request.limits(pins, offload),
        tilings,
        reserved=reserved,
        together=request.groups(pins),
    )


def _with_restrictions(request: PlanRequest, instance: Instance) -> Instance:
    """Apply restrictions that options do not contain: `max_ranks`, and the even rows of a grid."""
    instance = _with_even_grids(request, instance)
    most = {key: c.max_ranks for key, c in request.constraints.items() if c.max_ranks is not None}
    if not most:
        return instance
    width = instance.width.copy()
    held = np.minimum(instance.width * instance.pieces, instance.ranks)
    for t, name in enumerate(instance.names):
        if name in most:
            width[t, held[t] > most[name]] = 0
            if not width[t].any():
                raise ConfigError(
                    f"Table '{name}': max_ranks={most[name]} and its other constraints contradict each other: all "
                    "splits that those allow use more ranks. Raise max_ranks, or allow table_wise."
                )
    return replace(instance, width=width)


def _with_even_grids(request: PlanRequest, instance: Instance) -> Instance:
    """Forbid uneven rows for tables that may be grid-sharded but not row-wise, as the rows of a grid are even."""
    rows = {ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE}
    grids = {
        key
        for key, limits in request.constraints.items()
        if ShardingType.GRID_SHARD in limits.types_allowed() and rows.isdisjoint(limits.types_allowed())
    }
    if not grids:
        return instance
    divisible = instance.divisible.copy()
    divisible[[name in grids for name in instance.names]] = False
    return replace(instance, divisible=divisible)


def _with_table_fields(
    made: ParameterSharding, table: PlannedTable, limits: ParameterConstraints | None, topology: Topology
) -> ParameterSharding:
    """Return the sharding with its kernel, its ids per bag, and a sharding type that the constraints allow."""
    allowed = () if limits is None else limits.types_allowed()
    kind = made.kind if not allowed or made.kind in allowed else _allowed_type(made, allowed, topology)
    kernel = kernel_of(table, limits)
    ids_per_bag = made.ids_per_bag
    if ids_per_bag is None and limits is not None:
        ids_per_bag = limits.ids_per_bag()
    if (kind, kernel, ids_per_bag) == (made.kind, made.kernel, made.ids_per_bag):
        return made
    # All fields have been checked; constructing a new record would check up to a thousand ranks again.
    finished = ParameterSharding.__new__(ParameterSharding)
    vars(finished).update(vars(made), sharding_type=kind, compute_kernel=kernel, ids_per_bag=ids_per_bag)
    if kernel is not None and kernel not in KERNELS_IN_USE:
        return replace(finished)  # its constructor warns
    return finished


def _behind_a_cache(
    made: ParameterSharding, work: TableWork, limits: ParameterConstraints | None
) -> ParameterSharding:
    """Return the sharding with its rows in host memory."""
    params = None if limits is None else limits.cache_params
    if not work.load_factor:
        return replace(made, compute_kernel=EmbeddingComputeKernel.FUSED_UVM)
    return replace(
        made,
        compute_kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING,
        cache_params=params or CacheParams(load_factor=work.load_factor),
    )


def _allowed_type(
    made: ParameterSharding, allowed: tuple[ShardingType, ...], topology: Topology
) -> ShardingType:
    """Return the first allowed type that yields this tiling; rows over all ranks of one host have several types."""
    tiling = made.tiling
    assert tiling is not None
    for kind in allowed:
        strategies = [STRATEGIES[kind]]
        if kind in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE):
            rows = row_wise if kind is ShardingType.ROW_WISE else table_row_wise
            strategies.append(partial(rows, sizes=[r1 - r0 for r0, r1 in pairwise(tiling.blocks[0].cuts)]))
        for strategy in strategies:
            try:
                if strategy("", tiling.rows, tiling.dim, made.ranks, topology) == tiling:
                    return kind
            except ConfigError:
                continue  # the type allows other ranks or another number of pieces
    return made.kind


def kernel_of(table: PlannedTable, limits: ParameterConstraints | None) -> EmbeddingComputeKernel | None:
    """Return the table's kernel; None if the optimizer attached at sharding will determine it.

    Raises:
        ConfigError: an optimizer is attached, but the constraints allow only "dense".
    """
    allowed = () if limits is None else limits.kernels_allowed()
    dense = EmbeddingComputeKernel.DENSE
    if not allowed:
        return table.kernel
    # Device memory first: if both are allowed, the chosen option moves rows to host memory.
    updating = sorted(
        (k for k in allowed if k is not dense), key=lambda k: (k in HOST_KERNELS, k not in KERNELS_IN_USE)
    )
    if table.kernel is None and dense in allowed:
        return None if updating else dense
    if not updating:
        raise ConfigError(
            f"{table}: an optimizer is attached, so its kernel is 'fused', which compute_kernels "
            f"{[k.value for k in allowed]} does not allow; allow 'fused', or do not attach an optimizer."
        )
    return updating[0]


def _check_kernel(
    table: PlannedTable, sharding: ParameterSharding, limits: ParameterConstraints | None
) -> None:
    kernel_of(table, limits)
    if table.optimizer is not None and sharding.kernel is EmbeddingComputeKernel.DENSE:
        raise ConfigError(
            f"{table}: an optimizer is attached, so its kernel is 'fused', but its pinned sharding has 'dense'. Leave "
            "compute_kernel out."
        )


def topology_of_ranks(ranks: int, compute_device: str, **more: Any) -> Topology:
    """Return a topology with LOCAL_WORLD_SIZE ranks per host if that divides `ranks`, else with one host."""
    local = launcher_local_size()
    even = local is not None and ranks % local == 0
    return Topology(ranks, compute_device, local_world_size=local if even else None, **more)
