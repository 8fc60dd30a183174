"""2D parallelism of a model's tables: sharded inside groups of ranks, with a copy in every group.

Nouns
  part     collections that are sharded over groups of one size: the whole model, unless sub-configs say otherwise
  exact    replicas exchange the gradients of touched rows before every update: an ordinary plan over all ranks, in
           which every tile has an owner in each sharding group
  average  every sharding group trains by itself; weights and optimizer state are averaged now and then

    gradient of a row   exact: sum over all W ranks / W      average: sum over the group's G ranks / G

`rank_grid.py` says which ranks form which group, `replicated_plan.py` what a plan of one group is for the world,
`replica_sync.py` how replicas are averaged.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tilerec.comms.agree import agree, heard_by_all
from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.compat.sharders import ModuleSharder
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.optim.attach import unattached_on_error
from tilerec.parallel.broadcast_init import send_from_rank_0
from tilerec.parallel.device import device_of
from tilerec.parallel.hosts import topology_of
from tilerec.parallel.managed_paths import with_table_paths
from tilerec.parallel.model_tables import collections_of, described, sizes_of, ties_of
from tilerec.parallel.plan_of import keep_plan
from tilerec.parallel.plan_templates import without_cuts
from tilerec.parallel.read_plan import AnyPlan, completed, read_plan
from tilerec.parallel.shard import Job, cut_all, prepare
from tilerec.parallel.table_optimizers import keep_caches
from tilerec.parallel.two_d.rank_grid import RankGrid, blocks_of
from tilerec.parallel.two_d.replica_sync import AverageHook, ReplicaSync
from tilerec.parallel.two_d.replicated_plan import ReplicatedPlan
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.sharder import listed, sharder_of
from tilerec.planner.tables import tables_of
from tilerec.sharding.embedding import is_drawn
from tilerec.sharding.shard_ids import IdRanks, check_ids
from tilerec.sharding.table import ShardedTable, check_rule
from tilerec.sharding.teams import Teams
from tilerec.sharding.touched import SLOTS, WEIGHTS
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology
from tilerec.spec.without_effect import warn_without_effect

Sync = Literal["exact", "average"]


@dataclass(frozen=True)
class GroupConfig:
    """How some collections are sharded.

    Args:
        plan: of one sharding group, in any form that `shard` takes; None: one is made.
        group_size: ranks of a sharding group, G.
        node_group_size: table_row_wise and grid_shard take runs of so many members for hosts; None: the machines.
        across_hosts: members are neighbours and replicas are not; see `RankGrid`.
        paths: of the collections; None: all that no other part has.
    """

    plan: AnyPlan | ReplicatedPlan | None
    group_size: int
    node_group_size: int | None = None
    across_hosts: bool = False
    paths: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ReplicaSettings:
    """How replicas are kept together.

    Args:
        sync: "exact" or "average".
        interval: updates from one average to the next; None: when `sync()` is called.
        exact: the same bits under every plan.
        moment_scale: what a gradient adds to the moment of row-wise Adagrad, where groups train apart; None: 1 / R.
        hook: averages in place of an all-reduce.
        refuse_together: of "average": a batch that one rank refuses is refused by all ranks of the world.
    """

    sync: Sync = "exact"
    interval: int | None = None
    exact: bool = False
    moment_scale: float | None = None
    hook: AverageHook | None = None
    refuse_together: bool = False

    def check(self, who: str) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: an unknown `sync`; an interval that is no number from 1; a scale that is not above 0.
        """
        if self.sync not in ("exact", "average"):
            raise ConfigError(f"{who}: sync is {self.sync!r}; use 'exact' or 'average'.")
        interval, scale = self.interval, self.moment_scale
        if interval is not None and (
            not isinstance(interval, int) or isinstance(interval, bool) or interval < 1
        ):
            raise ConfigError(
                f"{who}: sync_interval is {interval!r}; it must be a whole number of steps from 1, or None to average "
                "when sync() is called."
            )
        if scale is not None and not (
            isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale < float("inf")
        ):
            raise ConfigError(
                f"{who}: moment_scale is {scale!r}; it must be a number above 0, or None for 1 / replicas."
            )
        check_hook(self.hook, who)
        for name in ("exact", "refuse_together"):
            check_bool(getattr(self, name), who, name)

    def words(self, replicas: int) -> str:
        """As a line of the printed plan."""
        if replicas == 1:
            return "one: nothing to keep together"
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
    """Refuse what is neither True nor False, as "no", which Python takes for true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{who}: {name} is {value!r:.80}; it must be True or False.")


def check_hook(hook: object, who: str) -> None:
    """Refuse what cannot be called."""
    if hook is not None and not callable(hook):
        raise ConfigError(
            f"{who}: {hook!r} is no function of a list of tensors; pass one, or None for an all-reduce."
        )


@dataclass(frozen=True)
class Part:
    """Collections in 2D parallelism, as they run.

    Args:
        paths: of the collections.
        shard, axis: this rank's sharding group and replica group.
        average: None where replicas never come apart.
    """

    paths: tuple[str, ...]
    plan: ReplicatedPlan
    shard: Group
    axis: Group
    average: ReplicaSync | None


@final
class TwoD:
    """A model's tables in 2D parallelism. Made by `shard_2d`.

    Args:
        world: all ranks.
        parts: the first is the one for everything that no sub-config names.
    """

    def __init__(self, world: Group, parts: Sequence[Part], settings: ReplicaSettings) -> None:
        self.world, self.parts, self.settings = world, tuple(parts), settings

    @property
    def averages(self) -> list[ReplicaSync]:
        """What keeps replicas together that train apart."""
        return [part.average for part in self.parts if part.average is not None]

    @property
    def unsynced_steps(self) -> int:
        """Updates since replicas were last equal, optimizer state included; 0 where they always are."""
        return max([average.unsynced_steps for average in self.averages], default=0)

    def sync(self, include_optimizer_state: bool = True, *, wait: bool = True) -> None:
        """Average what replicas have touched since the last time; all ranks call it. Exact: there is nothing to do.

        Args:
            include_optimizer_state: else weights only; state of these rows comes along the next time.
            wait: else it ends before the tables are next looked up, updated or saved. What may run meanwhile: anything
                that writes no row of a table.

        Raises:
            ConfigError: replicas differ in what they average, or by what: on all of them, before anything is written.
        """
        for average in self.averages:
            average(state=bool(include_optimizer_state), wait=wait)

    def sync_if_due(self, *, wait: bool = True) -> bool:
        """Average if `interval` updates have come since; every rank calls it between two steps. Whether it was due."""
        interval, due = self.settings.interval, False
        for average in self.averages:
            if interval is not None and average.steps >= interval:
                average(wait=wait)
                due = True
        return due

    def sync_all(self) -> None:
        """Be equal: average whatever any replica has touched, weights and state. All ranks call it."""
        for average in self.averages:
            average()

    def settle(self) -> None:
        """End what `sync(wait=False)` began."""
        for average in self.averages:
            average.settle()

    def set_hook(self, hook: AverageHook | None) -> None:
        """See `ReplicaSettings.hook`."""
        check_hook(hook, "set_all_reduce_hook")
        if hook is not None and not self.averages:
            why = {"reduce_hook": "sync='exact' exchanges gradients; it averages nothing"}
            warn_without_effect("set_all_reduce_hook", {"reduce_hook": hook}, why, 3)
        for average in self.averages:
            average.hook = hook

    def of_copy(self, module: nn.Module) -> TwoD:
        """For a copy of the model, over the same ranks."""
        parts = [
            Part(part.paths, part.plan, part.shard, part.axis, _average(module, part.paths, part.axis, part.average))
            for part in self.parts
        ]  # fmt: skip
        return TwoD(self.world, parts, self.settings)

    def mesh(self, part: int = 0) -> DeviceMesh:
        """The ranks as a mesh with the axes ("replicate", "shard").

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
                "device_mesh: ranks that are threads have no DeviceMesh; run them as processes, or read plan.grid."
            )
        everyone = dist.get_process_group_ranks(world.process_group)
        ranks = [[everyone[rank] for rank in group] for group in self.parts[part].plan.grid.sharding_groups]
        return DeviceMesh.from_group(
            [axis.process_group, shard.process_group],
            world.device.type,
            mesh=torch.tensor(ranks, dtype=torch.int, device="cpu"),
            mesh_dim_names=("replicate", "shard"),
        )


