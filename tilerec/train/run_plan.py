"""The sharding of a run's tables, from its settings."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from tilerec.comms.process import ProcessGroupComms
from tilerec.parallel.hosts import launched_topology
from tilerec.parallel.shard import shard
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.spec.plan import ShardingPlan
from tilerec.train.config import ParallelConfig

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
    plan: ShardingPlan | str | None = saved
    if plan is None:
        plan = ShardingPlan.load(config.plan) if config.plan else config.sharding
    if plan == "planned":
        plan = None
    if not config.group_size:
        hosts_of_plan = isinstance(plan, ShardingPlan) and plan.hosts is not None
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
