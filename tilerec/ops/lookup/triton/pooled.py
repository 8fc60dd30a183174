"""Kernels of the pooled forward: bags by groups, and the chunks of long bags. Nouns as in `backend.py`.

Legend: G rows of a group, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.lookup.triton.parts import (
    ANYWHERE,
    CHUNK,
    COLUMN,
    DIM,
    DISTANCE,
    FEATURE,
    FIELDS,
    LONG,
    MEAN,
    PLANE,
    ROWS,
    STRIDE,
    any_true,
    bounds_of,
    chunk_of,
    load_ids,
    report_bad_bounds,
    report_bad_id,
    report_uncovered,
    run_of,
)
from tilerec.ops.runtime.triton.rows import load_tiles, store_tiles, tile_columns


@triton.jit
def _add_rows(
    sums_GC, base, ids, sample_weights, begin_G, end_G, distance, rows, dim, columns, inside,
    VEC: tl.constexpr, STEPS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add the rows of the ids at positions [begin, end) of each bag, in their order.

    Returns the sums and a mask of the bags with bad ids. The compiler moves the loads of an iteration (STEPS positions)
    in front of its additions.
    """
    bad_G = begin_G < 0
    for p in range(0, tl.max(end_G - begin_G, 0), STEPS):
        for u in tl.static_range(STEPS):
            at_G = begin_G + (p + u)
            take_G = at_G < end_G
            id_G, sound_G = load_ids(ids, at_G, take_G, rows)
            bad_G = bad_G | (take_G & (sound_G == 0))
            rows_GC = load_tiles(base, distance + id_G * dim, sound_G, columns, inside, VEC)
            if WEIGHTED:
                rows_GC = rows_GC * tl.load(sample_weights + at_G, mask=take_G, other=0.0)[:, None]
            sums_GC += rows_GC
    return sums_GC, bad_G


