"""Shard the ids of managed collision, in place: each rank keeps the buckets that it owns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.buckets import bucket_cuts
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddings,
)
from tilerec.sharding.broadcast import broadcast_tensor, tensor_digest
from tilerec.sharding.buckets_view import BucketsView
from tilerec.sharding.id_exchange import IdExchange
from tilerec.sharding.managed_collision import (
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
    ShardedManagedCollisionEmbeddings,
)


class IdRanks(NamedTuple):
    """Ranks whose batches form the global batch. They may hold several copies of the tables.

    Args:
        group: all these ranks. Ids are spread over them, and its collectives come before those of `route`, in one
            order.
        member_of: maps a rank of the group to its rank in the tilings of its tables.
    """

    group: Group
    member_of: Callable[[int], int]


class IdsBelow(NamedTuple):
    """A collection of ids below a module, and the module that reads its rows; None if no module does."""

    collection: ManagedCollisionCollection
    reader: ManagedCollisionEmbeddings | None


def ids_below(module: nn.Module, tables: Collection[nn.Module] | None = None) -> dict[str, IdsBelow]:
    """Return every collection of ids below a module, by path.

    Args:
        tables: return only collections whose embedding module is one of these; None: all.
    """
    readers = {
        id(part.managed_collision_collection): part
        for part in module.modules()
        if isinstance(part, ManagedCollisionEmbeddings)
    }
    found = {
        path: IdsBelow(part, readers.get(id(part)))
        for path, part in module.named_modules()
        if isinstance(part, ManagedCollisionCollection)
    }
    if tables is None:
        return found
    chosen = set(map(id, tables))
    return {
        path: own for path, own in found.items() if own.reader is not None and id(own.reader.embedding_module) in chosen
    }


def check_ids(found: Mapping[str, IdsBelow], world_size: int) -> None:
    """Raise a `ConfigError` for ids that cannot be spread over this many ranks, or that are sharded already."""
    for path, (collection, _) in found.items():
        if isinstance(collection, ShardedManagedCollisionCollection):
            raise ConfigError(f"shard: module '{path}' is sharded already; shard a model once, as a whole.")
        for table, part in collection.modules_by_table.items():
            own = part._buckets
            if own.held != own.count:
                raise ConfigError(
                    f"Table '{table}': its module holds buckets [{own.first}, {own.last}) of {own.count} only; leave "
                    "start_bucket and end_bucket out, as sharding sets them."
                )
            if world_size > own.count:
                raise ConfigError(
                    f"Table '{table}': {own.count} buckets cannot be shared by {world_size} ranks, which hold whole "
                    f"buckets; use at least {world_size} buckets (rows: a multiple of that), or at most {own.count} "
                    "ranks."
                )


def described_ids(found: Mapping[str, IdsBelow]) -> dict[str, Any]:
    """Return a description of the ids that must be equal on every rank."""
    return {
        path: {
            table: {**part.described(), "features": list(collection._table_features[table])}
            for table, part in collection.modules_by_table.items()
        }
        for path, (collection, _) in found.items()
    }


def shard_ids(found: Mapping[str, IdsBelow], over: IdRanks, device: torch.device | str | None = None) -> None:
    """Spread ids over the ranks, in place; the tables of their rows must be sharded already.

    Args:
        device: device for modules on meta.
    """
    group, member_of = over
    for collection, reader in found.values():
        tables = {} if reader is None else reader.embedding_module._tables
        own = {name: tables[name] for name in collection.modules_by_table if name in tables}
        _take_from_rank_0(group, collection)
        for part in collection.modules_by_table.values():
            cuts = bucket_cuts(part.buckets(), group.size)
            part.hold(cuts[group.rank], cuts[group.rank + 1], BucketsView(group, cuts), device)
        collection.__class__ = ShardedManagedCollisionCollection
        cast(ShardedManagedCollisionCollection, collection).exchange = IdExchange(
            group, collection.modules_by_table, collection._table_features, own, member_of
        )
        if reader is None:
            continue
        bags = isinstance(reader, ManagedCollisionEmbeddingBagCollection)
        reader.__class__ = (
            ShardedManagedCollisionEmbeddingBagCollection if bags else ShardedManagedCollisionEmbeddingCollection
        )
        sharded = cast(ShardedManagedCollisionEmbeddings, reader)
        sharded._routed, sharded._resets = 0, deque()
        sharded.renew_handle()


def _take_from_rank_0(group: Group, collection: ManagedCollisionCollection) -> None:
    """Copy rank 0's ids to all ranks if the ranks built the model with different ids. Collective."""
    if group.size == 1:
        return
    tensors = [
        tensor
        for module in collection.modules_by_table.values()
        if not module.ids.is_meta
        for tensor in (
            *(found for found, _ in module.id_map.state_tensors().values()),
            module.numbers()["step"],
        )
    ]
    digests = group.all_gather_object([tensor_digest(tensor) for tensor in tensors])
    if all(digest == digests[0] for digest in digests):
        return
    for tensor in tensors:
        # As int64: communication backends do not support every integer dtype.
        words = tensor.detach().to(group.device, torch.int64, copy=True)
        broadcast_tensor(group, words)
        tensor.copy_(words)
    for module in collection.modules_by_table.values():
        module.step = int(module._step)
