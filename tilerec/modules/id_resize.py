"""Resizing of an id map: change the rows per bucket, or split or merge buckets. The old map stays unchanged.

Legend: M rows that move, B buckets held by this rank, C admission counters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.modules.buckets import Buckets
from tilerec.modules.evict import Evicting
from tilerec.modules.id_counts import KINDS
from tilerec.ops.hash.definition import HashRange, HashState, Policy, zch_buckets, zch_resize


class Resized(NamedTuple):
    """Result of a change of capacity.

    Args:
        old_rows, new_rows: int64 [M], row numbers before and after, of live ids and of shared rows.
        kept: number of live ids that still have a row.
        dropped_ids: int64, ids that no longer fit.
    """

    old_rows: Tensor
    new_rows: Tensor
    kept: int
    dropped_ids: Tensor


class ResizedIdMap(NamedTuple):
    """The new map, and the rows that moved."""

    buckets: Buckets
    state: HashState
    counts_BC: Tensor
    moved: Resized


def resized_buckets(
    who: str, old: Buckets, zch_size: int | None, total_num_buckets: int | None, *, shares: bool
) -> Buckets:
    """Return all buckets of the new capacity; see `ManagedCollisionModule.resize`.

    Raises:
        ConfigError: the rows do not fill the buckets equally, or neither bucket count divides the other.
    """
    count = old.count if total_num_buckets is None else total_num_buckets
    rows = old.size * count if zch_size is None else zch_size
    new = Buckets.of(who, rows, count, shares=shares, percent_shared=old.percent)
    if count % old.count and old.count % count:
        raise ConfigError(
            f"{who}: got total_num_buckets={count} for a map of {old.count} buckets; expected a multiple or a divisor "
            f"of {old.count}. Whole buckets split or merge."
        )
    return new


def resize_id_map(
    state: HashState, counts_BC: Tensor, old: Buckets, whole: Buckets, max_probe: int, step: int,
    evicting: Evicting | None,
) -> ResizedIdMap:  # fmt: skip
    """Return a map with new buckets and the ids of `state`; `state` stays unchanged.

    Args:
        old: the buckets held here, which must split or merge into whole ones.
        whole: the result of `resized_buckets`.
    """
    new = whole.cut(old.first * whole.count // old.count, old.last * whole.count // old.count)
    evicting = evicting or Evicting(Policy.LFU)
    made = zch_resize(
        state, HashRange(old.count, old.slots, max_probe, old.first), new.count, new.slots, step=step,
        policy=evicting.policy, exponent=evicting.exponent,
    )  # fmt: skip
    resized = made.state
    if state.counters_BC.shape[1]:
        resized = resized._replace(counters_BC=_with_width(resized.counters_BC, 2 * new.slots))
    dropped_ids = state.ids_E[made.moved_E == -2]
    places = (made.moved_E >= 0).nonzero().squeeze(1)
    old_rows = old.rows_of(places + old.first * old.slots)
    new_rows = new.rows_of(made.moved_E[places])
    shared_old, shared_new = _shared_moves(old, new, state.ids_E.device)
    moved = Resized(
        torch.cat([old_rows, shared_old]), torch.cat([new_rows, shared_new]), places.numel(), dropped_ids
    )  # fmt: skip
    return ResizedIdMap(new, resized, _resized_counts(counts_BC, old, new, dropped_ids), moved)


def _resized_counts(counts_BC: Tensor, old: Buckets, new: Buckets, dropped_ids: Tensor) -> Tensor:
    """Return counters of the new buckets: a split gives them to the first child, a merge adds them; totals stay."""
    if new.count >= old.count:
        made = counts_BC.new_zeros(new.held, counts_BC.shape[1])
        made[:: new.count // old.count] = counts_BC
    else:
        made = counts_BC.view(new.held, old.count // new.count, counts_BC.shape[1]).sum(1)
    if dropped_ids.numel():
        bucket_M = zch_buckets(dropped_ids, new.count) - new.first
        made[:, KINDS.index("evictions")].index_add_(0, bucket_M, torch.ones_like(bucket_M))
    return made


def _shared_moves(old: Buckets, new: Buckets, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return old and new numbers of shared rows: a child copies its parent's, a merged bucket its first part's."""
    kept = min(old.shared, new.shared)
    slots = torch.arange(kept, device=device)
    buckets = torch.arange(new.first, new.last, device=device)
    parents = buckets * old.count // new.count
    old_rows = (parents * old.size + old.slots)[:, None] + slots
    new_rows = (buckets * new.size + new.slots)[:, None] + slots
    return old_rows.reshape(-1), new_rows.reshape(-1)


def _with_width(counters_BC: Tensor, width: int) -> Tensor:
    """Return admission counters of a new width. Positions depend on the width, so another width starts at zero."""
    if counters_BC.shape[1] == width:
        return counters_BC
    return counters_BC.new_zeros(counters_BC.shape[0], width)
