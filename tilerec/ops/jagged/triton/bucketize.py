"""Bucketing of ids by cuts of the id space. Nouns as in `backend.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.jagged.triton.item_copies import ITEMS
from tilerec.ops.jagged.triton.offsets import (
    ANYWHERE,
    CHECKED,
    as_int64,
    check_offsets,
    offset_error_raiser,
)
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.addresses import ceil_div
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.runtime.triton.reports import new_report, post, raise_due
from tilerec.ops.runtime.triton.search import segment_at, segments_of


@triton.jit(do_not_specialize=["items", "segments", "buckets"], do_not_specialize_on_alignment=ANYWHERE)
def deal_ids(keys, counts, ids, offsets, cuts, report, items, segments, buckets, TILE: tl.constexpr):
    """Store the bucket of each id of a tile, and count ids per bucket and segment.

    Counts are integers: the order of their atomic additions does not change the result.
    """
    program = tl.program_id(0).to(tl.int64)
    check_offsets(offsets, segments, items, program, report, True)
    first = program * TILE
    if first < items:
        low = segment_at(offsets, segments, first)
        high = segment_at(offsets, segments, tl.minimum(first + TILE, items) - 1)
        item = first + tl.arange(0, TILE)
        here = item < items
        segment = segments_of(offsets, item, low, high)
        begin = tl.load(offsets + segment, mask=here & (segment < segments), other=0)
        end = tl.load(offsets + segment + 1, mask=here & (segment < segments), other=0)
        id_ = tl.load(ids + item, mask=here, other=0).to(tl.int64)
        bucket = segments_of(cuts, id_, 0, buckets - 1)
        tl.store(keys + item, bucket.to(keys.dtype.element_ty), mask=here)
        one = tl.full((TILE,), 1, counts.dtype.element_ty)
        tl.atomic_add(
            counts + bucket * segments + segment,
            one,
            mask=here & (begin <= item) & (item < end),
            sem="relaxed",
        )


@triton.jit(do_not_specialize=["items"])
def local_ids(out, ids, keys, positions, cuts, items, TILE: tl.constexpr):
    """Store each id, in the order of `positions`, minus the first row of its bucket."""
    item = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = item < items
    cut = tl.load(cuts + tl.load(keys + item, mask=here, other=0).to(tl.int64), mask=here, other=0)
    id_ = tl.load(ids + tl.load(positions + item, mask=here, other=0), mask=here, other=0)
    tl.store(out + item, (id_.to(tl.int64) - cut).to(out.dtype.element_ty), mask=here)


def bucketize_by_cuts(ids_N: Tensor, lengths_S: Tensor, cuts_C1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    known = (torch.int32, torch.int64)
    if ids_N.dtype not in known or lengths_S.dtype not in known:
        return LIBRARY.references["bucketize_by_cuts"](ids_N, lengths_S, cuts_C1)
    device = ids_N.device
    raise_due(device)
    ids_N, cuts_C1 = ids_N.contiguous(), as_int64(cuts_C1)
    offsets_S1 = torch.ops.tilerec.offsets_from_lengths.default(lengths_S)
    items, segments, buckets = ids_N.shape[0], lengths_S.shape[0], cuts_C1.shape[0] - 1
    lengths_CS = torch.zeros(buckets * segments, dtype=lengths_S.dtype, device=device)
    keys_N = torch.empty(items, dtype=key_type(buckets), device=device)
    tile = 256
    programs = max(ceil_div(items, tile), ceil_div(segments + 1, CHECKED.value))
    report = new_report(device)
    launch(deal_ids, (programs,),
        keys_N, lengths_CS, ids_N, offsets_S1, cuts_C1, report, items, segments, buckets, TILE=tile, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    post(report, offset_error_raiser("bucketize_by_cuts"))
    keys_N, positions_N = torch.sort(keys_N, stable=True)
    local_ids_N = torch.empty_like(ids_N)
    if items:
        launch(local_ids, (ceil_div(items, ITEMS),),
            local_ids_N, ids_N, keys_N, positions_N, cuts_C1, items, TILE=ITEMS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return lengths_CS, local_ids_N, positions_N


def key_type(keys: int) -> torch.dtype:
    """Return the narrowest integer dtype that holds 0 to `keys` - 1: a radix sort takes one pass per byte of a key."""
    if keys <= 1 << 8:
        return torch.uint8
    return torch.int16 if keys <= 1 << 15 else torch.int32
