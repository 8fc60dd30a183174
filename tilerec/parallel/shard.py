"""`shard`: replaces the tables of a model by this rank's tiles, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from tilerec.comms.agreement import agreeing
from tilerec.comms.group import Group
from tilerec.optim.attach import restore_optimizers_on_error
from tilerec.parallel.device import device_of
from tilerec.parallel.env import Ranks, group_of_ranks
from tilerec.parallel.model_tables import collections_of
from tilerec.parallel.plan_of import store_plan
from tilerec.parallel.prepared_model import prepare_sharding
from tilerec.parallel.read_plan import AnyPlan
from tilerec.parallel.shard_job import ShardJob, shard_jobs
from tilerec.planner.sharder import check_sharder, checked_sharders
from tilerec.sharders.table_sharders import ModuleSharder
from tilerec.sharding.shard_ids import check_ids
from tilerec.spec.topology import Topology

_Module = TypeVar("_Module", bound=nn.Module)


def shard(
    module: _Module,
    plan: AnyPlan | None = None,
    env: Ranks | None = None,
    device: torch.device | str | int | None = None,
    sharder: ModuleSharder | Sequence[ModuleSharder] | None = None,
    *,
    mesh: Ranks | None = None,
    topology: Topology | None = None,
    exact: bool = False,
) -> _Module:
    """Shard every embedding collection in a module, including the module itself, in place. Collective.

    Names of modules, parameters and state do not change. Existing values and optimizer state are kept, cut to this
    rank's tiles. If ranks hold different values, all ranks take rank 0's. Every rank passes the same model and plan;
    one small collective checks this.

    Args:
        module: the model.
        plan: a `ShardingPlan`, the path of its JSON file, or `{module path: {table: ParameterSharding or Tiling}}`
            (`{table: …}` if the module is a collection). The result of `row_wise()` or another helper may stand for a
            table, for a module path or for all tables. Missing tilings are made from sharding types and ranks. None:
            `EmbeddingShardingPlanner(topology=…)` makes a plan. "row_wise" or another sharding type: it makes a plan
            with all tables of this type.
        env, mesh: two names of one argument, the ranks: a `ShardingEnv`, a `DeviceMesh` of one axis, a process group or
            a `Group`; None: the default process group.
        topology: the ranks of each host, and memory sizes for the planner. None: the plan's hosts, else those of the
            launcher (LOCAL_WORLD_SIZE), else one host.
        device: the device of tiles whose tables are on meta; tables with values stay on their device. None: CPU.
        sharder: a sharder with the optimizer and wire formats of tables that have none, as in
            `DistributedModelParallel`; or a list with at most one per kind of collection.
        exact: produce the same bits under every plan, with more bytes on the wire.

    A table that the plan has as `dense` loses its attached optimizer, with a warning. Its gradients go to `.grad`,
    reduced over the ranks as in `DistributedDataParallel`.

    Returns:
        The module, with the complete plan at `.plan` (printable). If the model has its own attribute `plan`, use
        `tilerec.parallel.plan_of(module)`.

    Raises:
        ConfigError: the plan does not fit this model or this world, lacks a table, contradicts itself (a tiling that
            does not follow from sharding type and ranks), or differs between ranks; a collection is sharded already;
            tied tables have different tilings; `env` and `mesh` are both given; this machine lacks `device`. The model
            is then unchanged.
    """
    if not collections_of(module):
        warnings.warn(
            f"shard: {type(module).__name__} has no EmbeddingBagCollection or EmbeddingCollection; nothing to do.",
            stacklevel=2,
        )
    if sharder is not None and (isinstance(sharder, str) or not isinstance(sharder, Sequence)):
        check_sharder(sharder, "shard: sharder")
        sharder = [sharder]
    group = group_of_ranks("shard", env=env, mesh=mesh)
    shard_tables(module, plan, group, topology, device, exact, sharder, "shard")
    return module


def shard_tables(
    module: nn.Module,
    plan: AnyPlan | None,
    group: Group,
    topology: Topology | None,
    device: torch.device | str | int | None,
    exact: bool,
    sharders: Sequence[ModuleSharder] | None,
    who: str,
    also: Callable[[], Mapping[str, object]] = dict,
) -> nn.Module:
    """Shard a model as `shard` does. If it raises, optimizers that sharders attached are detached again.

    Args:
        who: name of the calling function, for errors.
        also: returns further settings that must be equal on all ranks; may raise on one rank.
    """
    with restore_optimizers_on_error(module.parameters()):
        with agreeing(group, "the model to shard") as found:
            found.update(also())
            device = None if device is None else device_of(device, who)
            ready = prepare_sharding(module, plan, group, topology, device, checked_sharders(sharders, who))
            check_ids(ready.ids, group.size)
            found.update(exact=exact, **ready.described())
        if ready.collections or ready.ids:
            # Separate channels: other collectives of the model's ranks may run between those of the tables.
            rows, route = group.split("rows"), group.split("route")
            shard_jobs(group, [ShardJob(ready, rows, route, device, exact)])
    store_plan(module, ready.plan)
    return module
