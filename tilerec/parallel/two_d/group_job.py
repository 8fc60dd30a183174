"""The communication channels of a part of a model in 2D parallelism, its `ShardJob`, and the start of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.modules.table import Table
from tilerec.parallel.prepared_model import prepare_sharding
from tilerec.parallel.shard_job import ShardJob
from tilerec.parallel.two_d.group_plan import PlannedPart
from tilerec.parallel.two_d.replica_sync import ReplicaSync
from tilerec.parallel.two_d.running_groups import RunningGroup
from tilerec.parallel.two_d.settings import ReplicaSettings
from tilerec.sharding.broadcast import broadcast_tensor
from tilerec.sharding.changed_rows import SLOTS, WEIGHTS
from tilerec.sharding.replica_groups import ReplicaGroups
from tilerec.sharding.shard_ids import IdRanks, check_ids
from tilerec.sharding.table import ShardedTable


@dataclass(frozen=True)
class GroupChannels:
    """The communication channels of a part."""

    shard: Group
    axis: Group
    rows: Group
    route: Group
    ids: Group | None
    refusals: Group | None

    @classmethod
    def of(cls, part: PlannedPart, world: Group, settings: ReplicaSettings) -> GroupChannels:
        """Open the channels. Collective over the world."""
        grid, exact = part.plan.grid, settings.sync == "exact"
        shard = world.partition("shard", grid.sharding_groups)
        axis = world.partition("replicate", grid.replica_groups)
        # All teams share one map of ids, so that a row number means the same id in every replica.
        ids = None if exact else world.split("ids")
        if exact:
            rows, route = world.split("rows"), world.split("route")
        else:
            rows, route = (world.partition(name, grid.sharding_groups) for name in ("rows", "route"))
        together = settings.refuse_together and not exact and grid.replicas > 1
        return cls(shard, axis, rows, route, ids, world.split("refusals") if together else None)


def group_job(
    module: nn.Module, part: PlannedPart, own: GroupChannels, world: Group, settings: ReplicaSettings,
    device: torch.device | None, *, first: bool,
) -> ShardJob:  # fmt: skip
    """Return the job of a part, with all checks that one rank can make alone.

    Args:
        first: whether this part includes the managed-collision ids that no collection reads.
    """
    plan, topology, grid = part.plan, part.plan.topology, part.plan.grid
    exact = settings.sync == "exact"
    team, member = grid.team_of(world.rank), grid.member_of(world.rank)
    if exact:
        group, whole, hosts = world, plan.world_plan(), topology
        of = tuple(grid.team_of(rank) for rank in range(world.size))
        teams, ids = ReplicaGroups(of, own.axis, grid.replica_groups[member]), None
    else:
        group, whole = own.shard, plan.group_plan
        hosts = grid.topology_of(team, topology, plan.group_plan.hosts)
        scale = 1.0 / grid.replicas if settings.moment_scale is None else float(settings.moment_scale)
        names = grid.sharding_groups[team]
        replicas = grid.replica_groups[member]
        teams = ReplicaGroups((0,) * own.shard.size, own.axis, (), scale, names, replicas, own.refusals)
        assert own.ids is not None
        ids = IdRanks(own.ids, grid.member_of)
    ready = prepare_sharding(
        module, whole, group, hosts, device, part.sharders, tuple(part.collections), lone_ids=first
    )
    check_ids(ready.ids, (group if ids is None else ids.group).size)
    return ShardJob(ready, own.rows, own.route, device, settings.exact, teams, ids)


def running_group(
    module: nn.Module, part: PlannedPart, own: GroupChannels, job: ShardJob, drawn: Sequence[Table],
    settings: ReplicaSettings,
) -> RunningGroup:  # fmt: skip
    """Return a part after its job has run. Collective: with "average", replicas take equal initial values.

    Args:
        drawn: tables whose values a user's function has drawn, in each sharding group for itself.
    """
    average = None
    if settings.sync != "exact":
        for table in drawn:
            assert isinstance(table, ShardedTable)
            for leaf in table.leaves():
                broadcast_tensor(own.axis, leaf)
        average = ReplicaSync(own.axis, [module.get_submodule(path) for path in part.collections], settings.hook)
        for rows in average.rows():
            assert rows.touched is not None
            rows.touched.agreed(WEIGHTS | SLOTS)
    return RunningGroup(tuple(part.collections), part.plan.as_run(job.ready.plan), own.shard, own.axis, average)
