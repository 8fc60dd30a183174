"""`Decision`: the result of the search for a request, and the plan that follows from it.

    request  ──build──►  problem  ──together, max_ranks──►  instance  ──solve──►  solution  ──price──►  plan, report

The search minimizes an estimated cost. It equals the price of the plan's tilings if all hosts are alike; otherwise it
is close to the price. The price is decisive: if the price puts a rank over its cap, the search runs again with less
memory. The report states the price.

Legend: T tables that are not pinned, in the problem's order; G tables of the instance, co-located tables being one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilerec.planner.cost.cuts import sizes_of_shares
from tilerec.planner.cost.options import Problem
from tilerec.planner.cost.ways import Way
from tilerec.planner.pins import groups_of, pins_of
from tilerec.planner.plan_price import PlanPrice
from tilerec.planner.plan_price import priced as price_of
from tilerec.planner.price_walk import walk_downhill
from tilerec.planner.request import PlanRequest
from tilerec.planner.request_problem import build_problem, searched_instance
from tilerec.planner.search.instance import SHARE, Instance, Ints, Proof, Solution, Status, evaluate
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.solve import UNITS, lower_bound, solve
from tilerec.planner.search.work import Work
from tilerec.planner.table_limits import may_offload
from tilerec.planner.table_sharding import behind_cache, check_kernel, with_table_fields
from tilerec.sharding.strategies import row_wise
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType

MOST_PROPORTIONAL_TABLES = 8  # most tables whose rows are split in proportion to the ranks' memory
PRICING_STEPS = 5_000  # options are priced to 1 / PRICING_STEPS, as ranges of whole rows differ in size
NEAR = 500  # a price within 1 / NEAR of the search's cost is accepted without trying other solutions
EFFORTS_TRIED = 3  # efforts tried until a plan fits
MOST_PIECES_SEARCHED_TWICE = 1_024  # tables x ranks up to which a second search has fewer options with heads
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

    def price(self, solution: Solution) -> PlanPrice:
        """Return the price of the plan of a solution."""
        known = None if self.pins else self.problem.model
        return price_of(self.request, replace(self, solution=solution).shardings(), known)

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
                given = limits.sharding is not None
                found[table.key] = pin if given else with_table_fields(pin, table, limits, self.request.topology)
                continue
            t = free[table.key]
            o = self.option(t)
            made = self.problem.sharding(t, o, self.places(t), self.shares(t))
            finished = with_table_fields(made, table, limits, self.request.topology)
            if self.problem.options[o].cached:
                finished = behind_cache(finished, self.problem.tables[t], limits)
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
    pins = pins_of(request)
    for key, sharding in pins.items():
        check_kernel(request.by_key[key], sharding, request.limits_of(key))
    found = _searched_or_quick(request, pins, False, quick)
    if (
        not found.found
        and found.solution.status is not Status.NONE_EXISTS
        and len(set(request.topology.memory_caps)) > 1
    ):
        found = _with_proportional_rows(found, quick)
    if found.found or not may_offload(request):
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


def _searched(request: PlanRequest, pins: dict[str, ParameterSharding], offload: bool, quick: Work | None) -> Decision:
    """Build the problem, search for a solution, and price it."""
    problem = build_problem(request, pins, offload)
    instance, row = searched_instance(request, pins, problem.instance)
    if not instance.tables:
        nothing = evaluate(instance, np.zeros(0, np.int64), ())
        return _of_pins_only(Decision(request, pins, problem, instance, row, nothing, offload=offload))
    apart = problem.lower is not problem.instance
    lower = searched_instance(request, pins, problem.lower)[0] if apart else instance
    first = _solved(request, instance, quick, prove=not apart)
    if quick is None:
        first = _or_with_fewer_heads(request, problem, instance, first)
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


def _or_with_fewer_heads(request: PlanRequest, problem: Problem, instance: Instance, first: Solution) -> Solution:
    """Return the solution, or that of a search without heads beside ranges and grids on some ranks, if it costs less.

    For few tables. There, more options may lead the search away from the best one: by 7 % in one of 60 random sets.
    """
    ranges = [bool(o.head) and o.way in (Way.ROWS, Way.GRID) and o.width < instance.ranks for o in problem.options]
    few = instance.tables * instance.ranks <= MOST_PIECES_SEARCHED_TWICE
    if first.status is not Status.FOUND or not few or not any(ranges):
        return first
    fewer = replace(instance, width=np.where(ranges, 0, instance.width))
    second = _solved(request, fewer, None, prove=False)
    return replace(second, bound=first.bound) if second.status is Status.FOUND and second.cost < first.cost else first


def _with_proportional_rows(none: Decision, quick: Work | None) -> Decision:
    """Split the rows of the largest tables in proportion to the free memory of each rank.

    For ranks with different amounts of memory, if even pieces do not fit. Returns `none` if this does not fit either.
    """
    request, problem = none.request, none.problem
    free = (none.instance.cap - none.instance.base_memory)[:, problem.model.tier]
    # Co-located tables, and tables with fewer max_ranks, cannot be split over all ranks on their own.
    ranks = request.topology.world_size
    grouped = {key for group in groups_of(request, none.pins) for key in group}
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
            lower = searched_instance(request, none.pins, problem.lower)[0]
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
        with_price, priced = _priced(decision)
        if not priced.over.any():
            return _walked(_of_lowest_price(_with_even_rows(with_price)))
        less = np.maximum(priced.memory - decision.solution.memory + missed, 0)
        missed = np.maximum(missed, less + (less >> 4))  # 1/16 more, as the next plan will differ
        again = replace(instance, base_memory=instance.base_memory + missed)
        solution = _solved(decision.request, again, quick, prove=prove)
        if solution.status is not Status.FOUND:
            # This search had less memory than the ranks have, so it proves nothing.
            solution = replace(solution, status=Status.NONE_FOUND, proof=None)
        decision = replace(decision, solution=solution)
    return replace(decision, solution=replace(decision.solution, status=Status.NONE_FOUND, proof=None))


def _priced(decision: Decision) -> tuple[Decision, PlanPrice]:
    """Return the decision with the price of its plan, and that price."""
    priced = decision.price(decision.solution)
    return replace(decision, priced=priced), priced


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
        if len(row_counts[row]) == 1 or all(min(sizes_of_shares(count, shares)) > 0 for count in row_counts[row])
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
    other, then = _priced(replace(decision, solution=replace(solution, rows={})))
    return other if not then.over.any() and then.cost_ps < priced.cost_ps else decision


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
        solution = replace(other, bound=decision.solution.bound)
        found, priced = _priced(_without_empty_ranges(replace(decision, solution=solution)))
        if not priced.over.any() and priced.cost_ps < best.priced.cost_ps:
            best = found
    return best


def _walked(decision: Decision) -> Decision:
    """Return the decision at the end of a walk by price, if the price is above the cost that the search estimated."""

    solution, priced = decision.solution, decision.priced
    assert priced is not None
    if priced.cost_ps <= solution.cost + solution.cost // NEAR:
        return decision
    solution, priced = walk_downhill(decision.instance, solution, priced, decision.price)
    return replace(decision, solution=solution, priced=priced)


def _of_pins_only(decision: Decision) -> Decision:
    """Return the decision for a request whose tables are all pinned: the pins are the plan, if they fit."""
    found, priced = _priced(decision)
    if not priced.over.any():
        return replace(found, bound=priced.cost_ps)
    over = priced.over.max(0)
    tier = int(over.argmax())
    none = replace(decision.solution, status=Status.NONE_EXISTS, proof=Proof(tier, int(over[tier])))
    return replace(decision, solution=none)
