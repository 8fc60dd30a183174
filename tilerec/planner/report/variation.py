"""Variations of a request for what-ifs: other machines, batch sizes, data types or wire formats.

A varied request equals the request of a planner that is constructed with the new inputs.
"""

from __future__ import annotations

from dataclasses import replace

from tilerec.errors import ConfigError
from tilerec.planner.request import PlanRequest
from tilerec.spec.parameter_sharding import Wire
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

TYPES = {d.value.lower(): d for d in (DataType.FP32, DataType.BF16, DataType.FP16, DataType.FP64, DataType.FP8)}


def with_changes(
    request: PlanRequest,
    *,
    hosts: int | None = None,
    ranks_per_host: int | None = None,
    hbm_cap: int | None = None,
    ddr_cap: int | None = None,
    batch_size: int | None = None,
    data_type: str | None = None,
    wire: str | None = None,
) -> PlanRequest:
    """Return the request with the given inputs changed.

    Memory reserved as a part of the cap scales with the cap; reserved input batches scale with the batch size.

    Args:
        hosts, ranks_per_host: size of the new world; None: unchanged.
        hbm_cap, ddr_cap: bytes per rank, for all ranks.
        batch_size: samples per rank.
        data_type: data type of every table, such as "bf16".
        wire: wire format of rows and gradients, such as "bf16", for every table whose pin has none.

    Raises:
        ConfigError: a number is below 1, a type or format is unknown, or constraints name ranks that the new world
            lacks.
    """
    topology = request.topology
    if hbm_cap is not None:
        topology = replace(topology, hbm_cap=hbm_cap, hbm_caps=None)
    if ddr_cap is not None:
        topology = replace(topology, ddr_cap=ddr_cap, ddr_caps=None)
    if hosts is not None or ranks_per_host is not None:
        topology = world(topology, hosts, ranks_per_host)
    tables = request.tables
    if data_type is not None:
        if data_type.lower() not in TYPES:
            raise ConfigError(f"data type {data_type!r} is none of {list(TYPES)}.")
        tables = tuple(replace(table, data_type=TYPES[data_type.lower()]) for table in tables)
    if wire is not None:
        own = wire.lower()
        tables = tuple(
            replace(table, wire=replace(table.wire or Wire(), forward=own, backward=own)) for table in tables
        )
    return replace(request, topology=topology, tables=tables, batch_size=batch_size or request.batch_size)


def world(topology: Topology, hosts: int | None, ranks_per_host: int | None) -> Topology:
    """Return the topology with another number of hosts or ranks per host; None leaves a number unchanged.

    Raises:
        ConfigError: a number is below 1, or hosts or ranks differ in a value that the new ones would copy.
    """
    for name, value in (("hosts", hosts), ("ranks per host", ranks_per_host)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    if ranks_per_host is None and topology.local_world_size is None:
        raise ConfigError(
            f"The hosts differ in size ({topology}); give the number of ranks of each new host (ranks per host)."
        )
    for name in ("hbm_cap", "ddr_cap"):
        if getattr(topology, f"{name}s") is not None:
            raise ConfigError(f"The ranks differ in memory ({name}s); give the memory of the new ranks ({name}).")
    size = ranks_per_host or topology.local_world_size or 1
    count = hosts or topology.host_count
    return replace(topology, world_size=count * size, local_world_size=size, hosts=None)
