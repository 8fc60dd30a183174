"""From a model and the planner's settings to a `PlanRequest`: tables, constraints, pins (`fixed=`), reserved memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from tilerec.errors import ConfigError
from tilerec.gc_paused import gc_paused
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.request import PlanRequest
from tilerec.planner.reservation import StorageReservation
from tilerec.planner.sharder import Sharder, checked_sharders
from tilerec.planner.tables import PlannedTable, tables_of, tables_of_configs
from tilerec.spec.plan import ParameterSharding, ShardingPlan, ShardingType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

Fixed = ShardingPlan | str | Path | Mapping[str, Mapping[str, ParameterSharding | Tiling]]


@gc_paused()
def model_request(
    module: Any,
    sharders: Sequence[Sharder] | None,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints],
    fixed: Mapping[tuple[str, str], ParameterSharding],
    reservation: StorageReservation,
    *,
    batch_size: int,
    effort: int,
) -> PlanRequest:
    """Return the request for the tables of a module, or of a list of configs.

    Args:
        module, sharders: as in `EmbeddingShardingPlanner.plan`.
        constraints: by table name, or by `"<path>.<name>"`.
        fixed: shardings of pinned tables, by (module path, table name).

    Raises:
        ConfigError: there are no tables, or constraints or `fixed` do not fit them.
    """
    given = checked_sharders(sharders, "EmbeddingShardingPlanner")
    dense = {name for name, limits in constraints.items() if limits.only_dense()}
    if isinstance(module, nn.Module):
        tables = tables_of(module, given, dense)
        what = f"{type(module).__name__} has no embedding collection with tables; pass the model that holds them."
    elif isinstance(module, (list, tuple)):
        tables = tables_of_configs(module, given, dense)
        what = "the list of tables is empty."
    else:
        raise ConfigError(
            f"EmbeddingShardingPlanner: module is a {type(module).__name__}; wanted a module, or a list of configs."
        )
    if not tables:
        raise ConfigError(f"EmbeddingShardingPlanner: {what}")
    request = PlanRequest(tuple(tables), topology, batch_size, _by_key(tables, constraints, fixed), effort=effort)
    cap, part = topology.memory_cap, reservation.percentage
    model, one = module if isinstance(module, nn.Module) else None, request.input_bytes()
    reserved = reservation.reserved(cap, model, one) - math.ceil(cap * part)
    # Reserved input is stored as a number of batches, so that it scales when a what-if changes the batch size.
    batches = max(0, reserved + math.ceil(cap * part) - reservation.reserved(cap, model, 0)) // one
    return request.with_reserved(max(0, reserved - batches * one), part, batches)


def _by_key(
    tables: Sequence[PlannedTable],
    constraints: Mapping[str, ParameterConstraints],
    fixed: Mapping[tuple[str, str], ParameterSharding],
) -> dict[str, ParameterConstraints]:
    """Return constraints and pins by `PlannedTable.key`.

    A table with several names gets the constraints of its first name that has any.
    """
    used: set[str] = set()
    pinned: set[tuple[str, str]] = set()
    found: dict[str, ParameterConstraints] = {}
    for table in tables:
        for path, name in table.names:
            for given in (f"{path}.{name}" if path else name, name):
                if given in constraints:
                    used.add(given)
                    found.setdefault(table.key, constraints[given])
            if (path, name) in fixed:
                pinned.add((path, name))
                limits = found.get(table.key, ParameterConstraints())
                if limits.sharding is not None:
                    raise ConfigError(
                        f"{table}: got both fixed= and the sharding= of its constraints; expected one of them, as "
                        "each gives the placement. Leave one out."
                    )
                try:
                    found[table.key] = replace(limits, sharding=fixed[(path, name)])
                except ConfigError as error:
                    raise ConfigError(f"{table}: it is in fixed=, and {error}") from error
        skew = found[table.key].skew if table.key in found else None
        if table.managed and skew is not None and skew.hot:  # its rows have other ids
            found[table.key] = replace(found[table.key], skew=replace(skew, hot=()))
    strange = [name for name in constraints if name not in used]
    if strange:
        names = sorted({name for table in tables for _, name in table.names})
        near = {name: get_close_matches(name, names, n=1) for name in strange[:8]}
        meant = ", ".join(f"'{close[0]}' for '{name}'" for name, close in near.items() if close)
        raise ConfigError(
            f"EmbeddingShardingPlanner: constraints name {strange[:8]}, which is no table of the model; it has "
            f"{names[:8]}{' and more' if len(names) > 8 else ''}." + (f" Close are {meant}." if meant else "")
        )
    lost = sorted(set(fixed) - pinned)
    if lost:
        path, name = lost[0]
        raise ConfigError(
            f"EmbeddingShardingPlanner: fixed= has a table '{name}' of module '{path}', which the model lacks; "
            "take it out, or correct its name."
        )
    return found


def read_fixed(fixed: Fixed | None) -> tuple[dict[tuple[str, str], ParameterSharding], int | None]:
    """Return the shardings by (module path, table name), and the plan's number of ranks; None if it has none.

    Raises:
        ConfigError: `fixed` is not of this type, or the file cannot be read.
    """
    if fixed is None:
        return {}, None
    if isinstance(fixed, (str, Path)):
        try:
            fixed = ShardingPlan.load(fixed)
        except ConfigError as error:
            raise ConfigError(f"EmbeddingShardingPlanner: the plan in fixed= cannot be read: {error}") from error
    if isinstance(fixed, ShardingPlan):
        return {(path, name): sharding for path, name, sharding in fixed.tables()}, fixed.world_size
    if not isinstance(fixed, Mapping):
        raise ConfigError(
            f"EmbeddingShardingPlanner: fixed is a {type(fixed).__name__}; wanted a ShardingPlan, the path of one, or "
            "{module path: {table: ParameterSharding or Tiling}}."
        )
    found: dict[tuple[str, str], ParameterSharding] = {}
    for path, tables in fixed.items():
        if not isinstance(tables, Mapping):
            raise _wrong_kind(path, tables)
        for name, item in tables.items():
            if isinstance(item, Tiling):
                item = ParameterSharding(ShardingType.EXPLICIT, tiling=item)
            if not isinstance(item, ParameterSharding):
                raise _wrong_kind(path, item)
            found[(path, name)] = item
    return found, None


def _wrong_kind(path: object, item: Any) -> ConfigError:
    return ConfigError(
        f"EmbeddingShardingPlanner: fixed['{path}'] is or has a {type(item).__name__}; wanted "
        "{table: ParameterSharding or Tiling}."
    )
