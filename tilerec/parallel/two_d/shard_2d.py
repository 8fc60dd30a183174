"""2D parallelism of a model's tables: sharded within groups of ranks, with a copy in every group.

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

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tilerec.comms.agreement import agreeing
from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.compat.sharders import ModuleSharder
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.optim.attach import restore_optimizers_on_error
from tilerec.parallel.broadcast_init import broadcast_tensor
from tilerec.parallel.device import device_of
from tilerec.parallel.hosts import topology_of
from tilerec.parallel.managed_collision_paths import with_table_paths
from tilerec.parallel.model_tables import collections_of, properties_to_compare, sizes_of, ties_of
from tilerec.parallel.plan_of import store_plan
from tilerec.parallel.plan_templates import resolve_cuts
from tilerec.parallel.read_plan import AnyPlan, complete_plan_of, read_plan
from tilerec.parallel.shard import ShardJob, prepare_sharding, shard_jobs
from tilerec.parallel.table_optimizers import keep_cached_tables
from tilerec.parallel.two_d.rank_grid import RankGrid, runs_of
from tilerec.parallel.two_d.replica_sync import AverageHook, ReplicaSync
from tilerec.parallel.two_d.replicated_plan import ReplicatedPlan
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.sharder import checked_sharders, sharder_of
from tilerec.planner.tables import tables_of
from tilerec.sharding.changed_rows import SLOTS, WEIGHTS
from tilerec.sharding.embedding import has_pending_init
from tilerec.sharding.replica_groups import ReplicaGroups
from tilerec.sharding.shard_ids import IdRanks, check_ids
from tilerec.sharding.table import ShardedTable, check_rule
from tilerec.spec.ignored_settings import warn_ignored_settings
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology

Sync = Literal["exact", "average"]


@dataclass(frozen=True)
class GroupConfig:
    """Settings for collections that are sharded over groups of one size.

    Args:
        plan: the plan of one sharding group, in any form that `shard` takes; None: the planner makes one.
        group_size: G, the number of ranks of a sharding group.
        node_group_size: number of consecutive members that table_row_wise and grid_shard treat as one host; None: the
            ranks of each machine.
        across_hosts: members are neighbours and replicas are apart; see `RankGrid`.
        paths: paths of the collections; None: all collections that no other config has.
    """

    plan: AnyPlan | ReplicatedPlan | None
    group_size: int
    node_group_size: int | None = None
    across_hosts: bool = False
    paths: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ReplicaSettings:
    """Settings for keeping replicas equal.

    Args:
        sync: "exact" or "average".
        interval: number of updates between two averages; None: only calls of `sync()` average.
        exact: produce the same bits under every plan.
        moment_scale: with "average": factor of a gradient's contribution to the moment of row-wise Adagrad; None:
            1 / R.
        hook: averages tensors over the replica group in place of an all-reduce; None: all-reduce.
        refuse_together: with "average": if one rank refuses a batch, all ranks of the world refuse it.
    """

    sync: Sync = "exact"
    interval: int | None = None
    exact: bool = False
    moment_scale: float | None = None
    hook: AverageHook | None = None
    refuse_together: bool = False

    def described(self) -> dict[str, object]:
        """Return the settings as values that ranks can compare."""
        return {
            "sync": self.sync,
            "sync_interval": self.interval,
            "exact": self.exact,
            "moment_scale": self.moment_scale,
            "hook": self.hook is not None,
            "refuse_together": self.refuse_together,
        }

    def check(self, who: str) -> None:
        """Check the settings.

        Args:
            who: name of the calling function, for errors.

        Raises:
            ConfigError: `sync` is unknown; `interval` is not an integer from 1; `moment_scale` is not above 0; `hook`
                is not callable; `exact` or `refuse_together` is not a bool.
        """
        if self.sync not in ("exact", "average"):
            raise ConfigError(f"{who}: sync: got {self.sync!r}; expected 'exact' or 'average'.")
        interval, scale = self.interval, self.moment_scale
        if interval is not None and (
            not isinstance(interval, int) or isinstance(interval, bool) or interval < 1
        ):
            raise ConfigError(
                f"{who}: sync_interval: got {interval!r}; expected an integer number of steps from 1, or None to "
                "average only in calls of sync()."
            )
        if scale is not None and not (
            isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale < float("inf")
        ):
            raise ConfigError(
                f"{who}: moment_scale: got {scale!r}; expected a number above 0, or None for 1 / replicas."
            )
        check_hook(self.hook, who)
        for name in ("exact", "refuse_together"):
            check_bool(getattr(self, name), who, name)

    def words(self, replicas: int) -> str:
        """Return the description of the settings in the printed plan."""
        if replicas == 1:
            return "one: no replicas to keep equal"
        if self.sync == "exact":
            bits = ", the same bits under every plan" if self.exact else ""
            return f"exact: gradients of touched rows are exchanged before every update{bits}"
        every = (
            "when sync() is called"
            if self.interval is None
            else f"every {self.interval} updates, and by sync()"
        )
        return f"averaged {every}: weights and optimizer state of the rows touched since"


def check_bool(value: object, who: str, name: str) -> None:
    """Raise if the value is not a bool; the string "no" would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{who}: {name}: got {value!r:.80}; expected True or False.")


