"""`PlanRequest`: all inputs of a plan. The same request gives the same plan, on every machine.

    module, or configs  ──►  request  ──►  problem (cost/options.py)  ──►  solution (search/)  ──►  plan and report

A request can be stored in a file. `tilerec plan` writes it next to the plan, for `explain` and `whatif`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue, check_version, read_json
from tilerec.planner.constraints import NO_CONSTRAINTS, ParameterConstraints
from tilerec.planner.cost.reads import BATCH_SIZE, reads_of
from tilerec.planner.cost.workload import LOAD_FACTOR, Reads, TableWork
from tilerec.planner.placement import allowed_ranks, allowed_storages
from tilerec.planner.table_list import read_tables, table_to_json
from tilerec.planner.tables import PlannedTable
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import HOST_KERNELS, EmbeddingComputeKernel, ParameterSharding, Wire
from tilerec.spec.topology import MOST_BYTES, Topology

VERSION = 1
"""Version of the request format and of the planner's results; cached plans of another version are not used."""

_MOST = 10**12
_MOST_CELLS = 2**54  # so that bytes with optimizer state fit in 64 bits
_FROZEN = SGD(0.0)  # for tables without gradients: no optimizer state and no `.grad`


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Tables, machines, constraints and settings of the search.

    The reserved memory of a rank is the sum of `reserved`, `reserved_part` and `reserved_batches`.

    Args:
        tables: tables with distinct keys. A request without tables is valid, and its plan is empty; the planner
            itself refuses a model without tables.
        topology: the machines.
        batch_size: samples per rank and step.
        constraints: constraints, pins included, by `PlannedTable.key`.
        reserved: bytes per rank that tables must not use, in the memory that holds tables.
        reserved_part: part of that memory that tables must not use, at least 0 and below 1.
        reserved_batches: number of input batches to reserve memory for; their bytes follow from `batch_size`.
        effort: amount of search; see `solve`.

    Raises:
        ConfigError: a size is out of range, or constraints do not fit the tables or the topology.
    """

    tables: tuple[PlannedTable, ...]
    topology: Topology
    batch_size: int = BATCH_SIZE
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)
    reserved: int = 0
    effort: int = 1
    reserved_part: float = 0.0
    reserved_batches: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "effort"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MOST:
                raise ConfigError(f"Planner: {name} is {value!r}; it must be a whole number from 1 (below {_MOST:,}).")
        batches = self.reserved_batches
        if isinstance(batches, bool) or not isinstance(batches, int) or not 0 <= batches < _MOST:
            raise ConfigError(
                f"Planner: reserved_batches is {batches!r:.80}; it must be a whole number from 0 (below {_MOST:,})."
            )
        whole = isinstance(self.reserved, int) and not isinstance(self.reserved, bool)
        if not whole or not 0 <= self.reserved < MOST_BYTES:
            raise ConfigError(
                f"Planner: reserved={self.reserved!r}; expected bytes per rank, a whole number from 0 (below 2^60). "
                "For a part of the memory use reserved_part."
            )
        if not isinstance(self.reserved_part, (int, float)) or not 0 <= self.reserved_part < 1:
            raise ConfigError(
                f"Planner: reserved_part={self.reserved_part!r}; expected a part of the memory, at least 0 and below 1."
            )
        keys: set[str] = set()
        cells = 0
        for table in self.tables:
            if table.key in keys:
                raise ConfigError(f"{table} occurs twice; give every table a unique name.")
            keys.add(table.key)
            cells += table.rows * table.dim
            if cells >= _MOST_CELLS:
                raise ConfigError(
                    f"{table}: {table.rows} x {table.dim} cells make the tables larger than the limit of 2^54 cells in "
                    "total; correct its size."
                )
        for key in self.constraints:
            if key not in keys:
                raise ConfigError(f"Planner: constraints name '{key}', which is no table of the request.")
            self._check(key, self.constraints[key])

    def _check(self, key: str, limits: ParameterConstraints) -> None:
        topology = self.topology
        for name, size in (("ranks", topology.world_size), ("hosts", topology.host_count)):
            given = getattr(limits, name)
            if given is not None and given[-1] >= size:
                raise ConfigError(
                    f"Table '{key}': its constraints name {name[:-1]} {given[-1]}, but the topology has {name} 0 to "
                    f"{size - 1}; use those."
                )
        if limits.ranks is not None and limits.hosts is not None and not allowed_ranks(limits, topology):
            raise ConfigError(
                f"Table '{key}': none of the ranks in its constraints is on one of the hosts in its constraints; leave "
                "ranks or hosts out."
            )
        table = self.by_key[key]
        on_device, _ = allowed_storages(table, limits, topology, offload=False)
        if not on_device and table.trained and table.optimizer is None:
            raise ConfigError(
                f"Table '{key}': its compute_kernels {[kernel.value for kernel in limits.kernels_allowed()]} keep rows "
                "in host memory, which takes an optimizer that updates them in the backward pass. Attach one with "
                "apply_optimizer_in_backward or a sharder, or allow 'fused'."
            )
        if limits.device_group is not None and limits.device_group != topology.compute_device:
            raise ConfigError(
                f"Table '{key}': got device_group {limits.device_group!r}; expected the topology's device "
                f"{topology.compute_device!r}, as all tables of a plan are on one kind of device. Leave it out, or "
                "plan these tables separately."
            )

    # ---------------------------------------------------------------------------------------------- for the search

    def limits_of(self, key: str) -> ParameterConstraints:
        """Return the table's constraints; without restrictions if it has none."""
        return self.constraints.get(key, NO_CONSTRAINTS)

    @cached_property
    def by_key(self) -> dict[str, PlannedTable]:
        return {table.key: table for table in self.tables}

    def reserved_bytes(self) -> list[int]:
        """Return the reserved bytes of each rank, in the memory that holds tables."""
        always = self.reserved + (self.reserved_batches * self.input_bytes() if self.reserved_batches else 0)
        return [always + math.ceil(cap * self.reserved_part) for cap in self.topology.memory_caps]

    def works(self) -> list[TableWork]:
        """Return the work of a step for each table, sorted by key, so the plan does not depend on the model's order."""
        return list(self._works)

    @cached_property
    def _works(self) -> list[TableWork]:
        plain: dict[int, tuple[Reads, ...]] = {}
        for count in {len(table.features) for table in self.tables}:
            plain[count] = (Reads(self.batch_size),) * max(1, count)
        works = []
        for table in sorted(self.tables, key=lambda table: table.key):
            limits = self.limits_of(table.key)
            ids_per_bag = limits.ids_per_bag()
            reads = plain[len(table.features)]
            if table.weighted or limits is not NO_CONSTRAINTS:
                reads = self._reads(table, limits)
            works.append(
                TableWork(
                    table.key,
                    table.rows,
                    table.dim,
                    table.data_type,
                    table.optimizer if table.trained else _FROZEN,
                    reads,
                    limits.skew,
                    wire=_wire_of(table, limits),
                    each_id=not table.pooled,
                    collection=table.names[0][0],
                    # As in sharding: if ids per bag are unknown, rows are summed on the host before they are sent.
                    sums_in_hosts=None if not table.pooled else (ids_per_bag is None or ids_per_bag > 1),
                    **_cache_of(table, limits),
                )
            )
        return works

    def _reads(self, table: PlannedTable, limits: ParameterConstraints) -> tuple[Reads, ...]:
        if table.weighted and not limits.is_weighted:
            limits = replace(limits, is_weighted=True)
        return reads_of(table.key, table.features or (table.names[0][1],), self.batch_size, limits)

    def input_bytes(self) -> int:
        """Return the bytes of one input batch of a rank: int64 ids, int32 lengths, fp32 weights."""
        total = 0.0
        for work in self._works:
            for read in work.reads:
                total += read.bags * (4.0 + read.ids_per_bag * (8.0 + 4.0 * read.weighted))
        return int(total) + 1

    # ---------------------------------------------------------------------------------------------- as a file

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values."""
        return {
            "version": VERSION,
            "batch_size": self.batch_size,
            "reserved": self.reserved,
            "reserved_part": self.reserved_part,
            "reserved_batches": self.reserved_batches,
            "effort": self.effort,
            "topology": self.topology.to_json(),
            "tables": [table_to_json(table, self.limits_of(table.key)) for table in self.tables],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> PlanRequest:
        """Read a request that `to_json` returned. Only `topology` and `tables` are required.

        Raises:
            ConfigError: the data is not a request, or has another version.
        """
        value = JsonValue.of(data, "Plan request JSON")
        known = (
            "version", "batch_size", "reserved", "reserved_part", "reserved_batches", "effort", "topology", "tables",
        )  # fmt: skip
        found = value.record(known, ("topology", "tables"))
        check_version(found, VERSION, "Plan again.")
        tables, constraints = read_tables(found["tables"])
        topology = Topology.from_json(found["topology"])
        try:
            return PlanRequest(
                tuple(tables),
                topology,
                found["batch_size"].whole(1) if "batch_size" in found else BATCH_SIZE,
                constraints,
                found["reserved"].whole() if "reserved" in found else 0,
                found["effort"].whole(1) if "effort" in found else 1,
                found["reserved_part"].number(0, 1) if "reserved_part" in found else 0.0,
                found["reserved_batches"].whole() if "reserved_batches" in found else 0,
            )
        except ConfigError as error:
            raise error if str(error).startswith(value.where) else value.refused(error) from error

    @staticmethod
    def load(path: str | Path) -> PlanRequest:
        """Read a request from a file.

        Raises:
            FileError: the file cannot be read.
            ConfigError: the file is not a request.
        """
        return PlanRequest.from_json(read_json(path, "Plan request"))

    def digest(self) -> str:
        """Return a hash of the request: 32 hexadecimal digits, equal for equal requests."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def with_reserved(self, reserved: int, part: float, batches: int) -> PlanRequest:
        """Return the request with other reserved memory."""
        found = replace(self, reserved=reserved, reserved_part=part, reserved_batches=batches)
        vars(found)["_works"] = self._works  # they do not depend on it
        return found

    def with_constraint(self, key: str, **changes: Any) -> PlanRequest:
        """Return the request with some fields of one table's constraints replaced."""
        return self.with_constraints((key,), **changes)

    def with_constraints(self, keys: Iterable[str], **changes: Any) -> PlanRequest:
        """Return the request with some fields of these tables' constraints replaced."""
        changed = {key: replace(self.limits_of(key), **changes) for key in keys}
        return replace(self, constraints={**self.constraints, **changed})

    def with_tables(self, keys: Iterable[str], **changes: Any) -> PlanRequest:
        """Return the request with some fields of these tables replaced, such as `optimizer`."""
        chosen = set(keys)
        tables = (replace(table, **changes) if table.key in chosen else table for table in self.tables)
        return replace(self, tables=tuple(tables))


