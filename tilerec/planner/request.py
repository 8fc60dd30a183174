"""`PlanRequest`: all inputs of a plan. The same request gives the same plan, on every machine.

    module, or configs  ──►  request  ──►  problem (cost/options.py)  ──►  solution (search/)  ──►  plan and report

A request can be stored in a file. `tilerec plan` writes it next to the plan, for `explain` and `whatif`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue, check_version, read_json
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.reads import BATCH_SIZE, reads_of
from tilerec.planner.cost.ways import COLUMN_SPLITS, GRIDS, MIN_PARTITION, Limits
from tilerec.planner.cost.workload import LOAD_FACTOR, Reads, TableWork
from tilerec.planner.tables import PlannedTable
from tilerec.sharding.strategies import complete
from tilerec.spec.optimizer import SGD, OptimizerSpec
from tilerec.spec.parameter_sharding import read_wire
from tilerec.spec.plan import (
    HOST_KERNELS,
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
    Wire,
)
from tilerec.spec.table import DataType
from tilerec.spec.tile import Tiling
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
        tables: tables with distinct keys.
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
                raise ConfigError(
                    f"Planner: {name} is {value!r}; it must be a whole number from 1 (below {_MOST:,})."
                )
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
        if limits.ranks is not None and limits.hosts is not None and not self._ranks(limits):
            raise ConfigError(
                f"Table '{key}': none of the ranks in its constraints is on one of the hosts in its constraints; leave "
                "ranks or hosts out."
            )
        table = self.by_key[key]
        if not self._storages(key, False)[0] and table.trained and table.optimizer is None:
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

    def limits_of(self, key: str) -> ParameterConstraints | None:
        """Return the table's constraints; None if it has none."""
        return self.constraints.get(key)

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
            limits = self.constraints.get(table.key)
            ids_per_bag = None if limits is None else limits.ids_per_bag()
            reads = plain[len(table.features)]
            if table.weighted or limits is not None:
                reads = self._reads(table, limits or ParameterConstraints())
            works.append(
                TableWork(
                    table.key,
                    table.rows,
                    table.dim,
                    table.data_type,
                    table.optimizer if table.trained else _FROZEN,
                    reads,
                    None if limits is None else limits.skew,
                    wire=_wire_of(table, limits),
                    each_id=not table.pooled,
                    collection=table.names[0][0],
                    # As in sharding: if ids per bag are unknown, rows are summed on the host before they are sent.
                    sums_in_hosts=None if not table.pooled else (ids_per_bag is None or ids_per_bag > 1),
                    **({} if limits is None and table.cached is None else _cache_of(table, limits)),
                )
            )
        return works

    def _reads(self, table: PlannedTable, limits: ParameterConstraints) -> tuple[Reads, ...]:
        if table.weighted and not limits.is_weighted:
            limits = replace(limits, is_weighted=True)
        return reads_of(table.key, table.features or (table.names[0][1],), self.batch_size, limits)

    def pins(self) -> dict[str, ParameterSharding]:
        """Return the shardings of the pinned tables, each with its tiling."""
        found: dict[str, ParameterSharding] = {}
        for key, limits in self.constraints.items():
            if limits.sharding is not None:
                table = self.by_key[key]
                found[key] = complete(limits.sharding, key, table.rows, table.dim, self.topology)
        self._pin_colocated(found)
        return found

    def _pin_colocated(self, pins: dict[str, ParameterSharding]) -> None:
        """Pin the tables that are co-located with pinned tables, with the same sharding type and ranks.

        An explicit tiling does not carry over to another table; `limits` then restricts the ranks only.
        """
        colocated: dict[str, list[str]] = {}
        for key, limits in self.constraints.items():
            if limits.with_table is not None:
                colocated.setdefault(self.named(limits.with_table, key), []).append(key)
        waiting = [key for key in pins if key in colocated]
        while waiting:
            pin = pins[waiting[-1]]
            for key in colocated[waiting.pop()]:
                if key in pins or pin.kind is ShardingType.EXPLICIT:
                    continue
                table, limits = self.by_key[key], self.constraints[key]
                allowed = limits.types_allowed()
                if allowed and pin.kind not in allowed:
                    raise ConfigError(
                        f"Table '{key}': with_table='{limits.with_table}' makes it {pin.kind.value}, which its "
                        "constraints do not allow; leave out with_table or the constraints."
                    )
                self._check_colocated(key, limits, pin.tiling)
                alike = ParameterSharding(pin.kind, ranks=pin.ranks)
                pins[key] = complete(alike, key, table.rows, table.dim, self.topology)
                if key in colocated:
                    waiting.append(key)

    def _check_colocated(self, key: str, limits: ParameterConstraints, tiling: Tiling | None) -> None:
        assert tiling is not None
        assert limits.with_table is not None
        own, allowed = tiling.ranks(), self._ranks(limits)
        others = () if allowed is None else tuple(rank for rank in own if rank not in allowed)
        if others or len(own) > (limits.max_ranks or len(own)):
            raise ConfigError(
                f"Table '{key}': with_table='{self.named(limits.with_table, key)}' puts it on ranks {list(own)[:16]}, "
                "which its constraints do not allow; leave out with_table or the constraints."
            )

    def groups(self, pins: Mapping[str, ParameterSharding]) -> list[list[str]]:
        """Return the groups of co-located tables: two or more keys in each group, none of them pinned."""
        leader: dict[str, str] = {}

        def find(key: str) -> str:
            while leader.get(key, key) != key:
                key = leader[key]
            return key

        for key, limits in self.constraints.items():
            if limits.with_table is None:
                continue
            other = self.named(limits.with_table, key)
            if other not in pins and key not in pins:
                first, second = sorted((find(key), find(other)))
                leader[second] = first
        if not leader:
            return []
        groups: dict[str, list[str]] = {}
        for table in self.tables:
            groups.setdefault(find(table.key), []).append(table.key)
        return [group for group in groups.values() if len(group) > 1]

    def named(self, name: str, beside: str) -> str:
        """Return the key of the table that `with_table` names: by key, or by name if the name is unique.

        Args:
            name: key or name of a table.
            beside: key of the table with this constraint; a table in its module takes precedence.
        """
        path = self.by_key[beside].names[0][0]
        near = f"{path}.{name}" if path else name
        found = [key for key in (near, name) if key in self.by_key][:1]
        if not found:
            found = [table.key for table in self.tables if any(own == name for _, own in table.names)]
        if found == [beside]:
            raise ConfigError(
                f"Table '{beside}': with_table='{name}' is the table itself; name another one, or leave it out."
            )
        if len(found) != 1:
            raise ConfigError(
                f"Table '{beside}': with_table='{name}' "
                + (f"may be any of {found}; use one of these." if found else "is no table of the model.")
            )
        return found[0]

    def may_offload(self) -> bool:
        """Return True if the planner may move some tables from device memory to host memory behind a cache."""
        return any(ddr for _, ddr in self.topology.caps) and any(
            (table.optimizer is not None or not table.trained)
            and self._storages(table.key, True) != self._storages(table.key, False)
            for table in self.tables
        )

    def _storages(self, key: str, offload: bool) -> tuple[bool, bool]:
        """Return whether device memory, and whether host memory behind a cache, may hold the table."""
        given = self.constraints.get(key)
        if self.topology.compute_device == "cpu" or (given is not None and given.enforce_hbm):
            return True, False
        kernels = () if given is None else given.kernels_allowed()
        if not kernels:
            table = self.by_key[key]
            stays = table.cached is not None and (table.optimizer is not None or not table.trained)
            return (False, True) if stays else (True, offload)
        behind = any(kernel in HOST_KERNELS for kernel in kernels)
        return any(kernel not in HOST_KERNELS for kernel in kernels), behind

    def limits(self, pins: Mapping[str, ParameterSharding], offload: bool = False) -> dict[str, Limits]:
        """Return the restrictions on the options of each table, by key; tables without restrictions are left out.

        Args:
            pins: the shardings of pinned tables, which get no restrictions.
            offload: host memory may also hold the tables for which the user has not chosen a memory.
        """
        found: dict[str, Limits] = {}
        every = offload or any(table.cached is not None for table in self.tables)
        some = self.tables if every else [self.by_key[key] for key in self.constraints]
        for table in some:
            on_device, cached = self._storages(table.key, offload)
            if (cached or not on_device) and table.key not in pins:
                found[table.key] = Limits(on_device=on_device, cached=cached)
        for key, given in self.constraints.items():
            if key in pins:
                continue
            ranks = self._ranks(given)
            if given.with_table is not None:
                other = self.named(given.with_table, key)
                if other in pins:
                    own = pins[other].tiling
                    assert own is not None
                    self._check_colocated(key, given, own)
                    ranks = own.ranks()
            types = self._types(key, given)
            if ShardingType.TABLE_COLUMN_WISE in types and ShardingType.COLUMN_WISE not in types and ranks:
                ranks = self._on_one_host(ranks)
            if types or given.min_partition is not None or ranks is not None:
                limits = found.get(key, Limits())
                found[key] = replace(limits, types=types, min_partition=given.min_partition, ranks=ranks)
        return found

    def _ranks(self, limits: ParameterConstraints) -> tuple[int, ...] | None:
        if limits.ranks is None and limits.hosts is None:
            return None
        everyone = range(self.topology.world_size)
        allowed = set(everyone if limits.ranks is None else cast("Sequence[int]", limits.ranks))
        if limits.hosts is not None:
            hosts = cast("Sequence[int]", limits.hosts)
            allowed &= {rank for host in hosts for rank in self.topology.ranks_of(host)}
        return tuple(sorted(allowed))

    def _on_one_host(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks on the host that has the most of `ranks`."""
        hosts: dict[int, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(self.topology.host_of(rank), []).append(rank)
        most = max(len(own) for own in hosts.values())
        return tuple(next(own for own in hosts.values() if len(own) == most))

    def _types(self, key: str, given: ParameterConstraints) -> tuple[ShardingType, ...]:
        """Return the sharding types to search: on this topology, some allowed types reduce to simpler ones."""
        types, topology = given.types_allowed(), self.topology
        if not types or topology.world_size == 1:
            return ()
        dim, least = self.by_key[key].dim, given.min_partition or MIN_PARTITION
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

    def input_bytes(self) -> int:
        """Return the bytes of one input batch of a rank: int64 ids, int32 lengths, fp32 weights."""
        total = 0.0
        for table in self.tables:
            limits = self.constraints.get(table.key)
            if limits is None and not table.weighted:
                total += max(1, len(table.features)) * self.batch_size * 12.0
                continue
            for read in self._reads(table, limits or ParameterConstraints()):
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
            "tables": [self._table_to_json(table) for table in self.tables],
        }

    def _table_to_json(self, table: PlannedTable) -> dict[str, Any]:
        (path, name), *others = table.names
        out: dict[str, Any] = {
            "name": name,
            "num_embeddings": table.rows,
            "embedding_dim": table.dim,
            "data_type": table.data_type.value,
            "feature_names": list(table.features),
        }
        if path:
            out["module"] = path
        if others:
            out["also"] = [list(pair) for pair in others]
        if table.optimizer is not None:
            out["optimizer"] = table.optimizer.to_json()
        if table.wire is not None:
            out["wire"] = {"forward": table.wire.forward, "backward": table.wire.backward}
        if table.cached is not None:
            out["cached"] = table.cached
        for flag, usual in (("trained", True), ("pooled", True), ("weighted", False)):
            if getattr(table, flag) is not usual:
                out[flag] = getattr(table, flag)
        limits = self.constraints.get(table.key)
        if limits is not None and limits.to_json():
            out["constraints"] = limits.to_json()
        return out

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

    def with_constraint(self, key: str, **changes: Any) -> PlanRequest:
        """Return the request with some fields of one table's constraints replaced."""
        new = replace(self.constraints.get(key, ParameterConstraints()), **changes)
        return replace(self, constraints={**self.constraints, key: new})


def read_tables(data: Any) -> tuple[list[PlannedTable], dict[str, ParameterConstraints]]:
    """Return tables, and constraints by key, from a list of JSON objects.

    A table is `{"name": "user", "num_embeddings": 1000, "embedding_dim": 64}`; further fields are `data_type`,
    `feature_names`, `module` (its path), `optimizer` (`"SGD"`, or an object), `pooled`, `weighted`, `trained`, and
    `constraints` (an object with fields of `ParameterConstraints`).

    Raises:
        ConfigError: the data is not such a list; the message names the table.
    """
    value = JsonValue.of(data, "Tables")
    items = value.items(_TABLES)
    if not items:
        raise value.error(_TABLES)
    tables: list[PlannedTable] = []
    constraints: dict[str, ParameterConstraints] = {}
    optimizers: dict[str, OptimizerSpec] = {}
    for item in items:
        found = item.record(_FIELDS, ("name", "num_embeddings", "embedding_dim"))
        found = {key: each for key, each in found.items() if each.value is not None or key in _NOT_NULL}
        name = found["name"].text()
        table = PlannedTable(
            _names(name, found),
            found["num_embeddings"].whole(1),
            found["embedding_dim"].whole(1),
            _data_type(found["data_type"]) if "data_type" in found else DataType.FP32,
            found["feature_names"].texts(f'a list of texts such as ["{name:.40}"]')
            if "feature_names" in found
            else (name,),
            _optimizer(found["optimizer"], optimizers) if "optimizer" in found else None,
            found["trained"].flag() if "trained" in found else True,
            found["pooled"].flag() if "pooled" in found else True,
            found["weighted"].flag() if "weighted" in found else False,
            read_wire(found["wire"]) if "wire" in found else None,
            found["cached"].number(0, 1) if "cached" in found else None,
        )
        tables.append(table)
        if found.get("constraints") is not None and found["constraints"].value:
            constraints[table.key] = ParameterConstraints.from_json(table.key, found["constraints"])
    return tables, constraints


_TABLES = 'a list such as [{"name": "user", "num_embeddings": 1000, "embedding_dim": 64}]'
_NOT_NULL = (
    "name",
    "num_embeddings",
    "embedding_dim",
    "data_type",
    "module",
    "also",
    "trained",
    "pooled",
    "weighted",
)
_FIELDS = (
    "name", "num_embeddings", "embedding_dim", "data_type", "feature_names", "module", "also", "optimizer", "trained",
    "pooled", "weighted", "wire", "cached", "constraints",
)  # fmt: skip


def _names(name: str, found: Mapping[str, JsonValue]) -> tuple[tuple[str, str], ...]:
    """Return the pairs (module path, table name) of a table, its own pair first."""
    pairs = [(found["module"].text('a path such as "ebc"') if "module" in found else "", name)]
    for other in found["also"].items("a list of [path, table]") if "also" in found else ():
        pair = other.texts("[path, table]")
        if len(pair) != 2:
            raise other.error("[path, table]")
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def _wire_of(table: PlannedTable, limits: ParameterConstraints | None) -> Wire:
    """Return the wire formats of the pin, else those of the sharder, else fp32."""
    pin = None if limits is None else limits.sharding
    own = pin.wire if isinstance(pin, ParameterSharding) else None
    return own or table.wire or Wire()


def _cache_of(table: PlannedTable, limits: ParameterConstraints | None) -> dict[str, Any]:
    """Return the `cached` and `load_factor` arguments of a table's `TableWork`.

    `cached` is True only for a pin with rows in host memory.
    """
    if limits is None:
        return {"load_factor": table.cached}
    pin = limits.sharding if isinstance(limits.sharding, ParameterSharding) else None
    kernels = limits.kernels_allowed() if pin is None else (pin.kernel,)
    params = limits.cache_params if pin is None else pin.cache
    known = LOAD_FACTOR if table.cached is None else table.cached
    load_factor = known if params is None else params.load_factor
    if (
        EmbeddingComputeKernel.FUSED_UVM in kernels
        and EmbeddingComputeKernel.FUSED_UVM_CACHING not in kernels
    ):
        load_factor = 0.0
    return {"cached": pin is not None and pin.kernel in HOST_KERNELS, "load_factor": load_factor}


def _data_type(value: JsonValue) -> DataType:
    found = {d.value: d for d in (DataType.FP32, DataType.BF16, DataType.FP16, DataType.FP64, DataType.FP8)}
    if isinstance(value.value, str) and value.value.upper() in found:
        return found[value.value.upper()]
    raise value.error(f"one of {', '.join(found)}")


def _optimizer(value: JsonValue, known: dict[str, OptimizerSpec]) -> OptimizerSpec:
    if not isinstance(value.value, (str, Mapping)):
        raise value.error('{"optimizer": "SGD"}, or "SGD"')
    mark = json.dumps(value.value, sort_keys=True)
    if mark not in known:
        try:
            known[mark] = OptimizerSpec.from_json(
                JsonValue.of({"optimizer": value.value}, value.where)
                if isinstance(value.value, str)
                else value
            )
        except TypeError as error:
            raise value.refused(error) from error
    return known[mark]


def _divides(dim: int, splits: Sequence[int], most: int, least: int) -> bool:
    return any(k <= most and dim % k == 0 and dim // k >= least for k in splits)
