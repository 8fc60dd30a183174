"""`Decision`: what the search found for a request, and the plan that it stands for.

    request  ──build──►  problem  ──together, max_ranks──►  instance  ──solve──►  solution  ──►  plan, report

Legend: T tables that are not pinned, in the problem's order; G of the instance, where those that lie together are one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.options import Problem, build
from tilerec.planner.cost.workload import TableWork
from tilerec.planner.request import PlanRequest
from tilerec.planner.search.instance import Instance, Ints, Proof, Solution, Status, evaluate, fits
from tilerec.planner.search.solve import solve
from tilerec.planner.tables import PlannedTable
from tilerec.planner.together import together
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
from tilerec.spec.topology import Topology


@dataclass(frozen=True, eq=False)
class Decision:
    """What was found.

    Args:
        pins: shardings that were given, by key.
        row: [T] the instance's table that each of the problem's tables is (a part of).
        solution: of the instance; of status FOUND, or there is no plan.
        offload: device memory alone did not do, so host memory was tried, too.
    """

    request: PlanRequest
    pins: dict[str, ParameterSharding]
    problem: Problem
    instance: Instance
    row: Ints
    solution: Solution
    offload: bool = False

    @property
    def found(self) -> bool:
        return self.solution.status is Status.FOUND

    def option(self, table: int) -> int:
        """The option that a table of the problem has."""
        return int(self.solution.option[self.row[table]])

    def places(self, table: int) -> tuple[int, ...]:
        """Ranks, or hosts, of its pieces; () for all ranks."""
        return self.solution.places[self.row[table]]

    def shares(self, table: int) -> Ints | None:
        """Of an uneven split by rows."""
        return self.solution.rows.get(int(self.row[table]))

    def shardings(self) -> dict[str, ParameterSharding]:
        """Of every table, by key, in the request's order."""
        free = {work.name: t for t, work in enumerate(self.problem.tables)}
        found: dict[str, ParameterSharding] = {}
        for table in self.request.tables:
            limits = self.request.limits_of(table.key)
            if table.key in self.pins:
                pin = replace(self.pins[table.key], data_type=table.data_type)
                given = limits is not None and limits.sharding is not None
                found[table.key] = pin if given else _finished(pin, table, limits, self.request.topology)
                continue
            t = free[table.key]
            o = self.option(t)
            made = self.problem.sharding(t, o, self.places(t), self.shares(t))
            finished = _finished(made, table, limits, self.request.topology)
            if self.problem.options[o].cached:
                finished = _behind_a_cache(finished, self.problem.tables[t], limits)
            found[table.key] = finished
        return found

    def plan(self) -> ShardingPlan:
        """The plan, without its report."""
        topology = self.request.topology
        shardings = self.shardings()
        paths = dict.fromkeys(path for table in self.request.tables for path, _ in table.names)
        modules = {path: EmbeddingModuleShardingPlan() for path in paths}
        for table in self.request.tables:
            for path, name in table.names:
                modules[path][name] = shardings[table.key]
        return ShardingPlan(modules, topology.world_size, topology.host_ranks)


def decide(request: PlanRequest) -> Decision:
    """Search for a plan.

    Raises:
        ConfigError: constraints leave a table no option.
    """
    pins = request.pins()
    for key, sharding in pins.items():
        _check_kernel(request.by_key[key], sharding, request.limits_of(key))
    found = _decided(request, pins, offload=False)
    if found.found or not request.may_offload():
        return found
    # Device memory alone does not do: tables may lie behind caches, where nobody said otherwise.
    return _decided(request, pins, offload=True)


def _decided(request: PlanRequest, pins: dict[str, ParameterSharding], offload: bool) -> Decision:
    problem = problem_of(request, pins, offload)
    instance, row = together(_adapted(request, problem), request.groups(pins))
    solution = solve(instance, effort=request.effort) if instance.tables else _of_nothing(instance)
    return Decision(request, pins, problem, instance, row, solution, offload)


