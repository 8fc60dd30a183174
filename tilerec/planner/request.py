"""`PlanRequest`: everything that a plan depends on. The same request gives the same plan, on every machine.

    module, or configs  ──►  request  ──►  problem (options.py)  ──►  solution (search.py)  ──►  plan and report

A request is also a file: what `tilerec plan` keeps beside a plan, so that it can be explained and varied.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.reads import BATCH_SIZE, reads_of
from tilerec.planner.cost.ways import COLUMN_SPLITS, GRIDS, MIN_PARTITION, Limits
from tilerec.planner.cost.workload import Reads, TableWork
from tilerec.planner.tables import PlannedTable
from tilerec.sharding.strategies import complete
from tilerec.spec.optimizer import SGD, OptimizerSpec
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

VERSION = 1
"""Of what planning does with a request: plans of another version are not read from a cache."""

_FROZEN = SGD(0.0)  # a table without gradients has no state, and no `.grad`


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Tables, machines, and what a user says of them.

    Args:
        tables: with different keys.
        topology: the machines.
        batch_size: samples of a rank in a step.
        constraints: by `PlannedTable.key`; pins are among them.
        reserved: bytes of every rank that are taken, in the memory that tables lie in.
        effort: how long to search; see `solve`.

    Raises:
        ConfigError: a size out of range, no tables, constraints that do not fit the tables or the topology.
    """

    tables: tuple[PlannedTable, ...]
    topology: Topology
    batch_size: int = BATCH_SIZE
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)
    reserved: int = 0
    effort: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "effort"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Planner: {name} is {value!r}; it must be a whole number from 1.")
        keys: set[str] = set()
        for table in self.tables:
            if table.key in keys:
                raise ConfigError(f"{table} is there twice; give every table a name of its own.")
            keys.add(table.key)
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
                    f"Table '{key}': its constraints name {name[:-1]} {given[-1]}, and the topology has {name} 0 to "
                    f"{size - 1}; name those."
                )
        if limits.ranks is not None and limits.hosts is not None and not self._ranks(limits):
            raise ConfigError(
                f"Table '{key}': none of the ranks that its constraints allow is on one of the hosts that they allow; "
                "leave one of the two out."
            )
        if limits.device_group is not None and limits.device_group != topology.compute_device:
            raise ConfigError(
                f"Table '{key}': device_group is {limits.device_group!r} and the topology's device "
                f"{topology.compute_device!r}; all tables of a plan are on one kind of device: leave it out, or plan "
                "these tables apart."
            )

    # ---------------------------------------------------------------------------------------------- for the search

    def limits_of(self, key: str) -> ParameterConstraints | None:
        """A table's constraints."""
        return self.constraints.get(key)

    @cached_property
    def by_key(self) -> dict[str, PlannedTable]:
        return {table.key: table for table in self.tables}

    def works(self) -> list[TableWork]:
        """What a step does with each table, in the order of `tables`."""
        plain: dict[int, tuple[Reads, ...]] = {}
        for count in {len(table.features) for table in self.tables}:
            plain[count] = (Reads(self.batch_size),) * max(1, count)
        works = []
        for table in self.tables:
            limits = self.constraints.get(table.key)
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
                    wire=table.wire or Wire(),
                    each_id=not table.pooled,
                    collection=table.names[0][0],
                )
            )
        return works

    def _reads(self, table: PlannedTable, limits: ParameterConstraints) -> tuple[Reads, ...]:
        if table.weighted and not limits.is_weighted:
            limits = replace(limits, is_weighted=True)
        return reads_of(table.key, table.features or (table.names[0][1],), self.batch_size, limits)

    def pins(self) -> dict[str, ParameterSharding]:
        """Tables whose sharding is given, with a tiling each."""
        found: dict[str, ParameterSharding] = {}
        for key, limits in self.constraints.items():
            if limits.sharding is not None:
                table = self.by_key[key]
                found[key] = complete(limits.sharding, key, table.rows, table.dim, self.topology)
        return found

    def groups(self, pins: Mapping[str, ParameterSharding]) -> list[list[str]]:
        """Tables that lie together, two or more in each group, none of them pinned."""
        leader: dict[str, str] = {}

        def find(key: str) -> str:
            while leader.get(key, key) != key:
                key = leader[key]
            return key

        for key, limits in self.constraints.items():
            if limits.with_table is None:
                continue
            other = self.named(limits.with_table, key)
            if other not in pins:
                first, second = sorted((find(key), find(other)))
                leader[second] = first
        groups: dict[str, list[str]] = {}
        for table in self.tables:
            groups.setdefault(find(table.key), []).append(table.key)
        return [group for group in groups.values() if len(group) > 1]

    def named(self, name: str, beside: str) -> str:
        """The key of a table that a constraint names: by its key, or by its name where only one has it.

        Args:
            beside: the table whose constraints say it; one in its module is meant first.
        """
        path = self.by_key[beside].names[0][0]
        near = f"{path}.{name}" if path else name
        for key in (near, name):
            if key in self.by_key:
                return key
        found = [table.key for table in self.tables if any(own == name for _, own in table.names)]
        if len(found) != 1:
            raise ConfigError(
                f"Table '{beside}': with_table='{name}' "
                + (f"may be any of {found}; write one of these." if found else "is no table of the model.")
            )
        return found[0]

    def limits(self, pins: Mapping[str, ParameterSharding]) -> dict[str, Limits]:
        """What the options of each table are restricted to."""
        found: dict[str, Limits] = {}
        for key, given in self.constraints.items():
            if key in pins:
                continue
            ranks = self._ranks(given)
            if given.with_table is not None:
                other = self.named(given.with_table, key)
                if other in pins:
                    own = pins[other].tiling
                    assert own is not None
                    ranks = own.ranks() if ranks is None else tuple(r for r in ranks if r in own.ranks())
                    if not ranks:
                        raise ConfigError(
                            f"Table '{key}': with_table='{other}' puts it on ranks {list(own.ranks())[:16]}, which its "
                            "constraints do not allow; leave one of the two out."
                        )
            types = self._types(key, given)
            if ShardingType.TABLE_COLUMN_WISE in types and ShardingType.COLUMN_WISE not in types and ranks:
                ranks = self._on_one_host(ranks)
            if types or given.min_partition is not None or ranks is not None:
                found[key] = Limits(types, given.min_partition, ranks)
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
        """Those of the host with the most of them."""
        hosts: dict[int, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(self.topology.host_of(rank), []).append(rank)
        most = max(len(own) for own in hosts.values())
        return tuple(next(own for own in hosts.values() if len(own) == most))

    def _types(self, key: str, given: ParameterConstraints) -> tuple[ShardingType, ...]:
        """The sharding types to search, where those that are asked for come down to simpler ones on this world."""
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
        """Of one batch of a rank as it arrives: int64 ids, int32 lengths, fp32 weights."""
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
        """A dict of JSON values."""
        return {
            "version": VERSION,
            "batch_size": self.batch_size,
            "reserved": self.reserved,
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
        for flag, usual in (("trained", True), ("pooled", True), ("weighted", False)):
            if getattr(table, flag) is not usual:
                out[flag] = getattr(table, flag)
        limits = self.constraints.get(table.key)
        if limits is not None and limits.to_json():
            out["constraints"] = limits.to_json()
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PlanRequest:
        """The inverse of `to_json`. Only `topology` and `tables` must be there.

        Raises:
            ConfigError: it is no request, or one of another version.
        """
        known = {"version", "batch_size", "reserved", "effort", "topology", "tables"}
        if not isinstance(data, Mapping) or not {"topology", "tables"} <= set(data) <= known:
            raise ConfigError(
                f"Plan request: wanted an object with topology and tables, and of {sorted(known)}."
            )
        if data.get("version", VERSION) != VERSION:
            raise ConfigError(
                f"Plan request: version {data['version']!r} is not {VERSION}, the one that this release reads."
            )
        tables, constraints = read_tables(data["tables"])
        return PlanRequest(
            tuple(tables),
            Topology.from_json(data["topology"]),
            data.get("batch_size", BATCH_SIZE),
            constraints,
            data.get("reserved", 0),
            data.get("effort", 1),
        )

    def digest(self) -> str:
        """32 letters that two requests share exactly when they are the same (up to chance)."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def with_constraint(self, key: str, **changes: Any) -> PlanRequest:
        """The same with other fields of a table's constraints."""
        new = replace(self.constraints.get(key, ParameterConstraints()), **changes)
        return replace(self, constraints={**self.constraints, key: new})


def read_tables(data: Any) -> tuple[list[PlannedTable], dict[str, ParameterConstraints]]:
    """Tables and their constraints from a list of JSON objects.

    A table is `{"name": "user", "num_embeddings": 1000, "embedding_dim": 64}`; further fields are `data_type`,
    `feature_names`, `module` (its path), `optimizer` (`"SGD"`, or an object), `pooled`, `weighted`, `trained`, and
    `constraints` (an object with fields of `ParameterConstraints`).

    Raises:
        ConfigError: it is no such list; names the table.
    """
    if not isinstance(data, (list, tuple)) or not data:
        raise ConfigError(
            'Tables: wanted a list such as [{"name": "user", "num_embeddings": 1000, "embedding_dim": 64}].'
        )
    tables: list[PlannedTable] = []
    constraints: dict[str, ParameterConstraints] = {}
    optimizers: dict[str, OptimizerSpec] = {}
    for i, item in enumerate(data):
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
            raise ConfigError(f"Tables: number {i} is {item!r:.80}, wanted an object with a name.")
        name = item["name"]
        unknown = sorted(set(item) - set(_FIELDS))
        missing = sorted({"num_embeddings", "embedding_dim"} - set(item))
        if unknown or missing:
            raise ConfigError(
                f"Table '{name}': "
                + (f"unknown fields {unknown}" if unknown else f"{missing} missing")
                + f"; known are {list(_FIELDS)}."
            )
        for field_name in ("num_embeddings", "embedding_dim"):
            value = item[field_name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"Table '{name}': {field_name} is {value!r}; it must be a whole number from 1."
                )
        names = [(str(item.get("module", "")), name), *((str(p), str(n)) for p, n in item.get("also", []))]
        features = item.get("feature_names")
        table = PlannedTable(
            tuple(names),
            item["num_embeddings"],
            item["embedding_dim"],
            _data_type(name, item.get("data_type", "FP32")),
            (name,) if features is None else tuple(map(str, features)),
            _optimizer(name, item.get("optimizer"), optimizers),
            bool(item.get("trained", True)),
            bool(item.get("pooled", True)),
            bool(item.get("weighted", False)),
            _wire(name, item.get("wire")),
        )
        tables.append(table)
        if item.get("constraints"):
            constraints[table.key] = ParameterConstraints.from_json(table.key, item["constraints"])
    return tables, constraints


_FIELDS = (
    "name", "num_embeddings", "embedding_dim", "data_type", "feature_names", "module", "also", "optimizer", "trained",
    "pooled", "weighted", "wire", "constraints",
)  # fmt: skip


def _data_type(name: str, word: object) -> DataType:
    found = {d.value: d for d in (DataType.FP32, DataType.BF16, DataType.FP16, DataType.FP64)}
    if isinstance(word, str) and word.upper() in found:
        return found[word.upper()]
    raise ConfigError(f"Table '{name}': data_type is {word!r}; use one of {list(found)}.")


def _optimizer(name: str, given: object, known: dict[str, OptimizerSpec]) -> OptimizerSpec | None:
    if given is None:
        return None
    data = {"optimizer": given} if isinstance(given, str) else given
    if not isinstance(data, Mapping):
        raise ConfigError(f'Table \'{name}\': optimizer is {given!r}; wanted {{"optimizer": "SGD"}}.')
    mark = json.dumps(data, sort_keys=True)
    if mark not in known:
        try:
            known[mark] = OptimizerSpec.from_json(data)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"Table '{name}': {error}") from error
    return known[mark]


def _wire(name: str, given: object) -> Wire | None:
    if given is None:
        return None
    try:
        return Wire(**given)  # type: ignore[arg-type]
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"Table '{name}': wire is {given!r}, which is none: {error}.") from error


def _divides(dim: int, splits: Sequence[int], most: int, least: int) -> bool:
    return any(k <= most and dim % k == 0 and dim // k >= least for k in splits)
