"""`shard`: a model's tables become this rank's tiles of them, in place."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tilerec.comms.agree import agree, heard_by_all, on_all_ranks
from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of
from tilerec.compat.sharders import ModuleSharder
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.optim.attach import unattached_on_error
from tilerec.parallel.broadcast_init import replicas_from_first, take_from_rank_0
from tilerec.parallel.device import device_of
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.hosts import topology_of
from tilerec.parallel.managed_paths import with_table_paths
from tilerec.parallel.model_tables import Name, collections_of, described, sizes_of, ties_of
from tilerec.parallel.plan_of import keep_plan
from tilerec.parallel.plan_templates import without_cuts
from tilerec.parallel.read_plan import AnyPlan, completed, read_plan
from tilerec.parallel.table_optimizers import (
    attach,
    caches_of,
    detach_dense,
    gifts_of,
    keep_caches,
    warn_of_idle,
    with_kernels,
    with_wires,
)
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.sharder import check_sharder, listed
from tilerec.sharding.embedding import drawn_memory, is_drawn, shard_collection
from tilerec.sharding.shard_ids import (
    IdRanks,
    IdsBelow,
    check_ids,
    described_ids,
    ids_below,
    shard_ids,
)
from tilerec.sharding.table import check_rule
from tilerec.sharding.teams import Teams
from tilerec.spec.plan import ShardingPlan, Wire
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.storage.cached import RowCache

Ranks = ShardingEnv | Group | DeviceMesh | dist.ProcessGroup
"""Whatever says which ranks there are."""


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
    """Shard every embedding collection below a module (and the module itself, if it is one), in place.

    Names of modules, parameters and state stay; values and optimizer state that are there survive, cut to this rank's
    tiles. Where ranks hold different values, rank 0's count. Every rank calls it, with the same model and plan: one
    small collective checks that.

    Args:
        module: the model.
        plan: a `ShardingPlan`, the path of its JSON file, or `{module path: {table: ParameterSharding or Tiling}}`
            (`{table: …}` where the module is a collection), or what `row_wise()` and its like return, for a table, for
            a module path or for all tables. Tilings that it does not say are made from its sharding types and ranks.
            None: `EmbeddingShardingPlanner(topology=…)` makes one.
        env, mesh: one thing under two names, which ranks: a `ShardingEnv`, a `DeviceMesh` of one axis, a process
            group, a `Group`; None is the default process group.
        topology: which ranks share a host, and memory for the planner. None: the plan's hosts, else those of
            the launcher (LOCAL_WORLD_SIZE), else one host.
        device: where tiles of tables on meta get their memory; tables with values stay where they are. None: CPU.
        sharder: gives an optimizer and wire formats to tables that have none, as those of `DistributedModelParallel`;
            or a list with at most one per kind of collection.
        exact: the same bits under every plan, at the price of bytes on the wire.

    A table that the plan has as `dense` keeps no attached optimizer: it is taken off with a warning, and gradients go
    to `.grad`, summed over the ranks as `DistributedDataParallel` would.

    Returns:
        The module, with the whole plan at `.plan` (printable; `tilerec.parallel.plan_of(module)` where the model has
        something of its own called `plan`).

    Raises:
        ConfigError: the plan is not for this model or this world, forgets a table, contradicts itself (a tiling that
            its sharding type and ranks do not give), or differs between ranks; a collection is sharded already; tied
            tables have different tilings; `env` and `mesh` are both given; this machine has no such device. The model
            is then as it was.
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
        raise ConfigError("shard: env and mesh both say which ranks there are; keep one of them.")
    ranks = mesh if env is None else env
    if ranks is not None and not isinstance(ranks, Ranks):
        raise ConfigError(
            f"shard: {'mesh' if env is None else 'env'} is a {type(ranks).__name__}; wanted a ShardingEnv, a process "
            "group, a DeviceMesh, or None for the default process group."
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
    also: Mapping[str, object] | None = None,
) -> nn.Module:
    """`shard`, for `who` in messages. Optimizers of sharders stay attached only if it comes to an end.

    Args:
        also: what else `who` was given that must be the same on all ranks.
    """
    with unattached_on_error(module.parameters()):
        return _shard(module, plan, group, topology, device, exact, sharders, who, also or {})


def _shard(
    module: nn.Module,
    plan: AnyPlan | None,
    group: Group,
    topology: Topology | None,
    device: torch.device | str | int | None,
    exact: bool,
    sharders: Sequence[ModuleSharder] | None,
    who: str,
    also: Mapping[str, object],
) -> nn.Module:
    with heard_by_all(group, "the model to shard"):
        device = None if device is None else device_of(device, who)
        ready = prepare(module, plan, group, topology, device, listed(sharders, who), None)
        check_ids(ready.ids, group.size)
    agree(group, "the model to shard", {"checks": "passed", "exact": exact, **ready.described(), **also})
    if ready.collections or ready.ids:
        # Channels of their own: other calls of the model's ranks may come between theirs.
        rows, route = group.split("rows"), group.split("route")
        cut_all(group, [Job(ready, rows, route, device, exact)])
    keep_plan(module, ready.plan)
    return module


