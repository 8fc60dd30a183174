"""`ShardJob`: prepared collections of a model, and the replacement of their tables by this rank's tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from tilerec.comms.agreement import on_all_ranks
from tilerec.comms.group import Group
from tilerec.optim.step_checks import check_optimizers_at_next_step
from tilerec.parallel.broadcast_init import broadcast_from_rank_0, broadcast_to_replicas
from tilerec.parallel.prepared_model import PreparedModel
from tilerec.parallel.table_optimizers import caches_of
from tilerec.sharding.replica_groups import ReplicaGroups
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sharding.shard_ids import IdRanks, shard_ids
from tilerec.sharding.table import ShardedTable
from tilerec.sharding.tile_memory import has_pending_init, initialized_memory
from tilerec.spec.tile import Tiling
from tilerec.storage.row_cache import RowCache


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

    Users' `init_fn` functions run, and the space of files is allocated, before any table changes. If this fails on a
    rank, all ranks raise and the model is unchanged on all of them.
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
                caches = _caches(job, path)
                in_files = any(cache.folder is not None for cache in caches.values())
                if in_files or any(map(has_pending_init, part._tables.values())):
                    tilings, rank = _tilings(job, path), job.rows.rank
                    memory[path] = initialized_memory(part, tilings, rank, job.device, seen, caches)
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
                    wires={name: sharding.wire for name, sharding in own.items() if sharding.wire is not None},
                    teams=job.teams,
                    memory=memory.pop(path, None),
                    caches=_caches(job, path),
                    name=path,
                )
    check_optimizers_at_next_step()
    for job, made in zip(jobs, drawn, strict=True):
        shard_ids(job.ready.ids, job.id_ranks or IdRanks(job.route, lambda rank: rank), job.device)
        for table in cast("list[ShardedTable]", job.ready.tables):
            if not table.weight.is_meta:
                table.weight_of().fill_copies()
        if made:
            broadcast_to_replicas(job.rows, made)


def _caches(job: ShardJob, path: str) -> dict[str, RowCache]:
    own = {path: job.ready.plan.plan[path]}
    found = caches_of(replace(job.ready.plan, plan=own), job.ready.collections, job.device)
    return {name: cache for (_, name), cache in found.items()}


def _tilings(job: ShardJob, path: str) -> dict[str, Tiling]:
    own = job.ready.plan.plan[path]
    return {name: cast(Tiling, own[name].tiling) for name in job.ready.collections[path]._tables}
