"""`shard`: replaces the tables of a model by this rank's tiles, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tilerec.comms.agreement import agreeing, on_all_ranks
from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of
from tilerec.compat.sharders import ModuleSharder
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.optim.attach import restore_optimizers_on_error
from tilerec.optim.step_checks import check_optimizers_at_next_step
from tilerec.parallel.broadcast_init import broadcast_from_rank_0, broadcast_to_replicas
from tilerec.parallel.device import device_of
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.hosts import topology_of
from tilerec.parallel.managed_collision_paths import with_table_paths
from tilerec.parallel.model_tables import Name, collections_of, properties_to_compare, sizes_of, ties_of
from tilerec.parallel.plan_of import store_plan
from tilerec.parallel.plan_templates import resolve_cuts
from tilerec.parallel.read_plan import AnyPlan, complete_plan_of, read_plan
from tilerec.parallel.table_optimizers import (
    attach,
    caches_of,
    detach_dense,
    keep_cached_tables,
    sharder_optimizers,
    warn_of_unused_sharders,
    with_kernels,
    with_wire_formats,
)
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.sharder import check_sharder, checked_sharders
from tilerec.sharding.embedding import has_pending_init, initialized_memory, shard_collection
from tilerec.sharding.replica_groups import ReplicaGroups
from tilerec.sharding.shard_ids import (
    IdRanks,
    IdsBelow,
    check_ids,
    described_ids,
    ids_below,
    shard_ids,
)
from tilerec.sharding.table import check_rule
from tilerec.spec.plan import ShardingPlan, Wire
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.storage.cached import RowCache

Ranks = ShardingEnv | Group | DeviceMesh | dist.ProcessGroup
"""The accepted descriptions of a set of ranks."""


def shard(
    module: nn.Module,
    plan: AnyPlan | None = None,
    env: Ranks | None = None,
    device: torch.device | str | int | None = None,
    sharder: ModuleSharder | Sequence[ModuleSharder] | None = None,
    *,
    mesh: Ranks | None = None,
    topology: Topology | None = None,
    exact: bool = False,
) -> nn.Module:
    """Shard every embedding collection in a module, including the module itself, in place. Collective.

    Names of modules, parameters and state do not change. Existing values and optimizer state are kept, cut to this
    rank's tiles. If ranks hold different values, all ranks take rank 0's. Every rank passes the same model and plan;
    one small collective checks this.

    Args:
        module: the model.
        plan: a `ShardingPlan`, the path of its JSON file, or `{module path: {table: ParameterSharding or Tiling}}`
            (`{table: …}` if the module is a collection). The result of `row_wise()` or another helper may stand for a
            table, for a module path or for all tables. Missing tilings are made from sharding types and ranks. None:
            `EmbeddingShardingPlanner(topology=…)` makes a plan.
        env, mesh: two names of one argument, the ranks: a `ShardingEnv`, a `DeviceMesh` of one axis, a process group or
            a `Group`; None: the default process group.
        topology: the ranks of each host, and memory sizes for the planner. None: the plan's hosts, else those of the
            launcher (LOCAL_WORLD_SIZE), else one host.
        device: the device of tiles whose tables are on meta; tables with values stay on their device. None: CPU.
        sharder: a sharder with the optimizer and wire formats of tables that have none, as in
            `DistributedModelParallel`; or a list with at most one per kind of collection.
        exact: produce the same bits under every plan, with more bytes on the wire.

    A table that the plan has as `dense` loses its attached optimizer, with a warning. Its gradients go to `.grad`,
    reduced over the ranks as in `DistributedDataParallel`.

    Returns:
        The module, with the complete plan at `.plan` (printable). If the model has its own attribute `plan`, use
        `tilerec.parallel.plan_of(module)`.

    Raises:
        ConfigError: the plan does not fit this model or this world, lacks a table, contradicts itself (a tiling that
            does not follow from sharding type and ranks), or differs between ranks; a collection is sharded already;
            tied tables have different tilings; `env` and `mesh` are both given; this machine lacks `device`. The model
            is then unchanged.
    """
    if not collections_of(module):
        warnings.warn(
            f"shard: {type(module).__name__} has no EmbeddingBagCollection or EmbeddingCollection; nothing to do.",
            stacklevel=2,
        )
    if sharder is not None and (isinstance(sharder, str) or not isinstance(sharder, Sequence)):
        check_sharder(sharder, "shard: sharder")
        sharder = [sharder]
    return shard_tables(module, plan, _group(env, mesh), topology, device, exact, sharder, "shard")


def _group(env: Ranks | None, mesh: Ranks | None) -> Group:
    if env is not None and mesh is not None:
        raise ConfigError("shard: got both env and mesh, two names of one argument; keep one of them.")
    ranks = mesh if env is None else env
    if ranks is not None and not isinstance(ranks, Ranks):
        raise ConfigError(
            f"shard: {'mesh' if env is None else 'env'}: got a {type(ranks).__name__}; expected a ShardingEnv, a "
            "process group, a DeviceMesh, or None for the default process group."
        )
    return ranks.group() if isinstance(ranks, ShardingEnv) else group_of(ranks)


def shard_tables(
    module: nn.Module,
    plan: AnyPlan | None,
    group: Group,
    topology: Topology | None,
    device: torch.device | str | int | None,
    exact: bool,
    sharders: Sequence[ModuleSharder] | None,
    who: str,
    also: Callable[[], Mapping[str, object]] = dict,
) -> nn.Module:
    """Shard a model as `shard` does. If it raises, optimizers that sharders attached are detached again.

    Args:
        who: name of the calling function, for errors.
        also: returns further settings that must be equal on all ranks; may raise on one rank.
    """
    with restore_optimizers_on_error(module.parameters()):
        return _shard(module, plan, group, topology, device, exact, sharders, who, also)


def _shard(
    module: nn.Module,
    plan: AnyPlan | None,
    group: Group,
    topology: Topology | None,
    device: torch.device | str | int | None,
    exact: bool,
    sharders: Sequence[ModuleSharder] | None,
    who: str,
    also: Callable[[], Mapping[str, object]],
) -> nn.Module:
    with agreeing(group, "the model to shard") as found:
        found.update(also())
        device = None if device is None else device_of(device, who)
        ready = prepare_sharding(module, plan, group, topology, device, checked_sharders(sharders, who), None)
        check_ids(ready.ids, group.size)
        found.update(exact=exact, **ready.described())
    if ready.collections or ready.ids:
        # Separate channels: other collectives of the model's ranks may run between those of the tables.
        rows, route = group.split("rows"), group.split("route")
        shard_jobs(group, [ShardJob(ready, rows, route, device, exact)])
    store_plan(module, ready.plan)
    return module


class PreparedModel(NamedTuple):
    """A model, or a part of it, that has passed this rank's checks and can be sharded."""

    collections: dict[str, TableCollection]
    ties: list[dict[Name, Table]]
    plan: ShardingPlan
    topology: Topology
    ids: dict[str, IdsBelow]

    def described(self) -> dict[str, object]:
        """Return the properties that must be equal on all ranks."""
        return {
            "modules": properties_to_compare(self.collections),
            "ids": described_ids(self.ids),
            "plan": self.plan.to_json(),
        }

    @property
    def tables(self) -> list[Table]:
        """The distinct tables."""
        return [next(iter(names.values())) for names in self.ties]


