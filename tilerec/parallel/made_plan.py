"""`make_plan`: the planner's plan of some collections of a model, for a user who passes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from tilerec.modules.collection import TableCollection
from tilerec.parallel.model_tables import ties_of
from tilerec.parallel.read_plan import complete_plan_of
from tilerec.parallel.table_optimizers import keep_cached_tables
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.tables import tables_of
from tilerec.sharders.table_sharders import ModuleSharder
from tilerec.spec.plan import ShardingPlan, ShardingType
from tilerec.spec.topology import Topology


def make_plan(
    module: nn.Module,
    collections: Mapping[str, TableCollection],
    topology: Topology,
    sharders: Sequence[ModuleSharder],
    kind: ShardingType | None = None,
) -> ShardingPlan:
    """Return the planner's plan, complete.

    Tied tables are placed as the first of each tie, and cached tables keep their caches.

    Args:
        collections: those of the module's collections to plan.
        sharders: as in `EmbeddingShardingPlanner.plan`.
        kind: of every table; None: the planner chooses.

    Raises:
        PlannerError: there is no such plan.
    """
    tables = [table for table in tables_of(module, sharders) if table.names[0][0] in collections]
    plan = made = ShardingPlan({})
    if tables:
        limits = {} if kind is None else {table.key: ParameterConstraints(sharding_types=[kind]) for table in tables}
        plan = made = EmbeddingShardingPlanner(topology=topology, constraints=limits or None).plan(tables, sharders)
    for names in ties_of(collections):
        (path, table), *others = names
        first = made.plan[path][table]
        for other_path, other in others:
            sharding = plan.plan[other_path][other]
            changed = replace(sharding, sharding_type=first.sharding_type, ranks=first.ranks, tiling=first.tiling)
            plan = plan.replaced(other_path, other, changed)
    complete = complete_plan_of(keep_cached_tables(plan, collections), collections, topology)
    return replace(complete, report=made.report)
