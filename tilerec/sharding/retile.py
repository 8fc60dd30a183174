"""Replace a sharded table's tiles by those of another tiling, at once.

Nouns
  row state    tensors per row that belong to other objects (`RowState`); they move together with the table's tiles

These stay the same objects: the table, its first leaf, as many further leaves as there are both before and after, and
the hyper-parameters (`SharedParamGroup`). The gradient sinks (`TileRows`) are new, so the backward of a lookup in the
old tiles finds no sink.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilerec.sharding.changed_rows import ChangedRows
from tilerec.sharding.head_rows import names_of
from tilerec.sharding.table import ShardedTable, leaf_name, peers_of, tiles_or_empty
from tilerec.sharding.update import TileRows, UpdatePeers
from tilerec.spec.tile import Tile, Tiling
from tilerec.spec.topology import Topology
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.table_rows import TilePosition
from tilerec.torch_private import is_ddp_ignored


class RowState(ABC):
    """State per row of a sharded table that is not optimizer state, such as ids of rows and when they were last seen.

    Registered in `ShardedTable.row_states`, it moves with the table's rows under any tiling. If a row is in several
    tiles (column blocks, replicas), each tile has a copy of its state.
    """

    @abstractmethod
    def parts(self) -> Mapping[str, Sequence[Tensor]]:
        """Return by name one tensor `[rows, ...]` per tile of this rank, in tile order. All ranks have equal names."""

    @abstractmethod
    def take(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Replace the state by `parts`, one tensor per new tile; the new tiles are in place. Must not fail."""


def new_peers(table: ShardedTable, tiling: Tiling, place: Tile, topology: Topology) -> UpdatePeers:
    """Return the ranks that take part in a tile's updates under a tiling."""
    old = table.tile_rows[0].peers
    return peers_of(tiling, place, old.group, topology, old.exact, old.teams)


def replace_tiles(
    table: ShardedTable, tiling: Tiling, peers: Sequence[UpdatePeers], memory: Sequence[Tensor],
    state: Sequence[dict[str, Tensor]], grads: Sequence[Tensor | None], touched: Sequence[ChangedRows | None],
) -> list[nn.Parameter]:  # fmt: skip
    """Replace the tiles of this table and of all tables tied to it; nothing is copied.

    Args:
        peers, memory, state, grads, touched: for each tile of `tiles_or_empty`: its `UpdatePeers`, its memory
            `[rows, width]`, the optimizer's slots and counts (empty without an optimizer), its `.grad`, and the rows
            that replicas have yet to average (None if they never differ).

    Returns:
        The leaves, old objects first. Old leaves that are no longer used become empty.
    """
    rank, before, old = table.tile_rows[0].peers.group.rank, table.leaves(), table.tile_rows
    places, first = tiles_or_empty(tiling, rank), table.leaves()[0]
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
        names = names_of(tiling, place)
        made.append(_like(old[min(i, len(old) - 1)], leaf, place, names, peers[i], state[i], fresh=i >= len(old)))
        made[-1].touched = touched[i]
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
    old: TileRows, leaf: nn.Parameter, place: Tile, names: Tensor | None, peers: UpdatePeers, state: dict[str, Tensor],
    fresh: bool,
) -> TileRows:  # fmt: skip
    """Return the rows of a new tile, with the training settings of the old ones."""
    rows, cache = TileRows.__new__(TileRows), old.cache or old.cache_beside
    own = {
        **old.settings(),
        "cache": cache if names is None else None,
        "cache_beside": cache if names is not None else None,
        "place": TilePosition(old.place.key, place.r0, place.c0),
        "names": names,
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
    """Give a leaf other memory, possibly of another shape, and drop its gradient."""
    leaf.grad = None
    if not memory.is_meta and not leaf.is_meta:
        # A graph or a hook may keep the leaf's gradient accumulator, which stores the old shape. torch creates another
        # accumulator when the dtype changes.
        other = torch.float16 if memory.dtype != torch.float16 else torch.float32
        leaf.data = memory.new_empty(0, dtype=other)
    leaf.data = memory