@dataclass(frozen=True)
class ShardJob:
    """Collections to be sharded over a group.

    Args:
        ready: the checked collections with their plan.
        rows, route: two channels of the group.
        device: device of tiles whose tables are on meta; None: CPU.
        exact: produce the same bits under every plan.
        teams: the teams of 2D parallelism; None: one team, so every table lies on the group once.
        id_ranks: ranks over which managed collision distributes its ids; None: the group.
    """

    ready: PreparedModel
    rows: Group
    route: Group
    device: torch.device | None
    exact: bool
    teams: ReplicaGroups | None = None
    id_ranks: IdRanks | None = None


def shard_jobs(world: Group, jobs: Sequence[ShardJob]) -> None:
    """Replace tables by tiles, and send ids to the owners of their buckets. Collective over `world`.

    Users' `init_fn` functions run before any table changes. If one fails on a rank, all ranks raise and the model is
    unchanged on all of them.
    """
    collections = {path: part for job in jobs for path, part in job.ready.collections.items()}
    tables = [table for job in jobs for table in job.ready.tables]
    broadcast_from_rank_0(world, collections, tables)
    drawn = [[table for table in job.ready.tables if has_pending_init(table)] for job in jobs]
    memory: dict[str, dict[str, list[Tensor]]] = {}
    seen: set[int] = set()  # tables handled so far: other collections may share their rows
    with on_all_ranks(world, "the sharded model", "its tables' initial values"):
        for job in jobs:
            for path, part in job.ready.collections.items():
                if any(map(has_pending_init, part._tables.values())):
                    hosted = set(_caches(job, path))
                    memory[path] = initialized_memory(
                        part, _tilings(job, path), job.rows.rank, job.device, seen, hosted
                    )
                seen.update(id(table.rows) for table in part._tables.values())
    with on_all_ranks(world, "the sharded model", "its tiles"):
        for job in jobs:
            for path, part in job.ready.collections.items():
                own = job.ready.plan.plan[path]
                shard_collection(
                    part,
                    _tilings(job, path),
                    job.rows,
                    job.route,
                    job.ready.topology,
                    device=job.device,
                    exact=job.exact,
                    fan_in={name: s.ids_per_bag for name, s in own.items() if s.ids_per_bag is not None},
                    wires={name: cast(Wire, sharding.wire) for name, sharding in own.items()},
                    teams=job.teams,
                    memory=memory.pop(path, None),
                    caches=_caches(job, path),
                    name=path,
                )
    check_optimizers_at_next_step()
    for job, made in zip(jobs, drawn, strict=True):
        shard_ids(job.ready.ids, job.id_ranks or IdRanks(job.route, lambda rank: rank), job.device)
        if made:
            broadcast_to_replicas(job.rows, made)


