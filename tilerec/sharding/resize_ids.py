"""A sharded table with managed collision gets another number of rows, in place: ids, rows and optimizer state follow.

    buckets of a rank ──► those that split or merge lie together ──► resized where they are ──► as even as before
    tiles of a rank   ──► the same buckets' rows, more of them or fewer                      (no row leaves its rank)

A rank's tiles hold whole buckets, before and after: rows are cut at multiples of a bucket, or not at all. So what
moves, moves inside of a tile, and only (old row, new row) pairs travel, from the buckets' owners to the tiles' holders.

Legend: M rows that move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from tilerec.comms.agree import agree
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.buckets import Buckets, bucket_cuts
from tilerec.modules.collection import readers
from tilerec.modules.id_resize import Resized
from tilerec.modules.initial import fill_initial
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.id_exchange import row_ranges
from tilerec.sharding.layout import rectangles
from tilerec.sharding.managed_collision import (
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddings,
)
from tilerec.sharding.retile import new_peers, places_of, take_tiles
from tilerec.sharding.table import ShardedTable
from tilerec.spec.tile import Tiling


@torch.no_grad()
def resize_sharded(
    users: ShardedManagedCollisionEmbeddings, table: str, zch_size: int | None, total_num_buckets: int | None
) -> Resized:
    """`ManagedCollisionEmbeddings.resize` of a sharded module; all ranks call it, between two steps.

    Returns:
        As `resize`; rows are those of this rank's buckets, numbers and dropped ids those of all ranks.

    Raises:
        ConfigError: what `resize` raises; rows that are cut inside of a bucket; a table without an attached optimizer,
            or whose replicas are averaged; ranks that say different sizes. Nothing has changed then.
    """
    collection = cast(ShardedManagedCollisionCollection, users.managed_collision_collection)
    group = collection.exchange.group
    failure: ConfigError | None = None
    try:
        held = _checked(users, table)
        module = collection.modules_by_table[table]
        old, new = module._buckets, module.resized(zch_size, total_num_buckets)
        if new.count < group.size:
            raise ConfigError(
                f"Table '{table}': {new.count} buckets cannot be shared by {group.size} ranks, which hold whole ones."
            )
        tiling = _scaled(table, held.tiling, old, new)
    except ConfigError as error:
        failure = error
    agree(
        group,
        "the new capacity",
        {
            "table": table,
            "rows": zch_size,
            "buckets": total_num_buckets,
            "checks": str(failure or "passed"),
        },
    )
    if failure is not None:
        raise failure
    users.settle()
    merged = max(1, old.count // new.count)
    cuts = bucket_cuts(new.count, group.size)
    exchange = collection.exchange
    if merged > 1:
        exchange.recut(table, [cut * merged for cut in cuts])
    moved = module.resize_held(new)
    t = list(exchange.modules).index(table)
    exchange.cuts[t] = tuple(cut * new.count // old.count for cut in exchange.cuts[t])
    exchange.recut(table, cuts)
    ranges = [row_ranges(held.tiling.tiles_of(exchange.member_of(rank))) for rank in range(group.size)]
    old_rows_M, new_rows_M = _told(group, moved, ranges)
    _resize_tiles(users, table, tiling, old_rows_M, new_rows_M)
    collection._embedding_configs = tuple(
        replace(config, num_embeddings=new.rows) if config.name == table else config
        for config in collection._embedding_configs
    )
    everyone = cast(
        "list[tuple[int, list[int]]]", group.all_gather_object((moved.kept, moved.dropped_ids.tolist()))
    )
    dropped = torch.tensor([id_ for _, ids in everyone for id_ in ids], dtype=torch.int64)
    return moved._replace(kept=sum(kept for kept, _ in everyone), dropped_ids=dropped)


def _checked(users: ShardedManagedCollisionEmbeddings, table: str) -> ShardedTable:
    collection = users.managed_collision_collection
    if table not in collection.modules_by_table:
        raise ConfigError(f"no managed table '{table}'; it has {list(collection.modules_by_table)[:20]}.")
    held = cast(ShardedTable, users.embedding_module._tables[table])
    if len(held.rows.holders) > 1:
        raise ConfigError(
            f"Table '{table}' is tied to another collection's, which would keep the old rows; resize before tying."
        )
    if held.rows.spec is None and held.weight.requires_grad:
        raise ConfigError(
            f"Table '{table}' is stepped by an optimizer that would not follow; attach one "
            "(apply_optimizer_in_backward), or freeze the table."
        )
    if any(rows.touched is not None for rows in held.tile_rows):
        raise ConfigError(
            f"Table '{table}': its replicas are averaged now and then; resize it unsharded, or under sync='exact'."
        )
    return held


def _scaled(table: str, tiling: Tiling, old: Buckets, new: Buckets) -> Tiling:
    """The tiling whose tiles hold the same buckets at their new size.

    Raises:
        ConfigError: rows are cut inside of a bucket, or of several that merge.
    """
    unit = old.size * max(1, old.count // new.count)

    def scaled(row: int) -> int:
        if row % unit:
            raise ConfigError(
                f"Table '{table}': its rows are cut at {row}, inside of a bucket ({old.size} rows"
                + (f", {unit // old.size} of which merge" if unit > old.size else "")
                + f"); cut at multiples of {unit}: row_wise(num_buckets={old.rows // unit}), or whole rows."
            )
        return row // unit * (new.size * max(1, new.count // old.count))

    tiles = [(scaled(tile.r0), scaled(tile.r1), tile.c0, tile.c1, tile.owners) for tile in rectangles(tiling)]
    return Tiling.of(table, new.rows, tiling.dim, tiles)


def _told(group: Group, moved: Resized, ranges: list[tuple[tuple[int, int], ...]]) -> tuple[Tensor, Tensor]:
    """Which rows move, of those that this rank holds: old rows and new ones."""
    pairs_M2 = torch.stack([moved.old_rows, moved.new_rows], dim=1)
    outs = []
    for own in ranges:
        inside = torch.zeros(pairs_M2.shape[0], dtype=torch.bool, device=pairs_M2.device)
        for r0, r1 in own:
            inside |= (pairs_M2[:, 0] >= r0) & (pairs_M2[:, 0] < r1)
        outs.append(pairs_M2[inside].view(-1))
    sizes_W = torch.tensor([part.numel() for part in outs], device=pairs_M2.device)
    ones = [1] * group.size
    heard = group.all_to_all("moved rows", torch.zeros_like(sizes_W), sizes_W, ones, ones).wait().tolist()
    into = torch.zeros(sum(heard), dtype=torch.int64, device=pairs_M2.device)
    group.all_to_all("moved rows", into, torch.cat(outs), heard, [part.numel() for part in outs]).wait()
    old_rows_M, new_rows_M = into.view(-1, 2).unbind(1)
    return old_rows_M, new_rows_M


def _resize_tiles(
    users: ShardedManagedCollisionEmbeddings,
    table: str,
    tiling: Tiling,
    old_rows_M: Tensor,
    new_rows_M: Tensor,
) -> None:
    collection = cast(ShardedCollection, users.embedding_module)
    held = cast(ShardedTable, collection._tables[table])
    config = replace(held.config, num_embeddings=tiling.rows)
    rank, topology = held.tile_rows[0].peers.group.rank, collection.exchange.topology
    before = [held.place_of(i) for i in range(len(held.tile_rows))]
    memory: list[Tensor] = []
    states: list[dict[str, Tensor]] = []
    for old_place, new_place, rows in zip(before, places_of(tiling, rank), held.tile_rows, strict=True):
        inside = (old_rows_M >= old_place.r0) & (old_rows_M < old_place.r1)
        source = (old_rows_M[inside] - old_place.r0).to(rows.leaf.device)
        target = (new_rows_M[inside] - new_place.r0).to(rows.leaf.device)
        made = rows.leaf.detach().new_empty(new_place.r1 - new_place.r0, new_place.c1 - new_place.c0)
        if not made.is_meta and made.numel():
            fill_initial(made, config, rows.place.key, new_place.r0, new_place.c0)
            made[target] = rows.leaf.detach()[source]
        memory.append(made)
        inits = {} if rows.spec is None else {slot.name: slot.init for slot in rows.spec.slots}
        states.append(_moved_state(rows.state, inits, made.shape[0], source, target))
    held.config = config
    peers = [new_peers(held, tiling, place, topology) for place in places_of(tiling, rank)]
    take_tiles(held, tiling, peers, memory, states, [None] * len(memory))
    collection._configs = tuple(config if c.name == table else c for c in collection._configs)
    collection._readers = readers(collection._configs)
    collection._sizes = collection._slot_sizes()
    collection._routes.clear()
    tables = [
        replace(layout, tiling=tiling) if layout.name == table else layout
        for layout in collection.exchange.layout.tables
    ]
    collection.exchange = collection.exchange.over(topology, tables)
    collection._renew_sinks()


def _moved_state(
    state: Mapping[str, Tensor], inits: Mapping[str, float], rows: int, source: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Slots of the new rows: those that move bring theirs, the others begin anew; counts stay."""
    made = {}
    for name, value in state.items():
        if name not in inits or value.dim() == 0:
            made[name] = value
            continue
        made[name] = value.new_full((rows, *value.shape[1:]), inits[name])
        if not value.is_meta:
            made[name][target] = value[source]
    return made
