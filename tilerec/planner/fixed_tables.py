"""The `fixed=` argument of the planner: tables whose sharding is given by hand, as a plan, its file, or mappings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilerec.errors import ConfigError
from tilerec.spec.plan import ParameterSharding, ShardingPlan, ShardingType
from tilerec.spec.tile import Tiling

Fixed = ShardingPlan | str | Path | Mapping[str, Mapping[str, ParameterSharding | Tiling]]


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
            raise ConfigError(
                f"EmbeddingShardingPlanner: the plan in fixed= cannot be read: {error}"
            ) from error
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
