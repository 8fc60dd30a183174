"""`check_replicas`: bitwise comparison of the copies of each tile."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.sharding.table import ShardedTable
from tilerec.sharding.update import TileRows

_CHUNK = 1 << 22
"""Elements per step of a digest; the check needs 2 x 8 bytes of memory for each of them."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

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
        _compare(cast("list[dict[_Tile, list[int]]]", group.all_gather_object(own)))


def _digests(rows: TileRows) -> dict[_Tile, list[int]]:
    rows.settle()
    place = rows.place
    tensors = {"weight": rows.leaf.detach(), **rows.state}
    return {
        (rows.name, place.row_offset, place.column_offset, name): _digest(tensor)
        for name, tensor in tensors.items()
    }


def _digest(tensor: Tensor) -> list[int]:
    """Return two sums over the tensor's words modulo 2^64: plain, and weighted by odd positions 1, 3, 5, ..."""
    words = tensor.reshape(-1).view(_WORDS[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for begin in range(0, words.numel(), _CHUNK):
        own = words[begin : begin + _CHUNK].to(torch.int64)
        places = torch.arange(2 * begin + 1, 2 * (begin + own.numel()), 2, device=tensor.device)
        sums += torch.stack((own.sum(), (own * places).sum()))
    return sums.tolist()


def _compare(digests_by_rank: list[dict[_Tile, list[int]]]) -> None:
    by_tile: dict[_Tile, dict[tuple[int, ...], list[int]]] = {}
    for rank, own in enumerate(digests_by_rank):
        for tile, digest in own.items():
            by_tile.setdefault(tile, {}).setdefault(tuple(digest), []).append(rank)
    for (table, row, column, tensor), ranks_by_digest in by_tile.items():
        if len(ranks_by_digest) > 1:
            holders = " and ".join(
                f"ranks {ranks}" if len(ranks) > 1 else f"rank {ranks[0]}"
                for ranks in ranks_by_digest.values()
            )
            raise ConfigError(
                f"Table '{table}': {tensor} of the tile at row {row}, column {column} differs between {holders}; "
                "expected the same bits. One rank has changed its copy alone. Load a checkpoint on all ranks, and look "
                "for code that writes tables or steps their optimizer on some ranks only."
            )
