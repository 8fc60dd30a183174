"""Jagged algebra: the ops under `KeyedJaggedTensor`.

Terms
    item      one row of a jagged tensor's values: a scalar id, or a vector
    segment   a run of consecutive items: a bag, or all bags of one key
    lengths   items per segment, int32 or int64
    offsets   starts of segments, int64:  offsets[s + 1] = offsets[s] + lengths[s],  offsets[0] = 0
    order     selected segments in output order; repeats and gaps are allowed
    cut       a row number where one bucket ends and the next begins

Keys, samples of one key and bags are all *segments*. So "permute keys", "select samples" and "drop bags" are the same
op, `select_segments`, with offsets of different granularity. The size of every output is an argument or follows from
shapes: no op reads a size from the device, so none of them synchronizes.

Shapes
    S segments, N input items, P selected segments, M output items, B bags, L padded length, C buckets
    `values_N` may have trailing dimensions; they belong to their item.

This file contains the schema, the plain-PyTorch reference (any device), the fake kernel and the autograd formula of
each op. Its last section has typed functions that call the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.jagged.checks import CHECKS
from tilerec.ops.runtime.library import LIBRARY, Function
from tilerec.torch_private import BelowAutograd, fresh_size

_OPS = torch.ops.tilerec


def _op(schema: str, fake: Callable[..., Any] | None) -> Callable[[Function], Function]:
    return LIBRARY.op(schema, fake, check=CHECKS[schema.partition("(")[0]])


def _fake_items(items: Tensor, *arguments: Any) -> Tensor:
    """Return as many items as the last argument."""
    return items.new_empty((arguments[-1], *items.shape[1:]))


@_op(
    "offsets_from_lengths(Tensor lengths_S) -> Tensor",
    lambda lengths_S: lengths_S.new_empty(lengths_S.shape[0] + 1, dtype=torch.int64),
)
def _offsets_from_lengths(lengths_S: Tensor) -> Tensor:
    """Return starts of segments and the end of the last one, always in int64, so a sum past 2**31 is safe.

    lengths [2, 0, 1] -> offsets [0, 2, 2, 3]
    """
    offsets_S1 = torch.zeros(lengths_S.shape[0] + 1, dtype=torch.int64, device=lengths_S.device)
    torch.cumsum(lengths_S, 0, dtype=torch.int64, out=offsets_S1[1:])
    return offsets_S1


@_op(
    "segment_ids(Tensor offsets_S1, SymInt total) -> Tensor",
    lambda offsets_S1, total: offsets_S1.new_empty(total, dtype=torch.int64),
)
def _segment_ids(offsets_S1: Tensor, total: int) -> Tensor:
    """Return the segment of every item, int64.

    offsets [0, 2, 2, 3], total 3 -> [0, 0, 2]
    """
    segments_S = torch.arange(offsets_S1.shape[0] - 1, device=offsets_S1.device)
    return torch.repeat_interleave(segments_S, offsets_S1.diff(), output_size=total)


@_op(
    "unbacked_rows(Tensor items_N, int parts) -> Tensor",
    lambda items_N, parts: items_N.new_empty(fresh_size(items_N.shape[0], parts), 0),
)
def _unbacked_rows(items_N: Tensor, parts: int) -> Tensor:
    """Return no numbers, [N, 0]. An exporter takes its N for a size about which nothing is known.

    It takes it for the size of the items if that is written as a multiple of `parts`.
    """
    return items_N.new_empty(items_N.shape[0], 0)


def _source_positions(offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int) -> Tensor:
    """Return the position in the input of every output item."""
    segment_M = _segment_ids(out_offsets_P1, total)
    shift_P = offsets_S1.index_select(0, order_P) - out_offsets_P1[:-1]
    return torch.arange(total, device=order_P.device) + shift_P.index_select(0, segment_M)


_SELECTION = "Tensor offsets_S1, Tensor order_P, Tensor out_offsets_P1, SymInt total"


@_op(f"select_segments(Tensor values_N, {_SELECTION}) -> Tensor", _fake_items)
def _select_segments(
    values_N: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int
) -> Tensor:
    """Return the items of the segments `order_P`, concatenated.

    values [a, b, c], offsets [0, 2, 2, 3] (segments [a b] [] [c]), order [2, 0, 2], out offsets [0, 1, 3, 4], total 4
    -> [c, a, b, c]

    `out_offsets_P1` are the offsets of the selected lengths, and `total` is the last of them. They are arguments
    because the ids and weights of one batch share them.
    """
    return values_N.index_select(0, _source_positions(offsets_S1, order_P, out_offsets_P1, total))


@_op(f"select_segments_backward(Tensor grad_M, {_SELECTION}) -> Tensor", _fake_items)
def _select_segments_backward(
    grad_M: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int
) -> Tensor:
    """Return the transpose: each input item receives the sum over its copies, zero if it was not selected.

    grad [1, 2, 4, 8] for the example above -> [2, 4, 1 + 8]

    Copies are added in output order, halves in fp32 with one rounding at the end. They are sorted by their item and
    summed as segments, since torch's accumulating writes add in a varying order of threads.
    """
    position_M = _source_positions(offsets_S1, order_P, out_offsets_P1, grad_M.shape[0])
    copies_N = torch.zeros(total, dtype=torch.int64, device=grad_M.device)
    copies_N.scatter_add_(0, position_M, torch.ones_like(position_M))
    by_item_M = torch.sort(position_M, stable=True).indices
    return _segment_sum(grad_M.index_select(0, by_item_M), _offsets_from_lengths(copies_N))


@_op(
    "take_segments_(Tensor[] values, Tensor[] offsets, Tensor[] orders, Tensor(a!)[] outs, Tensor(b!)[] lengths) -> ()",
    None,
)
def _take_segments_(
    values: list[Tensor], offsets: list[Tensor], orders: list[Tensor], outs: list[Tensor], lengths: list[Tensor]
) -> None:
    """Copy the items of segments into memory of the caller, for several selections.

    Segments are numbered through all sources: source s has the items `values[s]`, cut by `offsets[s]`. Selection c has
    the segments `orders[c]` (int64): their items go to the front of `outs[c]`, and their numbers to `lengths[c]`
    (int32). Items for which `outs[c]` has no room are left out. Items of `outs[c]` behind the copies become arbitrary.

    values [[a, b], [c]], offsets [[0, 2, 2], [0, 1]] (segments [a b] [] [c]), orders [[2, 0], [0]], room for 4 and 1
    -> outs [c, a, b, ?], [a]; lengths [1, 2], [2]
    """
    values_N = torch.cat(values)
    starts_S = torch.cat([own[:-1] + sum(one.shape[0] for one in values[:s]) for s, own in enumerate(offsets)])
    lengths_S = torch.cat([own.diff() for own in offsets])
    for order_P, out_M, lengths_P in zip(orders, outs, lengths, strict=True):
        lengths_P.copy_(lengths_S.index_select(0, order_P))
        if not (order_P.shape[0] and values_N.shape[0]):
            continue
        out_offsets_P1 = _offsets_from_lengths(lengths_P)
        place_M = torch.arange(out_M.shape[0], device=values_N.device)
        selected_M = torch.searchsorted(out_offsets_P1[1:], place_M, right=True).clamp(max=order_P.shape[0] - 1)
        shift_P = starts_S.index_select(0, order_P) - out_offsets_P1[:-1]
        position_M = (place_M + shift_P.index_select(0, selected_M)).clamp(max=values_N.shape[0] - 1)
        out_M.copy_(values_N.index_select(0, position_M))


@_op(
    "bucketize_by_cuts(Tensor ids_N, Tensor lengths_S, Tensor cuts_C1) -> (Tensor, Tensor, Tensor)",
    lambda ids_N, lengths_S, cuts_C1: (
        lengths_S.new_empty((cuts_C1.shape[0] - 1) * lengths_S.shape[0]),
        ids_N.new_empty(ids_N.shape[0]),
        ids_N.new_empty(ids_N.shape[0], dtype=torch.int64),
    ),
)
def _bucketize_by_cuts(ids_N: Tensor, lengths_S: Tensor, cuts_C1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distribute ids to buckets of rows: bucket c owns rows [cuts[c], cuts[c + 1]).

    Returns `lengths_CS` (number of ids of each segment in each bucket, in the dtype of `lengths_S`, flat and
    bucket-major), `local_ids_N` (id minus the first row of its bucket, in the dtype of `ids_N`) and `positions_N`
    (position in the input of each output item, int64). Output items are ordered by bucket, then by segment, then by
    their original position.
    original order.

    ids [7, 1, 4], lengths [2, 1] (segments [7 1] [4]), cuts [0, 4, 10]
    -> lengths [1, 0, 1, 1], local ids [1, 3, 0], positions [1, 0, 2]

    Cuts ascend; equal neighbours make an empty bucket. An id outside of [cuts[0], cuts[-1]) is not lost: it is put into
    the first or last bucket with a local id outside of that bucket's rows, which the owner's range check reports.
    """
    buckets = cuts_C1.shape[0] - 1
    segments = lengths_S.shape[0]
    ids_long_N = ids_N.long()
    bucket_N = torch.searchsorted(cuts_C1[1:-1].long().contiguous(), ids_long_N, right=True)
    position_N = torch.sort(bucket_N, stable=True).indices
    segment_N = _segment_ids(_offsets_from_lengths(lengths_S), ids_N.shape[0])
    lengths_CS = torch.zeros(buckets * segments, dtype=torch.int64, device=ids_N.device)
    lengths_CS.scatter_add_(0, bucket_N * segments + segment_N, torch.ones_like(bucket_N))
    local_N = ids_long_N - cuts_C1.long().index_select(0, bucket_N)
    return lengths_CS.to(lengths_S.dtype), local_N.index_select(0, position_N).to(ids_N.dtype), position_N


