"""The plan of a running model: its sharded collections, their present plan, and a new plan completed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.model_tables import sizes_of, ties_of
from tilerec.parallel.plan_of import stored_plans
from tilerec.parallel.read_plan import AnyPlan, read_complete_plan
from tilerec.parallel.resharding.end_state import joined
from tilerec.parallel.table_optimizers import check_storage, with_kernels, with_present_storage
from tilerec.sharding.embedding import ShardedCollection
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


def sharded_collections(model: nn.Module, caller: str, *, two_d: bool = False) -> dict[str, ShardedCollection]:
    """Return the sharded collections of a model by path. All of them are sharded over the same ranks.

    Args:
        caller: name of the public function, for error messages.
        two_d: True if the caller handles the sharding groups of 2D parallelism; collections may then differ in ranks.

    Raises:
        ConfigError: the model has no sharded collection, or its collections are sharded over different ranks.
    """
    found = {path: part for path, part in model.named_modules() if isinstance(part, ShardedCollection)}
    if not found:
        raise ConfigError(
            f"{caller}: model: got a {type(model).__name__} that has no sharded tables; shard it first (tilerec.shard, "
            "DistributedModelParallel)."
        )
    if not two_d and any(part.exchange.teams is not None for part in found.values()):
        raise ConfigError(
            f"{caller}: model: got a {type(model).__name__} whose tables are in 2D parallelism; pass the "
            "DMPCollection itself, which has the sharding groups."
        )
    sizes = {path: part.exchange.group.size for path, part in found.items()}
    if len(set(sizes.values())) > 1 and not two_d:
        raise ConfigError(
            f"{caller}: model: got a {type(model).__name__} with collections on groups of different sizes ({sizes}); "
            "expected one size. Pass the parts that share a group one by one."
        )
    return found


def present_plan(model: nn.Module, collections: Mapping[str, ShardedCollection], caller: str) -> ShardingPlan:
    """Return the current plan of a model's collections.

    Raises:
        ConfigError: a module outside of `model` keeps the plan of one of them.
    """
    known: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, plan in stored_plans(model):
        for inner, tables in plan.plan.items():
            known.setdefault(joined(path, inner), EmbeddingModuleShardingPlan(tables))
    missing = [path for path in collections if path not in known]
    if missing:
        raise ConfigError(
            f"{caller}: model: got a {type(model).__name__} whose module '{missing[0]}' was sharded as a part of "
            "another module; pass the module that was given to shard() or to DistributedModelParallel, which keeps the "
            "plan."
        )
    topology = next(iter(collections.values())).exchange.topology
    whole = ShardingPlan({path: known[path] for path in collections}, topology.world_size, topology.host_ranks)
    return with_present_storage(whole, collections)


def complete_plan(
    present: ShardingPlan, collections: Mapping[str, ShardedCollection], plan: AnyPlan, now: Topology
) -> tuple[ShardingPlan, Topology]:
    """Return the complete plan and its topology. Values that `plan` leaves out are those of the present plan.

    Args:
        now: topology of the present plan.

    Raises:
        ConfigError: the plan was made for another world or another model.
    """
    own, size = cast("Mapping[str, TableCollection]", collections), now.world_size

    def world(hosts: Sequence[Sequence[int]] | None) -> Topology:
        if hosts is None or [sorted(h) for h in hosts] == [sorted(h) for h in now.host_ranks]:
            return now
        if sorted(rank for host in hosts for rank in host) != list(range(size)):
            raise ConfigError(
                f"reshard: plan: got hosts {[list(host) for host in hosts]}; expected ranks 0 to {size - 1}, each "
                "once. Plan again, or leave out hosts."
            )
        return Topology(size, now.compute_device, hosts=hosts)

    given, topology = read_complete_plan(plan, own, size, world)
    paths = dict.fromkeys([*present.plan, *given.plan])
    ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan({**present.plan.get(path, {}), **given.plan.get(path, {})})
            for path in paths
        }
    ).check(sizes_of(own), size)
    shardings = {(path, name): sharding for path, name, sharding in given.tables()}
    for names in ties_of(own):
        named = [shardings[name] for name in names if name in shardings]
        for name in names:  # a plan for one name of a tied table is the plan for all its names
            if named and name not in shardings:
                shardings[name] = named[0]
    parts = {
        path: EmbeddingModuleShardingPlan(
            {
                name: _with_defaults(name, shardings.get((path, name)), present.plan[path][name], size)
                for name in part._tables
            }
        )
        for path, part in collections.items()
    }
    whole = ShardingPlan(parts, size, topology.host_ranks, report=given.report)
    whole = with_kernels(whole, own)
    check_storage(whole, own)
    return whole, topology


def _with_defaults(
    name: str, given: ParameterSharding | None, present: ParameterSharding, size: int
) -> ParameterSharding:
    """Return the given sharding of a table. Fields that it leaves out are those of the present one."""
    if given is None:
        return present
    hot = present.hot if given.hot is None else given.hot
    return replace(
        given,
        compute_kernel=given.kernel or present.kernel,
        wire=given.wire or present.wire,
        ids_per_bag=present.ids_per_bag if given.ids_per_bag is None else given.ids_per_bag,
        data_type=present.data_type,
        hot=hot,
        tiling=cast(Tiling, given.tiling).with_hot(name, hot, size),
    )
