"""A plan in any form that `shard` takes, as a whole `ShardingPlan`: every table with its tiling."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.two_d.replicated_plan import ReplicatedPlan
from tilerec.planner.helpers import Cut
from tilerec.sharding import strategies
from tilerec.spec.plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tilerec.spec.ranks import ranks_to_text
from tilerec.spec.table import DataType, dtype_to_data_type
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

AnyPlan = ShardingPlan | str | Path | Cut | Mapping[str, Any]
"""A plan, the path of its JSON file, `{module path: {table: ParameterSharding, Tiling or row_wise() and its like}}`, or
one of these helpers' results for all tables."""


def read_plan(plan: AnyPlan, collections: Mapping[str, TableCollection]) -> ShardingPlan:
    """The plan as a `ShardingPlan`; tilings may still be missing.

    Args:
        plan: without `Cut`s (see `without_cuts`). A plan of the model's one collection, `{table: …}`, is taken where
            the model is that collection.

    Raises:
        ConfigError: it is none of the forms.
    """
    if isinstance(plan, ShardingPlan):
        return plan
    if isinstance(plan, ReplicatedPlan):
        raise ConfigError(
            "shard: this is the plan of a model in 2D parallelism; pass its .group_plan, which is of one sharding "
            "group, or its .world_plan(), which is of all ranks."
        )
    if isinstance(plan, (str, Path)):
        return ShardingPlan.load(plan)
    if not isinstance(plan, Mapping):
        raise ConfigError(
            f"shard: plan is a {type(plan).__name__}; wanted a ShardingPlan, the path of its file, or "
            "{module path: {table: ParameterSharding or Tiling}}. Helpers give one for all tables: plan=row_wise()."
        )
    if plan and list(collections) == [""] and not any(isinstance(part, Mapping) for part in plan.values()):
        plan = {"": plan}
    parts: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, tables in plan.items():
        if not isinstance(tables, Mapping):
            raise ConfigError(
                f"shard: plan['{path}'] is a {type(tables).__name__}; wanted {{table: ParameterSharding or Tiling}}."
                + (_deeper(path, collections) if isinstance(tables, (ParameterSharding, Tiling)) else "")
            )
        parts[path] = EmbeddingModuleShardingPlan(
            {table: _sharding(path, table, item) for table, item in tables.items()},
            world_size=getattr(tables, "world_size", None),
            hosts=getattr(tables, "hosts", None),
        )
    return ShardingPlan(parts)


def _deeper(table: str, collections: Mapping[str, TableCollection]) -> str:
    """What to do with the plan of one collection, given for a model that holds collections deeper."""
    paths = [path for path, part in collections.items() if table in part._tables]
    if not paths:
        return f" The model's collections are {list(collections)[:8]}, and none has a table '{table}'."
    return f" The model's table '{table}' is in module '{paths[0]}': plan={{'{paths[0]}': {{'{table}': …}}}}."


def _sharding(path: str, table: str, item: object) -> ParameterSharding:
    if isinstance(item, ParameterSharding):
        return item
    if isinstance(item, Tiling):
        return ParameterSharding(ShardingType.EXPLICIT, tiling=item)
    raise ConfigError(
        f"shard: plan['{path}']['{table}'] is a {type(item).__name__}; wanted a ParameterSharding, a Tiling, "
        "or what row_wise() and its like return (called, not the helper itself)."
    )


