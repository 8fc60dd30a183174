"""A sharded table's new tiles: they take the place of the old ones in one go.

Nouns
  beside    what lies beside every tile, row by row, and belongs to somebody else (`RowState`): the table's tiles do not
            move without it

What stays the same object: the table, its first leaf, further leaves as far as there are as many before and after,
the optimizer's numbers (`HyperGroup`). What is new: what takes gradients (`TileRows`), so that a backward of a lookup
in the old tiles finds nobody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilerec.sharding.layout import rectangles
from tilerec.sharding.table import ShardedTable, leaf_name, peers_of
from tilerec.sharding.update import Peers, TileRows
from tilerec.spec.tile import Tile, Tiling
from tilerec.spec.topology import Topology
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.table_rows import Place
from tilerec.torch_private import is_ddp_ignored


class RowState(ABC):
    """Tensors of numbers per row of a sharded table that are no optimizer's: ids of rows, when they were last seen.

    In `ShardedTable.row_states`, they move with the table's rows, whatever its tiling. Where a row lies in several
    tiles (column blocks, replicas), each has the same numbers.
    """

    @abstractmethod
    def parts(self) -> Mapping[str, Sequence[Tensor]]:
        """By name, one tensor `[rows, ...]` for each of this rank's tiles, in their order. All ranks have the names."""

    @abstractmethod
    def take(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """The same beside the table's new tiles, which are in place. Must not fail."""


def places_of(tiling: Tiling, rank: int) -> tuple[Tile, ...]:
    """A rank's tiles, or the empty one that stands for none."""
    own = tuple(tile for tile in rectangles(tiling) if rank in tile.owners)
    return own or (Tile(0, 0, 0, tiling.dim, ()),)


def new_peers(table: ShardedTable, tiling: Tiling, place: Tile, topology: Topology) -> Peers:
    """Whom a tile's updates concern under a tiling."""
    old = table.tile_rows[0].peers
    if not place.owners:
        return Peers(
            old.group,
            (old.group.rank,),
            ((old.group.rank, 0, tiling.dim),),
            (),
            old.exact,
            old.teams,
        )
    return peers_of(tiling, place, old.group, topology, old.exact, old.teams)


def take_tiles(
    table: ShardedTable,
    tiling: Tiling,
    peers: Sequence[Peers],
    memory: Sequence[Tensor],
    state: Sequence[dict[str, Tensor]],
    grads: Sequence[Tensor | None],
) -> list[nn.Parameter]:
    """Put new tiles in the place of the old ones, in this table and in all that are tied to it; nothing is copied.

    Args:
        peers, memory, state, grads: of each of `places_of`: whom it concerns, `[rows, width]`, the optimizer's slots
            and counts (empty without one), and `.grad`.

    Returns:
        The leaves, old objects first. Those that are not needed any more hold nothing.
    """
    rank, before, old = table.tile_rows[0].peers.group.rank, table.leaves(), table.tile_rows
    places, first = places_of(tiling, rank), table.leaves()[0]
    made: list[TileRows] = []
    for i, place in enumerate(places):
        if i < len(before):
            leaf = before[i]
            replace_memory(leaf, memory[i])
        else:
            leaf = nn.Parameter(memory[i].data, requires_grad=first.requires_grad)
            if is_ddp_ignored(first):
                cast(Any, leaf)._ddp_ignored = True
        leaf.grad = grads[i]
        made.append(_like(old[min(i, len(old) - 1)], leaf, place, peers[i], state[i], fresh=i >= len(old)))
    made[0].skipped_rows += sum(rows.skipped_rows for rows in old[len(places) :])
    for i, leaf in enumerate(before[len(places) :], start=len(places)):
        replace_memory(leaf, leaf.new_empty(0, tiling.dim))
        vars(first).pop(str(i), None)
        cast(Any, leaf)._tilerec_sink = -1
    for holder in list(old[0].holders):
        assert isinstance(holder, ShardedTable)
        for name in holder.leaf_names:
            holder._parameters.pop(name)
        for i, rows in enumerate(made):
            holder._parameters[leaf_name(i)] = rows.leaf
        holder.tiling = tiling
        holder.tiles = tuple(place for place in places if place.owners)
        holder.tile_rows = list(made)
        holder.leaf_names = tuple(leaf_name(i) for i in range(len(made)))
        holder.rows = made[0]
        holder._bind()
    return [rows.leaf for rows in made]


def _like(
    old: TileRows, leaf: nn.Parameter, place: Tile, peers: Peers, state: dict[str, Tensor], fresh: bool
) -> TileRows:
    """Rows of a new tile, trained as the old ones are."""
    rows = TileRows.__new__(TileRows)
    own = {
        **old.__getstate__(),
        "place": Place(old.place.key, place.r0, place.c0),
        "peers": peers,
        "state": state,
    }
    rows.__setstate__({**own, "skipped_rows": 0} if fresh else own)
    rows.bind(leaf)
    if fresh and rows.cache is not None:
        rows.cache.stats = CacheStats()
    return rows


@torch.no_grad()
def replace_memory(leaf: nn.Parameter, memory: Tensor) -> None:
    """Give a leaf other memory, of another shape as the case may be; its gradient goes."""
    leaf.grad = None
    if not memory.is_meta and not leaf.is_meta:
        # A graph or a hook may keep the leaf's gradient accumulator, which knows the old shape; torch makes another
        # one when the type changes.
        other = torch.float16 if memory.dtype != torch.float16 else torch.float32
        leaf.data = memory.new_empty(0, dtype=other)
    leaf.data = memory