def problem_of(request: PlanRequest, pins: dict[str, ParameterSharding], offload: bool = False) -> Problem:
    """The request's tables with their options, and what is taken already; `offload` as in `PlanRequest.limits`."""
    topology = request.topology
    reserved = np.zeros((topology.world_size, 2), np.int64)
    reserved[:, 1 if topology.compute_device == "cpu" else 0] = request.reserved_bytes()
    tilings = {key: sharding.tiling for key, sharding in pins.items() if sharding.tiling is not None}
    return build(request.works(), topology, request.limits(pins, offload), tilings, reserved=reserved)


def _of_nothing(instance: Instance) -> Solution:
    """Where every table was given by hand: what is there is the plan, if it fits."""
    solution = evaluate(instance, np.zeros(0, np.int64), ())
    if fits(instance, solution.memory):
        return replace(solution, bound=solution.cost)
    over = (solution.memory - instance.cap).max(0)
    tier = int(over.argmax())
    return replace(solution, status=Status.NONE_EXISTS, proof=Proof(tier, int(over[tier])))


def _adapted(request: PlanRequest, problem: Problem) -> Instance:
    """The problem's instance with what its options do not know: `max_ranks`, and that a grid's rows are even."""
    instance = _with_even_grids(request, problem.instance)
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
                    f"Table '{name}': max_ranks={most[name]} and its other constraints contradict each other: whatever "
                    "those allow is on more ranks; raise max_ranks, or allow table_wise."
                )
    return replace(instance, width=width)


def _with_even_grids(request: PlanRequest, instance: Instance) -> Instance:
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


def _finished(
    made: ParameterSharding, table: PlannedTable, limits: ParameterConstraints | None, topology: Topology
) -> ParameterSharding:
    """With the kernel that is known, the word that the user knows it by, and ids per bag where they were told."""
    allowed = () if limits is None else limits.types_allowed()
    kind = made.kind if not allowed or made.kind in allowed else _called(made, allowed, topology)
    kernel = kernel_of(table, limits)
    told = None if limits is None else limits.ids_per_bag()
    if (kind, kernel, told) == (made.kind, made.kernel, made.ids_per_bag):
        return made
    # All of it was checked already; a new record would check a thousand ranks again.
    finished = ParameterSharding.__new__(ParameterSharding)
    vars(finished).update(vars(made), sharding_type=kind, compute_kernel=kernel, ids_per_bag=told)
    if kernel is not None and kernel not in KERNELS_IN_USE:
        return replace(finished)  # which warns
    return finished


def _behind_a_cache(
    made: ParameterSharding, work: TableWork, limits: ParameterConstraints | None
) -> ParameterSharding:
    """The same, with rows in host memory."""
    params = None if limits is None else limits.cache_params
    if not work.load_factor:
        return replace(made, compute_kernel=EmbeddingComputeKernel.FUSED_UVM)
    return replace(
        made,
        compute_kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING,
        cache_params=params or CacheParams(load_factor=work.load_factor),
    )


def _called(made: ParameterSharding, allowed: tuple[ShardingType, ...], topology: Topology) -> ShardingType:
    """The first allowed type that gives this tiling: rows over all ranks of one host go by several names."""
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
                continue  # not on these ranks, or not so many pieces
    return made.kind


def kernel_of(table: PlannedTable, limits: ParameterConstraints | None) -> EmbeddingComputeKernel | None:
    """What is known or must be; None leaves it to what is attached when the model is sharded.

    Raises:
        ConfigError: an optimizer is attached, and the constraints allow "dense" alone.
    """
    allowed = () if limits is None else limits.kernels_allowed()
    dense = EmbeddingComputeKernel.DENSE
    if not allowed:
        return table.kernel
    # In host memory is what an option says, where there is a choice.
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
            f"{table}: an optimizer is attached, so its kernel is 'fused', and the sharding given for it says 'dense'; "
            "leave compute_kernel out."
        )


def topology_of_ranks(ranks: int, compute_device: str, **more: Any) -> Topology:
    """Ranks on hosts of LOCAL_WORLD_SIZE each where that divides them, else on one host."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(text) if text.isdecimal() and int(text) else ranks
    return Topology(ranks, compute_device, local_world_size=local if ranks % local == 0 else None, **more)
