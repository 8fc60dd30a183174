"""Tables in host memory or in files behind a cache in device memory, for modules that are not sharded.

In a sharded model, the plan sets the cache: `ParameterSharding(compute_kernel="fused_uvm_caching", cache_params=...)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.table import Table
from tilerec.spec.cache import CacheAlgorithm, CacheParams
from tilerec.spec.key_value import KeyValueParams
from tilerec.storage.row_cache import RowCache
from tilerec.storage.row_file import file_of, in_records, rows_in_file
from tilerec.storage.table_rows import TableRows


def cache_tables(
    module: nn.Module,
    load_factor: float = 0.2,
    algorithm: CacheAlgorithm | str = CacheAlgorithm.LRU,
    device: torch.device | str | None = None,
    *,
    reserved_memory: float | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Keep the tables below a module in host memory or in files, and cache the rows that batches read.

    The cache holds rows together with their optimizer state. Results are bitwise the same as without a cache. Attach
    the optimizer before or after (`apply_optimizer_in_backward`). Without one, tables can be read but not trained. A
    table that already has a cache gets a new one.

    Args:
        module: a table, a collection, or any module that contains one. Afterwards `.to(device)` moves caches and leaves
            the rows in place. Names of parameters and state do not change.
        load_factor: cache lines per row of a table, in (0, 1].
        algorithm: "lru" or "lfu"; see `CacheAlgorithm`.
        device: of the caches, and of the batches from then on. None: the tables' device. In host memory the cache is a
            simulation: it saves no memory, and shows how a cache would perform (`module.cache_stats()`).
        reserved_memory: bytes of the device to leave free.
        folder: of files for the rows and their optimizer's state (`KeyValueParams`); tables on meta get their initial
            values there. None: rows are in host memory.

    Returns:
        The module.

    Raises:
        ConfigError: a number is outside its range, or there is no table.
        FileError: the folder does not exist or cannot be written, or has not enough space. Tables before it have moved.
    """
    files = None if folder is None else KeyValueParams(folder).ssd_storage_directory
    params = CacheParams(algorithm, load_factor, reserved_memory)
    where = None if device is None else torch.device(device)
    found = list(iter_table_rows(module))
    if not found:
        raise ConfigError(
            f"cache_tables: got a {type(module).__name__} without tables; expected a collection, or a module that "
            "contains one."
        )
    for table, rows in found:
        set_cache(table, rows, params, where, files)
    return module


def uncache_tables(module: nn.Module) -> nn.Module:
    """Write all cached rows to their tables and remove the caches; tables are then read and updated directly."""
    for table, rows in iter_table_rows(module):
        cache = rows.cache or rows.cache_beside
        if cache is not None:
            rows.settle()
            in_files = rows.cache is not None and cache.folder is not None
            rows.cache = rows.cache_beside = None
            if in_files:
                _store(table, rows, [tensor.clone() for tensor in rows.host()])
            if cache.device is not None:
                table.to(cache.device)
    return module


def flush_caches(module: nn.Module) -> None:
    """Write all cached rows, and their optimizer state, to their tables.

    Every access through a table's name flushes automatically: `table.weight`, `state_dict()` of module and optimizer,
    checkpoints, resharding, copies. A saved reference (`w = table.weight`) shows the rows of the last flush. Flush
    before you write to it.
    """
    for _, rows in iter_table_rows(module):
        rows.settle()
        rows.about_to_write()


def iter_table_rows(module: nn.Module) -> Iterator[tuple[Table, TableRows]]:
    """Yield the distinct rows of the tables below a module, each with one of its tables."""
    seen: set[int] = set()
    for table in module.modules():
        if isinstance(table, Table):
            for rows in table._all_rows():
                if id(rows) not in seen:
                    seen.add(id(rows))
                    yield table, rows


def set_cache(
    table: Table, rows: TableRows, params: CacheParams | None, device: torch.device | None, folder: str | None = None
) -> None:  # fmt: skip
    """Set a cache for rows, and move them from a GPU to host memory, or to files of a folder.

    Args:
        params: None: only spare lines.
    """
    rows.settle()
    leaf = rows.leaf
    if device is None and leaf.device.type not in ("cpu", "meta"):
        device = leaf.device
    if device is not None and device.type == "cpu" and leaf.device.type == "cpu":
        device = None
    if rows.names is not None:  # copies of hot rows are on the device
        rows.cache_beside = RowCache(rows.name, params, device, folder)
        if device is not None:
            leaf.data = leaf.data.to(device)
            table._bind()
        return
    rows.cache = None
    if leaf.device.type not in ("cpu", "meta"):
        leaf.data = leaf.data.cpu()
        table._bind()  # the optimizer's state follows
    if folder is not None and leaf.is_meta:
        if type(table) is not Table:
            raise ConfigError(
                f"Table '{rows.name}': got a sharded table on meta; expected memory. Plan it with compute_kernel "
                "'key_value'."
            )
        memory = rows_in_file(folder, leaf.shape[0], rows.fields(leaf.shape[1]), rows.name)
        table.weight = nn.Parameter(memory, requires_grad=leaf.requires_grad)  # makes the optimizer's state, too
        table.reset_parameters()
    elif folder is not None:
        _store(table, rows, in_records(rows.host(), (), folder, rows.name) if leaf.numel() else rows.host())
    elif file_of(leaf) is not None:
        _store(table, rows, [tensor.clone() for tensor in rows.host()])
    rows.cache = RowCache(rows.name, params, device, folder)


@torch.no_grad()
def _store(table: Table, rows: TableRows, host: Sequence[Tensor]) -> None:
    """Give rows and slots other memory, which has their values."""
    rows.about_to_write()
    rows.leaf.data = host[0]
    names = [slot.name for slot in rows.spec.slots] if rows.spec is not None else []
    rows.state.update(zip(names, host[1:], strict=True))
    table._bind()