@triton.jit
def _pool(
    base, out, ids, offsets, sample_weights, part, chunk_sums, report, id_count, slots,
    bag_G, first, count, place, stride, distance, rows, dim, columns, inside,
    TILE: tl.constexpr, VEC: tl.constexpr, OUT_VEC: tl.constexpr, STEPS: tl.constexpr, WEIGHTED: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Sum the rows of a group of bags of any lengths, and write the results."""
    has_G = bag_G < count
    begin_G, end_G, wrong_G = bounds_of(offsets, first + bag_G, has_G, id_count)
    length_G = end_G - begin_G
    sums_GC = tl.zeros([bag_G.shape[0], TILE], tl.float32)
    rest_G = begin_G
    if SPLIT:
        slot_columns, _all = tile_columns(0, dim, TILE, VEC)
        chunks_G = tl.where(length_G > LONG, length_G // CHUNK, 0)
        slot_G = tl.load(part + PLANE) * slots + (begin_G + (CHUNK - 1)) // CHUNK
        for j in range(0, tl.max(chunks_G, 0), STEPS):
            for u in tl.static_range(STEPS):
                start_G = (slot_G + (j + u)) * TILE
                sums_GC += load_tiles(chunk_sums, start_G, j + u < chunks_G, slot_columns, inside, OUT_VEC)
        rest_G = begin_G + chunks_G * CHUNK
    sums_GC, bad_G = _add_rows(
        sums_GC, base, ids, sample_weights, rest_G, end_G, distance, rows, dim, columns, inside, VEC, STEPS, WEIGHTED
    )  # fmt: skip
    divisor_G = tl.where(tl.load(part + MEAN) != 0, tl.maximum(length_G, 1), 1).to(tl.float32)
    sums_GC = tl.div_rn(sums_GC, tl.broadcast_to(divisor_G[:, None], sums_GC.shape))
    store_tiles(out, place + bag_G * stride, has_G, columns, inside, sums_GC, OUT_VEC)
    if any_true(bad_G):
        report_bad_id(report, ids, rest_G, end_G, rows, tl.load(part + FEATURE))
    if any_true(wrong_G):
        report_bad_bounds(report, offsets, first + bag_G, wrong_G, id_count, tl.load(part + FEATURE))


@triton.jit(do_not_specialize=["id_count", "bags", "slots", "last"], do_not_specialize_on_alignment=ANYWHERE)
def pooled_kernel(
    base, out, ids, offsets, sample_weights, parts, runs, chunk_sums, report, id_count, bags, slots, last,
    GROUP: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr, OUT_VEC: tl.constexpr, STEPS: tl.constexpr,
    WEIGHTED: tl.constexpr, VARIABLE: tl.constexpr, SPLIT: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    """Sum the rows of WAVES groups of GROUP bags, of one part. Grid: (runs of WAVES * GROUP bags, parts).

    bags: number of bags of every feature, if all have equally many. slots: of a plane of `chunk_sums`. last: position
    of the last of the batch's offsets, for the last family; for others -1.

    Example: rows [[1, 2], [3, 4]], ids [0, 1, 1], offsets [0, 2, 2, 3] -> [[4, 6], [0, 0], [3, 4]].
    """
    part = parts + tl.program_id(1) * FIELDS
    first, count, place = run_of(part, runs, bags, VARIABLE, OUT_VEC)
    distance = tl.multiple_of(tl.load(part + DISTANCE), VEC)
    rows = tl.load(part + ROWS)
    dim = tl.multiple_of(tl.load(part + DIM), VEC)
    column = tl.multiple_of(tl.load(part + COLUMN), TILE)
    stride = tl.multiple_of(tl.load(part + STRIDE), OUT_VEC)
    columns, inside = tile_columns(column, dim, TILE, VEC)
    begin = tl.program_id(0).to(tl.int64) * (WAVES * GROUP)
    if WAVES == 1:
        _pool(
            base, out, ids, offsets, sample_weights, part, chunk_sums, report, id_count, slots,
            begin + tl.arange(0, GROUP), first, count, place, stride, distance, rows, dim, columns, inside,
            TILE, VEC, OUT_VEC, STEPS, WEIGHTED, SPLIT,
        )  # fmt: skip
    else:
        bag_G = begin + tl.arange(0, WAVES * GROUP)
        has_G = bag_G < count
        begin_G, end_G, wrong_G = bounds_of(offsets, first + bag_G, has_G, id_count)
        if tl.max(end_G - begin_G + wrong_G.to(tl.int64) * 2, 0) < 2:
            id_G, sound_G = load_ids(ids, begin_G, begin_G < end_G, rows)
            rows_GC = load_tiles(base, distance + id_G * dim, sound_G, columns, inside, VEC)
            if WEIGHTED:
                rows_GC = rows_GC * tl.load(sample_weights + begin_G, mask=sound_G, other=0.0)[:, None]
            # A sum begins at +0 and so turns -0 into +0; add 0 to a single row for the same bits.
            store_tiles(out, place + bag_G * stride, has_G, columns, inside, rows_GC + 0.0, OUT_VEC)
            if any_true((begin_G < end_G) & (sound_G == 0)):
                report_bad_id(report, ids, begin_G, end_G, rows, tl.load(part + FEATURE))
        else:
            for wave in range(WAVES):
                _pool(
                    base, out, ids, offsets, sample_weights, part, chunk_sums, report, id_count, slots,
                    begin + wave * GROUP + tl.arange(0, GROUP), first, count, place, stride, distance, rows, dim,
                    columns, inside, TILE, VEC, OUT_VEC, STEPS, WEIGHTED, SPLIT,
                )  # fmt: skip
    is_last = (tl.num_programs(0) - tl.program_id(0) == 1) & (tl.num_programs(1) - tl.program_id(1) == 1)
    if (last >= 0) & is_last:
        report_uncovered(report, offsets, last, id_count)


@triton.jit(do_not_specialize=["id_count", "bags", "slots", "part_count"], do_not_specialize_on_alignment=ANYWHERE)
def chunk_kernel(
    base, ids, offsets, sample_weights, parts, runs, chunk_sums, report, id_count, bags, slots, part_count,
    TILE: tl.constexpr, VEC: tl.constexpr, STEPS: tl.constexpr, WEIGHTED: tl.constexpr,
    VARIABLE: tl.constexpr,
):  # fmt: skip
    """Sum the rows of one slot's chunk, if it has one. Grid: (slots * planes,): planes may be many."""
    place = tl.program_id(0).to(tl.int64)
    plane = place // slots
    part, _bag, begin, end = chunk_of(
        parts, part_count, plane, place - plane * slots, offsets, runs, report, id_count, bags, VARIABLE
    )
    if begin < end:
        distance = tl.multiple_of(tl.load(part + DISTANCE), VEC)
        rows = tl.load(part + ROWS)
        dim = tl.multiple_of(tl.load(part + DIM), VEC)
        column = tl.multiple_of(tl.load(part + COLUMN), TILE)
        columns, inside = tile_columns(column, dim, TILE, VEC)
        begin_G = begin + tl.arange(0, 1)
        end_G = begin_G + CHUNK
        sums_GC, bad_G = _add_rows(
            tl.zeros([1, TILE], tl.float32), base, ids, sample_weights, begin_G, end_G, distance, rows, dim, columns,
            inside, VEC, STEPS, WEIGHTED,
        )  # fmt: skip
        start_G = (place + tl.arange(0, 1)) * TILE
        slot_columns, _all = tile_columns(0, dim, TILE, VEC)
        store_tiles(chunk_sums, start_G, begin_G >= 0, slot_columns, inside, sums_GC, VEC)
        if any_true(bad_G):
            report_bad_id(report, ids, begin_G, end_G, rows, tl.load(part + FEATURE))
