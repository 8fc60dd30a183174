"""The sharding plan of a run, from its settings."""

from __future__ import annotations

from typing import TypeAlias

from torch import nn

from tilerec.comms.process import ProcessGroupComms
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.spec.plan import ShardingPlan
from tilerec.train.config import ParallelConfig
from tilerec.train.optimizers import tables_of

Plan: TypeAlias = ShardingPlan | None
"""A plan for `shard`; None leaves every choice to the planner."""


def run_plan(model: nn.Module, config: ParallelConfig, group: ProcessGroupComms) -> Plan:
    """Return the plan of a new run."""
    if config.plan:
        return ShardingPlan.load(config.plan)
    if config.sharding == "planned":
        return None
    limits = ParameterConstraints(sharding_types=[config.sharding])
    constraints = {table.config.name: limits for table in tables_of(model)}
    if not constraints:
        return None
    return EmbeddingShardingPlanner(constraints=constraints).collective_plan(model, pg=group)