def completed(
    plan: ShardingPlan, collections: Mapping[str, TableCollection], topology: Topology
) -> ShardingPlan:
    """The plan with a tiling and a data type for every table of the model, and with the world it is for.

    Raises:
        ConfigError: a table's sharding type and ranks give no tiling, or not the one that stands beside them; a
            `data_parallel` table on some of the ranks only.
    """
    parts: dict[str, EmbeddingModuleShardingPlan] = {}
    other: list[tuple[str, str, DataType | None, DataType]] = []
    for path, tables in plan.plan.items():
        part = collections.get(path)
        done: dict[str, ParameterSharding] = {}
        for name, sharding in tables.items():
            table = None if part is None else part._tables.get(name)
            if table is not None:
                config = table.config
                _check_copies(path, name, sharding, topology)
                if sharding.tiling is not None:
                    _check_cut(path, name, sharding, topology)
                else:
                    sharding = strategies.complete(
                        sharding, name, config.num_embeddings, config.embedding_dim, topology
                    )
                data_type = dtype_to_data_type(table.weight.dtype)
                if sharding.data_type not in (None, data_type):
                    other.append((path, name, sharding.data_type, data_type))
                if sharding.data_type is not data_type:
                    sharding = replace(sharding, data_type=data_type)
            done[name] = sharding
        parts[path] = EmbeddingModuleShardingPlan(done)
    if other:
        path, name, said, data_type = other[0]
        more = f" and {len(other) - 1} other tables" if len(other) > 1 else ""
        warnings.warn(
            f"Table '{name}' of module '{path}'{more}: data_type {getattr(said, 'value', said)} in the plan has no "
            f"effect; the table's is {data_type.value}, as its config or .to() says.",
            stacklevel=6,
        )
    world_size = topology.world_size if plan.world_size is None else plan.world_size
    return ShardingPlan(parts, world_size, topology.host_ranks)


def _check_copies(path: str, name: str, sharding: ParameterSharding, topology: Topology) -> None:
    ranks = sharding.ranks
    if sharding.kind is not ShardingType.DATA_PARALLEL or ranks is None:
        return
    if sorted(set(ranks)) != list(range(topology.world_size)):
        raise ConfigError(
            f"Table '{name}' of module '{path}': data_parallel is a copy on every rank, and the plan says ranks "
            f"'{ranks_to_text(ranks)}' of {topology.world_size}; leave ranks (and the tiling) out. Copies on some of "
            "the ranks are sharding_type 'explicit' with a tiling."
        )


def _check_cut(path: str, name: str, sharding: ParameterSharding, topology: Topology) -> None:
    """Refuse a tiling that sharding type and ranks do not give, as where one of them was edited in a file."""
    tiling, ranks = sharding.tiling, sharding.ranks
    assert tiling is not None
    assert ranks is not None
    if sharding.kind is ShardingType.EXPLICIT:
        if tuple(sorted(set(ranks))) != tiling.ranks():
            raise ConfigError(
                f"Table '{name}' of module '{path}': the plan says ranks '{ranks_to_text(ranks)}', and the tiling "
                f"beside it lies on ranks '{ranks_to_text(tiling.ranks())}'. Change the tiling, and take 'ranks' out."
            )
        return
    if _gives(name, sharding.kind, ranks, tiling, topology):
        return
    text = json.dumps(tiling.to_json())
    raise ConfigError(
        f"Table '{name}' of module '{path}': the plan says {sharding.kind.value} over ranks "
        f"'{ranks_to_text(ranks)}', which does not give the tiling beside it, {text:.200}. Take 'tiling' out to have "
        "it made from the two, or say sharding_type 'explicit' (without ranks) to keep it."
    )


def _gives(name: str, kind: ShardingType, ranks: Sequence[int], tiling: Tiling, topology: Topology) -> bool:
    """Whether a sharding type over these ranks gives a tiling, with pieces of its own sizes or of the tiling's."""
    rows, dim = tiling.rows, tiling.dim
    widths = [block.c1 - block.c0 for block in tiling.blocks]
    sizes = [r1 - r0 for r0, r1 in pairwise(tiling.blocks[0].cuts)]
    by_rows = {
        ShardingType.ROW_WISE: strategies.row_wise,
        ShardingType.TABLE_ROW_WISE: strategies.table_row_wise,
    }
    by_columns = {
        ShardingType.COLUMN_WISE: strategies.column_wise,
        ShardingType.TABLE_COLUMN_WISE: strategies.table_column_wise,
        ShardingType.GRID_SHARD: strategies.grid,
    }
    ways: list[Callable[[], Tiling]] = [lambda: strategies.STRATEGIES[kind](name, rows, dim, ranks, topology)]
    if kind in by_rows:
        ways.append(lambda: by_rows[kind](name, rows, dim, ranks, topology, sizes=sizes))
    if kind in by_columns:
        ways.append(lambda: by_columns[kind](name, rows, dim, ranks, topology, widths=widths))
    for way in ways:
        try:
            if way() == tiling:
                return True
        except ConfigError:
            continue  # not cut like this
    return False
