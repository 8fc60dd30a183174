"""`Proposal`: a new plan for tables that are planned together, with the predicted seconds of steps and move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.model_tables import ties_of
from tilerec.parallel.resharding.measured_load import Load
from tilerec.parallel.resharding.measured_request import StepSeconds, measured_request, present_tables
from tilerec.parallel.resharding.move_price import cell_bytes, head_bytes, move_loads, price_of_move
from tilerec.parallel.resharding.move_reduction import (
    keep_tables_in_place,
    permute_ranks,
    tilings_of,
)
from tilerec.parallel.table_optimizers import with_storage_of
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.tables import PlannedTable
from tilerec.sharding.embedding import ShardedCollection
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology

Planned = tuple[dict[str, ShardedCollection], ShardingPlan, Topology]
"""Collections that are planned together, their present plan, and its topology."""


class Proposal(NamedTuple):
    """A plan for tables that are planned together, and predicted seconds of their step before and after the move."""

    before_s: float
    after_s: float
    move_s: float
    move_bytes: int
    present: ShardingPlan
    plan: ShardingPlan

    @property
    def moves(self) -> bool:
        return tilings_of(self.present) != tilings_of(self.plan)


def propose(
    model: nn.Module, part: Planned, planner: EmbeddingShardingPlanner | None, load: Load, alone: bool,
    budget: int | None, least_gain: float,
) -> Proposal:  # fmt: skip
    collections, present, own = part
    tables = present_tables(model, present)
    planner = _planner_for(planner, own, tables, alone)
    if not load.steps or not any(f.ids for path, name in tilings_of(present) for f in load.features[path, name]):
        return Proposal(0.0, 0.0, 0.0, 0, present, present)
    two_d = any(own.exchange.teams is not None for own in collections.values())
    request = measured_request(planner, tables, load, heads=not two_d)
    ties = [list(names) for names in ties_of(cast("dict[str, TableCollection]", collections))]
    step = StepSeconds(request)
    before = step(tilings_of(present))
    counted = replace(load, hot={}) if two_d else load
    proposed = _with_hot(with_storage_of(planner.make(request), present), present, counted)
    bytes_of_cell = cell_bytes(collections)
    topology = request.topology
    if topology.host_ranks == own.host_ranks:
        other = permute_ranks(proposed, present, bytes_of_cell, topology)
        if step(tilings_of(other)) <= step(tilings_of(proposed)) * 1.001:
            proposed = other
    after = step(tilings_of(proposed))
    # Up to half of the least gain may be given up for tables that then stay in place.
    most = after + max(0.0, min(0.1 * (before - after), 0.5 * least_gain * before))
    proposed = keep_tables_in_place(proposed, present, ties, bytes_of_cell, topology, step, most)
    after = step(tilings_of(proposed))
    loads = move_loads(collections, ties, present, proposed, own)
    heads = head_bytes(collections, ties, present, proposed)
    move_s, move_bytes = price_of_move(loads, topology, own, budget, heads)
    return Proposal(before, after, move_s, move_bytes, present, replace(proposed, report=None))


def _with_hot(plan: ShardingPlan, present: ShardingPlan, load: Load) -> ShardingPlan:
    """Return the plan with the present hot rows of tables whose frequent ids are not known.

    Other tables lose those that the planner did not choose. A plan that leaves `hot` out would keep them.
    """
    for path, name, sharding in list(plan.tables()):
        before, tiling = present.plan[path][name].hot, sharding.tiling
        assert tiling is not None
        if not before or sharding.hot is not None:
            continue
        hot = before if (path, name) not in load.hot and not tiling.replicated else HotRows()
        made = replace(sharding, hot=hot, tiling=tiling.with_hot(name, hot, plan.world_size or 1))
        plan = plan.replaced(path, name, made)
    return plan


def _planner_for(
    planner: EmbeddingShardingPlanner | None, own: Topology, tables: Sequence[PlannedTable], alone: bool
) -> EmbeddingShardingPlanner:
    """Return the user's planner if there is one part, else a planner for this part with its speeds and constraints.

    Args:
        own: topology of the part.
        alone: True if there is one part.
    """
    if planner is None:
        return EmbeddingShardingPlanner(own)
    given = planner.topology
    if alone and (given is None or given.world_size != own.world_size):
        raise ConfigError(
            f"rebalance: planner: got the topology {given}; expected one of {own.world_size} ranks, which hold the "
            "model's tables. Pass EmbeddingShardingPlanner(topology=...) with such a topology."
        )
    if alone:
        return planner
    if given is None or given.world_size != own.world_size:
        given = own if given is None else replace(own, speeds=given.speeds)
    keys = {key for table in tables for path, name in table.names for key in (f"{path}.{name}", name)}
    limits = {name: limit for name, limit in planner.constraints.items() if name in keys}
    return EmbeddingShardingPlanner(given, constraints=limits, effort=planner.effort)
