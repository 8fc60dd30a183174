"""From the constraints of a request to the restrictions on the options of its tables, as the search takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilerec.planner.cost.ways import Limits
from tilerec.planner.pins import check_colocated, named_table
from tilerec.planner.placement import allowed_ranks, allowed_storages, ranks_on_one_host, searched_types
from tilerec.planner.request import PlanRequest
from tilerec.planner.tables import PlannedTable
from tilerec.spec.plan import ParameterSharding, ShardingType


def may_offload(request: PlanRequest) -> bool:
    """Return True if the planner may move some tables from device memory to host memory behind a cache."""
    return any(ddr for _, ddr in request.topology.caps) and any(
        (table.optimizer is not None or not table.trained)
        and _storages(request, table, True) != _storages(request, table, False)
        for table in request.tables
    )


def limits_of_tables(
    request: PlanRequest, pins: Mapping[str, ParameterSharding], offload: bool = False
) -> dict[str, Limits]:
    """Return the restrictions on the options of each table, by key; tables without restrictions are left out.

    Args:
        pins: the shardings of pinned tables, which get no restrictions.
        offload: host memory may also hold the tables for which the user has not chosen a memory.
    """
    found: dict[str, Limits] = {}
    every = offload or any(table.cached is not None for table in request.tables)
    some = request.tables if every else [request.by_key[key] for key in request.constraints]
    for table in some:
        on_device, cached = _storages(request, table, offload)
        if (cached or not on_device) and table.key not in pins:
            found[table.key] = Limits(on_device=on_device, cached=cached)
    for key, given in request.constraints.items():
        if key in pins:
            continue
        ranks = allowed_ranks(given, request.topology)
        if given.with_table is not None:
            other = named_table(request, given.with_table, key)
            if other in pins:
                own = pins[other].tiling
                assert own is not None
                check_colocated(request, key, given, own)
                ranks = own.ranks()
        types = searched_types(given, request.by_key[key].dim, request.topology)
        if ShardingType.TABLE_COLUMN_WISE in types and ShardingType.COLUMN_WISE not in types and ranks:
            ranks = ranks_on_one_host(ranks, request.topology)
        heads = given.max_ranks is None or given.max_ranks >= request.topology.world_size
        if types or given.min_partition is not None or ranks is not None or not heads:
            limits = found.get(key, Limits())
            found[key] = replace(limits, types=types, min_partition=given.min_partition, ranks=ranks, heads=heads)
    return found


def _storages(request: PlanRequest, table: PlannedTable, offload: bool) -> tuple[bool, bool]:
    return allowed_storages(table, request.limits_of(table.key), request.topology, offload=offload)