def _wire_of(table: PlannedTable, limits: ParameterConstraints) -> Wire:
    """Return the wire formats of the pin, else those of the sharder, else fp32."""
    own = limits.sharding.wire if isinstance(limits.sharding, ParameterSharding) else None
    return own or table.wire or Wire()


def _cache_of(table: PlannedTable, limits: ParameterConstraints) -> dict[str, Any]:
    """Return the `cached`, `load_factor` and `files` arguments of a table's `TableWork`.

    `cached` is True only for a pin with rows in host memory or in files.
    """
    if limits is NO_CONSTRAINTS:
        return {} if table.cached is None else {"load_factor": table.cached, "files": table.files}
    pin = limits.sharding if isinstance(limits.sharding, ParameterSharding) else None
    kernels = limits.kernels_allowed() if pin is None else (pin.kernel,)
    params = limits.cache_params if pin is None else pin.cache
    known = LOAD_FACTOR if table.cached is None else table.cached
    load_factor = known if params is None else params.load_factor
    if set(HOST_KERNELS) & set(kernels) == {EmbeddingComputeKernel.FUSED_UVM}:
        load_factor = 0.0
    files = EmbeddingComputeKernel.KEY_VALUE in kernels if kernels else table.files
    return {"cached": pin is not None and pin.kernel in HOST_KERNELS, "load_factor": load_factor, "files": files}
