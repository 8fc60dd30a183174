"""`reshard`: a running model's tables get other tilings, in place, between two steps.

read the plan (ready.py) ──► all ranks agree ──► move (mover.py)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from tilerec.errors import ConfigError
from tilerec.parallel.managed_paths import with_table_paths
from tilerec.parallel.read_plan import AnyPlan
from tilerec.parallel.resharding.checks import (
    agreeing,
    check_moment,
    check_options,
    planned,
    present_plan,
    ready_to_move,
    sharded_collections,
    words_of,
)
from tilerec.parallel.resharding.interrupts import Interrupts
from tilerec.parallel.resharding.move_progress import ProgressOption
from tilerec.parallel.resharding.mover import Mover, Resharded
from tilerec.parallel.resharding.reshard_2d import reshard_2d
from tilerec.parallel.two_d.two_d import TwoD
from tilerec.sharding.managed_collision import settle_ids


def reshard(
    model: nn.Module,
    plan: AnyPlan,
    *,
    budget_bytes: int | None = None,
    progress: ProgressOption = None,
    optimizers: Sequence[Optimizer] | None = None,
) -> Resharded:
    """Give the tables of a sharded model the tilings of a plan, in place; every rank calls it, between two steps.

    Weights, every optimizer slot and count, and gradients that are there move. Training goes on with the bits that it
    would have if the plan had been in use from this state on. Modules, configs, names, hooks, the first leaf of every
    table, `fused_optimizer` handles, schedulers and the dense part stay the objects they are; further leaves
    (`weight.1` …) come and go.

    Args:
        model: what was given to `shard` or `DistributedModelParallel`, or the latter itself; a `DMPCollection` itself.
        plan: in any form that `shard` takes; of a `DMPCollection`, of one sharding group. Tables that it does not name
            stay where they are; wires and kernels that it does not name stay what they are.
        budget_bytes: memory that a rank may need beyond the larger of what its tables take before and after: new tiles
            beside old ones, and messages. None: what the largest move of a single table needs (at most one tile of
            each rank, where tables are alike), and messages of at most 64 MiB in all.
        progress: None shows a bar on rank 0 when it takes long, on a terminal; True always, False never; or a function
            that is called with a `Moving` on every rank.
        optimizers: those that step tables without an attached optimizer, in one order on every rank. None: those of
            this process that hold tiles of these tables.

    Raises:
        ConfigError: before anything moves, on every rank: the model is not sharded; the plan is for another world,
            names tables that the model lacks, has other sizes, differs between ranks, cuts tied tables in two ways or
            does not go with an attached optimizer; the budget is too small; an optimizer keeps state that cannot move.
        ReshardError: midway, on every rank: a rank could not do its part. The tables that have moved stay where they
            are now, all others stay where they were, and the model works under this mixed plan (`plan_of(model)`).
        CommsError: a rank is gone.
    """
    begun = time.monotonic()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"reshard: model is a {type(model).__name__}; wanted the module that was given to shard() or to "
            "DistributedModelParallel."
        )
    # What is made here is trained later, whatever this call's surroundings are.
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
        with agreeing(group) as found:
            check_moment()
            check_options(budget_bytes, progress)
            present = present_plan(model, collections, "reshard")
            whole, topology = planned(present, collections, with_table_paths(plan, model), now)
            ready = ready_to_move(collections, present, whole, topology, optimizers)
            found.append(words_of(ready, budget_bytes))
            mover = Mover(model, collections, group, group, ready, budget_bytes, progress, begun, interrupts)
            interrupts.check()
        mover.prepare()
        return mover.run()
