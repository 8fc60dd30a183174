"""Kernels of lookups in quantized rows. Nouns as in `ops/lookup/triton/backend.py`.

A part is FIELDS numbers, as of the float lookups, with the bytes of a row in place of the plane. A launch has the parts
of one number of bits (0: floats of one dtype) and one tile width. A program sums GROUP bags of one part, or copies
GROUP rows; long bags are not split.

Numbers are scale * code + bias without fused operations, so results have the CPU's bits.

Legend: G rows of a group, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.lookup.triton.parts import (
    ANYWHERE,
    COLUMN,
    DIM,
    DISTANCE,
    FEATURE,
    FIELDS,
    ID,
    MEAN,
    NEVER,
    ROWS,
    STRIDE,
    any_true,
    bounds_of,
    load_ids,
    report_bad_bounds,
    report_bad_id,
    report_uncovered,
    run_of,
)
from tilerec.ops.lookup.triton.sequence import check_starts_of
from tilerec.ops.runtime.triton.rows import load_tiles, store_tiles, take_report, tile_columns
from tilerec.ops.runtime.triton.search import segment_at, segments_of

ROW_BYTES = tl.constexpr(9)


@triton.jit
def _half(bits_G):
    """Return fp32 numbers from the lowest 16 bits of integers, which are fp16 numbers."""
    return bits_G.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _numbers(base, heads, distance_G, row_bytes, id_G, sound_G, dim, columns, inside, BITS: tl.constexpr):
    """Return one tile of each row as fp32 [G, C]; zeros for rows that are not sound.

    heads: the memory of `base` as int32; distances and starts of quantized rows are multiples of 4 bytes.
    """
    if BITS == 0:
        numbers_GC = load_tiles(base, distance_G + id_G * dim, sound_G, columns, inside, 1)
    else:
        start_G = tl.multiple_of(distance_G + id_G * row_bytes, 4)
        head_G = tl.load(heads + start_G // 4, mask=sound_G, other=0)
        places_GC = start_G[:, None] + (4 + columns * BITS // 8)
        bytes_GC = tl.load(base + places_GC, mask=sound_G[:, None] & inside, other=0).to(tl.int32)
        codes_GC = (bytes_GC >> (columns * BITS % 8)) & ((1 << BITS) - 1)
        numbers_GC = codes_GC.to(tl.float32) * _half(head_G)[:, None] + _half(head_G >> 16)[:, None]
    return numbers_GC


@triton.jit(do_not_specialize=["id_count", "bags", "last"], do_not_specialize_on_alignment=ANYWHERE)
def quantized_pooled_kernel(
    base, heads, out, ids, offsets, sample_weights, parts, runs, report, id_count, bags, last,
    BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, WEIGHTED: tl.constexpr,
    VARIABLE: tl.constexpr,
):  # fmt: skip
    """Sum the rows of GROUP bags of one part. Grid: (runs of bags, parts).

    last: number of the batch's last offset in one launch, which checks that all ids are in bags; -1 in others.
    """
    part = parts + tl.program_id(1) * FIELDS
    first, count, place = run_of(part, runs, bags, VARIABLE, 1)
    rows, dim = tl.load(part + ROWS), tl.load(part + DIM)
    distance, row_bytes = tl.load(part + DISTANCE), tl.load(part + ROW_BYTES)
    columns, inside = tile_columns(tl.load(part + COLUMN), dim, TILE, 1)
    bag_G = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    has_G = bag_G < count
    begin_G, end_G, wrong_G = bounds_of(offsets, first + bag_G, has_G, id_count)
    length_G = end_G - begin_G
    sums_GC = tl.zeros([GROUP, TILE], tl.float32)
    bad_G = begin_G < 0
    for p in range(0, tl.max(length_G, 0), STEPS):
        for u in tl.static_range(STEPS):
            at_G = begin_G + (p + u)
            take_G = at_G < end_G
            id_G, sound_G = load_ids(ids, at_G, take_G, rows)
            bad_G = bad_G | (take_G & (sound_G == 0))
            numbers_GC = _numbers(base, heads, distance, row_bytes, id_G, sound_G, dim, columns, inside, BITS)
            if WEIGHTED:
                numbers_GC = numbers_GC * tl.load(sample_weights + at_G, mask=take_G, other=0.0)[:, None]
            sums_GC += numbers_GC
    divisor_G = tl.where(tl.load(part + MEAN) != 0, tl.maximum(length_G, 1), 1).to(tl.float32)
    sums_GC = tl.div_rn(sums_GC, tl.broadcast_to(divisor_G[:, None], sums_GC.shape))
    store_tiles(out, place + bag_G * tl.load(part + STRIDE), has_G, columns, inside, sums_GC, 1)
    if any_true(bad_G):
        report_bad_id(report, ids, begin_G, end_G, rows, tl.load(part + FEATURE))
    if any_true(wrong_G):
        report_bad_bounds(report, offsets, first + bag_G, wrong_G, id_count, tl.load(part + FEATURE))
    is_last = (tl.num_programs(0) - tl.program_id(0) == 1) & (tl.num_programs(1) - tl.program_id(1) == 1)
    if (last >= 0) & is_last:
        report_uncovered(report, offsets, last, id_count)


@triton.jit(do_not_specialize=["id_count", "feature_count"], do_not_specialize_on_alignment=ANYWHERE)
def quantized_sequence_kernel(
    base, heads, out, ids, starts, features, report, id_count, feature_count, dim,
    BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Copy the rows of GROUP ids as numbers, a tile of each. Grid: (runs of ids, tiles).

    features: per feature its table's distance, rows (-1: another launch serves it), bytes of a row.
    """
    if CHECK and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        check_starts_of(report, starts, feature_count, id_count)
    columns, inside = tile_columns(tl.program_id(1) * TILE, dim, TILE, 1)
    begin = tl.program_id(0).to(tl.int64) * GROUP
    low = segment_at(starts, feature_count, begin)
    high = segment_at(starts, feature_count, begin + (GROUP - 1))
    at_G = begin + tl.arange(0, GROUP)
    feature_G = features + segments_of(starts, at_G, low, high) * 3
    rows_G = tl.load(feature_G + 1)
    take_G = (at_G < id_count) & (rows_G >= 0)
    id_G, sound_G = load_ids(ids, at_G, take_G, rows_G)
    bad_G = tl.where(take_G & (sound_G == 0), at_G, NEVER)
    numbers_GC = _numbers(
        base, heads, tl.load(feature_G), tl.load(feature_G + 2), id_G, sound_G, dim, columns, inside, BITS
    )
    store_tiles(out, at_G * dim, take_G, columns, inside, numbers_GC, 1)
    at = tl.min(bad_G, 0)
    if at < id_count:
        take_report(report, segment_at(starts, feature_count, at) * 2 + ID, at, tl.load(ids + at).to(tl.int64))
