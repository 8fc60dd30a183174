"""Jagged ops that sum items: of a segment, and of the copies that a selection made. Nouns as in `backend.py`.

Kernels add item after item, as the CPU does: a column's items are one chain of additions, whose loads run ahead of it.

Legend: N items going in, M items coming out, S segments, P selected segments, W numbers of an item.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.jagged.triton.item_copies import ITEMS, tiles
from tilerec.ops.jagged.triton.offsets import (
    ANYWHERE,
    CHECKED,
    as_int64,
    check_offsets,
    check_order,
    offset_error_raiser,
)
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.addresses import ceil_div
from tilerec.ops.runtime.triton.launch import GRID_Y, launch
from tilerec.ops.runtime.triton.reports import new_report, post, raise_due
from tilerec.ops.runtime.triton.search import segment_at, segments_of

_SUMS = {
    torch.float32: tl.float32,
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float64: tl.float64,
}
_COUNTED = {torch.int64: tl.int64, torch.int32: tl.int64, torch.int16: tl.int64, torch.int8: tl.int64,
            torch.uint8: tl.int64}  # fmt: skip


@triton.jit(do_not_specialize=["items", "segments"], do_not_specialize_on_alignment=ANYWHERE)
def sum_segments(
    out, values, offsets, report, items, segments, W: tl.constexpr, SUM: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Store `COLUMNS` columns of the sums of a group of segments, added item after item.

    The kernel loads `AHEAD` items before it adds the first of them, so a chain of additions waits for memory once per
    `AHEAD` items.
    """
    program = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        check_offsets(offsets, segments, items, program, report, False)
    segment = program * GROUP + tl.arange(0, GROUP)
    here = segment < segments
    begin = tl.load(offsets + segment, mask=here, other=0)
    end = tl.load(offsets + segment + 1, mask=here, other=0)
    begin = tl.maximum(begin, 0)
    count = tl.minimum(end, items) - begin
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = here[:, None] & (columns < W)
    total = tl.zeros((GROUP, COLUMNS), SUM)
    longest = tl.max(count, 0)
    step = longest * 0
    while step < longest:
        for ahead in tl.static_range(AHEAD):
            at = step + ahead
            item = tl.load(values + (begin + at)[:, None] * W + columns, mask=inside & (at < count)[:, None], other=0)
            total += item.to(SUM)
        step += AHEAD
    tl.store(out + segment[:, None] * W + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["items", "segments", "selected", "total"], do_not_specialize_on_alignment=ANYWHERE)