@_op(
    "jagged_to_padded(Tensor values_N, Tensor offsets_B1, SymInt length, float padding) -> Tensor",
    lambda values_N, offsets_B1, length, _: values_N.new_empty((offsets_B1.shape[0] - 1, length, *values_N.shape[1:])),
)
def _jagged_to_padded(values_N: Tensor, offsets_B1: Tensor, length: int, padding: float) -> Tensor:
    """Pad bags to rows of one width: the first `length` items of each bag, then `padding`.

    values [a, b, c, d], offsets [0, 1, 4], length 2, padding p -> [[a, p], [b, c]]
    """
    bags = offsets_B1.shape[0] - 1
    column_L = torch.arange(length, device=values_N.device)
    position_BL = offsets_B1[:-1, None] + column_L
    present_BL = position_BL < offsets_B1[1:, None]
    if values_N.shape[0] == 0:
        return values_N.new_full((bags, length, *values_N.shape[1:]), padding)
    rows_BL = values_N.index_select(0, position_BL.masked_fill(~present_BL, 0).flatten())
    present = present_BL.flatten().view(-1, *([1] * (values_N.dim() - 1)))
    padded = torch.where(present, rows_BL, torch.full((), padding, dtype=values_N.dtype, device=values_N.device))
    return padded.view(bags, length, *values_N.shape[1:])


