"""`rebalance`: plan for the measured load, and reshard if the predicted gain pays for the move.

    load ──► seconds of a step now ──► a plan for this load ──► seconds under it ──► seconds of the move ──► move or not

Rank 0 decides and sends the plan and the reasons to all other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from tilerec.comms.agreement import on_all_ranks
from tilerec.errors import ConfigError
from tilerec.parallel.resharding.external_optimizers import check_given, unattached_tables
from tilerec.parallel.resharding.measured_load import Load, load_of
from tilerec.parallel.resharding.move_progress import ProgressOption, check_progress
from tilerec.parallel.resharding.rebalance_decision import Rebalanced, decide
from tilerec.parallel.resharding.rebalance_proposal import Planned, propose
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.reshard_2d import group_topology
from tilerec.parallel.resharding.running_plan import present_plan, sharded_collections
from tilerec.parallel.two_d.running_groups import TwoD, unwrapped
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.sharding.embedding import ShardedCollection


def rebalance(
    model: nn.Module,
    planner: EmbeddingShardingPlanner | None = None,
    *,
    horizon: int = 1000,
    least_gain: float = 0.05,
    step_seconds: float | None = None,
    load: Load | None = None,
    apply: bool = True,
    budget_bytes: int | None = None,
    progress: ProgressOption = None,
    optimizers: Sequence[Optimizer] | None = None,
) -> Rebalanced:
    """Reshard a running model if another plan is faster for its measured load and the move pays. Collective.

    The load is the bags and ids that the batches of all ranks have read since the last call (`load_of`). The planner
    gets it as bags and ids per bag, in addition to its constraints. Its plan is then brought close to the present one:
    interchangeable ranks are permuted, and tables whose move saves little time stay.

    Args:
        model: a model that `reshard` accepts. For a `DMPCollection`, the plan is for one sharding group, and all groups
            follow it. The load is that of all ranks, or that of rank 0's group if groups train separately. Parts with
            groups of different sizes are planned one by one, and their step times are added.
        planner: a planner with constraints and a topology (calibrated, if prices are to be this machine's seconds). Its
            batch size and pooling factors are replaced by the measured ones. None: a planner for the model's topology.
            A part whose groups have another size uses the planner's speeds and constraints.
        horizon: number of steps in which the move must pay, usually those until the next call.
        least_gain: fraction of the step that a new plan must save. Smaller gains are within the model's error.
        step_seconds: measured seconds of the tables' part of a step; predicted seconds are scaled to it. None: no
            scaling.
        load: a load to use instead of the measured one; the one that rank 0 passes is used.
        apply: False: only return the decision.
        budget_bytes, progress, optimizers: see `reshard`.

    Returns:
        The decision: step times before and after, the price of the move, the reason, and the report of the move.

    Raises:
        ConfigError: the model is not sharded, an option is wrong, or the planner or `reshard` raises it.
        PlannerError: no plan fits the memory of the planner's topology.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"rebalance: model: got a {type(model).__name__}; expected a module that `shard` has "
            "sharded. Pass the model."
        )
    outer = model
    model, two_d = unwrapped(outer)
    collections = sharded_collections(model, "rebalance", two_d=two_d is not None)
    group = next(iter(collections.values())).exchange.group if two_d is None else two_d.world
    group.begin("rebalance")
    measured = load_of(model) if load is None else load
    found: Rebalanced | None = None
    with on_all_ranks(group, "rebalance", "its decision"):
        _check(planner, horizon, least_gain, step_seconds)
        if not isinstance(measured, Load):
            raise ConfigError(
                f"rebalance: load: got a {type(load).__name__}; expected the Load that load_of(model) returns. "
                "Leave it out to take that of the model."
            )
        check_progress(progress)
        if apply and optimizers is None:
            check_given(unattached_tables(collections), None, "rebalance")
        parts = _parts(model, collections, two_d)
        if group.rank == 0:
            proposals = [
                propose(model, part, planner, measured, len(parts) == 1, budget_bytes, least_gain) for part in parts
            ]
            found = decide(proposals, measured, horizon, least_gain, step_seconds)
    found = cast("list[Rebalanced]", group.all_gather_object(found))[0]
    if found.pays and apply:
        moved = reshard(outer, found.plan, budget_bytes=budget_bytes, progress=progress, optimizers=optimizers)
        return replace(found, moved=moved)
    return found


def _parts(model: nn.Module, collections: dict[str, ShardedCollection], two_d: TwoD | None) -> list[Planned]:
    """Return the parts that are planned one by one. In 2D parallelism, each has one sharding group."""
    if two_d is None:
        topology = next(iter(collections.values())).exchange.topology
        return [(collections, present_plan(model, collections, "rebalance"), topology)]
    return [
        ({path: collections[path] for path in part.paths}, part.plan.group_plan, group_topology(part))
        for part in two_d.parts
        if part.paths
    ]


def _check(planner: Any, horizon: Any, least_gain: Any, step_seconds: Any) -> None:
    if planner is not None and not isinstance(planner, EmbeddingShardingPlanner):
        raise ConfigError(
            f"rebalance: planner: got a {type(planner).__name__}; expected an EmbeddingShardingPlanner. "
            "Pass one, or leave it out."
        )
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ConfigError(
            f"rebalance: horizon: got {horizon!r}; expected a whole number of steps from 1. Pass the steps until the "
            "next call."
        )
    for name, value in (("least_gain", least_gain), ("step_seconds", step_seconds)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf")
        ):
            raise ConfigError(
                f"rebalance: {name}: got {value!r}; expected a finite number from 0. Leave it out for the default."
            )
