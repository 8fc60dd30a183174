"""`EndState`: the peers, exchanges and plans that a move puts in place when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from torch import nn

from tilerec.parallel.plan_of import store_plan, stored_plans
from tilerec.parallel.resharding.table_move import TableMove
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.exchange import Exchange
from tilerec.sharding.layout import TableLayout
from tilerec.sharding.retile import new_peers
from tilerec.sharding.table import ShardedTable, tiles_or_empty
from tilerec.sharding.update import UpdatePeers
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ShardingPlan, Wire
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


class EndState(NamedTuple):
    """Peers per tile, exchanges by path, and the plan."""

    peers: list[tuple[ShardedTable, list[UpdatePeers]]]
    exchanges: dict[str, Exchange]
    plan: ShardingPlan

    def put_in_place(self, model: nn.Module, collections: Mapping[str, ShardedCollection]) -> None:
        """Replace exchanges, peers and plans. Assignments only."""
        for table, peers in self.peers:
            for rows, own in zip(table.tile_rows, peers, strict=True):
                rows.peers = own
        for path, part in collections.items():
            part.exchange = self.exchanges[path]
            part.exchange.enter()
            part._renew_sinks()
        _store_plans(model, self.plan)


def end_state(
    collections: Mapping[str, ShardedCollection],
    rank: int,
    plan: ShardingPlan,
    topology: Topology,
    moved: Sequence[TableMove],
) -> EndState:
    """Return the peers and exchanges of a rank for a plan.

    Args:
        moved: the tables that have moved or are about to.
    """
    new = {name: move.new for move in moved for name in move.names}
    peers: list[tuple[ShardedTable, list[UpdatePeers]]] = []
    exchanges: dict[str, Exchange] = {}
    for path, part in collections.items():
        tables = cast("dict[str, ShardedTable]", part._tables)
        tilings = {name: new.get((path, name), table.tiling) for name, table in tables.items()}
        for name, table in tables.items():
            places = tiles_or_empty(tilings[name], rank)
            peers.append((table, [new_peers(table, tilings[name], place, topology) for place in places]))
        exchanges[path] = _renewed(part.exchange, tilings, plan.plan[path], topology)
    return EndState(peers, exchanges, plan)


def joined(path: str, inner: str) -> str:
    """Return the module path of `inner` below `path`."""
    return f"{path}.{inner}" if path and inner else path or inner


def _renewed(
    old: Exchange, tilings: Mapping[str, Tiling], plan: EmbeddingModuleShardingPlan, topology: Topology
) -> Exchange:
    """Return a collection's exchange for new tilings of its tables."""
    each = old.each_id or old.exact
    layouts = []
    for name, tiling in tilings.items():
        sharding = plan[name]
        known = sharding.ids_per_bag
        fan_in = 1.0 if each else 2.0 if known is None else known
        layouts.append(TableLayout(name, tiling, fan_in, sharding.wire or Wire()))
    return old.over(topology, layouts)


def _store_plans(model: nn.Module, plan: ShardingPlan) -> None:
    """Store a new plan in the model and in every submodule that keeps a part of the old plan."""
    for path, kept in list(stored_plans(model)):
        parts = {inner: plan.plan.get(joined(path, inner), tables) for inner, tables in kept.plan.items()}
        report = plan.report if path == "" else None
        holder = model.get_submodule(path)
        # A plan over sharding groups of several sizes has no world size.
        size = None if kept.world_size is None else plan.world_size
        store_plan(holder, ShardingPlan(parts, size, kept.hosts and plan.hosts, report=report))