@_op(
    "padded_to_jagged(Tensor padded_BL, Tensor offsets_B1, SymInt total) -> Tensor",
    lambda padded_BL, _, total: padded_BL.new_empty((total, *padded_BL.shape[2:])),
)
def _padded_to_jagged(padded_BL: Tensor, offsets_B1: Tensor, total: int) -> Tensor:
    """Return the items of each row, concatenated by bag; zero where a bag is longer than its row.

    padded [[a, x], [b, c]], offsets [0, 1, 4], total 4 -> [a, b, c, 0]
    """
    bags, length = padded_BL.shape[:2]
    if total == 0 or bags * length == 0:
        return padded_BL.new_zeros((total, *padded_BL.shape[2:]))
    bag_N = _segment_ids(offsets_B1, total)
    column_N = torch.arange(total, device=padded_BL.device) - offsets_B1.index_select(0, bag_N)
    present_N = (column_N < length).view(-1, *([1] * (padded_BL.dim() - 2)))
    position_N = bag_N * length + column_N.clamp(max=length - 1)
    items_N = padded_BL.reshape(bags * length, *padded_BL.shape[2:]).index_select(0, position_N)
    return torch.where(present_N, items_N, torch.zeros((), dtype=items_N.dtype, device=items_N.device))


@_op(
    "segment_sum(Tensor values_N, Tensor offsets_S1) -> Tensor",
    lambda values_N, offsets_S1: values_N.new_empty((offsets_S1.shape[0] - 1, *values_N.shape[1:])),
)
def _segment_sum(values_N: Tensor, offsets_S1: Tensor) -> Tensor:
    """Return the sum of each segment's items, in the dtype of the values; zero for an empty segment.

    values [1, 2, 4], offsets [0, 2, 2, 3] -> [3, 0, 4]

    Floating-point items are added from first to last, halves in fp32 with one rounding at the end. Integers are added
    in int64 and wrap as in torch.
    """
    item_shape = values_N.shape[1:]
    segments = offsets_S1.shape[0] - 1
    if values_N.shape[0] == 0 or item_shape.numel() == 0:
        return values_N.new_zeros((segments, *item_shape))
    if values_N.is_floating_point():
        sum_dtype = torch.float64 if values_N.dtype == torch.float64 else torch.float32
        items_N = values_N.to(sum_dtype).contiguous()
        sums_S = torch.segment_reduce(items_N, "sum", offsets=offsets_S1, axis=0, initial=0, unsafe=True)
        return sums_S.to(values_N.dtype)
    running_N1 = torch.zeros((values_N.shape[0] + 1, *item_shape), dtype=torch.int64, device=values_N.device)
    torch.cumsum(values_N, 0, dtype=torch.int64, out=running_N1[1:])
    return running_N1.index_select(0, offsets_S1).diff(dim=0).to(values_N.dtype)


