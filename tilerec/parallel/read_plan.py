"""Conversion of every form of plan that `shard` takes to a complete `ShardingPlan`, with a tiling per table."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.plan_templates import resolve_cuts
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
"""A plan, the path of its JSON file, a mapping, or the result of one helper (`row_wise()`, ...) for all tables.

`shard` also takes the name of a sharding type, such as "row_wise": the planner then places all tables by that type.

The mapping is `{module path: {table: sharding}}`; a sharding is a `ParameterSharding`, a `Tiling` or a helper's result.
"""


def sharding_type_of(plan: object) -> ShardingType | None:
    """Return the sharding type that a plan names, as in `plan="row_wise"`; None for every other plan."""
    return next((kind for kind in ShardingType if plan == kind.value and kind is not ShardingType.EXPLICIT), None)


def _load(path: str | Path) -> ShardingPlan:
    kind = sharding_type_of(path)
    if kind is not None:
        raise ConfigError(
            f"plan: got {kind.value!r}, a sharding type; expected a plan or the path of its file. Pass the plan that "
            f"EmbeddingShardingPlanner makes with constraints, or a helper of tilerec.planner for all tables."
        )
    return ShardingPlan.load(path)


def read_plan(plan: AnyPlan, collections: Mapping[str, TableCollection]) -> ShardingPlan:
    """Return the plan as a `ShardingPlan`; tilings may still be missing.

    Args:
        plan: a plan without `Cut`s (see `resolve_cuts`). If the model is a collection, `{table: …}` is accepted, too.

    Raises:
        ConfigError: the plan has none of these forms.
    """
    if isinstance(plan, ShardingPlan):
        return plan
    if isinstance(plan, ReplicatedPlan):
        raise ConfigError(
            "shard: plan: got the plan of a model in 2D parallelism; pass its .group_plan, for one sharding group, or "
            "its .world_plan(), for all ranks."
        )
    if isinstance(plan, (str, Path)):
        return _load(plan)
    if not isinstance(plan, Mapping):
        raise ConfigError(
            f"shard: plan: got a {type(plan).__name__}; expected a ShardingPlan, the path of its file, or "
            "{module path: {table: ParameterSharding or Tiling}}. For all tables alike: plan=row_wise()."
        )
    if plan and list(collections) == [""] and not any(isinstance(part, Mapping) for part in plan.values()):
        plan = {"": plan}
    parts: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, tables in plan.items():
        if not isinstance(tables, Mapping):
            raise ConfigError(
                f"shard: plan['{path}']: got a {type(tables).__name__}; "
                "expected {table: ParameterSharding or Tiling}."
                + (_path_advice(path, collections) if isinstance(tables, (ParameterSharding, Tiling)) else "")
            )
        parts[path] = EmbeddingModuleShardingPlan(
            {table: _sharding(path, table, item) for table, item in tables.items()},
            world_size=getattr(tables, "world_size", None),
            hosts=getattr(tables, "hosts", None),
        )
    return ShardingPlan(parts)


def _path_advice(table: str, collections: Mapping[str, TableCollection]) -> str:
    """Return advice for a plan `{table: …}` of a model that is not a collection itself."""
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
        f"shard: plan['{path}']['{table}']: got a {type(item).__name__}; expected a ParameterSharding, a Tiling, "
        "or the result of row_wise() or another helper (called, not the helper itself)."
    )


def plan_without(plan: Any, others: Collection[str]) -> Any:
    """Return a plan in any form without the modules at these paths, which belong to other sharding groups."""
    if others and isinstance(plan, (str, Path)):
        plan = _load(plan)
    if isinstance(plan, ShardingPlan) and any(path in others for path in plan.plan):
        kept = {path: part for path, part in plan.plan.items() if path not in others}
        return ShardingPlan(kept, plan.world_size, plan.hosts)
    if isinstance(plan, Mapping) and any(path in others for path in plan):
        return {path: part for path, part in plan.items() if path not in others}
    return plan


def read_complete_plan(
    plan: AnyPlan,
    collections: Mapping[str, TableCollection],
    size: int,
    world: Callable[[Sequence[Sequence[int]] | None], Topology],
) -> tuple[ShardingPlan, Topology]:
    """Return the complete plan in any form that `shard` takes, and its topology.

    Args:
        size: number of ranks.
        world: returns the topology of these ranks, given the hosts in the plan or None.

    Raises:
        ConfigError: as `resolve_cuts`, `read_plan` and `complete_plan_of`; the plan is for another number of ranks.
    """
    given = read_plan(resolve_cuts(plan, collections, world), collections)
    if given.world_size not in (None, size):
        given.check({}, size)  # first, because its hosts may belong to another world
    topology = world(given.hosts)
    return replace(complete_plan_of(given, collections, topology), report=given.report), topology


def complete_plan_of(
    plan: ShardingPlan, collections: Mapping[str, TableCollection], topology: Topology
) -> ShardingPlan:
    """Return the plan with a tiling and a data type for every table of the model, and with its world size and hosts.

    Raises:
        ConfigError: a table's sharding type and ranks produce no tiling, or another tiling than the plan's; a
            `data_parallel` table is on some of the ranks only.
    """
    parts: dict[str, EmbeddingModuleShardingPlan] = {}
    type_conflicts: list[tuple[str, str, DataType | None, DataType]] = []
    for path, tables in plan.plan.items():
        part = collections.get(path)
        done: dict[str, ParameterSharding] = {}
        for name, sharding in tables.items():
            table = None if part is None else part._tables.get(name)
            if table is not None:
                config = table.config
                _check_copies(path, name, sharding, topology)
                if sharding.tiling is not None:
                    _check_tiling(path, name, sharding, topology)
                else:
                    sharding = strategies.complete(
                        sharding, name, config.num_embeddings, config.embedding_dim, topology
                    )
                data_type = dtype_to_data_type(table.weight.dtype)
                if sharding.data_type not in (None, data_type):
                    type_conflicts.append((path, name, sharding.data_type, data_type))
                tiling = cast(Tiling, sharding.tiling).with_hot(name, sharding.hot, topology.world_size)
                if sharding.data_type is not data_type or tiling != sharding.tiling:
                    sharding = replace(sharding, data_type=data_type, tiling=tiling)
            done[name] = sharding
        parts[path] = EmbeddingModuleShardingPlan(done)
    if type_conflicts:
        path, name, plan_type, data_type = type_conflicts[0]
        more = f" and {len(type_conflicts) - 1} other tables" if len(type_conflicts) > 1 else ""
        warnings.warn(
            f"Table '{name}' of module '{path}'{more}: data_type {getattr(plan_type, 'value', plan_type)} in the plan "
            f"has no effect; the table's data type is {data_type.value}, from its config or .to().",
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
            f"Table '{name}' of module '{path}': data_parallel is a copy on every rank; got ranks "
            f"'{ranks_to_text(ranks)}' of {topology.world_size}. Leave ranks and the tiling out. For copies on some of "
            "the ranks use sharding_type 'explicit' with a tiling."
        )


def _check_tiling(path: str, name: str, sharding: ParameterSharding, topology: Topology) -> None:
    """Raise if the tiling does not follow from sharding type and ranks, e.g. after an edit of the file."""
    tiling, ranks = sharding.tiling, sharding.ranks
    assert tiling is not None
    assert ranks is not None
    if sharding.kind is ShardingType.EXPLICIT:
        if tuple(sorted(set(ranks))) != tiling.ranks():
            raise ConfigError(
                f"Table '{name}' of module '{path}': ranks: got '{ranks_to_text(ranks)}'; expected the ranks of the "
                f"tiling, '{ranks_to_text(tiling.ranks())}'. Change the tiling, and remove 'ranks'."
            )
        return
    if _produces(name, sharding.kind, ranks, tiling, topology):
        return
    text = json.dumps(tiling.to_json())
    raise ConfigError(
        f"Table '{name}' of module '{path}': {sharding.kind.value} over ranks '{ranks_to_text(ranks)}' does not "
        f"produce the plan's tiling, {text:.200}. Remove 'tiling' to derive it from sharding type and ranks, or use "
        "sharding_type 'explicit' (without ranks) to keep it."
    )


def _produces(name: str, kind: ShardingType, ranks: Sequence[int], tiling: Tiling, topology: Topology) -> bool:
    """Return True if the sharding type over these ranks produces the tiling, with default or the tiling's own sizes."""
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
    if kind is ShardingType.GRID_SHARD:
        ways.append(lambda: strategies.grid(name, rows, dim, ranks, topology, widths=widths, sizes=sizes))
    for way in ways:
        try:
            if way().blocks == tiling.blocks:
                return True
        except ConfigError:
            continue  # this way cannot tile the table
    return False
