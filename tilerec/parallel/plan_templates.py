"""Plans in the words of the helpers: `shard(ebc, row_wise())`, `shard(ebc, {"user": table_wise(rank=1)})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.planner.helpers import Cut
from tilerec.spec.plan import EmbeddingModuleShardingPlan
from tilerec.spec.topology import Topology


def without_cuts(
    plan: Any,
    collections: Mapping[str, TableCollection],
    world: Callable[[Sequence[Sequence[int]] | None], Topology],
) -> Any:
    """The plan with a `ParameterSharding` for each `Cut` in it; as it came where it has none.

    Args:
        plan: anything; one `Cut` is for all tables of the model, one for a module's path for all tables there.
        world: the topology of this world, given the hosts that a part of the plan says.

    Raises:
        ConfigError: a cut does not fit its table or the world, or is of a table that the model lacks.
    """
    if isinstance(plan, Cut):
        plan = dict.fromkeys(collections, plan)
    if not isinstance(plan, Mapping) or not any(_has_cuts(part) for part in plan.values()):
        return plan
    if list(collections) == [""] and not any(
        isinstance(part, Mapping) or path == "" for path, part in plan.items()
    ):
        plan = {"": plan}
    said = (getattr(part, "hosts", None) for part in plan.values())
    topology = world(next((hosts for hosts in said if hosts is not None), None))
    return {path: _part(path, part, collections, topology) for path, part in plan.items()}


def _has_cuts(part: object) -> bool:
    items = part.values() if isinstance(part, Mapping) else [part]
    return any(isinstance(item, Cut) for item in items)


def _part(path: str, part: Any, collections: Mapping[str, TableCollection], topology: Topology) -> Any:
    if not _has_cuts(part):
        return part
    collection = collections.get(path)
    if collection is None:
        deeper = [where for where, inside in collections.items() if path in inside._tables]
        raise ConfigError(
            f"shard: the plan says how to cut '{path}', which is no path of a collection in the model; it has "
            f"{list(collections)[:8]}."
            + (f" There is a table of this name: plan={{'{deeper[0]}': {{'{path}': …}}}}." if deeper else "")
        )
    tables = collection._tables
    if isinstance(part, Cut):
        part = dict.fromkeys(tables, part)
    made = EmbeddingModuleShardingPlan(
        world_size=getattr(part, "world_size", None), hosts=getattr(part, "hosts", None)
    )
    for name, item in part.items():
        if not isinstance(item, Cut):
            made[name] = item
            continue
        if name not in tables:
            raise ConfigError(
                f"shard: the plan says how to cut table '{name}' of module '{path}', which has {list(tables)[:8]}; "
                "name each of its tables once."
            )
        config = tables[name].config
        made[name] = item.sharding(name, config.num_embeddings, config.embedding_dim, topology)
    return made
