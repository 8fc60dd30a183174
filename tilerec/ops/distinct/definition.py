"""Repeated ids of a batch travel once: the distinct ids of each key, and their rows at every occurrence.

Terms
  item      an occurrence: an id of a sequence, or a bag with at most one id
  distinct  a key whose ids are listed once each, in the order of their first item

    distinct_ids    [7 3 7 7]  ->  [7 3], inverse [0 1 0 0]
    expand_rows     rows of 7 and 3  ->  those of 7, 3, 7, 7
    sum_rows        gradients of the four  ->  those of 7 and 3, added up in the order of the items

Legend: K keys, N ids, S bags, I items, U distinct ids, M ids of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import ConfigError
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    size = torch.library.get_ctx().new_dynamic_size()
    items = ids_N.shape[0] if each_id else sum(batches)
    ends = len(batches) + 1 if each_id else torch.library.get_ctx().new_dynamic_size()
    return (
        ids_N.new_empty(size), offsets_S1.new_empty(ends), ids_N.new_empty(items, dtype=torch.int32),
        torch.empty(len(batches), dtype=torch.int64, device="cpu"),
    )  # fmt: skip


@LIBRARY.op(
    "distinct_ids(Tensor ids_N, Tensor offsets_S1, int[] batches, int[] rows, int[] percent, bool each_id) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_distinct,
    check=check_distinct,
)
def _distinct_ids(
    ids_N: Tensor, offsets_S1: Tensor, batches: Sequence[int], rows: Sequence[int], percent: Sequence[int],
    each_id: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return a batch with the distinct ids of some keys. The host waits for the ids' device.

    Args:
        ids_N, offsets_S1: ids of all bags, key after key, and starts of the bags.
        batches: bags of each key.
        rows: of each key's table; 0: leave the key as it is.
        percent: leave a key with more distinct ids than this share of its items.
        each_id: items are ids, and the bags of a key do not matter; else items are bags, and a key with a bag of
            several ids is left as it is.

    Returns:
        ids, [M]; offsets: with `each_id` one bag per key, else one bag per distinct id, or the key's own bags;
        inverse, int32 [I]: per item of a distinct key its position among the key's distinct ids, -1 for a bag without
        ids (of other keys: any number); counts, int64 [K], on the CPU: U of each key, -1 if it is left as it is, -2 if
        that is because of an id outside of [0, rows).

    ids [7, 3, 7, 5, 6], bags [7] [] [3] | [7 5 6], batches [3, 1], rows [9, 9], percent [100, 100], not each_id
    -> ids [7, 3, 7, 5, 6], offsets [0, 1, 2, 5], inverse [0, -1, 1, ?], counts [2, -1]
    """
    if offsets_S1.numel() and (int(offsets_S1[0]) or int(offsets_S1[-1]) != ids_N.shape[0]):
        raise ConfigError(
            f"distinct_ids: got offsets from {int(offsets_S1[0])} to {int(offsets_S1[-1])} for {ids_N.shape[0]} ids; "
            "expected them to cover all ids. Correct them."
        )
    found: list[Tensor] = []
    lengths: list[Tensor] = []
    inverses: list[Tensor] = []
    counts: list[int] = []
    bag = 0
    for own_bags, own_rows, own_percent in zip(batches, rows, percent, strict=True):
        own_offsets = offsets_S1[bag : bag + own_bags + 1]
        own_ids, own_lengths = ids_N[int(own_offsets[0]) : int(own_offsets[-1])], own_offsets.diff()
        bag += own_bags
        items = own_ids.shape[0] if each_id else own_bags
        one = each_id or not bool((own_lengths > 1).any())
        good = own_rows == 0 or not bool(((own_ids < 0) | (own_ids >= own_rows)).any())
        if own_rows and one and good:
            distinct_U, inverse_N = _in_order(own_ids)
            if distinct_U.shape[0] * 100 <= items * own_percent:
                inverse_I = inverse_N
                if not each_id:
                    inverse_I = inverse_N.new_full((items,), -1)
                    inverse_I[own_lengths == 1] = inverse_N
                found.append(distinct_U)
                counts.append(distinct_U.shape[0])
                inverses.append(inverse_I)
                size = distinct_U.shape[0]
                lengths.append(torch.full((1,), size) if each_id else torch.ones(size, dtype=torch.int64))
                continue
        found.append(own_ids)
        counts.append(-1 if good or not one else -2)
        inverses.append(own_ids.new_full((items,), -1, dtype=torch.int64))
        lengths.append(own_lengths.sum(0, keepdim=True) if each_id else own_lengths)
    edges = [own.to(offsets_S1.device) for own in lengths]
    joined = torch.cat(edges) if edges else offsets_S1.new_empty(0)
    inverse = torch.cat(inverses).to(torch.int32) if inverses else ids_N.new_empty(0, dtype=torch.int32)
    return (
        torch.cat(found) if found else ids_N.clone(), torch.nn.functional.pad(joined.cumsum(0), (1, 0)), inverse,
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


_SLOTS = "int[] counts, int[] items, int[] widths, int[] starts, int[] places, int[] strides"


@LIBRARY.op(
    f"expand_rows(Tensor rows, Tensor inverse_I, {_SLOTS}, SymInt size) -> Tensor",
    lambda rows, *arguments: rows.new_empty(arguments[-1]),
)
def _expand_rows(
    rows: Tensor, inverse_I: Tensor, counts: Sequence[int], items: Sequence[int], widths: Sequence[int],
    starts: Sequence[int], places: Sequence[int], strides: Sequence[int], size: int,
) -> Tensor:  # fmt: skip
    """Return the rows of all items of several slots.

    Args:
        rows: flat, slot after slot, [counts[s] * widths[s]] each; float32 or float64.
        inverse_I: of `distinct_ids`.
        counts, items: distinct rows and items of each slot.
        widths: numbers of a row.
        starts: of each slot in `inverse_I`; -1: items are the rows themselves, in their order.
        places, strides: item i of a slot begins at places[s] + i * strides[s] of the result; no two overlap.
        size: of the result. Elements of no item become arbitrary, those of an item -1 zero.
    """
    out = rows.new_empty(size)
    for own, inverse, place, stride in _slots(rows, inverse_I, counts, items, widths, starts, places, strides):
        made = torch.cat([own, own.new_zeros(1, own.shape[1])])[inverse]  # -1: the row of zeros
        out.as_strided(made.shape, (stride, 1), place).copy_(made)
    return out


@LIBRARY.op(
    f"sum_rows(Tensor grads, Tensor inverse_I, {_SLOTS}) -> Tensor",
    lambda grads, _, counts, items, widths, *__: grads.new_empty(
        sum([count * width for count, width in zip(counts, widths, strict=True)])
    ),
)
def _sum_rows(
    grads: Tensor, inverse_I: Tensor, counts: Sequence[int], items: Sequence[int], widths: Sequence[int],
    starts: Sequence[int], places: Sequence[int], strides: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the gradients of the distinct rows, added up in the order of their items: the transpose of `expand_rows`.

    Args: as of `expand_rows`; grads: of its result.
    """
    total = sum([count * width for count, width in zip(counts, widths, strict=True)])
    out = grads.new_empty(total)
    for own, inverse, place, stride in _slots(out, inverse_I, counts, items, widths, starts, places, strides):
        given = grads.as_strided((inverse.shape[0], own.shape[1]), (stride, 1), grads.storage_offset() + place)
        count = own.shape[0]
        order = torch.where(inverse < 0, count, inverse)  # those of -1 go to one row more
        ends_N, ends_U = (torch.arange(size + 1, device=grads.device) for size in (inverse.shape[0], count + 1))
        summed = _OPS.select_segments_backward(given.contiguous(), ends_U, order, ends_N, count + 1)
        own.copy_(summed[:count])
    return out


def _slots(
    flat: Tensor, inverse_I: Tensor, counts: Sequence[int], items: Sequence[int], widths: Sequence[int],
    starts: Sequence[int], places: Sequence[int], strides: Sequence[int],
) -> list[tuple[Tensor, Tensor, int, int]]:  # fmt: skip
    """Return for each slot its rows [U, width], the row of each item (int64 [I]), place and stride."""
    found: list[Any] = []
    at = 0
    for count, own_items, width, start, place, stride in zip(
        counts, items, widths, starts, places, strides, strict=True
    ):
        own = flat[at : at + count * width].view(count, width)
        at += count * width
        if start < 0:
            inverse = torch.arange(own_items, device=flat.device)
        else:
            inverse = inverse_I[start : start + own_items].to(torch.int64)
        found.append((own, inverse, place, stride))
    return found