def check_hook(hook: object, who: str) -> None:
    """Raise if the hook is not callable."""
    if hook is not None and not callable(hook):
        raise ConfigError(
            f"{who}: got {hook!r}; expected a function of a list of tensors, or None for an all-reduce."
        )


@dataclass(frozen=True)
class RunningGroup:
    """Sharded collections in 2D parallelism.

    Args:
        paths: paths of the collections.
        plan: their plan.
        shard: this rank's sharding group.
        axis: this rank's replica group.
        average: synchronization of the replicas; None with `sync="exact"`.
    """

    paths: tuple[str, ...]
    plan: ReplicatedPlan
    shard: Group
    axis: Group
    average: ReplicaSync | None


@final
class TwoD:
    """A model's tables in 2D parallelism, returned by `shard_2d`.

    Args:
        world: all ranks.
        parts: the parts; the first holds all collections outside sub-configs.
        settings: settings for keeping replicas equal.
    """

    def __init__(self, world: Group, parts: Sequence[RunningGroup], settings: ReplicaSettings) -> None:
        self.world, self.parts, self.settings = world, tuple(parts), settings

    @property
    def averages(self) -> list[ReplicaSync]:
        """The synchronization of each part; empty with `sync="exact"`."""
        return [part.average for part in self.parts if part.average is not None]

    @property
    def unsynced_steps(self) -> int:
        """Updates since weights and optimizer state were last averaged; 0 with `sync="exact"`."""
        return max([average.unsynced_steps for average in self.averages], default=0)

    def sync(self, include_optimizer_state: bool = True, *, wait: bool = True) -> None:
        """Average the rows touched since the last sync, over the replicas. Collective; with "exact" it does nothing.

        Args:
            include_optimizer_state: False: average weights only; a later sync averages the state of these rows.
            wait: False: return early; the average ends before the tables are next looked up, updated or saved. Until
                then no code may write rows of the tables.

        Raises:
            ConfigError: replicas differ in their settings or optimizers. All replicas raise, before any row is written.
        """
        for average in self.averages:
            average(state=bool(include_optimizer_state), wait=wait)

    def sync_if_due(self, *, wait: bool = True) -> bool:
        """Average if `interval` updates were made since the last average, and return True if so. Collective."""
        interval, due = self.settings.interval, False
        for average in self.averages:
            if interval is not None and average.steps >= interval:
                average(wait=wait)
                due = True
        return due

    def sync_all(self) -> None:
        """Average weights and optimizer state of rows touched since the last sync, over the replicas. Collective."""
        for average in self.averages:
            average()

    def settle(self) -> None:
        """Complete a `sync(wait=False)`."""
        for average in self.averages:
            average.settle()

    def set_hook(self, hook: AverageHook | None) -> None:
        """Set the hook of all parts; see `ReplicaSettings.hook`."""
        check_hook(hook, "set_all_reduce_hook")
        if hook is not None and not self.averages:
            why = {"reduce_hook": "sync='exact' exchanges gradients and does not average"}
            warn_ignored_settings("set_all_reduce_hook", {"reduce_hook": hook}, why, 3)
        for average in self.averages:
            average.hook = hook

    def of_copy(self, module: nn.Module) -> TwoD:
        """Return the 2D parallelism of a copy of the model, over the same ranks."""
        parts = [
            RunningGroup(
                part.paths, part.plan, part.shard, part.axis, _sync_like(module, part.paths, part.axis, part.average)
            )
            for part in self.parts
        ]  # fmt: skip
        return TwoD(self.world, parts, self.settings)

    def mesh(self, part: int = 0) -> DeviceMesh:
        """Return the ranks of a part as a mesh with the axes ("replicate", "shard").

        Raises:
            ConfigError: the ranks are threads.
        """
        shard, axis, world = self.parts[part].shard, self.parts[part].axis, self.world
        if not (
            isinstance(world, ProcessGroupComms)
            and isinstance(shard, ProcessGroupComms)
            and isinstance(axis, ProcessGroupComms)
        ):
            raise ConfigError(
                "device_mesh: ranks are threads, which have no DeviceMesh; run them as processes, or read plan.grid."
            )
        everyone = dist.get_process_group_ranks(world.process_group)
        ranks = [[everyone[rank] for rank in group] for group in self.parts[part].plan.grid.sharding_groups]
        return DeviceMesh.from_group(
            [axis.process_group, shard.process_group],
            world.device.type,
            mesh=torch.tensor(ranks, dtype=torch.int, device="cpu"),
            mesh_dim_names=("replicate", "shard"),
        )


