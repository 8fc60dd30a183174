"""`reshard`: change the tilings of a running model's tables in place, between two steps.

read the plan (running_plan.py, reshard_checks.py) ──► all ranks agree ──► move (mover.py)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from tilerec.comms.agreement import agreeing
from tilerec.errors import ConfigError
from tilerec.parallel.managed_collision_paths import with_table_paths
from tilerec.parallel.read_plan import AnyPlan
from tilerec.parallel.resharding.interrupts import Interrupts
from tilerec.parallel.resharding.move_progress import ProgressOption
from tilerec.parallel.resharding.move_report import Resharded
from tilerec.parallel.resharding.mover import MoveOptions, Mover
from tilerec.parallel.resharding.reshard_2d import reshard_2d
from tilerec.parallel.resharding.reshard_checks import (
    PLAN,
    check_options,
    check_outside_backward,
    move_description,
    prepare_move,
)
from tilerec.parallel.resharding.running_plan import complete_plan, present_plan, sharded_collections
from tilerec.parallel.two_d.running_groups import unwrapped
from tilerec.sharding.managed_collision import settle_ids


def reshard(
    model: nn.Module,
    plan: AnyPlan,
    *,
    budget_bytes: int | None = None,
    progress: ProgressOption = None,
    optimizers: Sequence[Optimizer] | None = None,
) -> Resharded:
    """Give the tables of a sharded model the tilings of a plan, in place. Collective; call it between two steps.

    Weights, all optimizer slots and counts, and existing gradients move. Training then continues with the same bits as
    a model that had the new plan from this state on. These stay the same objects: modules, configs, names, hooks, the
    first leaf of every table, `fused_optimizer` handles, schedulers and the dense part. Further leaves (`weight.1` …)
    are added or removed.

    Args:
        model: the module that was passed to `shard` or `DistributedModelParallel`, or the latter itself; a
            `DMPCollection` itself.
        plan: a plan in any form that `shard` accepts; for a `DMPCollection`, the plan of one sharding group. Tables,
            wires and kernels that it does not name stay unchanged.
        budget_bytes: memory that a rank may need beyond max(its tables before the move, its tables after it), for new
            tiles beside old ones and for messages. None: the need of the largest move of a single table (at most one
            tile of each rank if tables are alike), plus messages of at most 64 MiB in total.
        progress: None: a bar on rank 0 if stderr is a terminal and the move takes more than a second. True: always a
            bar. False: no bar. A function is called with a `Moving` on every rank.
        optimizers: the optimizers that step tables without an attached optimizer, in the same order on every rank;
            their parameters and state move along. None: no optimizer steps these tables.

    Raises:
        ConfigError: raised on every rank before anything moves. The model is not sharded, the budget is too small, an
            optimizer keeps state that cannot move, or `optimizers` is None and an optimizer steps a moving table. Or
            the plan is for another world, names tables that the model lacks, has other sizes, differs between ranks,
            cuts tied tables in two ways, or conflicts with an attached optimizer.
        ReshardError: raised on every rank if one fails midway. Tables that have moved keep their new tiles, all others
            their old ones, and the model works under this mixed plan (`plan_of(model)`).
        CommsError: a rank is gone.
    """
    begun = time.monotonic()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"reshard: model: got a {type(model).__name__}; expected the module that was given to shard() or to "
            "DistributedModelParallel."
        )
    # New tiles are trained later, so they must not be inference tensors even if the caller is in inference mode.
    with torch.inference_mode(False), Interrupts() as interrupts:
        options = MoveOptions(budget_bytes, progress, optimizers, begun, interrupts)
        settle_ids(model)
        model, two_d = unwrapped(model)
        if two_d is not None:
            return reshard_2d(model, two_d, plan, options)
        collections = sharded_collections(model, "reshard")
        group = next(iter(collections.values())).exchange.group
        now = next(iter(collections.values())).exchange.topology
        group.begin("reshard")
        with agreeing(group, PLAN) as found:
            check_outside_backward()
            check_options(options)
            present = present_plan(model, collections, "reshard")
            whole, topology = complete_plan(present, collections, with_table_paths(plan, model), now)
            ready = prepare_move(collections, present, whole, topology, optimizers)
            found.update(move_description(ready, budget_bytes))
            mover = Mover(model, collections, group, group, ready, options)
            interrupts.check()
        mover.prepare()
        return mover.run()
