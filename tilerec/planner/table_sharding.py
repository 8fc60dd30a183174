"""The sharding of one table in the plan: its kernel, its storage, and a sharding type that its constraints allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.workload import TableWork
from tilerec.planner.tables import PlannedTable
from tilerec.sharding.strategies import STRATEGIES, grid, row_wise, table_row_wise
from tilerec.spec.cache import CacheParams
from tilerec.spec.plan import (
    HOST_KERNELS,
    KERNELS_IN_USE,
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
)
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

_WITH_SIZES: dict[ShardingType, Callable[..., Tiling]] = {
    ShardingType.ROW_WISE: row_wise,
    ShardingType.TABLE_ROW_WISE: table_row_wise,
    ShardingType.GRID_SHARD: grid,
}
"""Types whose ranges of rows may be uneven."""


def with_table_fields(
    made: ParameterSharding, table: PlannedTable, limits: ParameterConstraints, topology: Topology
) -> ParameterSharding:
    """Return the sharding with its kernel, its ids per bag, and a sharding type that the constraints allow."""
    allowed = limits.types_allowed()
    kind = made.kind if not allowed or made.kind in allowed else _allowed_type(made, allowed, topology)
    kernel = _kernel_of(table, limits)
    ids_per_bag = limits.ids_per_bag() if made.ids_per_bag is None else made.ids_per_bag
    if (kind, kernel, ids_per_bag) == (made.kind, made.kernel, made.ids_per_bag):
        return made
    # All fields have been checked; constructing a new record would check up to a thousand ranks again.
    finished = ParameterSharding.__new__(ParameterSharding)
    vars(finished).update(vars(made), sharding_type=kind, compute_kernel=kernel, ids_per_bag=ids_per_bag)
    if kernel is EmbeddingComputeKernel.KEY_VALUE:
        vars(finished).update(cache_params=limits.cache_params, key_value_params=limits.key_value_params)
    if kernel is not None and kernel not in KERNELS_IN_USE:
        return replace(finished)  # its constructor warns
    return finished


def behind_cache(made: ParameterSharding, work: TableWork, limits: ParameterConstraints) -> ParameterSharding:
    """Return the sharding with its rows in host memory, or in files."""
    if work.files:
        return replace(
            made,
            compute_kernel=EmbeddingComputeKernel.KEY_VALUE,
            cache_params=limits.cache_params or CacheParams(load_factor=work.load_factor),
            key_value_params=limits.key_value_params,
        )
    if not work.load_factor:
        return replace(made, compute_kernel=EmbeddingComputeKernel.FUSED_UVM)
    return replace(
        made,
        compute_kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING,
        cache_params=limits.cache_params or CacheParams(load_factor=work.load_factor),
    )


def _allowed_type(made: ParameterSharding, allowed: tuple[ShardingType, ...], topology: Topology) -> ShardingType:
    """Return the first allowed type that yields this tiling; rows over all ranks of one host have several types."""
    tiling = made.tiling
    assert tiling is not None
    for kind in allowed:
        strategies = [STRATEGIES[kind]]
        if kind in _WITH_SIZES:
            sizes = [r1 - r0 for r0, r1 in pairwise(tiling.blocks[0].cuts)]
            strategies.append(partial(_WITH_SIZES[kind], sizes=sizes))
        for strategy in strategies:
            try:
                if strategy("", tiling.rows, tiling.dim, made.ranks, topology) == tiling:
                    return kind
            except ConfigError:
                continue  # the type allows other ranks or another number of pieces
    return made.kind


def _kernel_of(table: PlannedTable, limits: ParameterConstraints) -> EmbeddingComputeKernel | None:
    """Return the table's kernel; None if the optimizer attached at sharding will determine it.

    Raises:
        ConfigError: an optimizer is attached, but the constraints allow only "dense".
    """
    allowed = limits.kernels_allowed()
    dense = EmbeddingComputeKernel.DENSE
    if not allowed:
        return table.kernel
    # Device memory first: if both are allowed, the chosen option moves rows to host memory.
    updating = sorted(
        (k for k in allowed if k is not dense), key=lambda k: (k in HOST_KERNELS, k not in KERNELS_IN_USE)
    )
    if table.kernel is None and dense in allowed:
        return None if updating else dense
    if not updating:
        raise ConfigError(
            f"{table}: an optimizer is attached, so its kernel is 'fused', which compute_kernels "
            f"{[k.value for k in allowed]} does not allow; allow 'fused', or do not attach an optimizer."
        )
    return updating[0]


def check_kernel(table: PlannedTable, sharding: ParameterSharding, limits: ParameterConstraints) -> None:
    _kernel_of(table, limits)
    if table.optimizer is not None and sharding.kernel is EmbeddingComputeKernel.DENSE:
        raise ConfigError(
            f"{table}: an optimizer is attached, so its kernel is 'fused', but its pinned sharding has 'dense'. Leave "
            "compute_kernel out."
        )
