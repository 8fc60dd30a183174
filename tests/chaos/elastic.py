"""A model with managed ids that is resharded and resized while it trains, saved after each step.

    step 1  2  reshard  3  4  resize_ids  5  6

A process that continues does the same changes before it loads, as far as they had happened.
"""

from __future__ import annotations

import warnings
from typing import Any

from tests.chaos.kills import COLLECTIVES, dies_at
from tests.sharding.managed_models import build, sizes_of, train
from tilerec.checkpoint import CheckpointManager, latest
from tilerec.comms.process import ProcessGroupComms
from tilerec.parallel import DistributedModelParallel, reshard, resize_ids
from tilerec.planner.helpers import row_wise, table_wise

STEPS, RESHARD_AFTER, RESIZE_AFTER = 6, 2, 4
POLICY = "lru and lfu, shared rows"


def plan(world: int, turn: int) -> dict[str, Any]:
    user = row_wise(num_buckets=6) if turn else table_wise(rank=0)
    return {"_embedding_module": {"user": user, "item": table_wise(rank=(turn + 1) % world), "plain": table_wise(0)}}


def change(model: Any, world: int, step: int) -> None:
    """Do the change that follows a step, if there is one."""
    if step == RESHARD_AFTER:
        reshard(model, plan(world, 1), progress=False)
    elif step == RESIZE_AFTER:
        resize_ids(model, "user", 96, 12)


def run_elastic(folder: str, victim: int, at: int) -> tuple[int, int]:
    """Train to the end; return the number of collectives of both changes, and the step that was resumed.

    Args:
        victim: rank that dies at call number `at` of the collectives within the changes; -1 for none.
    """
    group = ProcessGroupComms()
    model = DistributedModelParallel(build(POLICY), plan=plan(group.size, 0))
    manager = CheckpointManager(folder, every=1, keep_last=2)
    found = latest(folder)
    for done in range(1, (found.step if found else 0) + 1):
        change(model, group.size, done)
    parts = {"model": model, "optimizer": model.fused_optimizer}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = manager.resume(parts)
    step = first = resumed[0] if resumed else 0
    calls = 0
    while step < STEPS:
        train(model, group, sizes_of(group.size), range(step, step + 1))
        step += 1
        # The change is part of the step, so a checkpoint has it or the step is done again.
        with dies_at(COLLECTIVES, at - calls if group.rank == victim else -1) as count:
            change(model, group.size, step)
        calls += count[0]
        manager.save(step, parts)
    return calls, first
