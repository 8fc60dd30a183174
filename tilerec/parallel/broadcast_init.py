"""Broadcast of initial values from rank 0, as in torch's `DistributedDataParallel`.

Ranks may seed their generators differently, and only rank 0 may have read a pretrained table. All ranks take the keys
of rank 0's random initial values, so tables on meta need no further data. Values are sent only for tables whose bits
differ between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.sharding.broadcast import broadcast_tensor, tensor_digest
from tilerec.sharding.table import ShardedTable
from tilerec.storage.table_rows import TilePosition


@torch.no_grad()
def broadcast_from_rank_0(group: Group, collections: Mapping[str, TableCollection], tables: Sequence[Table]) -> None:
    """Broadcast rank 0's seeds, weights and optimizer state. Collective; sends only digests if all ranks agree."""
    if group.size == 1:
        return
    own = [(table.rows.place.key, [tensor_digest(tensor) for tensor in _tensors(table)]) for table in tables]
    seeds = {path: part.seed for path, part in collections.items()}
    everyone = cast("list[tuple[dict[str, int], list[Any]]]", group.all_gather_object((seeds, own)))
    first_seeds, first = everyone[0]
    for path, part in collections.items():
        part.seed = first_seeds[path]
    for t, (table, (key, _)) in enumerate(zip(tables, first, strict=True)):
        table.rows.place = TilePosition(key, table.rows.place.row_offset, table.rows.place.column_offset)
        differing = [facts[1][t][1] != first[t][1] for facts in everyone]
        if any(differing):
            for tensor in _tensors(table):
                broadcast_tensor(group, tensor)
    for part in collections.values():
        for table in part._tables.values():
            table.seed = part.seed


def _tensors(table: Table) -> list[Tensor]:
    """Return the weight and the state, without tensors on meta, in one order on all ranks."""
    state = table.rows.state
    tensors = [table.weight.detach(), *(state[name] for name in sorted(state))]
    return [tensor for tensor in tensors if not tensor.is_meta]


@torch.no_grad()
def broadcast_to_replicas(group: Group, tables: Sequence[Table]) -> None:
    """Overwrite all replicas of each tile with the values of the lowest rank that owns it. Collective.

    This is for values that a user's function draws on each rank. Only torch's own generators are seeded, so functions
    with other generators draw different values. Sends only digests if the replicas agree.
    """
    own: dict[tuple[int, int, int], tuple[Tensor, tuple[int, ...]]] = {}
    for t, table in enumerate(tables):
        assert isinstance(table, ShardedTable)
        for leaf, tile in zip(table.leaves(), table.tiles, strict=False):
            if len(tile.owners) > 1 and not leaf.is_meta:
                own[t, tile.r0, tile.c0] = leaf.detach(), tile.owners
    digests = {place: tensor_digest(values) for place, (values, _) in own.items()}
    everyone = cast("list[dict[tuple[int, int, int], Any]]", group.all_gather_object(digests))
    for place, (values, (first, *others)) in sorted(own.items(), key=lambda item: item[0]):
        if len({everyone[rank][place] for rank in (first, *others)}) == 1:
            continue
        broadcast_tensor(group, values, (first, *others))
