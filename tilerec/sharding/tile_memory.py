"""Memory of a rank's tiles of a collection, allocated before the tables are converted."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.initial_values import fill_initial
from tilerec.modules.table import Table
from tilerec.sharding.head_rows import is_head
from tilerec.sharding.table import ShardedTable, tiles_or_empty
from tilerec.spec.tile import Tile, Tiling, rectangles
from tilerec.storage.flat_storage import flat_memory
from tilerec.storage.row_cache import RowCache
from tilerec.storage.row_file import rows_in_file

OWN_STORAGE_FROM_BYTES = 1 << 20
"""Minimum bytes of a rank's tiles of one table for a storage of their own."""

_NO_CACHES: Mapping[str, RowCache] = MappingProxyType({})

SHARED_STORAGE_BYTES = 4 << 20
"""Approximate bytes of a storage that smaller tables share."""


def has_pending_init(table: Table) -> bool:
    """Return True if a user's `init_fn` has yet to fill the table's values."""
    return table.weight.is_meta and table.config.init_fn is not None


@torch.no_grad()
def initialized_memory(
    module: TableCollection, tilings: Mapping[str, Tiling], rank: int, device: torch.device | None, seen: Set[int],
    caches: Mapping[str, RowCache] = _NO_CACHES,
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Return the memory of a rank's tiles by table, for `shard_collection`, filled where the user gave an `init_fn`.

    Args:
        seen: `id` of the rows of tables that an earlier collection shares: these get their memory there.
        caches: of tables in host memory or in files.
    """
    memory = tile_memory(module, tilings, rank, device, seen, caches)
    for name, table in module._tables.items():
        if has_pending_init(table) and name in memory:
            held = [tile for tile in rectangles(tilings[name]) if rank in tile.owners]
            for tile, own in zip(held, memory[name], strict=False):
                if own.numel() and not is_head(tilings[name], tile):  # the caller fills copies
                    fill_initial(own, table.config, table.rows.place.key, tile.r0, tile.c0)
    return memory


def tile_memory(
    module: TableCollection, tilings: Mapping[str, Tiling], rank: int, device: torch.device | str | None,
    seen: Set[int] = frozenset(), caches: Mapping[str, RowCache] = _NO_CACHES,
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Return the memory of this rank's tiles, side by side in storages of one dtype and device.

    A large table has its own storage, so its memory is freed when it moves. Small tables share storages of a few MiB,
    each of which is freed when all its tables have moved. Each tile of a table in files has a file, with room for its
    state. Copies of hot rows of a table behind a cache are on the cache's device.
    """
    places: dict[str, dict[int, Tensor]] = {}
    shapes: dict[tuple[torch.dtype, torch.device, str], list[tuple[str, int, Tile]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, table in module._tables.items():
        if (
            isinstance(table, ShardedTable) or id(table.rows) in seen
        ):  # another collection that shares the table provides the memory
            continue
        weight, tiling, cache = table.weight, tilings[name], caches.get(name)
        places[name] = {}
        by_device: dict[torch.device, list[tuple[str, int, Tile]]] = {}
        for k, tile in enumerate(tiles_or_empty(tiling, rank)):
            where = weight.device if not weight.is_meta else torch.device(device or "cpu")
            if cache is not None:
                where = torch.device("cpu") if cache.device is None or not is_head(tiling, tile) else cache.device
            if cache is not None and cache.folder is not None and not is_head(tiling, tile):
                rows, dim = _shape(tile)
                places[name][k] = rows_in_file(cache.folder, rows, table.rows.fields(dim), name)
            else:
                by_device.setdefault(where, []).append((name, k, tile))
        for where, own in by_device.items():
            size = sum(tile.rectangle.cells for _, _, tile in own) * weight.element_size()
            apart = size >= OWN_STORAGE_FROM_BYTES
            filled[weight.dtype, where] = filled.get((weight.dtype, where), 0) + size * (not apart)
            shared = f"\0{filled[weight.dtype, where] // SHARED_STORAGE_BYTES}"  # a name that no table has
            shapes.setdefault((weight.dtype, where, name if apart else shared), []).extend(own)
    for (dtype, where, _), group in shapes.items():
        try:
            memory = flat_memory([_shape(tile) for _, _, tile in group], dtype, where)
        except RuntimeError as error:
            heads = {name: head for name, _, _ in group if (head := tilings[name].head) is not None}
            here = sorted({name for name, _, tile in group if name in caches and not is_head(tilings[name], tile)})
            size = sum(tile.rectangle.cells for _, _, tile in group) * dtype.itemsize
            if heads and not here:
                most = max(heads, key=lambda name: len(heads[name].hot) * tilings[name].dim)
                raise ConfigError(
                    f"Table '{most}': no memory for {size / 2**30:.1f} GiB of this rank's rows, copies of "
                    f"{len(heads[most].hot):,} hot rows among them. Make fewer rows hot, or use more ranks."
                ) from error
            if not here:
                raise
            raise ConfigError(
                f"Table '{here[0]}': no host memory for {size / 2**30:.1f} GiB of this rank's rows of {here}, which "
                "the plan places there behind caches; place them on more hosts, on fewer ranks of each, or in files "
                "(compute_kernel 'key_value')."
            ) from error
        for (name, k, _), own_memory in zip(group, memory, strict=True):
            places[name][k] = own_memory
    return {name: [own[k] for k in sorted(own)] for name, own in places.items()}


def _shape(tile: Tile) -> tuple[int, int]:
    return tile.rectangle.rows, tile.rectangle.width
