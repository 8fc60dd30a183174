"""`CapacityChange`: another number of rows for a table with managed collision, after the checks of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from torch.optim import Optimizer

from tilerec.errors import ConfigError
from tilerec.modules.buckets import Buckets
from tilerec.parallel.resharding.external_optimizers import ExternalOptimizers
from tilerec.sharding.managed_collision import (
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddings,
)
from tilerec.sharding.resize_ids import scaled_tiling
from tilerec.sharding.table import ShardedTable
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.tile import Tiling


class CapacityChange(NamedTuple):
    """A change of capacity that has passed the checks of this rank."""

    held: ShardedTable
    old: Buckets
    new: Buckets
    tiling: Tiling
    plan: ShardingPlan
    steppers: ExternalOptimizers


def check_capacity(
    embeddings: ShardedManagedCollisionEmbeddings, table: str, zch_size: int | None, total_num_buckets: int | None,
    plan: ShardingPlan, path: str, optimizers: Sequence[Optimizer] | None,
) -> CapacityChange:  # fmt: skip
    """Return the change of a table's capacity; see `resize_ids`.

    Args:
        plan: the plan of the model.
        path: path of the table's collection in the plan.

    Raises:
        ConfigError: the table is tied, ranks would share a bucket, or an optimizer has state that cannot follow.
    """
    collection = cast(ShardedManagedCollisionCollection, embeddings.managed_collision_collection)
    held = cast(ShardedTable, embeddings.embedding_module._tables[table])
    if len(held.rows.holders) > 1:
        raise ConfigError(
            f"Table '{table}' is tied to a table of another collection, which would keep the old rows. Resize before "
            "tying."
        )
    module, size = collection.modules_by_table[table], collection.exchange.group.size
    old, new = module._buckets, module.id_map.resized(zch_size, total_num_buckets)
    if new.count < size:
        raise ConfigError(
            f"Table '{table}': {new.count} buckets cannot be shared by {size} ranks, which hold whole buckets; use at "
            f"least {size} buckets."
        )
    tiling = scaled_tiling(table, held.tiling, old, new)
    steppers = ExternalOptimizers({table: held} if held.rows.spec is None else {}, optimizers)
    sharding = replace(plan.plan[path][table], tiling=tiling)
    return CapacityChange(held, old, new, tiling, plan.replaced(path, table, sharding), steppers)