class Ready(NamedTuple):
    """A model, or a part of one, that can be sharded, as this rank sees it."""

    collections: dict[str, TableCollection]
    ties: list[dict[Name, Table]]
    plan: ShardingPlan
    topology: Topology
    ids: dict[str, IdsBelow]

    def described(self) -> dict[str, object]:
        """What must be the same on every rank, in words."""
        return {
            "modules": described(self.collections),
            "ids": described_ids(self.ids),
            "plan": self.plan.to_json(),
        }

    @property
    def tables(self) -> list[Table]:
        """The distinct ones."""
        return [next(iter(names.values())) for names in self.ties]


@dataclass(frozen=True)
class Job:
    """Collections that are spread over a group.

    Args:
        rows, route: two channels over the group.
        teams: where ranks are several teams, each of which holds every table.
        id_ranks: over which managed collision spreads its ids; None: over the group.
    """

    ready: Ready
    rows: Group
    route: Group
    device: torch.device | None
    exact: bool
    teams: Teams | None = None
    id_ranks: IdRanks | None = None


def cut_all(world: Group, jobs: Sequence[Job]) -> None:
    """Tables become tiles, and ids go to the owners of their buckets. All ranks of `world` call it, with like jobs.

    What a user's `init_fn` makes is made before anything is cut: a rank on which it fails raises, the others say so,
    and the model is as it was on all of them.
    """
    collections = {path: part for job in jobs for path, part in job.ready.collections.items()}
    tables = [table for job in jobs for table in job.ready.tables]
    take_from_rank_0(world, collections, tables)
    drawn = [[table for table in job.ready.tables if is_drawn(table)] for job in jobs]
    memory: dict[str, dict[str, list[Tensor]]] = {}
    seen: set[int] = set()  # rows of tables, which other collections may share
    with on_all_ranks(world, "the sharded model", "its tables' initial values"):
        for job in jobs:
            for path, part in job.ready.collections.items():
                if any(map(is_drawn, part._tables.values())):
                    hosted = set(_caches(job, path))
                    memory[path] = drawn_memory(
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
    for job, made in zip(jobs, drawn, strict=True):
        shard_ids(job.ready.ids, job.id_ranks or IdRanks(job.route, lambda rank: rank), job.device)
        if made:
            replicas_from_first(job.rows, made)


def _caches(job: Job, path: str) -> dict[str, RowCache]:
    own = {path: job.ready.plan.plan[path]}
    found = caches_of(replace(job.ready.plan, plan=own), job.ready.collections, job.device)
    return {name: cache for (_, name), cache in found.items()}


def _tilings(job: Job, path: str) -> dict[str, Tiling]:
    own = job.ready.plan.plan[path]
    return {name: cast(Tiling, own[name].tiling) for name in job.ready.collections[path]._tables}


def prepare(
    module: nn.Module,
    plan: AnyPlan | None,
    group: Group,
    topology: Topology | None,
    device: torch.device | None,
    given_sharders: list[ModuleSharder],
    only: Collection[str] | None,
    lone_ids: bool = True,
) -> Ready:
    """All checks that need no other rank. Attaches the optimizers that sharders give.

    Args:
        only: paths of the collections to shard; None: all.
        lone_ids: whether ids that no collection's tables are the rows of belong to it, where `only` is given.
    """
    collections = collections_of(module, only)
    ties = ties_of(collections)
    kind = device.type if device is not None else _device_type(collections)
    plan = with_table_paths(plan, module)
    plan = without_cuts(plan, collections, lambda hosts: topology_of(group, topology, hosts, kind))
    given = None if plan is None else read_plan(plan, collections)
    if given is not None and given.world_size not in (None, group.size):
        given.check({}, group.size)  # before its hosts are read, which are another world's
    topology = topology_of(group, topology, None if given is None else given.hosts, kind)
    if given is None:
        planner = EmbeddingShardingPlanner(topology=topology)
        made = planner.plan(module, given_sharders) if collections else ShardingPlan({})
        given = replace(keep_caches(_tied_alike(made, ties), collections), report=made.report)
    cut = completed(given, collections, topology)
    cut.check(sizes_of(collections), group.size)
    tilings = {(path, table): cast(Tiling, s.tiling) for path, table, s in cut.tables()}
    _check_ties(ties, tilings)
    detach_dense(cut, ties)
    gifts = gifts_of(cut, collections, ties, given_sharders)
    attach(gifts)
    warn_of_idle(gifts, cut, collections, given_sharders)
    for names in ties:
        for name, table in names.items():
            check_rule(table, tilings[name])
    whole = with_kernels(with_wires(cut, collections, given_sharders), collections, given_sharders)
    whole = replace(whole, report=given.report)
    ids = ids_below(module)
    if only is not None:
        chosen = ids_below(module, list(collections.values()))
        ids = {p: own for p, own in ids.items() if p in chosen or (lone_ids and own.reader is None)}
    return Ready(collections, ties, whole, topology, ids)


def _device_type(collections: Mapping[str, TableCollection]) -> str:
    types = [part.device.type for part in collections.values()]
    return next((kind for kind in types if kind != "meta"), "cpu")


def _tied_alike(plan: ShardingPlan, ties: list[dict[Name, Table]]) -> ShardingPlan:
    """A plan of the planner's own, in which tied tables lie where the first of them does."""
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
                    f"'{first[0]}', but the plan cuts them differently; give both the same tiling."
                )
