"""Change the capacity of a sharded table's ids: build the new map beside the current one, then switch at once.

    buckets of a rank ──► gathered with those they merge with ──► resized on their rank ──► spread evenly again
    tiles of a rank   ──► rows of the same buckets, more or fewer of them               (no row leaves its rank)

A rank's tiles hold whole buckets, before and after: rows are cut at multiples of a bucket, or not at all. Rows
therefore move only inside a tile. Only (old row, new row) pairs are sent, from the owners of buckets to the holders of
tiles.

After each step that can fail on one rank, all ranks agree on success before any of them waits for the result. If one
rank fails, every rank raises.

Legend: M rows that move, W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from tilerec.comms.agreement import on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.buckets import Buckets, bucket_cuts
from tilerec.modules.id_resize import Resized, resize_id_map
from tilerec.modules.id_state import HASH_NAMES, zeros
from tilerec.ops.hash.definition import HashState
from tilerec.sharding.buckets_view import BucketsView
from tilerec.sharding.id_exchange import Ranges
from tilerec.sharding.layout import rectangles
from tilerec.sharding.managed_collision import ShardedManagedCollisionCollection
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.tile import Tiling

_Parts = Mapping[str, tuple[Tensor, int]]
_T = TypeVar("_T")


class NewIds(NamedTuple):
    """A table's ids at the new capacity, not yet in use.

    Args:
        buckets: this rank's buckets.
        cuts: bucket cuts of all ranks.
        parts: this rank's state tensors, by name.
        moved: moves of rows in the buckets that this rank owned before.
        old_rows_M, new_rows_M: moves of rows in the tiles that this rank holds.
    """

    buckets: Buckets
    cuts: tuple[int, ...]
    parts: dict[str, Tensor]
    moved: Resized
    old_rows_M: Tensor
    new_rows_M: Tensor


@torch.no_grad()
def build_ids(
    collection: ShardedManagedCollisionCollection, table: str, whole: Buckets, ranges: list[Ranges]
) -> NewIds:
    """Build the ids at another capacity. Nothing in use changes. Collective.

    Args:
        whole: result of `ManagedCollisionModule.resized`.
        ranges: per rank, the row ranges of the table that it holds.

    Raises:
        ConfigError: another rank could not build its part (its own error gives the reason).
    """
    exchange = collection.exchange
    module, group = exchange.modules[table], exchange.group
    old, cuts = module._buckets, exchange.cuts[list(exchange.modules).index(table)]
    merged, split = max(1, old.count // whole.count), max(1, whole.count // old.count)
    even = bucket_cuts(whole.count, group.size)
    parts: _Parts = module.id_map.parts()
    if merged > 1:
        together = tuple(cut * merged for cut in even)
        parts = _spread(group, parts, old, cuts, together)
        cuts = together
    here = old.cut(cuts[group.rank], cuts[group.rank + 1])
    state = HashState(*(parts[name][0] for name in HASH_NAMES))
    with on_all_ranks(group, f"table '{table}'", "building its new ids"):
        made = resize_id_map(
            state,
            parts["counts"][0],
            here,
            whole,
            module.settings.max_probe,
            module.step,
            module.settings.evicting,
        )
    named = {**dict(zip(HASH_NAMES, made.state, strict=True)), "counts": made.counts_BC}
    parts = {name: (tensor, tensor.shape[0] // made.buckets.held) for name, tensor in named.items()}
    parts = _spread(
        group, parts, made.buckets, tuple(cut * split // merged for cut in cuts), even
    )  # fmt: skip
    old_rows_M, new_rows_M = _exchange_moves(group, made.moved, ranges)
    own = whole.cut(even[group.rank], even[group.rank + 1])
    return NewIds(
        own, even, {name: tensor for name, (tensor, _) in parts.items()}, made.moved, old_rows_M, new_rows_M
    )  # fmt: skip


def replace_ids(collection: ShardedManagedCollisionCollection, table: str, made: NewIds) -> None:
    """Replace the table's ids by new ones. Must not fail."""
    exchange = collection.exchange
    module = exchange.modules[table]
    module.become(made.buckets, made.parts, BucketsView(exchange.group, made.cuts))
    exchange.cuts[list(exchange.modules).index(table)] = made.cuts
    collection._embedding_configs = tuple(
        replace(config, num_embeddings=made.buckets.rows) if config.name == table else config
        for config in collection._embedding_configs
    )