@_op("repeat_segments(Tensor rows_S, Tensor offsets_S1, SymInt total) -> Tensor", _fake_items)
def _repeat_segments(rows_S: Tensor, offsets_S1: Tensor, total: int) -> Tensor:
    """Copy each segment's row to each of its items: the transpose of `segment_sum`.

    rows [a, b, c], offsets [0, 2, 2, 3], total 3 -> [a, a, c]
    """
    return rows_S.index_select(0, _segment_ids(offsets_S1, total))


# ---------------------------------------------------------------------------------------------------------------
# autograd
#
# Each floating-point op is linear, so its backward is its transpose, and each pair of ops is closed under
# differentiation. The formula is an `autograd.Function` registered for the Autograd key, since
# `torch.library.register_autograd` costs about five times as much per call.


_TRANSPOSES: dict[str, tuple[str, Callable[[Tensor], tuple[Any, ...]]]] = {
    "select_segments": ("select_segments_backward", lambda values_N: (values_N.shape[0],)),
    "select_segments_backward": ("select_segments", lambda grad_M: (grad_M.shape[0],)),
    "jagged_to_padded": ("padded_to_jagged", lambda values_N: (values_N.shape[0],)),
    "padded_to_jagged": ("jagged_to_padded", lambda padded_BL: (padded_BL.shape[1], 0.0)),
    "segment_sum": ("repeat_segments", lambda values_N: (values_N.shape[0],)),
    "repeat_segments": ("segment_sum", lambda rows_S: ()),
}
"""Per op its transpose, and the arguments of the transpose that follow the op's tensors: sizes of the op's input."""


