"""`reshard`: change the tilings of a running model's tables in place, between two steps.

read the plan (reshard_checks.py) ──► all ranks agree ──► move (mover.py)
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
from tilerec.parallel.resharding.mover import Mover, Resharded
from tilerec.parallel.resharding.reshard_2d import reshard_2d
from tilerec.parallel.resharding.reshard_checks import (
    PLAN,
    check_options,
    check_outside_backward,
    complete_plan,
    move_description,
    prepare_move,
    present_plan,
    sharded_collections,
)
from tilerec.parallel.two_d.shard_2d import TwoD
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
        optimizers: the optimizers that step tables without an attached optimizer, in the same order on every rank.
            None: those of this process that hold tiles of these tables.

    Raises:
        ConfigError: raised on every rank before anything moves. The model is not sharded, the budget is too small, or
            an optimizer keeps state that cannot move. Or the plan is for another world, names tables that the model
            lacks, has other sizes, differs between ranks, cuts tied tables in two ways, or conflicts with an attached
            optimizer.
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
        settle_ids(model)
        two_d = vars(model).get("_two_d")
        model = getattr(model, "module") if hasattr(model, "_dmp_wrapped_module") else model  # noqa: B009
        if isinstance(two_d, TwoD):
            return reshard_2d(model, two_d, plan, budget_bytes, progress, optimizers, begun, interrupts)
        collections = sharded_collections(model, "reshard")
        group = next(iter(collections.values())).exchange.group
        now = next(iter(collections.values())).exchange.topology
        group.begin("reshard")
        with agreeing(group, PLAN) as found:
            check_outside_backward()
            check_options(budget_bytes, progress)
            present = present_plan(model, collections, "reshard")
            whole, topology = complete_plan(present, collections, with_table_paths(plan, model), now)
            ready = prepare_move(collections, present, whole, topology, optimizers)
            found.update(move_description(ready, budget_bytes))
            mover = Mover(model, collections, group, group, ready, budget_bytes, progress, begun, interrupts)
            interrupts.check()
        mover.prepare()
        return mover.run()
