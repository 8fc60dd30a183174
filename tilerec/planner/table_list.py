"""The JSON form of a list of tables with their constraints, in requests and in the files of `tilerec plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tilerec.json_document import JsonValue
from tilerec.planner.constraints import NO_CONSTRAINTS, ParameterConstraints
from tilerec.planner.tables import PlannedTable
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.parameter_sharding import read_wire
from tilerec.spec.table import DataType


def table_to_json(table: PlannedTable, limits: ParameterConstraints) -> dict[str, Any]:
    """Return a table with its constraints as a dict of JSON values."""
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
        out["wire"] = table.wire.to_json()
    if table.cached is not None:
        out["cached"] = table.cached
    for flag, usual in (("trained", True), ("pooled", True), ("weighted", False), ("files", False)):
        if getattr(table, flag) is not usual:
            out[flag] = getattr(table, flag)
    if limits is not NO_CONSTRAINTS and limits.to_json():
        out["constraints"] = limits.to_json()
    return out


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
            found["files"].flag() if "files" in found else False,
        )
        tables.append(table)
        if found.get("constraints") is not None and found["constraints"].value:
            constraints[table.key] = ParameterConstraints.from_json(table.key, found["constraints"])
    return tables, constraints


_TABLES = 'a list such as [{"name": "user", "num_embeddings": 1000, "embedding_dim": 64}]'
_NOT_NULL = (
    "name", "num_embeddings", "embedding_dim", "data_type", "module", "also", "trained", "pooled", "weighted",
    "files",
)  # fmt: skip
_FIELDS = (
    "name", "num_embeddings", "embedding_dim", "data_type", "feature_names", "module", "also", "optimizer", "trained",
    "pooled", "weighted", "wire", "cached", "files", "constraints",
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
                JsonValue.of({"optimizer": value.value}, value.where) if isinstance(value.value, str) else value
            )
        except TypeError as error:
            raise value.refused(error) from error
    return known[mark]
