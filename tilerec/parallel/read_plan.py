"""A plan in any form that `shard` takes, as a whole `ShardingPlan`: every table with its tiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.sharding.strategies import complete
from tilerec.spec.plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tilerec.spec.table import dtype_to_data_type
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

AnyPlan = ShardingPlan | str | Path | Mapping[str, Any]
"""A plan, the path of its JSON file, or `{module path: {table: ParameterSharding or Tiling}}`."""


def read_plan(plan: AnyPlan, collections: Mapping[str, TableCollection]) -> ShardingPlan:
    """The plan as a `ShardingPlan`; tilings may still be missing.

    Args:
        plan: a plan of the model's one collection, `{table: …}`, is taken where the model is that collection.

    Raises:
        ConfigError: it is none of the forms.
    """
    if isinstance(plan, ShardingPlan):
        return plan
    if isinstance(plan, (str, Path)):
        return ShardingPlan.load(plan)
    if not isinstance(plan, Mapping):
        raise ConfigError(
            f"shard: plan is a {type(plan).__name__}; wanted a ShardingPlan, the path of its file, or "
            "{module path: {table: ParameterSharding or Tiling}}."
        )
    if plan and list(collections) == [""] and not any(isinstance(part, Mapping) for part in plan.values()):
        plan = {"": plan}
    parts: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, tables in plan.items():
        if not isinstance(tables, Mapping):
            raise ConfigError(
                f"shard: plan['{path}'] is a {type(tables).__name__}; wanted {{table: ParameterSharding or Tiling}}."
            )
        parts[path] = EmbeddingModuleShardingPlan(
            {table: _sharding(path, table, item) for table, item in tables.items()}
        )
    return ShardingPlan(parts)


def _sharding(path: str, table: str, item: object) -> ParameterSharding:
    if isinstance(item, ParameterSharding):
        return item
    if isinstance(item, Tiling):
        return ParameterSharding(ShardingType.EXPLICIT, tiling=item)
    raise ConfigError(
        f"shard: plan['{path}']['{table}'] is a {type(item).__name__}; wanted a ParameterSharding or a Tiling."
    )


def completed(
    plan: ShardingPlan, collections: Mapping[str, TableCollection], topology: Topology
) -> ShardingPlan:
    """The plan with a tiling and a data type for every table of the model, and with the world it is for."""
    parts: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, tables in plan.plan.items():
        part = collections.get(path)
        done: dict[str, ParameterSharding] = {}
        for name, sharding in tables.items():
            table = None if part is None else part._tables.get(name)
            if table is not None:
                config = table.config
                if sharding.tiling is None:
                    sharding = complete(sharding, name, config.num_embeddings, config.embedding_dim, topology)
                if sharding.data_type is None:
                    sharding = replace(sharding, data_type=dtype_to_data_type(table.weight.dtype))
            done[name] = sharding
        parts[path] = EmbeddingModuleShardingPlan(done)
    world_size = topology.world_size if plan.world_size is None else plan.world_size
    return ShardingPlan(parts, world_size, topology.host_ranks)
