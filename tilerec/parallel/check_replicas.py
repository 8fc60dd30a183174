"""`check_replicas`: bitwise comparison of the copies of each tile."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.sharding.broadcast import tensor_digest
from tilerec.sharding.table import ShardedTable
from tilerec.sharding.update import TileRows

_Tile = tuple[str, int, int, str]
"""Table name, first row, first column, tensor name."""


@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Raise on every rank if the copies of a tile differ in their bits. Collective; call it between two steps.

    The check covers weights and the attached optimizer's state. It reads every replicated tile once, and ranks
    exchange 16 bytes per tensor.

        if step % 1000 == 0:
            check_replicas(model)

    The check skips copies that sharding groups average (`DMPCollection` without `sync="exact"`): they differ between
    two averages by design.

    Raises:
        ConfigError: copies differ. The error names the first such table, its tensor, and the ranks.
    """
    groups: dict[int, tuple[Group, list[TileRows]]] = {}
    seen: set[int] = set()
    for part in model.modules():
        if isinstance(part, ShardedTable):
            _, found = groups.setdefault(id(part.ranks), (part.ranks, []))
            for rows in part.tile_rows:
                if id(rows) not in seen and len(rows.peers.replicas) > 1:
                    found.append(rows)
                seen.add(id(rows))
    for group, found in groups.values():
        group.begin("check_replicas")
        own = {key: digest for rows in found for key, digest in _digests(rows).items()}
        _compare(cast("list[dict[_Tile, tuple[int, int]]]", group.all_gather_object(own)))


def _digests(rows: TileRows) -> dict[_Tile, tuple[int, int]]:
    rows.settle()
    place = rows.place
    tensors = {"weight": rows.leaf.detach(), **rows.state}
    return {
        (rows.name, place.row_offset, place.column_offset, name): tensor_digest(tensor)
        for name, tensor in tensors.items()
    }


def _compare(digests_by_rank: list[dict[_Tile, tuple[int, int]]]) -> None:
    by_tile: dict[_Tile, dict[tuple[int, int], list[int]]] = {}
    for rank, own in enumerate(digests_by_rank):
        for tile, digest in own.items():
            by_tile.setdefault(tile, {}).setdefault(digest, []).append(rank)
    for (table, row, column, tensor), ranks_by_digest in by_tile.items():
        if len(ranks_by_digest) > 1:
            holders = " and ".join(
                f"ranks {ranks}" if len(ranks) > 1 else f"rank {ranks[0]}" for ranks in ranks_by_digest.values()
            )
            raise ConfigError(
                f"Table '{table}': {tensor} of the tile at row {row}, column {column} differs between {holders}; "
                "expected the same bits. One rank has changed its copy alone. Load a checkpoint on all ranks, and look "
                "for code that writes tables or steps their optimizer on some ranks only."
            )
