"""`shard_collection`: convert a collection into this rank's part of a sharded one, in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.sharding import ddp_tables as ddp_tables
from tilerec.sharding.embedding import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from tilerec.sharding.exchange import Exchange
from tilerec.sharding.layout import SlotRead, TableLayout
from tilerec.sharding.replica_groups import ReplicaGroups
from tilerec.sharding.table import ShardedTable, shard_table
from tilerec.sharding.tile_memory import has_pending_init, tile_memory
from tilerec.spec.plan import Wire
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.storage.row_cache import RowCache


def shard_collection(
    module: TableCollection, tilings: Mapping[str, Tiling], group: Group, route_group: Group, topology: Topology, *,
    device: torch.device | str | None = None, exact: bool = False, fan_in: Mapping[str, float] | None = None,
    wires: Mapping[str, Wire] | None = None, teams: ReplicaGroups | None = None,
    memory: dict[str, list[Tensor]] | None = None, caches: Mapping[str, RowCache] | None = None, name: str = "",
) -> None:  # fmt: skip
    """Convert a collection into this rank's part of a sharded one, in place.

    All ranks shard the collections of one `route_group` in the same order.

    Args:
        tilings: tiling of every table.
        group, route_group: two channels over the same ranks.
        device: device of the tiles of tables on meta; other tables stay on their device. None: CPU.
        exact: pool on the home rank and sum in fixed blocks, so that no bit depends on the tiling. Sends more bytes.
        fan_in: expected ids per bag, for tables where it is known; decides whether sums inside a host save bytes.
        wires: wire formats of tables' rows and gradients; default: the accumulation dtype. Sums inside a host are
            always sent in the accumulation dtype.
        teams: set if the ranks form several teams, each of which holds every table; None: one team.
        memory: result of `initialized_memory`; None: allocated here.
        caches: for tables with tiles in host memory or in files: the cache that each of these tiles gets a copy of.
        name: path of the collection in the model, for errors; "": errors list its tables.

    Raises:
        ConfigError: `exact` with a wire that rounds, or that adds up gradients before they travel.
    """
    tables = module._tables
    names = list(tables)
    for table_name, wire in (wires or {}).items():
        if exact and not wire.keeps_bits:
            raise ConfigError(
                f"Table '{table_name}': exact=True needs the same bits under every plan, and its wire {wire} rounds or "
                "adds up gradients on the way; leave out one of them."
            )
    each_id = isinstance(module, EmbeddingCollection)
    # An unpooled id has one owner, so there is nothing to add up inside a host.
    bags = {} if each_id or exact else dict(fan_in or {})
    likely = 1.0 if each_id or exact else 2.0
    layouts = [TableLayout(own, tilings[own], bags.get(own, likely), (wires or {}).get(own, Wire())) for own in names]
    exchange = Exchange(
        group, route_group, topology, layouts,
        [SlotRead(names.index(read.table), read.feature) for read in module._reads],
        weighted=getattr(module, "_is_weighted", False), each_id=each_id, exact=exact, teams=teams,
        name=_collection_name(name, names),
    )  # fmt: skip
    caches = caches or {}
    places = tile_memory(module, tilings, group.rank, device, caches=caches) if memory is None else memory
    for own, table in tables.items():
        if not isinstance(table, ShardedTable):
            written = memory is not None and has_pending_init(table)
            shard_table(table, tilings[own], group, topology, places[own], exact, teams, written=written)
            if own in caches:
                for rows in cast(ShardedTable, table).tile_rows:
                    if rows.names is None:
                        rows.cache = copy.copy(caches[own])
                    else:
                        rows.cache_beside = copy.copy(caches[own])
        elif table.tiling != tilings[own]:
            raise ConfigError(
                f"Table '{own}' is sharded already, with another collection that it is tied to, and with another "
                "tiling; give both the same tiling."
            )
    module.__class__ = ShardedEmbeddingCollection if each_id else ShardedEmbeddingBagCollection
    cast(ShardedCollection, module).exchange = exchange
    exchange.enter()
    module._renew_sinks()


def _collection_name(name: str, tables: Sequence[str]) -> str:
    """Return the collection's name in errors: `name`, or a list of its tables."""
    if name:
        return f"'{name}'"
    return f"the collection of {', '.join(map(repr, tables[:3]))}{', …' if len(tables) > 3 else ''}"
