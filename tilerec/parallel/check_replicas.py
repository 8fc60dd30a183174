"""`check_replicas`: do the copies of each tile still have the same bits?"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.sharding.table import ShardedTable
from tilerec.sharding.update import TileRows

_CHUNK = 1 << 22
"""Elements that are digested at a time: what the check needs beside the tables is 8 bytes of each, twice."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Tile = tuple[str, int, int, str]
"""Table, first row and column, and which tensor."""


@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Raise, on every rank, where ranks that hold the same tile of a table differ in its bits.

    Weights and the attached optimizer's state are compared, by 16 bytes of each tensor. All ranks call it, between two
    steps, as often as you like: it reads every replicated tile once.

        if step % 1000 == 0:
            check_replicas(model)

    Copies that sharding groups average (`DMPCollection` without `sync="exact"`) differ between two averages by design,
    and are not compared.

    Raises:
        ConfigError: copies differ: the first such table, its tensor, and the ranks.
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
    """Two sums of the tensor's words modulo 2^64: plain, and each times its odd place."""
    words = tensor.reshape(-1).view(_WORDS[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for begin in range(0, words.numel(), _CHUNK):
        own = words[begin : begin + _CHUNK].to(torch.int64)
        places = torch.arange(2 * begin + 1, 2 * (begin + own.numel()), 2, device=tensor.device)
        sums += torch.stack((own.sum(), (own * places).sum()))
    return sums.tolist()


def _compare(everyone: list[dict[_Tile, list[int]]]) -> None:
    by_tile: dict[_Tile, dict[tuple[int, ...], list[int]]] = {}
    for rank, own in enumerate(everyone):
        for tile, digest in own.items():
            by_tile.setdefault(tile, {}).setdefault(tuple(digest), []).append(rank)
    for (table, row, column, tensor), camps in by_tile.items():
        if len(camps) > 1:
            told = " and ".join(
                f"ranks {ranks}" if len(ranks) > 1 else f"rank {ranks[0]}" for ranks in camps.values()
            )
            raise ConfigError(
                f"Table '{table}': {tensor} of the tile at row {row}, column {column} differs between {told}; expected "
                "the same bits. A rank has changed its copy on its own: load a checkpoint on all ranks, and look for "
                "code that writes tables, or steps their optimizer, on some ranks only."
            )
