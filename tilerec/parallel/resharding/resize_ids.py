"""`resize_ids`: change the number of rows of a running model's table with managed collision, and update its plan.

checks ──► all ranks agree ──► build new ids and tiles beside the current ones ──► all ranks agree ──► switch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from tilerec.comms.agreement import agreeing, on_all_ranks
from tilerec.errors import ConfigError
from tilerec.modules.buckets import Buckets
from tilerec.modules.id_resize import Resized
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddings
from tilerec.modules.table_resize import check_not_in_files
from tilerec.parallel.plan_of import plan_of, store_plan
from tilerec.parallel.resharding.external_optimizers import ExternalOptimizers
from tilerec.parallel.resharding.table_resize import ResizedTable
from tilerec.parallel.two_d.running_groups import unwrapped
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.id_exchange import row_ranges
from tilerec.sharding.managed_collision import (
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddings,
)
from tilerec.sharding.resize_ids import build_ids, moved_hot_rows, replace_ids, scaled_tiling
from tilerec.sharding.table import ShardedTable


def resize_ids(
    model: nn.Module,
    table: str,
    zch_size: int | None = None,
    total_num_buckets: int | None = None,
    *,
    optimizers: Sequence[Optimizer] | None = None,
) -> Resized:
    """Change the capacity of a table in place, and keep its ids with their rows and optimizer state.

    Collective; call it between two steps.

    Args:
        model: the module that was passed to `shard` or `DistributedModelParallel`, or the latter itself; a
            `DMPCollection` itself; or an unsharded module.
        table: a table with managed collision. Its rows must be cut at whole buckets (`row_wise(num_buckets=…)`) or not
            at all.
        zch_size, total_num_buckets: see `ManagedCollisionEmbeddings.resize`.
        optimizers: the optimizers that step the table if none is attached, in the same order on every rank. None:
            no optimizer steps it.

    Returns:
        The moves of rows in this rank's buckets. `kept` and `dropped_ids` are over all ranks.

    Raises:
        ConfigError: no table or several tables have this name, the sizes do not fit, rows are cut inside a bucket, the
            table is tied, or an optimizer has state that cannot follow. Also if another rank lacks memory or its
            `init_fn` fails (that rank raises its own error). Nothing has changed then, on any rank.
    """
    plan_holder, two_d = unwrapped(model)
    path, embeddings = _embeddings_of(model, table)
    if not isinstance(embeddings, ShardedManagedCollisionEmbeddings):
        return embeddings.resize(table, zch_size, total_num_buckets)
    path = next(path for path, part in plan_holder.named_modules() if part is embeddings.embedding_module)
    collection = cast(ShardedManagedCollisionCollection, embeddings.managed_collision_collection)
    group = collection.exchange.group
    group.begin("resize_ids")
    held = cast(ShardedTable, embeddings.embedding_module._tables[table])
    old = collection.modules_by_table[table]._buckets
    with agreeing(group, "the new capacity") as found:
        found.update(table=table, rows=zch_size, buckets=total_num_buckets)
        new = _new_buckets(collection, held, table, zch_size, total_num_buckets)
        tiling, plan = scaled_tiling(table, held.tiling, old, new), plan_of(plan_holder)
        steppers = ExternalOptimizers({table: held} if held.rows.spec is None else {}, optimizers)
        found["optimizers"] = steppers.described()
    if two_d is not None and held.tiling.head is not None:
        two_d.sync_all()  # copies of hot rows get no marks of touched rows
    embeddings.settle()
    exchange = collection.exchange
    ranges = [row_ranges(held.tiling.tiles_of(exchange.member_of(rank))) for rank in range(group.size)]
    ids = build_ids(collection, table, new, ranges)
    tables = cast(ShardedCollection, embeddings.embedding_module)
    hot, hot_moves = moved_hot_rows(group, held.tiling, ids)
    tiling = scaled_tiling(table, held.tiling, old, new, hot)
    plan = plan.replaced(path, table, replace(plan.plan[path][table], tiling=tiling, hot=hot))
    with on_all_ranks(group, f"table '{table}'", "building its new tiles"):
        tiles = ResizedTable(tables, held, tiling, ids.old_rows_M, ids.new_rows_M, steppers, table, hot_moves)
    moved_of_all = cast(
        "list[tuple[int, list[int]]]",
        group.all_gather_object((ids.moved.kept, ids.moved.dropped_ids.tolist())),
    )
    dropped = torch.tensor([id_ for _, own in moved_of_all for id_ in own], dtype=torch.int64)
    replace_ids(collection, table, ids)
    tiles.switch()
    store_plan(plan_holder, plan)
    if two_d is not None:
        two_d.retile(path, table, lambda own: scaled_tiling(table, own, old, new, hot))
    return ids.moved._replace(kept=sum(kept for kept, _ in moved_of_all), dropped_ids=dropped)


def _embeddings_of(model: nn.Module, table: str) -> tuple[str, ManagedCollisionEmbeddings]:
    found = {
        path: part
        for path, part in model.named_modules()
        if isinstance(part, ManagedCollisionEmbeddings) and table in part.managed_collision_collection.modules_by_table
    }
    if len(found) != 1:
        raise ConfigError(
            f"resize_ids: table: got '{table}', which {len(found)} modules map; expected one. "
            + (
                f"Pass one of {list(found)[:8]} as model."
                if found
                else "Give the name of a table with managed collision."
            )
        )
    return next(iter(found.items()))


def _new_buckets(
    collection: ShardedManagedCollisionCollection, held: ShardedTable, table: str, zch_size: int | None,
    total_num_buckets: int | None,
) -> Buckets:  # fmt: skip
    """Return the buckets of a table's new capacity.

    Raises:
        ConfigError: the sizes do not fit, the table is tied, or ranks would share a bucket.
    """
    check_not_in_files(held)
    if len(held.rows.holders) > 1:
        raise ConfigError(
            f"Table '{table}' is tied to a table of another collection, which would keep the old rows. Resize before "
            "tying."
        )
    new = collection.modules_by_table[table].id_map.resized(zch_size, total_num_buckets)
    size = collection.exchange.group.size
    if new.count < size:
        raise ConfigError(
            f"Table '{table}': {new.count} buckets cannot be shared by {size} ranks, which hold whole buckets; use at "
            f"least {size} buckets."
        )
    return new
