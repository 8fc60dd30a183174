"""The sharding of a run's tables, from its settings."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from tilerec.comms.process import ProcessGroupComms
from tilerec.parallel.hosts import launched_topology
from tilerec.parallel.shard import shard
from tilerec.parallel.two_d.rank_grid import RankGrid
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology
from tilerec.train.config import ParallelConfig
from tilerec.train.optimizers import tables_of

Plan: TypeAlias = ShardingPlan | None
"""A plan for `shard` or, of one sharding group, for `shard_2d`; None leaves every choice to the planner."""


def shard_run(
    model: nn.Module, config: ParallelConfig, group: ProcessGroupComms, device: torch.device, saved: Plan = None
) -> None:
    """Shard a model's tables over the ranks, in place. Collective.

    Args:
        device: of the tables.
        saved: plan of a run that is continued; None makes the plan of a new run.
    """
    topology = launched_topology(group, device.type)
    plan = saved or run_plan(model, config, group, topology)
    if not config.group_size:
        hosts_of_plan = plan is not None and plan.hosts is not None
        shard(
            model, plan=plan, mesh=group, topology=None if hosts_of_plan else topology, device=device,
            exact=config.exact,
        )  # fmt: skip
        return
    whole = [GroupConfig(plan, config.group_size)]
    settings = ReplicaSettings(exact=config.exact)
    shard_2d(model, lambda: (whole, {}), group, settings, topology, device=device, who="parallel.group_size")


def plan_in(model: nn.Module) -> Plan:
    """Return the plan of the model's tables; None for a model that is not sharded."""
    plan = getattr(model, "plan", None)
    return plan if isinstance(plan, ShardingPlan) else None


def run_plan(model: nn.Module, config: ParallelConfig, group: ProcessGroupComms, topology: Topology) -> Plan:
    """Return the plan of a new run; of one sharding group if the run has replicas. Collective.

    Args:
        topology: of the group's ranks.
    """
    if config.plan:
        return ShardingPlan.load(config.plan)
    if config.sharding == "planned":
        return None
    limits = ParameterConstraints(sharding_types=[config.sharding])
    constraints = {table.config.name: limits for table in tables_of(model)}
    if not constraints:
        return None
    if config.group_size:
        topology = RankGrid(group.size, config.group_size).topology_of(0, topology)
    return EmbeddingShardingPlanner(topology, constraints=constraints).collective_plan(model, pg=group)
