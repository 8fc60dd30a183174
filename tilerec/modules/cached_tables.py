"""Tables in host memory behind a cache in device memory, for modules that are not sharded.

In a sharded model the plan says it: `ParameterSharding(compute_kernel="fused_uvm_caching", cache_params=...)`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.table import Table
from tilerec.spec.cache import CacheAlgorithm, CacheParams
from tilerec.storage.cached import RowCache
from tilerec.storage.table_rows import TableRows


def cache_tables(
    module: nn.Module,
    load_factor: float = 0.2,
    algorithm: CacheAlgorithm | str = CacheAlgorithm.LRU,
    device: torch.device | str | None = None,
    *,
    reserved_memory: float | None = None,
) -> nn.Module:
    """Keep the tables below a module in host memory, and the rows that batches name in a cache.

    Rows have their optimizer's state with them. Results are the same bits as without a cache. Attach the optimizer
    before or after (`apply_optimizer_in_backward`); without one, tables can be read and not trained. A table that has
    a cache gets a new one.

    Args:
        module: a table, a collection, or anything above; `.to(device)` then moves caches and leaves rows where they
            are. Names of parameters and state stay.
        load_factor: lines per row of a table, in (0, 1].
        algorithm: "lru" or "lfu"; see `CacheAlgorithm`.
        device: of the caches, and of the batches then. None: where the tables are; in host memory that is a
            simulation, which saves nothing and shows how a cache would do (`module.cache_stats()`).
        reserved_memory: bytes of the device to leave free.

    Returns:
        The module.

    Raises:
        ConfigError: a number outside its range; there is no table.
    """
    params = CacheParams(algorithm, load_factor, reserved_memory)
    where = None if device is None else torch.device(device)
    found = list(rows_below(module))
    if not found:
        raise ConfigError(
            f"cache_tables: {type(module).__name__} has no table; give it a collection, or what is above one."
        )
    for table, rows in found:
        set_cache(table, rows, params, where)
    return module


def uncache_tables(module: nn.Module) -> nn.Module:
    """Write all newest rows to their tables, and read and update them there from now on."""
    for table, rows in rows_below(module):
        if rows.cache is not None:
            device = rows.cache.device
            rows.settle()
            rows.cache = None
            if device is not None and device != rows.leaf.device:
                table.to(device)
    return module


def flush_caches(module: nn.Module) -> None:
    """Write all newest rows, and their optimizer's state, to their tables.

    Whatever goes by a table's name does this by itself: `table.weight`, `state_dict()` of module and optimizer,
    checkpoints, resharding, copies. A tensor that was kept (`w = table.weight`) shows rows as they were at the last
    flush, and must be flushed before it is written to.
    """
    for _, rows in rows_below(module):
        rows.settle()


def rows_below(module: nn.Module) -> Iterator[tuple[Table, TableRows]]:
    """The distinct rows of the tables below a module, each with one of its tables."""
    seen: set[int] = set()
    for table in module.modules():
        if isinstance(table, Table):
            for rows in table._all_rows():
                if id(rows) not in seen:
                    seen.add(id(rows))
                    yield table, rows


def set_cache(table: Table, rows: TableRows, params: CacheParams | None, device: torch.device | None) -> None:
    """Give rows a cache; what was on a GPU goes to host memory. `params` None: spare lines only."""
    rows.settle()
    leaf = rows.leaf
    if device is None and leaf.device.type not in ("cpu", "meta"):
        device = leaf.device
    if device is not None and device.type == "cpu" and leaf.device.type == "cpu":
        device = None
    rows.cache = None
    if leaf.device.type not in ("cpu", "meta"):
        leaf.data = leaf.data.cpu()
        table._bind()  # the optimizer's state follows
    rows.cache = RowCache(rows.name, params, device)