def _sync_like(
    module: nn.Module, paths: Sequence[str], axis: Group, like: ReplicaSync | None
) -> ReplicaSync | None:
    if like is None:
        return None
    return ReplicaSync(axis, [module.get_submodule(path) for path in paths], like.hook, like.ranks)


# -------------------------------------------------------------------------------------------------- construction


@dataclass(frozen=True)
class _Planned:
    """A planned part of a model that is not sharded yet."""

    collections: dict[str, TableCollection]
    plan: ReplicatedPlan


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
        planned, topology, given = _planned(
            module, configs, world, settings, topology, tables_device, sharders, who
        )
        found.update(settings.described())
        found["groups"] = [
            {
                "sharding_group_size": part.plan.grid.group_size,
                "use_inter_host_allreduce": part.plan.grid.across_hosts,
            }
            for part in planned
        ]
        found["plans"] = [part.plan.to_json() for part in planned]
        found["model"] = properties_to_compare(collections_of(module))
        found.update(also)
    # Open all groups and run all checks before any table changes, so that ranks fail together.
    channels = [_Channels.of(part, world, settings) for part in planned]
    with restore_optimizers_on_error(module.parameters()):
        with agreeing(world, "the model to shard in 2D") as found:
            jobs = [
                _job(module, part, own, world, settings, topology, tables_device, sharders_, first=k == 0)
                for k, (part, own, sharders_) in enumerate(zip(planned, channels, given, strict=True))
            ]
            found["parts"] = [job.ready.described() for job in jobs]
        drawn = [[table for table in job.ready.tables if has_pending_init(table)] for job in jobs]
        shard_jobs(world, jobs)
    parts = []
    for part, own, job, made in zip(planned, channels, jobs, drawn, strict=True):
        average = None
        if settings.sync != "exact":
            for table in made:  # a user's function has drawn the values of each group
                assert isinstance(table, ShardedTable)
                for leaf in table.leaves():
                    broadcast_tensor(own.axis, leaf)
            average = ReplicaSync(
                own.axis, [module.get_submodule(path) for path in part.collections], settings.hook
            )
            for rows in average.rows():
                assert rows.touched is not None
                rows.touched.agreed(WEIGHTS | SLOTS)
        plan = part.plan.as_run(job.ready.plan)
        parts.append(RunningGroup(tuple(part.collections), plan, own.shard, own.axis, average))
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


@dataclass(frozen=True)
class _Channels:
    """The communication channels of a part."""

    shard: Group
    axis: Group
    rows: Group
    route: Group
    ids: Group | None
    refusals: Group | None

    @classmethod
    def of(cls, part: _Planned, world: Group, settings: ReplicaSettings) -> _Channels:
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


def _job(
    module: nn.Module, part: _Planned, own: _Channels, world: Group, settings: ReplicaSettings, topology: Topology,
    device: torch.device | None, sharders: list[ModuleSharder], *, first: bool,
) -> ShardJob:  # fmt: skip
    """Return the job of a part, with all checks that one rank can make alone."""
    plan, grid, exact = part.plan, part.plan.grid, settings.sync == "exact"
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
        module, whole, group, hosts, device, sharders, tuple(part.collections), lone_ids=first
    )
    check_ids(ready.ids, (group if ids is None else ids.group).size)
    return ShardJob(ready, own.rows, own.route, device, settings.exact, teams, ids)


