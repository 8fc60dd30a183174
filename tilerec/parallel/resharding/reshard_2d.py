"""`reshard` in 2D parallelism: every sharding group moves to the plan of one sharding group.

    exact     one move of all ranks: every tile of the group's plan has an owner in each sharding group
    average   one move per sharding group, each of its own rows; all ranks vote, so that replicas keep equal tilings

In both modes replicas hold the same tiles before and after. The marks of rows touched since the last sync move along;
averaged replicas with hot rows are synchronized first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tilerec.comms.agreement import agreeing
from tilerec.parallel.managed_collision_paths import with_table_paths
from tilerec.parallel.read_plan import AnyPlan, plan_without
from tilerec.parallel.resharding.move_report import Resharded, merged_report
from tilerec.parallel.resharding.mover import MoveOptions, Mover
from tilerec.parallel.resharding.reshard_checks import (
    PLAN,
    check_options,
    check_outside_backward,
    move_description,
    prepare_move,
)
from tilerec.parallel.resharding.running_plan import complete_plan, present_plan
from tilerec.parallel.resharding.table_move import TableMove
from tilerec.parallel.two_d.running_groups import RunningGroup, TwoD
from tilerec.sharding.embedding import ShardedCollection
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ShardingPlan
from tilerec.spec.topology import Topology


def reshard_2d(model: nn.Module, two_d: TwoD, plan: AnyPlan, options: MoveOptions) -> Resharded:
    """Reshard all sharding groups; see `reshard`.

    Args:
        model: the model without wrappers.
    """
    world, exact = two_d.world, two_d.settings.sync == "exact"
    collections = {path: part for path, part in model.named_modules() if isinstance(part, ShardedCollection)}
    two_d.settle()
    turns = [list(range(len(two_d.parts)))] if exact else [[k] for k in range(len(two_d.parts))]
    wanted: list[ShardingPlan] = []
    movers: list[tuple[list[int], Mover]] = []
    done: list[TableMove] = []
    world.begin("reshard")
    with agreeing(world, PLAN) as found:
        check_outside_backward()
        check_options(options)
        plan = with_table_paths(plan, model)
        for part in two_d.parts:
            own = {path: collections[path] for path in part.paths}
            part_plan = plan_without(plan, collections.keys() - own)
            wanted.append(complete_plan(part.plan.group_plan, own, part_plan, group_topology(part))[0])
        for turn in turns:
            own = {path: collections[path] for k in turn for path in two_d.parts[k].paths}
            if not own:
                continue
            first = next(iter(own.values())).exchange
            if exact:
                present = present_plan(model, own, "reshard")
                whole = _world_plan([replace(two_d.parts[k].plan, group_plan=wanted[k]) for k in turn], present)
            else:
                present, whole = two_d.parts[turn[0]].plan.group_plan, wanted[turn[0]]
            ready = prepare_move(own, present, whole, first.topology, options.optimizers)
            found[f"part {len(movers)}"] = move_description(ready, options.budget)
            mover = Mover(model, own, first.group, world, ready, options, done)
            movers.append((turn, mover))
        options.interrupts.check()
    if any(_has_hot_rows(own) for own in (*wanted, *(part.plan.group_plan for part in two_d.parts))):
        two_d.sync_all()  # copies that are made or dropped have no marks of touched rows
    for _, mover in movers:
        mover.prepare()
    reports = []
    for turn, mover in movers:
        try:
            reports.append(mover.run())
        finally:
            done += mover.moved
            two_d.parts = tuple(
                _with_current_plan(part, wanted[k], mover) if k in turn else part for k, part in enumerate(two_d.parts)
            )
    return merged_report(reports)


def group_topology(part: RunningGroup) -> Topology:
    """Return the topology of one sharding group, with the hosts of its plan."""
    return part.plan.grid.topology_of(0, part.plan.topology, part.plan.group_plan.hosts)


def _world_plan(plans: Sequence[Any], present: ShardingPlan) -> ShardingPlan:
    """Return one plan of all ranks, made of group plans."""
    parts: dict[str, EmbeddingModuleShardingPlan] = {}
    for plan in plans:
        parts.update(plan.world_plan().plan)
    return ShardingPlan({path: parts[path] for path in present.plan}, present.world_size, present.hosts)


def _with_current_plan(part: RunningGroup, wanted: ShardingPlan, mover: Mover) -> RunningGroup:
    """Return a part with the current plan of its tables."""
    moved = {name for move in mover.moved for name in move.names}
    all_names = {name for move in mover.moves for name in move.names}
    now = part.plan.group_plan
    parts = {
        path: EmbeddingModuleShardingPlan(
            {
                # Unmoved tables get their new wires and kernels only if the whole move succeeded.
                name: wanted.plan[path][name]
                if (path, name) in moved or (moved == all_names and mover.done)
                else sharding
                for name, sharding in tables.items()
            }
        )
        for path, tables in now.plan.items()
    }
    return replace(part, plan=replace(part.plan, group_plan=replace(now, plan=parts, report=None)))


def _has_hot_rows(plan: ShardingPlan) -> bool:
    return any(sharding.tiling is not None and sharding.tiling.head is not None for _, _, sharding in plan.tables())