def _spread(group: Group, parts: _Parts, own: Buckets, before: tuple[int, ...], after: tuple[int, ...]) -> _Parts:
    """Return the parts redistributed from the bucket cuts `before` to the cuts `after`."""
    if before == after:
        return parts
    held = after[group.rank + 1] - after[group.rank]
    with on_all_ranks(group, "new ids", "their memory"):
        made = {
            name: (zeros((held * per_bucket, *tensor.shape[1:]), tensor.dtype, tensor.device), per_bucket)
            for name, (tensor, per_bucket) in parts.items()
        }
    view, source = BucketsView(group, after), BucketsView(group, before)
    for name, (tensor, per_bucket) in made.items():
        if per_bucket and 0 not in tensor.shape[1:]:
            view.fill(tensor, per_bucket, source, parts[name][0])
    return made


def scaled_tiling(table: str, tiling: Tiling, old: Buckets, new: Buckets, hot: HotRows | None = None) -> Tiling:
    """Return the tiling whose tiles hold the same buckets at their new size, with these hot rows.

    Raises:
        ConfigError: rows are cut inside a bucket, or inside a run of buckets that merge.
    """
    unit = old.size * max(1, old.count // new.count)

    def scaled(row: int) -> int:
        if row % unit:
            raise ConfigError(
                f"Table '{table}': its rows are cut at {row}, inside a bucket ({old.size} rows"
                + (f", {unit // old.size} of which merge" if unit > old.size else "")
                + f"); cut at multiples of {unit}: row_wise(num_buckets={old.rows // unit}), or whole rows."
            )
        return row // unit * (new.size * max(1, new.count // old.count))

    tiles = [(scaled(tile.r0), scaled(tile.r1), tile.c0, tile.c1, tile.owners) for tile in rectangles(tiling.bare)]
    world_size = 0 if tiling.head is None else len(tiling.head.owners)
    return Tiling.of(table, new.rows, tiling.dim, tiles).with_hot(table, hot, world_size)


def moved_hot_rows(group: Group, tiling: Tiling, moved: NewIds) -> tuple[HotRows | None, tuple[Tensor, Tensor] | None]:
    """Return the hot rows at the new capacity, whose ids are kept, and their old and new numbers, int64 `[M]` each.

    None without hot rows. Collective with them.
    """
    if tiling.head is None:
        return None, None
    ids_H = torch.from_numpy(tiling.head.hot.ids.copy())
    old_rows_M, new_rows_M = moved.old_rows_M.cpu(), moved.new_rows_M.cpu()
    own = torch.isin(old_rows_M, ids_H)
    pairs = list(zip(new_rows_M[own].tolist(), old_rows_M[own].tolist(), strict=True))
    every = {pair for part in cast("list[list[tuple[int, int]]]", group.all_gather_object(pairs)) for pair in part}
    new, old = torch.tensor(sorted(every), dtype=torch.int64).view(-1, 2).T.contiguous()
    return HotRows(new), (old, new)


def _exchange_moves(group: Group, moved: Resized, ranges: list[Ranges]) -> tuple[Tensor, Tensor]:
    """Send moves to the holders of their rows; return the old and new rows of the moves in this rank's tiles."""
    pairs_M2 = torch.stack([moved.old_rows, moved.new_rows], dim=1)
    outs = []
    for own in ranges:
        inside = torch.zeros(pairs_M2.shape[0], dtype=torch.bool, device=pairs_M2.device)
        for r0, r1 in own:
            inside |= (pairs_M2[:, 0] >= r0) & (pairs_M2[:, 0] < r1)
        outs.append(pairs_M2[inside].view(-1))
    sizes_W = torch.tensor([part.numel() for part in outs], device=pairs_M2.device)
    ones = [1] * group.size
    ins = group.all_to_all("moved rows", torch.zeros_like(sizes_W), sizes_W, ones, ones).wait().tolist()
    into = torch.zeros(sum(ins), dtype=torch.int64, device=pairs_M2.device)
    group.all_to_all("moved rows", into, torch.cat(outs), ins, [part.numel() for part in outs]).wait()
    old_rows_M, new_rows_M = into.view(-1, 2).unbind(1)
    return old_rows_M, new_rows_M
