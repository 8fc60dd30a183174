"""Repeated ids of a batch travel once: the distinct ids of each key, and their rows at every occurrence.

Terms
  item      an occurrence: an id of a sequence, or a bag with at most one id
  distinct  a key whose ids are listed once each, in the order of their first item
  segment   as in the exchange ops; a row of a segment with repeats belongs to a distinct id, and so to all its items

    distinct_ids    [7 3 7 7]  ->  [7 3], items [0 2 3 | 1], starts [0 3 4]
    expand_rows_    rows of 7 and 3  ->  those of 7, 3, 7, 7
    sum_rows_       gradients of the four  ->  g0 + g2 + g3 and g1

Legend: K keys, N ids, S bags, I items of distinct keys that have an id, U distinct ids, M ids of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.exchange.definition import SEGMENTS, Segment, segments_of
from tilerec.ops.runtime.library import LIBRARY

_OPS = torch.ops.tilerec


def check_distinct(
    ids_N: Tensor, offsets_S1: Tensor, batches: Sequence[int], rows: Sequence[int], percent: Sequence[int], _: bool
) -> None:
    """Raise `ConfigError` for arguments that do not fit."""
    if ids_N.dtype not in (torch.int32, torch.int64) or offsets_S1.dtype != torch.int64:
        raise ConfigError(
            f"distinct_ids: got ids {ids_N.dtype} and offsets {offsets_S1.dtype}; expected int32 or int64, and int64. "
            "Convert them."
        )
    if not len(batches) == len(rows) == len(percent) or offsets_S1.shape != (sum(batches) + 1,):
        raise ConfigError(
            f"distinct_ids: got {len(batches)} batches with {sum(batches)} bags in all, {len(rows)} rows, "
            f"{len(percent)} percents and offsets {list(offsets_S1.shape)}; expected one of each per key, and one "
            "offset more than bags. Correct them."
        )


def _fake_distinct(
    ids_N: Tensor, offsets_S1: Tensor, batches: Sequence[int], rows: Sequence[int], percent: Sequence[int],
    each_id: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    context = torch.library.get_ctx()
    size, items, distinct = context.new_dynamic_size(), context.new_dynamic_size(), context.new_dynamic_size()
    ends = len(batches) + 1 if each_id else context.new_dynamic_size()
    return (
        ids_N.new_empty(size), offsets_S1.new_empty(ends), ids_N.new_empty(items, dtype=torch.int32),
        ids_N.new_empty(distinct, dtype=torch.int32), torch.empty(len(batches), dtype=torch.int64, device="cpu"),
    )  # fmt: skip


@LIBRARY.op(
    "distinct_ids(Tensor ids_N, Tensor offsets_S1, int[] batches, int[] rows, int[] percent, bool each_id) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_distinct,
    check=check_distinct,
)
def _distinct_ids(
    ids_N: Tensor, offsets_S1: Tensor, batches: Sequence[int], rows: Sequence[int], percent: Sequence[int],
    each_id: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return a batch with the distinct ids of some keys. The host waits for the ids' device.

    Args:
        ids_N, offsets_S1: ids of all bags, key after key, and starts of the bags.
        batches: bags of each key.
        rows: of each key's table; 0: leave the key as it is.
        percent: leave a key with more distinct ids than this share of its items.
        each_id: items are ids, and the bags of a key do not matter; else items are bags, and a key with a bag of
            several ids is left as it is.

    Returns:
        ids [M]; offsets: with `each_id` one bag per key, else one bag per distinct id, or the key's own bags; items,
        int32 [I]: the items of each distinct id, ascending, numbered within their key; starts, int32 [U + 1]: of each
        distinct id's items; counts, int64 [K], on the CPU: U of each key, -1 if it is left as it is, -2 if that is
        because of an id outside of [0, rows).

    ids [7, 3, 7, 5, 6], bags [7] [] [3] [7] | [5 6], batches [4, 1], rows [9, 9], percent [100, 100], not each_id
    -> ids [7, 3, 5, 6], offsets [0, 1, 2, 4], items [0, 3, 2], starts [0, 2, 3], counts [2, -1]
    """
    if offsets_S1.numel() and (int(offsets_S1[0]) or int(offsets_S1[-1]) != ids_N.shape[0]):
        raise ConfigError(
            f"distinct_ids: got offsets from {int(offsets_S1[0])} to {int(offsets_S1[-1])} for {ids_N.shape[0]} ids; "
            "expected them to cover all ids. Correct them."
        )
    nothing = ids_N.new_empty(0, dtype=torch.int64)
    found, lengths, items, repeats = [ids_N[:0]], [nothing], [nothing], [nothing]
    counts: list[int] = []
    bag = 0
    for own_bags, own_rows, own_percent in zip(batches, rows, percent, strict=True):
        own_offsets = offsets_S1[bag : bag + own_bags + 1]
        own_ids, own_lengths = ids_N[int(own_offsets[0]) : int(own_offsets[-1])], own_offsets.diff()
        bag += own_bags
        count = own_ids.shape[0] if each_id else own_bags
        one = each_id or not bool((own_lengths > 1).any())
        good = own_rows == 0 or not bool(((own_ids < 0) | (own_ids >= own_rows)).any())
        if own_rows and one and good:
            distinct_U, inverse_N = _in_order(own_ids)
            size = distinct_U.shape[0]
            if size * 100 <= count * own_percent:
                item_N = torch.arange(own_ids.shape[0], device=ids_N.device) if each_id else own_lengths.nonzero()[:, 0]
                found.append(distinct_U)
                counts.append(size)
                items.append(item_N[inverse_N.argsort(stable=True)])
                repeats.append(inverse_N.bincount(minlength=size))
                lengths.append(nothing.new_full((1,), size) if each_id else nothing.new_ones(size))
                continue
        found.append(own_ids)
        counts.append(-1 if good or not one else -2)
        lengths.append(own_lengths.sum(0, keepdim=True) if each_id else own_lengths)
    offsets, starts = (torch.nn.functional.pad(torch.cat(own).cumsum(0), (1, 0)) for own in (lengths, repeats))
    return (
        torch.cat(found), offsets, torch.cat(items).to(torch.int32), starts.to(torch.int32),
        torch.tensor(counts, dtype=torch.int64, device="cpu"),
    )  # fmt: skip


