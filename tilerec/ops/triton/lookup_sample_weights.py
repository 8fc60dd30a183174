"""The kernels of the gradient of sample weights: a bag's gradient times each of its rows (`lookup.py` has the nouns).

Legend: G rows of a group, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.triton.lookup_parts import (
    ANYWHERE,
    CHUNK,
    DIM,
    DISTANCE,
    FEATURE,
    FIELDS,
    LONG,
    MEAN,
    ROWS,
    STRIDE,
    bounds_of,
    chunk_of,
    load_ids,
    run_of,
    some,
    tell_bounds,
    tell_id,
)
from tilerec.ops.triton.rows import load_tiles, tile_columns


@triton.jit
def _multiply_rows(
    out, base, ids, grad, begin_G, end_G, has_G, grad_G, divisor_G, distance, rows, dim,
    TILE: tl.constexpr, VEC: tl.constexpr, GRAD_VEC: tl.constexpr, STEPS: tl.constexpr, ONE: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """out[p] (+)= <grad of the bag / divisor, row of ids[p]> at positions [begin, end) of each bag; which hold bad ids.

    has_G: which bags there are. grad_G: where a bag's gradient begins. ONE: rows are one tile. ADD: to what is there.
    """
    bad_G = begin_G < 0
    if ONE:
        columns, inside = tile_columns(0, dim, TILE, VEC)
        grads_GC = load_tiles(grad, grad_G, has_G, columns, inside, GRAD_VEC)
        grads_GC = tl.div_rn(grads_GC, tl.broadcast_to(divisor_G[:, None], grads_GC.shape))
    for p in range(0, tl.max(end_G - begin_G, 0), STEPS):
        for u in tl.static_range(STEPS):
            at_G = begin_G + (p + u)
            take_G = at_G < end_G
            id_G, sound_G = load_ids(ids, at_G, take_G, rows)
            bad_G = bad_G | (take_G & (sound_G == 0))
            start_G = distance + id_G * dim
            if ONE:
                rows_GC = load_tiles(base, start_G, sound_G, columns, inside, VEC)
                product_G = tl.sum(rows_GC * grads_GC, 1)
            else:
                product_G = tl.zeros(begin_G.shape, tl.float32)
                for column in range(0, dim, TILE):
                    columns, inside = tile_columns(tl.multiple_of(column, TILE), dim, TILE, VEC)
                    grads_GC = load_tiles(grad, grad_G, take_G, columns, inside, GRAD_VEC)
                    grads_GC = tl.div_rn(grads_GC, tl.broadcast_to(divisor_G[:, None], grads_GC.shape))
                    rows_GC = load_tiles(base, start_G, sound_G, columns, inside, VEC)
                    product_G += tl.sum(rows_GC * grads_GC, 1)
            if ADD:
                product_G += tl.load(out + at_G, mask=take_G, other=0.0)
            tl.store(out + at_G, product_G, mask=take_G)
    return bad_G


@triton.jit(do_not_specialize=["id_count", "bags"], do_not_specialize_on_alignment=ANYWHERE)
def sample_weight_kernel(
    base, out, ids, offsets, grad, parts, runs, report, id_count, bags,
    GROUP: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr, GRAD_VEC: tl.constexpr, STEPS: tl.constexpr,
    ONE: tl.constexpr, ADD: tl.constexpr, VARIABLE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Products of GROUP bags of one feature, but of the chunks of long ones. Grid: (runs of bags, features).

    Example: rows [[1, 2], [3, 4]], ids [0, 1, 1], offsets [0, 2, 3], grad [[1, 0], [1, 1]] -> [1, 3, 7].
    """
    part = parts + tl.program_id(1) * FIELDS
    first, count, place = run_of(part, runs, bags, VARIABLE, GRAD_VEC)
    rows = tl.load(part + ROWS)
    bag_G = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    has_G = bag_G < count
    begin_G, end_G, wrong_G = bounds_of(offsets, first + bag_G, has_G, id_count)
    length_G = end_G - begin_G
    rest_G = begin_G
    if SPLIT:
        rest_G = begin_G + tl.where(length_G > LONG, length_G // CHUNK * CHUNK, 0)
    divisor_G = tl.where(tl.load(part + MEAN) != 0, tl.maximum(length_G, 1), 1).to(tl.float32)
    grad_G = place + bag_G * tl.multiple_of(tl.load(part + STRIDE), GRAD_VEC)
    bad_G = _multiply_rows(
        out, base, ids, grad, rest_G, end_G, has_G, grad_G, divisor_G,
        tl.multiple_of(tl.load(part + DISTANCE), VEC), rows, tl.multiple_of(tl.load(part + DIM), VEC),
        TILE, VEC, GRAD_VEC, STEPS, ONE, ADD,
    )  # fmt: skip
    if some(bad_G):
        tell_id(report, ids, rest_G, end_G, rows, tl.load(part + FEATURE))
    if some(wrong_G):
        tell_bounds(report, offsets, first + bag_G, wrong_G, id_count, tl.load(part + FEATURE))


@triton.jit(do_not_specialize=["id_count", "bags", "part_count"], do_not_specialize_on_alignment=ANYWHERE)
def sample_weight_chunk_kernel(
    base, out, ids, offsets, grad, parts, runs, report, id_count, bags, part_count,
    TILE: tl.constexpr, VEC: tl.constexpr, GRAD_VEC: tl.constexpr, STEPS: tl.constexpr,
    ONE: tl.constexpr, ADD: tl.constexpr, VARIABLE: tl.constexpr,
):  # fmt: skip
    """Products of one slot's chunk, if it has one. Grid: (slots,)."""
    part, bag, begin, end = chunk_of(
        parts, part_count, 0, tl.program_id(0).to(tl.int64), offsets, runs, report, id_count, bags, VARIABLE
    )
    if begin < end:
        first, _, place = run_of(part, runs, bags, VARIABLE, GRAD_VEC)
        rows = tl.load(part + ROWS)
        length = tl.load(offsets + first + bag + 1) - tl.load(offsets + first + bag)
        divisor = tl.where(tl.load(part + MEAN) != 0, length, 1).to(tl.float32)
        begin_G = begin + tl.arange(0, 1)
        end_G = begin_G + CHUNK
        grad_G = place + (bag + tl.arange(0, 1)) * tl.multiple_of(tl.load(part + STRIDE), GRAD_VEC)
        bad_G = _multiply_rows(
            out, base, ids, grad, begin_G, end_G, begin_G >= 0, grad_G, divisor + tl.zeros([1], tl.float32),
            tl.multiple_of(tl.load(part + DISTANCE), VEC), rows, tl.multiple_of(tl.load(part + DIM), VEC),
            TILE, VEC, GRAD_VEC, STEPS, ONE, ADD,
        )  # fmt: skip
        if some(bad_G):
            tell_id(report, ids, begin_G, end_G, rows, tl.load(part + FEATURE))
