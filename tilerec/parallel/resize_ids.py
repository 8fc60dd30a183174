"""`resize_ids`: a running model's table with managed collision gets another number of rows; its plan follows."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.id_resize import Resized
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddings
from tilerec.parallel.plan_of import keep_plan, plan_of
from tilerec.sharding.managed_collision import ShardedManagedCollisionEmbeddings
from tilerec.sharding.resize_ids import resize_sharded
from tilerec.sharding.table import ShardedTable


def resize_ids(
    model: nn.Module, table: str, zch_size: int | None = None, total_num_buckets: int | None = None
) -> Resized:
    """Change the capacity of a table in place, and keep its ids with their rows and optimizer state.

    Args:
        model: that was given to `shard` or `DistributedModelParallel` (or that one itself; or an unsharded one). All
            ranks call it, between two steps.
        table: a table with managed collision. Its rows are cut at whole buckets: `row_wise(num_buckets=…)`, or not at
            all.
        zch_size, total_num_buckets: see `ManagedCollisionEmbeddings.resize`.

    Returns:
        What moved in this rank's buckets; and of all ranks, how many ids were kept and which found no place.

    Raises:
        ConfigError: no such table, or several; sizes that do not fit; rows cut inside of a bucket; an optimizer that
            would not follow. Nothing has changed then, on any rank.
    """
    found = {
        path: part
        for path, part in model.named_modules()
        if isinstance(part, ManagedCollisionEmbeddings)
        and table in part.managed_collision_collection.modules_by_table
    }
    if len(found) != 1:
        raise ConfigError(
            f"resize_ids: {len(found)} modules map a table '{table}'; "
            + (
                f"pass one of {list(found)[:8]}."
                if found
                else "give the name of one that managed collision maps."
            )
        )
    ((_, users),) = found.items()
    if not isinstance(users, ShardedManagedCollisionEmbeddings):
        return users.resize(table, zch_size, total_num_buckets)
    keeper = getattr(model, "module", model) if hasattr(model, "_dmp_wrapped_module") else model
    plan = plan_of(keeper)
    path = next(path for path, part in keeper.named_modules() if part is users.embedding_module)
    moved = resize_sharded(users, table, zch_size, total_num_buckets)
    held = users.embedding_module._tables[table]
    assert isinstance(held, ShardedTable)
    sharding = replace(plan.plan[path][table], tiling=held.tiling)
    keep_plan(keeper, plan.replaced(path, table, sharding))
    return moved