def sum_copies(
    out, grads, offsets, order, out_offsets, first_copy, copies, report, items, segments, selected, total,
    W: tl.constexpr, SUM: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write one tile of the transpose of a selection: for each of `items` input items, the sum over its copies.

    Segment s was selected at the places `copies[first_copy[s] : first_copy[s + 1]]`, ascending. So the kernel adds
    copies in output order, without atomics. Order [2, 0, 2]: first_copy [0, 1, 1, 3], copies [1, 0, 2].
    """
    program = tl.program_id(0).to(tl.int64)
    check_offsets(out_offsets, selected, total, program, report, True)
    check_order(offsets, segments, order, out_offsets, selected, program, report)
    first = program * TILE
    if first < items:
        low = segment_at(offsets, segments, first)
        high = segment_at(offsets, segments, tl.minimum(first + TILE, items) - 1)
        for at in range(0, TILE, GROUP):
            item = first + at + tl.arange(0, GROUP)
            segment = segments_of(offsets, item, low, high)
            here = (item < items) & (segment < segments)
            within = item - tl.load(offsets + segment, mask=here, other=0)
            there = here & (within >= 0) & (item < tl.load(offsets + segment + 1, mask=here, other=0))
            copy = tl.load(first_copy + segment, mask=there, other=0)
            stop = tl.load(first_copy + segment + 1, mask=there, other=0)
            most = tl.max(stop - copy, 0)
            for column in range(0, W, COLUMNS):
                columns = column + tl.arange(0, COLUMNS)[None, :]
                inside = columns < W
                sums = tl.zeros((GROUP, COLUMNS), SUM)
                step = most * 0
                while step < most:
                    more = there & (copy + step < stop)
                    place = tl.load(copies + copy + step, mask=more, other=0)
                    begin = tl.load(out_offsets + place, mask=more, other=0)
                    more &= within < tl.load(out_offsets + place + 1, mask=more, other=0) - begin
                    source = begin + within
                    more &= (source >= 0) & (source < total)
                    grad = tl.load(grads + source[:, None] * W + columns, mask=more[:, None] & inside, other=0)
                    sums += grad.to(SUM)
                    step += 1
                tl.store(
                    out + item[:, None] * W + columns, sums.to(out.dtype.element_ty),
                    mask=(item < items)[:, None] & inside,
                )  # fmt: skip


def select_segments_backward(
    grad_M: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int
) -> Tensor:
    sum_type = _SUMS.get(grad_M.dtype) or _COUNTED.get(grad_M.dtype)
    if sum_type is None:
        return LIBRARY.references["select_segments_backward"](grad_M, offsets_S1, order_P, out_offsets_P1, total)
    device = grad_M.device
    raise_due(device)
    offsets_S1, order_P, out_offsets_P1 = as_int64(offsets_S1), as_int64(order_P), as_int64(out_offsets_P1)
    segments, selected = offsets_S1.shape[0] - 1, order_P.shape[0]
    grad_M, width = grad_M.contiguous(), grad_M.shape[1:].numel()
    out_N = torch.empty((total, *grad_M.shape[1:]), dtype=grad_M.dtype, device=device)
    # Sort segments, not items: they are fewer. Many segments get keys of 4 bytes.
    keys_P = order_P.to(torch.int32) if selected > 4096 and segments < 1 << 31 else order_P
    sorted_P, copies_P = torch.sort(keys_P, stable=True)
    numbers_S1 = torch.arange(segments + 1, dtype=sorted_P.dtype, device=device)
    first_copy_S1 = torch.searchsorted(sorted_P, numbers_S1)
    tile, group, columns = tiles(width, grad_M.element_size()) if width else (ITEMS, ITEMS, 1)
    group = max(group // (4 // min(grad_M.element_size(), 4)), 1)  # sums are 4 bytes wide
    programs = max(ceil_div(total, tile) if width else 0, ceil_div(selected + 1, CHECKED.value))
    report = new_report(device)
    launch(sum_copies, (programs,),
        out_N, grad_M, offsets_S1, order_P, out_offsets_P1, first_copy_S1, copies_P, report, total if width else 0,
        segments, selected, grad_M.shape[0], W=max(width, 1), SUM=sum_type, TILE=tile, GROUP=group, COLUMNS=columns,
        num_warps=4 if width == 1 else 1, enable_fp_fusion=False,
    )  # fmt: skip
    post(report, offset_error_raiser("select_segments_backward"))
    return out_N


def segment_sum(values_N: Tensor, offsets_S1: Tensor) -> Tensor:
    sum_type = _SUMS.get(values_N.dtype) or _COUNTED.get(values_N.dtype)
    width = values_N.shape[1:].numel()
    # A lane reads 16 bytes at a time. Short rows of several segments share one load of a warp.
    lanes = 512 // values_N.element_size()
    if sum_type is None or width > GRID_Y * lanes:
        return LIBRARY.references["segment_sum"](values_N, offsets_S1)
    device = values_N.device
    raise_due(device)
    offsets_S1, values_N = as_int64(offsets_S1), values_N.contiguous()
    segments = offsets_S1.shape[0] - 1
    out_S = torch.empty((segments, *values_N.shape[1:]), dtype=values_N.dtype, device=device)
    columns = min(1 << (max(width, 1) - 1).bit_length(), lanes)
    group = lanes // columns
    # Programs past the last segment, if any, only check offsets.
    programs = max(ceil_div(segments, group), ceil_div(segments + 1, CHECKED.value))
    report = new_report(device)
    launch(sum_segments, (programs, max(ceil_div(width, columns), 1)),
        out_S, values_N, offsets_S1, report, values_N.shape[0], segments, W=width, SUM=sum_type, GROUP=group,
        COLUMNS=columns, AHEAD=8, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    post(report, offset_error_raiser("segment_sum"))
    return out_S
