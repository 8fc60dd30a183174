"""`shard_2d`: 2D parallelism of a model's tables, sharded within groups of ranks, with a copy in every group.

Nouns
  part     collections that are sharded over groups of one size: the whole model, unless there are sub-configs
  exact    replicas exchange the gradients of touched rows before every update: an ordinary plan over all ranks, in
           which every tile has an owner in each sharding group
  average  sharding groups train independently; weights and optimizer state are averaged at intervals

    gradient of a row   exact: sum over all W ranks / W      average: sum over the group's G ranks / G

`rank_grid.py` assigns ranks to groups, `replicated_plan.py` extends a plan of one group to the world, and
`replica_sync.py` averages replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from tilerec.comms.agreement import agreeing
from tilerec.comms.group import Group
from tilerec.optim.attach import restore_optimizers_on_error
from tilerec.parallel.device import device_of
from tilerec.parallel.plan_of import store_plan
from tilerec.parallel.shard_job import shard_jobs
from tilerec.parallel.two_d.group_job import GroupChannels, group_job, running_group
from tilerec.parallel.two_d.group_plan import plan_parts
from tilerec.parallel.two_d.running_groups import TwoD
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.planner.sharder import checked_sharders
from tilerec.sharders.table_sharders import ModuleSharder
from tilerec.sharding.tile_memory import has_pending_init
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology


def shard_2d(
    module: nn.Module,
    checked: Callable[[], tuple[Sequence[GroupConfig], Mapping[str, object]]],
    world: Group,
    settings: ReplicaSettings,
    topology: Topology | None = None,
    device: torch.device | str | int | None = None,
    sharders: Sequence[ModuleSharder] | None = None,
    who: str = "shard_2d",
) -> TwoD:
    """Shard a model's tables in 2D, in place. Collective: every rank passes the same model and settings.

    Args:
        checked: checks the caller's arguments and returns the configs (one per group size; exactly one has no paths and
            covers all other collections) and further settings that must be equal on all ranks. May raise on one rank.
        world: all ranks.
        settings: settings for keeping replicas equal.
        topology: the topology of the world, with the ranks of each host, and memory sizes for the planner. None: from
            the launcher.
        device, sharders: see `shard`.
        who: name of the calling function, for errors.

    Raises:
        ConfigError: as `shard`; a group size does not divide the world size; a plan has another number of ranks than a
            sharding group; ranks have different settings; an `init_fn` fails on another rank. All ranks raise, and the
            model is unchanged.
    """
    with agreeing(world, "the model to shard in 2D") as found:
        configs, also = checked()
        settings.check(who)
        tables_device = None if device is None else device_of(device, who)
        planned = plan_parts(
            module, configs, world, settings, topology, tables_device, checked_sharders(sharders, who), who
        )
        found.update(settings.described(), parts=[part.described() for part in planned], **also)
    # Open all groups and run all checks before any table changes, so that ranks fail together.
    channels = [GroupChannels.of(part, world, settings) for part in planned]
    with restore_optimizers_on_error(module.parameters()):
        with agreeing(world, "the model to shard in 2D") as found:
            jobs = [
                group_job(module, part, own, world, settings, tables_device, first=part is planned[0])
                for part, own in zip(planned, channels, strict=True)
            ]
            found["parts"] = [job.ready.described() for job in jobs]
        drawn = [[table for table in job.ready.tables if has_pending_init(table)] for job in jobs]
        shard_jobs(world, jobs)
    parts = [
        running_group(module, part, own, job, made, settings)
        for part, own, job, made in zip(planned, channels, jobs, drawn, strict=True)
    ]
    store_plan(module, _merged([job.ready.plan for job in jobs]))
    return TwoD(world, parts, settings)


def _merged(plans: Sequence[ShardingPlan]) -> ShardingPlan:
    """Merge the plans of all parts; the world size is None if their sharding groups have different sizes."""
    plans = [plan for plan in plans if plan.plan] or plans[:1]
    first = plans[0]
    if len(plans) == 1:
        return first
    whole = {path: own for plan in plans for path, own in plan.plan.items()}
    size = first.world_size if len({plan.world_size for plan in plans}) == 1 else None
    hosts = first.hosts if size is not None and len({str(plan.hosts) for plan in plans}) == 1 else None
    return ShardingPlan(whole, size, hosts)