def _caches(job: ShardJob, path: str) -> dict[str, RowCache]:
    own = {path: job.ready.plan.plan[path]}
    found = caches_of(replace(job.ready.plan, plan=own), job.ready.collections, job.device)
    return {name: cache for (_, name), cache in found.items()}


def _tilings(job: ShardJob, path: str) -> dict[str, Tiling]:
    own = job.ready.plan.plan[path]
    return {name: cast(Tiling, own[name].tiling) for name in job.ready.collections[path]._tables}


def prepare_sharding(
    module: nn.Module,
    plan: AnyPlan | None,
    group: Group,
    topology: Topology | None,
    device: torch.device | None,
    given_sharders: list[ModuleSharder],
    only: Collection[str] | None,
    lone_ids: bool = True,
) -> PreparedModel:
    """Check and complete the plan on this rank alone, and attach the optimizers of sharders.

    Args:
        only: paths of the collections to shard; None: all.
        lone_ids: with `only`: whether to include managed-collision ids that no collection reads.
    """
    collections = collections_of(module, only)
    ties = ties_of(collections)
    kind = device.type if device is not None else _device_type(collections)
    plan = with_table_paths(plan, module)
    plan = resolve_cuts(plan, collections, lambda hosts: topology_of(group, topology, hosts, kind))
    given = None if plan is None else read_plan(plan, collections)
    if given is not None and given.world_size not in (None, group.size):
        given.check({}, group.size)  # first, because its hosts may belong to another world
    topology = topology_of(group, topology, None if given is None else given.hosts, kind)
    if given is None:
        planner = EmbeddingShardingPlanner(topology=topology)
        made = planner.plan(module, given_sharders) if collections else ShardingPlan({})
        given = replace(keep_cached_tables(_with_ties_aligned(made, ties), collections), report=made.report)
    complete_plan = complete_plan_of(given, collections, topology)
    complete_plan.check(sizes_of(collections), group.size)
    tilings = {(path, table): cast(Tiling, s.tiling) for path, table, s in complete_plan.tables()}
    _check_ties(ties, tilings)
    detach_dense(complete_plan, ties)
    gifts = sharder_optimizers(complete_plan, collections, ties, given_sharders)
    attach(gifts)
    warn_of_unused_sharders(gifts, complete_plan, collections, given_sharders)
    for names in ties:
        for name, table in names.items():
            check_rule(table, tilings[name])
    whole = with_kernels(
        with_wire_formats(complete_plan, collections, given_sharders), collections, given_sharders
    )
    whole = replace(whole, report=given.report)
    ids = ids_below(module)
    if only is not None:
        chosen = ids_below(module, list(collections.values()))
        ids = {p: own for p, own in ids.items() if p in chosen or (lone_ids and own.reader is None)}
    return PreparedModel(collections, ties, whole, topology, ids)


def _device_type(collections: Mapping[str, TableCollection]) -> str:
    types = [part.device.type for part in collections.values()]
    return next((kind for kind in types if kind != "meta"), "cpu")


def _with_ties_aligned(plan: ShardingPlan, ties: list[dict[Name, Table]]) -> ShardingPlan:
    """Return the planner's plan with tied tables placed as the first of each tie."""
    for names in ties:
        (path, table), *others = names
        first = plan.plan[path][table]
        for other_path, other in others:
            sharding = plan.plan[other_path][other]
            changed = replace(
                sharding, sharding_type=first.sharding_type, ranks=first.ranks, tiling=first.tiling
            )
            plan = plan.replaced(other_path, other, changed)
    return plan


def _check_ties(ties: list[dict[Name, Table]], tilings: Mapping[Name, Tiling]) -> None:
    for names in ties:
        first, *others = names
        for other in others:
            if tilings[first] != tilings[other]:
                raise ConfigError(
                    f"shard: table '{other[1]}' of module '{other[0]}' is the same table as '{first[1]}' of "
                    f"'{first[0]}', but the plan gives them different tilings; give both the same tiling."
                )
