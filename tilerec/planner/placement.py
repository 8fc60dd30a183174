"""Placements that the constraints of one table allow on a topology: memory, ranks and sharding types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.ways import COLUMN_SPLITS, GRIDS, MIN_PARTITION
from tilerec.planner.tables import PlannedTable
from tilerec.spec.plan import HOST_KERNELS, EmbeddingComputeKernel, ShardingType
from tilerec.spec.topology import Topology


def allowed_storages(
    table: PlannedTable, limits: ParameterConstraints, topology: Topology, *, offload: bool
) -> tuple[bool, bool]:
    """Return whether device memory, and whether slower memory behind a cache, may hold the table.

    Args:
        offload: host memory may also hold tables without constraints on the memory.
    """
    if limits.enforce_hbm:
        return True, False
    # A CPU has no memory below its own but files.
    on_cpu = topology.compute_device == "cpu"
    slower = (EmbeddingComputeKernel.KEY_VALUE,) if on_cpu else HOST_KERNELS
    kernels = limits.kernels_allowed()
    if not kernels:
        stays = table.cached is not None and (table.optimizer is not None or not table.trained)
        return (False, True) if stays and (table.files or not on_cpu) else (True, offload and not on_cpu)
    behind = any(kernel in slower for kernel in kernels)
    return any(kernel not in slower for kernel in kernels), behind


def allowed_ranks(limits: ParameterConstraints, topology: Topology) -> tuple[int, ...] | None:
    """Return the ranks that may hold pieces of the table, ascending; None for all."""
    if limits.ranks is None and limits.hosts is None:
        return None
    everyone = range(topology.world_size)
    allowed = set(everyone if limits.ranks is None else cast("Sequence[int]", limits.ranks))
    if limits.hosts is not None:
        hosts = cast("Sequence[int]", limits.hosts)
        allowed &= {rank for host in hosts for rank in topology.ranks_of(host)}
    return tuple(sorted(allowed))


def ranks_on_one_host(ranks: Sequence[int], topology: Topology) -> tuple[int, ...]:
    """Return the ranks on the host that has the most of `ranks`."""
    hosts: dict[int, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(topology.host_of(rank), []).append(rank)
    most = max(len(own) for own in hosts.values())
    return tuple(next(own for own in hosts.values() if len(own) == most))


def searched_types(limits: ParameterConstraints, dim: int, topology: Topology) -> tuple[ShardingType, ...]:
    """Return the sharding types to search; () for all.

    On some topologies, allowed types reduce to simpler ones: column-wise with one block is table-wise.

    Args:
        dim: columns of the table.
    """
    types = limits.types_allowed()
    if not types or topology.world_size == 1:
        return ()
    least = limits.min_partition or MIN_PARTITION
    kind = ShardingType
    sizes = Counter(len(host) for host in topology.host_ranks)
    alike = max(count for size, count in sizes.items() if size > 1 or len(sizes) == 1)
    found: list[ShardingType] = []
    for each in types:
        if each in (kind.COLUMN_WISE, kind.TABLE_COLUMN_WISE):
            most = topology.world_size if each is kind.COLUMN_WISE else max(sizes)
            if not _divides(dim, COLUMN_SPLITS, most, least):
                each = kind.TABLE_WISE  # one block
        elif topology.host_count > 1 and each is kind.GRID_SHARD:
            if not _divides(dim, GRIDS, alike, least):
                each = kind.TABLE_ROW_WISE  # one block
            elif set(sizes) == {1}:
                each = kind.COLUMN_WISE
        if each is kind.TABLE_ROW_WISE and topology.host_count > 1 and set(sizes) == {1}:
            each = kind.TABLE_WISE
        found.append(each)
    return tuple(dict.fromkeys(found))


def _divides(dim: int, splits: Sequence[int], most: int, least: int) -> bool:
    return any(k <= most and dim % k == 0 and dim // k >= least for k in splits)
