"""Plans of sharding groups: the parts of a model that are sharded over groups of one size, each with its plan."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.hosts import topology_of
from tilerec.parallel.made_plan import make_plan
from tilerec.parallel.managed_collision_paths import with_table_paths
from tilerec.parallel.model_tables import collections_of, device_type_of, properties_to_compare, sizes_of
from tilerec.parallel.read_plan import plan_without, read_complete_plan, sharding_type_of
from tilerec.parallel.two_d.rank_grid import RankGrid, runs_of
from tilerec.parallel.two_d.replicated_plan import ReplicatedPlan
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings, check_bool
from tilerec.planner.sharder import sharder_of
from tilerec.sharders.table_sharders import ModuleSharder
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology


@dataclass(frozen=True)
class PlannedPart:
    """A planned part of a model that is not sharded yet.

    Args:
        sharders: the sharders of its collections.
    """

    collections: dict[str, TableCollection]
    plan: ReplicatedPlan
    sharders: list[ModuleSharder]

    def described(self) -> dict[str, object]:
        """Return the properties that must be equal on all ranks."""
        return {
            "groups": {
                "sharding_group_size": self.plan.grid.group_size,
                "use_inter_host_allreduce": self.plan.grid.across_hosts,
            },
            "plan": self.plan.to_json(),
            "model": properties_to_compare(self.collections),
        }


def plan_parts(
    module: nn.Module, configs: Sequence[GroupConfig], world: Group, settings: ReplicaSettings,
    topology: Topology | None, device: torch.device | None, sharders: Sequence[ModuleSharder], who: str,
) -> list[PlannedPart]:  # fmt: skip
    """Plan all parts on this rank alone; see `shard_2d`."""
    assert sum(config.paths is None for config in configs) == 1, "exactly one config has no paths"
    for config in configs:
        check_bool(config.across_hosts, who, "use_inter_host_allreduce")
    grids = [RankGrid(world.size, config.group_size, config.across_hosts) for config in configs]
    if topology is not None:
        grids[0].check_topology(topology)
    everything = collections_of(module)
    topology = topology_of(world, topology, None, device_type_of(device, everything))
    taken = [path for config in configs for path in config.paths or ()]
    idle = [s for s in sharders if not _has_kind(s, everything)]
    planned = []
    for config, grid in zip(configs, grids, strict=True):
        mine = config.paths
        paths = [p for p in everything if (p in mine if mine is not None else p not in taken)]
        collections = {path: everything[path] for path in paths}
        others = [path for path in everything if path not in collections]
        matching = [s for s in sharders if _has_kind(s, collections)]
        plan, source = _group_plan(module, config, grid, collections, others, topology, matching)
        replicated = ReplicatedPlan(plan, grid, topology, source, settings.words(grid.replicas))
        planned.append(PlannedPart(collections, replicated, [*matching, *(idle if mine is None else [])]))
    return planned


def _has_kind(sharder: ModuleSharder, collections: Mapping[str, TableCollection]) -> bool:
    return any(sharder_of(part, [sharder]) is not None for part in collections.values())


def _group_plan(
    module: nn.Module, config: GroupConfig, grid: RankGrid, collections: dict[str, TableCollection],
    others: Collection[str], world: Topology, sharders: Sequence[ModuleSharder],
) -> tuple[ShardingPlan, str]:  # fmt: skip
    """Return a complete plan of one sharding group, and the source of its hosts."""
    size, node = grid.group_size, config.node_group_size
    if node is not None and (not isinstance(node, int) or isinstance(node, bool) or not 1 <= node <= size):
        raise ConfigError(
            f"2D parallelism: node_group_size: got {node!r}; expected an integer from 1 to the sharding group's {size} "
            "ranks, or None for the hosts of the machines."
        )
    if node is not None and size % node:
        warnings.warn(
            f"2D parallelism: node_group_size={node} does not divide the sharding group's {size} ranks; the last host "
            f"has {size % node}.",
            stacklevel=2,
        )
    own = grid.topology_of(0, world, None if node is None else runs_of(size, node))

    def topology_with(hosts: Sequence[Sequence[int]] | None) -> Topology:
        return grid.topology_of(0, world, hosts) if node is None and _other_hosts(hosts, own) else own

    plan = config.plan.group_plan if isinstance(config.plan, ReplicatedPlan) else config.plan
    kind = sharding_type_of(plan)
    try:
        if plan is None or kind is not None:
            complete_plan, topology = make_plan(module, collections, own, sharders, kind), own
        else:
            plan = plan_without(with_table_paths(plan, module), others)
            complete_plan, topology = read_complete_plan(plan, collections, size, topology_with)
        complete_plan.check(sizes_of(collections), size)
    except ConfigError as error:
        if config.plan is None:
            raise
        raise ConfigError(
            f"{error} In 2D parallelism a plan is for one sharding group: {size} ranks, numbered from 0, of the "
            f"{grid.world_size} ranks of the world."
        ) from error
    source = "the machines" if node is None else "node_group_size"
    return complete_plan, source if topology is own else "the plan"


def _other_hosts(hosts: Sequence[Sequence[int]] | None, topology: Topology) -> bool:
    """Return True if the plan's hosts have the topology's ranks, grouped differently."""
    if hosts is None or sorted(rank for host in hosts for rank in host) != list(range(topology.world_size)):
        return False
    return sorted(map(sorted, hosts)) != sorted(map(sorted, topology.host_ranks))