def _average(
    module: nn.Module, paths: Sequence[str], axis: Group, like: ReplicaSync | None
) -> ReplicaSync | None:
    if like is None:
        return None
    return ReplicaSync(axis, [module.get_submodule(path) for path in paths], like.hook, like.ranks)


# ---------------------------------------------------------------------------------------------------- making


@dataclass(frozen=True)
class _Planned:
    """A part before anything is changed."""

    collections: dict[str, TableCollection]
    plan: ReplicatedPlan


def shard_2d(
    module: nn.Module,
    configs: Sequence[GroupConfig],
    world: Group,
    settings: ReplicaSettings,
    topology: Topology | None = None,
    device: torch.device | str | int | None = None,
    sharders: Sequence[ModuleSharder] | None = None,
    who: str = "shard_2d",
    also: Mapping[str, object] | None = None,
) -> TwoD:
    """Shard a model's tables in 2D, in place. Every rank calls it, with the same model and settings.

    Args:
        configs: one for each group size; exactly one has no paths: it is for all the others.
        world: all ranks.
        topology: of the world: which ranks share a host, and memory for the planner. None: as the launcher says.
        device, sharders: as of `shard`.
        who: for messages.
        also: what the caller was given that must be the same on all ranks.

    Raises:
        ConfigError: what `shard` raises; a group size that does not divide the world; a plan of another number of
            ranks than a sharding group has; ranks that were given different settings; an `init_fn` that fails on
            another rank. It is told on all ranks, and the model is as it was.
    """
    with heard_by_all(world, "the model to shard in 2D"):
        settings.check(who)
        home = None if device is None else device_of(device, who)
        planned, topology, given = _planned(module, configs, world, settings, topology, home, sharders, who)
    said = {
        "checks": "passed",
        "sync": settings.sync,
        "sync_interval": settings.interval,
        "exact": settings.exact,
        "moment_scale": settings.moment_scale,
        "hook": settings.hook is not None,
        "refuse_together": settings.refuse_together,
        "groups": [
            {
                "sharding_group_size": part.plan.grid.group_size,
                "use_inter_host_allreduce": part.plan.grid.across_hosts,
            }
            for part in planned
        ],
        "plans": [part.plan.to_json() for part in planned],
        "model": described(collections_of(module)),
        **dict(also or {}),
    }
    agree(world, "the model to shard in 2D", said)
    # All groups are there before anything is cut, and whatever may fail is tried first: ranks fail together.
    channels = [_Channels.of(part, world, settings) for part in planned]
    with unattached_on_error(module.parameters()):
        with heard_by_all(world, "the model to shard in 2D"):
            jobs = [
                _job(module, part, own, world, settings, topology, home, sharders_, first=k == 0)
                for k, (part, own, sharders_) in enumerate(zip(planned, channels, given, strict=True))
            ]
        agree(
            world,
            "the model to shard in 2D",
            {"checks": "passed", "parts": [job.ready.described() for job in jobs]},
        )
        drawn = [[table for table in job.ready.tables if is_drawn(table)] for job in jobs]
        cut_all(world, jobs)
    parts = []
    for part, own, job, made in zip(planned, channels, jobs, drawn, strict=True):
        average = None
        if settings.sync != "exact":
            for table in made:  # by a user's function, in each group for itself
                assert isinstance(table, ShardedTable)
                for leaf in table.leaves():
                    send_from_rank_0(own.axis, leaf)
            average = ReplicaSync(
                own.axis, [module.get_submodule(path) for path in part.collections], settings.hook
            )
            for rows in average.rows():
                assert rows.touched is not None
                rows.touched.agreed(WEIGHTS | SLOTS)
        plan = part.plan.as_run(job.ready.plan)
        parts.append(Part(tuple(part.collections), plan, own.shard, own.axis, average))
    keep_plan(module, _together([job.ready.plan for job in jobs]))
    return TwoD(world, parts, settings)


