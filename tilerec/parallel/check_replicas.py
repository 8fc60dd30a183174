"""`check_replicas`: bitwise comparison of the copies of each tile, and of hot rows with their copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.sharding.broadcast import tensor_digest
from tilerec.sharding.head_rows import first_other_row
from tilerec.sharding.table import ShardedTable
from tilerec.sharding.update import TileRows

_Tile = tuple[str, int, int, str]
"""Table name, first row, first column, tensor name."""

_Digests = dict[_Tile, tuple[int, int]]
_Row = tuple[str, str, int]
"""Table name, tensor name, row."""


@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Raise on every rank if the copies of a tile differ in their bits. Collective; call it between two steps.

    The check covers weights and the attached optimizer's state. It reads every replicated tile once, and ranks
    exchange 16 bytes per tensor. Copies of hot rows are compared with their rows, too.

        if step % 1000 == 0:
            check_replicas(model)

    The check skips copies that sharding groups average (`DMPCollection` without `sync="exact"`): they differ between
    two averages by design.

    Raises:
        ConfigError: copies differ. The error names the first such table, its tensor, and the ranks.
    """
    groups: dict[int, tuple[Group, list[TileRows], list[tuple[TileRows, TileRows]]]] = {}
    seen: set[int] = set()
    for part in model.modules():
        if isinstance(part, ShardedTable):
            _, found, hot = groups.setdefault(id(part.ranks), (part.ranks, [], []))
            heads = [rows for rows in part.tile_rows if rows.names is not None]
            for rows in part.tile_rows:
                if id(rows) not in seen and len(rows.peers.replicas) > 1:
                    found.append(rows)
                if id(rows) not in seen and rows.names is None:
                    hot += [(head, rows) for head in heads]
                seen.add(id(rows))
    for group, found, hot in groups.values():
        group.begin("check_replicas")
        own = {key: digest for rows in found for key, digest in _digests(rows).items()}
        others = [(tile.name, *other) for head, tile in hot if (other := first_other_row(head, tile)) is not None]
        by_rank = cast("list[tuple[_Digests, list[_Row]]]", group.all_gather_object((own, others)))
        _compare([digests for digests, _ in by_rank])
        _raise_first([rows for _, rows in by_rank])


def _digests(rows: TileRows) -> dict[_Tile, tuple[int, int]]:
    rows.settle()
    place = rows.place
    tensors = {"weight": rows.leaf.detach(), **rows.state}
    return {
        (rows.name, place.row_offset, place.column_offset, name): tensor_digest(tensor)
        for name, tensor in tensors.items()
    }


def _compare(digests_by_rank: Sequence[_Digests]) -> None:
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


def _raise_first(rows_by_rank: Sequence[list[_Row]]) -> None:
    """Raise for the first hot row that differs from its copies on some rank."""
    for rank, rows in enumerate(rows_by_rank):
        for table, tensor, row in rows:
            raise ConfigError(
                f"Table '{table}': {tensor} of the hot row {row} on rank {rank} differs from its copies; expected the "
                "same bits. Code has written rows without their copies, by hand or by torch's dcp.load. Load "
                "the state dicts of the model and of its optimizer on all ranks, which fills the copies."
            )
