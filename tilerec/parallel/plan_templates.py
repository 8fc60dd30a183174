"""Plans made with helpers: `shard(ebc, row_wise())`, `shard(ebc, {"user": table_wise(rank=1)})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.planner.helpers import Cut
from tilerec.spec.plan import EmbeddingModuleShardingPlan
from tilerec.spec.topology import Topology


def resolve_cuts(
    plan: Any,
    collections: Mapping[str, TableCollection],
    world: Callable[[Sequence[Sequence[int]] | None], Topology],
) -> Any:
    """Return the plan with a `ParameterSharding` in place of each `Cut`; return a plan without `Cut`s unchanged.

    Args:
        plan: any form. A single `Cut` applies to all tables of the model, a `Cut` for a module path to all tables of
            that module.
        world: returns the topology of this world, given the hosts in the plan or None.

    Raises:
        ConfigError: a `Cut` does not fit its table or the world, or is for a table that the model lacks.
    """
    if isinstance(plan, Cut):
        plan = dict.fromkeys(collections, plan)
    if not isinstance(plan, Mapping) or not any(_has_cuts(part) for part in plan.values()):
        return plan
    if list(collections) == [""] and not any(isinstance(part, Mapping) or path == "" for path, part in plan.items()):
        plan = {"": plan}
    hosts_per_part = (getattr(part, "hosts", None) for part in plan.values())
    topology = world(next((hosts for hosts in hosts_per_part if hosts is not None), None))
    return {path: _resolved(path, part, collections, topology) for path, part in plan.items()}


def _has_cuts(part: object) -> bool:
    items = part.values() if isinstance(part, Mapping) else [part]
    return any(isinstance(item, Cut) for item in items)


def _resolved(path: str, part: Any, collections: Mapping[str, TableCollection], topology: Topology) -> Any:
    if not _has_cuts(part):
        return part
    collection = collections.get(path)
    if collection is None:
        deeper = [where for where, inside in collections.items() if path in inside._tables]
        raise ConfigError(
            f"shard: plan: got '{path}'; expected paths of the model's collections, {list(collections)[:8]}."
            + (f" There is a table of this name: plan={{'{deeper[0]}': {{'{path}': …}}}}." if deeper else "")
        )
    tables = collection._tables
    if isinstance(part, Cut):
        part = dict.fromkeys(tables, part)
    made = EmbeddingModuleShardingPlan(world_size=getattr(part, "world_size", None), hosts=getattr(part, "hosts", None))
    for name, item in part.items():
        if not isinstance(item, Cut):
            made[name] = item
            continue
        if name not in tables:
            raise ConfigError(
                f"shard: plan['{path}']: got table '{name}'; expected the tables of the module, {list(tables)[:8]}. "
                "Name each of them once."
            )
        config = tables[name].config
        made[name] = item.sharding(name, config.num_embeddings, config.embedding_dim, topology)
    return made