def _together(plans: Sequence[ShardingPlan]) -> ShardingPlan:
    """The plans of all parts as one: over all ranks, or (average) of sharding groups, whose sizes may differ."""
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
    """What the ranks of a part talk through."""

    shard: Group
    axis: Group
    rows: Group
    route: Group
    ids: Group | None
    refusals: Group | None

    @classmethod
    def of(cls, part: _Planned, world: Group, settings: ReplicaSettings) -> _Channels:
        """All ranks of the world open them, in one order."""
        grid, exact = part.plan.grid, settings.sync == "exact"
        shard = world.partition("shard", grid.sharding_groups)
        axis = world.partition("replicate", grid.replica_groups)
        # One map of ids for all teams: a row number means the same id in every replica.
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
) -> Job:  # fmt: skip
    """A part, checked as far as one rank can."""
    plan, grid, exact = part.plan, part.plan.grid, settings.sync == "exact"
    team, member = grid.team_of(world.rank), grid.member_of(world.rank)
    if exact:
        group, whole, hosts = world, plan.world_plan(), topology
        of = tuple(grid.team_of(rank) for rank in range(world.size))
        teams, ids = Teams(of, own.axis, grid.replica_groups[member]), None
    else:
        group, whole = own.shard, plan.group_plan
        hosts = grid.topology_of(team, topology, plan.group_plan.hosts)
        scale = 1.0 / grid.replicas if settings.moment_scale is None else float(settings.moment_scale)
        names = grid.sharding_groups[team]
        replicas = grid.replica_groups[member]
        teams = Teams((0,) * own.shard.size, own.axis, (), scale, names, replicas, own.refusals)
        assert own.ids is not None
        ids = IdRanks(own.ids, grid.member_of)
    ready = prepare(module, whole, group, hosts, device, sharders, tuple(part.collections), lone_ids=first)
    check_ids(ready.ids, (group if ids is None else ids.group).size)
    return Job(ready, own.rows, own.route, device, settings.exact, teams, ids)