def _planned(
    module: nn.Module, configs: Sequence[GroupConfig], world: Group, settings: ReplicaSettings,
    topology: Topology | None, tables_device: torch.device | None, sharders: Sequence[ModuleSharder] | None,
    who: str,
) -> tuple[list[_Planned], Topology, list[list[ModuleSharder]]]:  # fmt: skip
    """Plan all parts on this rank alone; return parts, topology of the world, and sharders per part."""
    own = checked_sharders(sharders, who)
    everything = collections_of(module)
    rest = [config for config in configs if config.paths is None]
    assert len(rest) == 1, "exactly one config has no paths"
    taken = [path for config in configs for path in config.paths or ()]
    kinds = [part.device.type for part in everything.values() if part.device.type != "meta"]
    kind = tables_device.type if tables_device is not None else (kinds or ["cpu"])[0]
    for config in configs:
        check_bool(config.across_hosts, who, "use_inter_host_allreduce")
    grids = [RankGrid(world.size, config.group_size, config.across_hosts) for config in configs]
    if topology is not None:
        grids[0].check_topology(topology)
    topology = topology_of(world, topology, None, kind)
    planned, given = [], []
    for config, grid in zip(configs, grids, strict=True):
        mine = config.paths
        paths = [p for p in everything if (p in mine if mine is not None else p not in taken)]
        collections = {path: everything[path] for path in paths}
        others = [path for path in everything if path not in collections]
        matching = [s for s in own if any(sharder_of(part, [s]) is not None for part in collections.values())]
        idle = [s for s in own if not any(sharder_of(part, [s]) is not None for part in everything.values())]
        given.append([*matching, *(idle if mine is None else [])])
        plan = _group_plan(module, config, grid, collections, others, topology, matching)
        planned.append(
            _Planned(
                collections,
                ReplicatedPlan(plan[0], grid, topology, plan[1], settings.words(grid.replicas)),
            )
        )
    return planned, topology, given


def _group_plan(
    module: nn.Module, config: GroupConfig, grid: RankGrid, collections: dict[str, TableCollection],
    others: Collection[str], world: Topology, sharders: Sequence[ModuleSharder],
) -> tuple[ShardingPlan, str]:  # fmt: skip
    """Return a complete plan of one sharding group, and the source of its hosts."""
    size = grid.group_size
    node = config.node_group_size
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
    hosts = None if node is None else runs_of(size, node)
    source = "the machines" if node is None else "node_group_size"
    topology = grid.topology_of(0, world, hosts)
    plan = config.plan.group_plan if isinstance(config.plan, ReplicatedPlan) else config.plan
    plan = _without_others(with_table_paths(plan, module), collections, others)
    try:
        plan_size = getattr(plan, "world_size", None)
        if plan_size not in (None, size):
            raise ConfigError(f"ShardingPlan: made for {plan_size} ranks, this sharding group has {size}.")
        plan = resolve_cuts(plan, collections, lambda _: topology)
        given = None if plan is None else read_plan(plan, collections)
        if given is None:
            tables = [table for table in tables_of(module, sharders) if table.names[0][0] in collections]
            made = EmbeddingShardingPlanner(topology=topology).plan(tables, sharders) if tables else None
            given = (
                ShardingPlan({})
                if made is None
                else keep_cached_tables(_with_shared_tables_aligned(made, collections), collections)
            )
        elif given.world_size not in (None, size):
            raise ConfigError(
                f"ShardingPlan: made for {given.world_size} ranks, this sharding group has {size}."
            )
        elif node is None and _other_hosts(given.hosts, topology):
            source, topology = "the plan", grid.topology_of(0, world, given.hosts)
        complete_plan = complete_plan_of(given, collections, topology)
        complete_plan.check(sizes_of(collections), size)
        for path, name, sharding in complete_plan.tables():
            assert sharding.tiling is not None, "completed"
            check_rule(collections[path]._tables[name], sharding.tiling)
    except ConfigError as error:
        if config.plan is None:
            raise
        raise ConfigError(
            f"{error} In 2D parallelism a plan is for one sharding group: {size} ranks, numbered from 0, of the "
            f"{grid.world_size} ranks of the world."
        ) from error
    return replace(complete_plan, report=given.report), source


def _other_hosts(hosts: Sequence[Sequence[int]] | None, topology: Topology) -> bool:
    """Return True if the plan's hosts have the topology's ranks, grouped differently."""
    if hosts is None or sorted(rank for host in hosts for rank in host) != list(range(topology.world_size)):
        return False
    return sorted(map(sorted, hosts)) != sorted(map(sorted, topology.host_ranks))


def _with_shared_tables_aligned(plan: ShardingPlan, collections: dict[str, TableCollection]) -> ShardingPlan:
    """Return the planner's plan with one placement for all names of a table that several collections share."""
    made = plan
    for names in ties_of(collections):
        (path, table), *more = names
        for other_path, other in more:
            made = made.replaced(other_path, other, plan.plan[path][table])
    return replace(made, report=plan.report)


def _without_others(plan: AnyPlan | None, collections: Collection[str], others: Collection[str]) -> Any:
    """Return the plan without the collections of other parts."""
    if others and isinstance(plan, (str, Path)):
        plan = ShardingPlan.load(plan)
    if isinstance(plan, ShardingPlan) and any(path in others for path in plan.plan):
        kept = {path: part for path, part in plan.plan.items() if path not in others}
        return ShardingPlan(kept, plan.world_size, plan.hosts)
    if isinstance(plan, dict) and any(path in others and path not in collections for path in plan):
        return {path: part for path, part in plan.items() if path not in others}
    return plan