class _Linear(torch.autograd.Function):
    """An op of `_TRANSPOSES`, whose backward is its transpose."""

    @staticmethod
    def forward(ctx: Any, op: str, values: Tensor, *args: Any) -> Tensor:
        ctx.save_for_backward(*[each for each in args if isinstance(each, Tensor)])
        transpose, sizes = _TRANSPOSES[op]
        ctx.transpose, ctx.sizes, ctx.inputs = getattr(_OPS, transpose), sizes(values), len(args)
        return _below(getattr(_OPS, op).default, values, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, ctx.transpose(*grads, *ctx.saved_tensors, *ctx.sizes), *[None] * ctx.inputs


def _below(op: Callable[..., Any], *args: Any) -> Any:
    """Call `op` below the Autograd key, since the formula already provides autograd."""
    with BelowAutograd():
        return op(*args)


def _differentiable(name: str) -> Callable[..., Tensor]:
    op = getattr(_OPS, name).default

    def kernel(values: Tensor, *args: Any) -> Tensor:
        # Values are usually ids, which need no graph node.
        if values.requires_grad and torch.is_grad_enabled():
            return _Linear.apply(name, values, *args)
        return _below(op, values, *args)

    return kernel


for _name in _TRANSPOSES:
    LIBRARY.impl(_name, _differentiable(_name), "Autograd")


# ---------------------------------------------------------------------------------------------------------------
# typed functions that call the ops


class Bucketized(NamedTuple):
    """Ids by bucket of rows; see `bucketize_by_cuts`."""

    lengths_CS: Tensor
    local_ids_N: Tensor
    weights_N: Tensor | None
    positions_N: Tensor


class Selected(NamedTuple):
    """Segments selected from a jagged tensor; see `select_jagged`."""

    lengths_P: Tensor
    values_M: Tensor
    weights_M: Tensor | None
    offsets_P1: Tensor


def offsets_from_lengths(lengths_S: Tensor) -> Tensor:
    """Return starts of segments, int64 [S + 1]. lengths [2, 0, 1] -> [0, 2, 2, 3]."""
    return _OPS.offsets_from_lengths.default(lengths_S)


def segment_ids(offsets_S1: Tensor, total: int) -> Tensor:
    """Return the segment of every item, int64 [total]. offsets [0, 2, 2, 3] -> [0, 0, 2]."""
    return _OPS.segment_ids.default(offsets_S1, total)


def unbacked_rows(items_N: Tensor, parts: int) -> Tensor:
    """Return no numbers, [N, 0], for their shape: an exported program assumes nothing about this N // parts."""
    return _OPS.unbacked_rows.default(items_N, parts)


def select_segments(
    values_N: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int
) -> Tensor:
    """Return the items of the segments `order_P`, concatenated; differentiable in `values_N`."""
    return _OPS.select_segments.default(values_N, offsets_S1, order_P, out_offsets_P1, total)


def select_jagged(
    order_P: Tensor, lengths_S: Tensor, values_N: Tensor, weights_N: Tensor | None = None,
    offsets_S1: Tensor | None = None, total: int | None = None,
) -> Selected:  # fmt: skip
    """Return lengths, values and weights of the segments `order_P` (keys, samples or bags; repeats allowed).

    `offsets_S1` saves a cumulative sum. `total`, the number of selected items, saves a synchronization: without it, it
    is read from the result's offsets.
    """
    if offsets_S1 is None:
        offsets_S1 = offsets_from_lengths(lengths_S)
    lengths_P = lengths_S.index_select(0, order_P)
    out_offsets_P1 = offsets_from_lengths(lengths_P)
    if total is None:
        total = int(out_offsets_P1[-1].item())
    values_M = select_segments(values_N, offsets_S1, order_P, out_offsets_P1, total)
    weights_M = None
    if weights_N is not None:
        weights_M = select_segments(weights_N, offsets_S1, order_P, out_offsets_P1, total)
    return Selected(lengths_P, values_M, weights_M, out_offsets_P1)


def take_segments(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    orders: Sequence[Tensor],
    outs: Sequence[Tensor],
    lengths: Sequence[Tensor],
) -> None:
    """Copy the items of segments to the front of `outs[c]`, and their numbers to `lengths[c]`, for each selection c.

    values [[a, b], [c]], offsets [[0, 2, 2], [0, 1]] (segments [a b] [] [c]), orders [[2, 0], [0]], room for 4 and 1
    -> outs [c, a, b, ?], [a]; lengths [1, 2], [2]

    Segments are numbered through all sources. `offsets[s]` are int32 or int64 from 0 to the number of `values[s]`,
    `orders` int64, `lengths` int32. Items for which `outs[c]` has no room are left out: the sum of `lengths[c]` is the
    room that they need.
    """
    _OPS.take_segments_.default(values, offsets, orders, outs, lengths)


def bucketize_by_cuts(ids_N: Tensor, lengths_S: Tensor, cuts_C1: Tensor, weights_N: Tensor | None = None) -> Bucketized:
    """Distribute ids, and weights if given, to buckets of rows [cuts[c], cuts[c + 1]).

    ids [7, 1, 4], lengths [2, 1], cuts [0, 4, 10]
    -> lengths [1, 0, 1, 1], local ids [1, 3, 0], positions [1, 0, 2]
    """
    if cuts_C1.dim() != 1 or cuts_C1.shape[0] < 2:
        raise InputError(
            f"bucketize_by_cuts: cuts have shape {list(cuts_C1.shape)}; expected one ascending list with at "
            f"least 2 entries: the first row of each bucket and the end of the last."
        )
    lengths_CS, local_ids_N, positions_N = _OPS.bucketize_by_cuts.default(ids_N, lengths_S, cuts_C1)
    bucketized_weights_N = None if weights_N is None else weights_N.index_select(0, positions_N)
    return Bucketized(lengths_CS, local_ids_N, bucketized_weights_N, positions_N)


def jagged_to_padded(values_N: Tensor, offsets_B1: Tensor, length: int, padding: float = 0.0) -> Tensor:
    """Return bags as rows of one width [B, length, ...], cut or padded at the end; differentiable in `values_N`."""
    return _OPS.jagged_to_padded.default(values_N, offsets_B1, length, padding)


def padded_to_jagged(padded_BL: Tensor, offsets_B1: Tensor, total: int | None = None) -> Tensor:
    """Return the items of each row [total, ...], concatenated by bag; zero where a bag is longer than its row.

    `total` is the last offset; without it, it is read from the device.
    """
    if total is None:
        total = int(offsets_B1[-1].item())
    return _OPS.padded_to_jagged.default(padded_BL, offsets_B1, total)


def segment_sum(values_N: Tensor, offsets_S1: Tensor) -> Tensor:
    """Return the sum of each segment's items [S, ...]. values [1, 2, 4], offsets [0, 2, 2, 3] -> [3, 0, 4]."""
    return _OPS.segment_sum.default(values_N, offsets_S1)


def repeat_segments(rows_S: Tensor, offsets_S1: Tensor, total: int) -> Tensor:
    """Copy each segment's row to each of its items [total, ...]."""
    return _OPS.repeat_segments.default(rows_S, offsets_S1, total)