def _planned(
    module: nn.Module, configs: Sequence[GroupConfig], world: Group, settings: ReplicaSettings,
    topology: Topology | None, home: torch.device | None, sharders: Sequence[ModuleSharder] | None,
    who: str,
) -> tuple[list[_Planned], Topology, list[list[ModuleSharder]]]:  # fmt: skip
    """Plans of all parts; nothing is changed, and nothing travels."""
    own = listed(sharders, who)
    everything = collections_of(module)
    rest = [config for config in configs if config.paths is None]
    assert len(rest) == 1, "one config is for what no other names"
    taken = [path for config in configs for path in config.paths or ()]
    kinds = [part.device.type for part in everything.values() if part.device.type != "meta"]
    kind = home.type if home is not None else (kinds or ["cpu"])[0]
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
        spoken = [s for s in own if any(sharder_of(part, [s]) is not None for part in collections.values())]
        idle = [s for s in own if not any(sharder_of(part, [s]) is not None for part in everything.values())]
        given.append([*spoken, *(idle if mine is None else [])])
        plan = _group_plan(module, config, grid, collections, others, topology, spoken)
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
    """A complete plan of one sharding group, and what its hosts are."""
    size = grid.group_size
    node = config.node_group_size
    if node is not None and (not isinstance(node, int) or isinstance(node, bool) or not 1 <= node <= size):
        raise ConfigError(
            f"2D parallelism: node_group_size is {node!r}; it must be a whole number from 1 to the sharding group's "
            f"{size} ranks, or None for the machines' own hosts."
        )
    if node is not None and size % node:
        warnings.warn(
            f"2D parallelism: node_group_size {node} does not divide the sharding group's {size} ranks, so the last "
            f"of its hosts has {size % node}.",
            stacklevel=2,
        )
    hosts = None if node is None else blocks_of(size, node)
    source = "the machines" if node is None else "node_group_size"
    topology = grid.topology_of(0, world, hosts)
    plan = config.plan.group_plan if isinstance(config.plan, ReplicatedPlan) else config.plan
    plan = _without(with_table_paths(plan, module), collections, others)
    try:
        said = getattr(plan, "world_size", None)
        if said not in (None, size):
            raise ConfigError(f"ShardingPlan: it was made for {said} ranks.")
        plan = without_cuts(plan, collections, lambda _: topology)
        given = None if plan is None else read_plan(plan, collections)
        if given is None:
            tables = [table for table in tables_of(module, sharders) if table.names[0][0] in collections]
            made = EmbeddingShardingPlanner(topology=topology).plan(tables, sharders) if tables else None
            given = (
                ShardingPlan({})
                if made is None
                else keep_caches(_named_alike(made, collections), collections)
            )
        elif given.world_size not in (None, size):
            raise ConfigError(f"ShardingPlan: it was made for {given.world_size} ranks.")
        elif node is None and _other_hosts(given.hosts, topology):
            source, topology = "the plan", grid.topology_of(0, world, given.hosts)
        cut = completed(given, collections, topology)
        cut.check(sizes_of(collections), size)
        for path, name, sharding in cut.tables():
            assert sharding.tiling is not None, "completed"
            check_rule(collections[path]._tables[name], sharding.tiling)
    except ConfigError as error:
        if config.plan is None:
            raise
        raise ConfigError(
            f"{error} A plan in 2D parallelism is of one sharding group: of {size} ranks, numbered from 0, of the "
            f"{grid.world_size} ranks in all."
        ) from error
    return replace(cut, report=given.report), source


def _other_hosts(hosts: Sequence[Sequence[int]] | None, topology: Topology) -> bool:
    """Whether a plan was made for these ranks on other hosts."""
    if hosts is None or sorted(rank for host in hosts for rank in host) != list(range(topology.world_size)):
        return False
    return sorted(map(sorted, hosts)) != sorted(map(sorted, topology.host_ranks))


def _named_alike(plan: ShardingPlan, collections: dict[str, TableCollection]) -> ShardingPlan:
    """A planner's plan in which a table that several collections share lies alike under all its names."""
    made = plan
    for names in ties_of(collections):
        (path, table), *more = names
        for other_path, other in more:
            made = made.replaced(other_path, other, plan.plan[path][table])
    return replace(made, report=plan.report)


def _without(plan: AnyPlan | None, collections: Collection[str], others: Collection[str]) -> Any:
    """A plan without what other parts plan for themselves."""
    if others and isinstance(plan, (str, Path)):
        plan = ShardingPlan.load(plan)
    if isinstance(plan, ShardingPlan) and any(path in others for path in plan.plan):
        kept = {path: part for path, part in plan.plan.items() if path not in others}
        return ShardingPlan(kept, plan.world_size, plan.hosts)
    if isinstance(plan, dict) and any(path in others and path not in collections for path in plan):
        return {path: part for path, part in plan.items() if path not in others}
    return plan
