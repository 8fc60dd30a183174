"""A request with other machines, batches, tables or wire formats: the inputs of a what-if.

A varied request equals the one that a planner makes which is constructed with the new inputs.
"""

from __future__ import annotations

from dataclasses import replace

from tilerec.errors import ConfigError
from tilerec.planner.request import PlanRequest
from tilerec.spec.parameter_sharding import Wire
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

TYPES = {
    d.value.lower(): d for d in (DataType.FP32, DataType.BF16, DataType.FP16, DataType.FP64, DataType.FP8)
}


def varied(
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

    A part of the memory that is reserved stays that part; reserved batches of input grow with the batch.

    Args:
        hosts, ranks_per_host: of the new world; what is left out stays.
        hbm_cap, ddr_cap: bytes of a rank, of all ranks alike.
        batch_size: samples of a rank.
        data_type: "bf16", …: of every table.
        wire: "bf16", …: format of rows and gradients between ranks, for every table without a pin's own.

    Raises:
        ConfigError: a number below 1, an unknown type or format, or constraints for ranks that the new world lacks.
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
        tables = tuple(replace(table, wire=Wire(wire.lower(), wire.lower())) for table in tables)
    return replace(request, topology=topology, tables=tables, batch_size=batch_size or request.batch_size)


def world(topology: Topology, hosts: int | None, ranks_per_host: int | None) -> Topology:
    """As many hosts of as many ranks, on machines like these; what is None stays.

    Raises:
        ConfigError: a number below 1, or what stays is not the same for all hosts or ranks.
    """
    for name, value in (("hosts", hosts), ("ranks per host", ranks_per_host)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    if ranks_per_host is None and topology.local_world_size is None:
        raise ConfigError(
            f"The hosts differ in size ({topology}); say how many ranks each of the new ones has (ranks per host)."
        )
    for name in ("hbm_cap", "ddr_cap"):
        if getattr(topology, f"{name}s") is not None:
            raise ConfigError(
                f"The ranks differ in memory ({name}s); say how much the new ones have ({name})."
            )
    size = ranks_per_host or topology.local_world_size or 1
    count = hosts or topology.host_count
    return replace(topology, world_size=count * size, local_world_size=size, hosts=None)