def _in_order(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return distinct ids in the order of their first occurrence, and the place of each id among them."""
    ascending_U, inverse_N = ids_N.unique(return_inverse=True)
    count = ids_N.shape[0]
    first_U = inverse_N.new_full((ascending_U.shape[0],), count)
    first_U.scatter_reduce_(0, inverse_N, torch.arange(count, device=ids_N.device), "amin")
    order_U = first_U.argsort()
    return ascending_U[order_U], order_U.argsort()[inverse_N]


def _items(segment: Segment, items_I: Tensor, starts_U1: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a segment, once per item, and the items."""
    rows_P = first + segment.slots
    count_P = starts_U1[rows_P + 1] - starts_U1[rows_P]
    row_I = torch.arange(count_P.shape[0], device=count_P.device).repeat_interleave(count_P)
    within_I = torch.arange(row_I.shape[0], device=count_P.device) - (count_P.cumsum(0) - count_P)[row_I]
    return row_I, items_I[starts_U1[rows_P][row_I] + within_I].to(torch.int64)


@LIBRARY.op(
    f"expand_rows_(Tensor(a!) out, Tensor rows, Tensor slots, {SEGMENTS}, int[] adds, bool fresh, Tensor items_I, "
    "Tensor starts_U1, int[] firsts, int[] features) -> ()"
)
def _expand_rows_(
    out: Tensor, rows: Tensor, slots: Tensor, counts: Sequence[int], widths: Sequence[int],
    slot_starts: Sequence[int], places: Sequence[int], strides: Sequence[int], adds: Sequence[int], fresh: bool,
    items_I: Tensor, starts_U1: Tensor, firsts: Sequence[int], features: Sequence[int],
) -> None:  # fmt: skip
    """Write rows into a batch's output, those of distinct ids at all their items. Float32 or float64.

    Args:
        out, rows, slots, counts, widths, slot_starts, places, strides, adds, fresh: as of `place_rows_`; a slot of a
            segment with repeats is a distinct id, and its rows are never added.
        items_I, starts_U1: of `distinct_ids`.
        firsts: per segment, position of its key's first distinct id in `starts_U1`; -1: without repeats.
        features: per segment; segments of two features share no elements of `out`.
    """
    if fresh:
        out.zero_()
    for segment in segments_of(rows, out, slots, counts, widths, slot_starts, places, strides, firsts):
        s, (here, there, slots_P, _) = segment.number, segment
        if firsts[s] >= 0:
            row_I, item_I = _items(segment, items_I, starts_U1, firsts[s])
            there[item_I] = here[row_I]
        elif adds[s]:
            there.index_add_(0, slots_P, here)
        else:
            there[slots_P] = here


@LIBRARY.op(
    f"sum_rows_(Tensor(a!) rows, Tensor source, Tensor slots, {SEGMENTS}, Tensor items_I, Tensor starts_U1, "
    "int[] firsts) -> ()"
)
def _sum_rows_(
    rows: Tensor, source: Tensor, slots: Tensor, counts: Sequence[int], widths: Sequence[int],
    slot_starts: Sequence[int], places: Sequence[int], strides: Sequence[int], items_I: Tensor, starts_U1: Tensor,
    firsts: Sequence[int],
) -> None:  # fmt: skip
    """Gather the gradients of rows; those of a distinct id are added up, in the order of its items.

    It is the transpose of `expand_rows_`, and has its arguments; source: gradients of the output; rows: the result.
    """
    for segment in segments_of(rows, source, slots, counts, widths, slot_starts, places, strides, firsts):
        s, (here, there, slots_P, _) = segment.number, segment
        if firsts[s] < 0:
            here.copy_(there[slots_P])
            continue
        row_I, item_I = _items(segment, items_I, starts_U1, firsts[s])
        ends_I, ends_P = (torch.arange(size + 1, device=rows.device) for size in (row_I.shape[0], here.shape[0]))
        here.copy_(_OPS.select_segments_backward(there[item_I], ends_P, row_I, ends_I, here.shape[0]))
