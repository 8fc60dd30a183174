"""Kernels of the gradient of sample weights: a bag's gradient times each of its rows. Nouns as in `backend.py`.

A position's product is one number, a sum over the row's own columns. So positions can be split freely: as many teams of
lanes as a group has bags read a chunk, a piece each.

Legend: G bags of a group, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.lookup.triton.parts import (
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
    any_true,
    bounds_of,
    chunk_of,
    load_ids,
    report_bad_bounds,
    report_bad_id,
    run_of,
)
from tilerec.ops.runtime.triton.rows import load_tiles, read_tiles, tile_columns


@triton.jit
def _and(ones, one):
    return ones + (one,)  # noqa: RUF005 - Triton compiles no `(*ones, one)`


@triton.jit
def _multiply_rows(
    out, base, ids, grad, begin_G, end_G, has_G, grad_G, divisor_G, distance, rows, dim,
    TILE: tl.constexpr, VEC: tl.constexpr, GRAD_VEC: tl.constexpr, STEPS: tl.constexpr, ONE: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Store out[p] (+)= <grad of the bag / divisor, row of ids[p]> at positions [begin, end) of each bag.

    Returns a mask of the bags with bad ids. has_G: mask of the bags that exist. grad_G: first element of a bag's
    gradient. ONE: rows are one tile. ADD: add to `out`.

    An iteration has STEPS positions of each bag, one tensor [G] each, in tuples: all ids, then all rows, then all
    products, then all stores. A store between two rows would delay the second's load. One tensor of all positions has
    the same loads, but older assemblers convert all rows of bf16 before they add, and spill.
    """
    if ONE:
        columns, inside = tile_columns(0, dim, TILE, VEC)
        grads_GC = _shares(grad, grad_G, has_G, divisor_G, columns, inside, GRAD_VEC)
    length_G = (end_G - begin_G).to(tl.int32)  # of a chunk, or of a bag without chunks
    sound_count_G = length_G * 0
    for p in range(0, tl.max(length_G, 0), STEPS):
        at_G = begin_G + p
        left_G = length_G - p
        starts, sounds = (), ()
        for u in tl.static_range(STEPS):
            id_G, sound_G = load_ids(ids, at_G + u, left_G > u, rows)
            sound_count_G += sound_G.to(tl.int32)
            starts = _and(starts, distance + id_G * dim)
            sounds = _and(sounds, sound_G)
        if ONE:
            products = _products(base, starts, sounds, columns, inside, grads_GC, VEC, STEPS)
        else:
            products = ()
            for _u in tl.static_range(STEPS):
                products = _and(products, tl.zeros(begin_G.shape, tl.float32))
            for column in range(0, dim, TILE):
                columns, inside = tile_columns(tl.multiple_of(column, TILE), dim, TILE, VEC)
                grads_GC = _shares(grad, grad_G, left_G > 0, divisor_G, columns, inside, GRAD_VEC)
                more = _products(base, starts, sounds, columns, inside, grads_GC, VEC, STEPS)
                products = _added(products, more, STEPS)
        if ADD:
            there = ()
            for u in tl.static_range(STEPS):
                there = _and(there, tl.load(out + (at_G + u), mask=left_G > u, other=0.0))
            products = _added(products, there, STEPS)
        for u in tl.static_range(STEPS):
            tl.store(out + (at_G + u), products[u], mask=left_G > u)
    return sound_count_G < length_G


@triton.jit
def _shares(grad, grad_G, take_G, divisor_G, columns, inside, GRAD_VEC: tl.constexpr):
    """Return a tile of each bag's gradient, divided by the bag's length for means."""
    grads_GC = load_tiles(grad, grad_G, take_G, columns, inside, GRAD_VEC)
    return tl.div_rn(grads_GC, tl.broadcast_to(divisor_G[:, None], grads_GC.shape))


@triton.jit
def _products(base, starts, sounds, columns, inside, grads_GC, VEC: tl.constexpr, STEPS: tl.constexpr):
    """Return <gradient, tile> of each position of an iteration: a tuple of [G]."""
    tiles, products = (), ()
    for u in tl.static_range(STEPS):
        tiles = _and(tiles, read_tiles(base, starts[u], sounds[u], columns, inside, VEC))
    for u in tl.static_range(STEPS):
        products = _and(products, tl.sum(tiles[u].to(tl.float32) * grads_GC, 1))
    return products


@triton.jit
def _added(ones, others, STEPS: tl.constexpr):
    sums = ()
    for u in tl.static_range(STEPS):
        sums = _and(sums, ones[u] + others[u])
    return sums


@triton.jit(do_not_specialize=["id_count", "bags"], do_not_specialize_on_alignment=ANYWHERE)
def sample_weight_kernel(
    base, out, ids, offsets, grad, parts, runs, report, id_count, bags,
    GROUP: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr, GRAD_VEC: tl.constexpr, STEPS: tl.constexpr,
    ONE: tl.constexpr, ADD: tl.constexpr, VARIABLE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Store the products of GROUP bags of one feature, except those of chunks. Grid: (runs of bags, features).

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
    if any_true(bad_G):
        report_bad_id(report, ids, rest_G, end_G, rows, tl.load(part + FEATURE))
    if any_true(wrong_G):
        report_bad_bounds(report, offsets, first + bag_G, wrong_G, id_count, tl.load(part + FEATURE))


@triton.jit(do_not_specialize=["id_count", "bags", "part_count"], do_not_specialize_on_alignment=ANYWHERE)
def sample_weight_chunk_kernel(
    base, out, ids, offsets, grad, parts, runs, report, id_count, bags, part_count,
    GROUP: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr, GRAD_VEC: tl.constexpr, STEPS: tl.constexpr,
    ONE: tl.constexpr, ADD: tl.constexpr, VARIABLE: tl.constexpr,
):  # fmt: skip
    """Store the products of one slot's chunk, if it has one, in GROUP pieces. Grid: (slots,)."""
    part, bag, begin, end = chunk_of(
        parts, part_count, 0, tl.program_id(0).to(tl.int64), offsets, runs, report, id_count, bags, VARIABLE
    )
    if begin < end:
        first, _, place = run_of(part, runs, bags, VARIABLE, GRAD_VEC)
        rows = tl.load(part + ROWS)
        length = tl.load(offsets + first + bag + 1) - tl.load(offsets + first + bag)
        divisor = tl.where(tl.load(part + MEAN) != 0, length, 1).to(tl.float32)
        each = (CHUNK + GROUP - 1) // GROUP
        begin_G = tl.minimum(begin + tl.arange(0, GROUP) * each, end)
        end_G = tl.minimum(begin_G + each, end)
        grad_G = begin_G * 0 + (place + bag * tl.multiple_of(tl.load(part + STRIDE), GRAD_VEC))
        bad_G = _multiply_rows(
            out, base, ids, grad, begin_G, end_G, begin_G < end_G, grad_G, tl.zeros([GROUP], tl.float32) + divisor,
            tl.multiple_of(tl.load(part + DISTANCE), VEC), rows, tl.multiple_of(tl.load(part + DIM), VEC),
            TILE, VEC, GRAD_VEC, STEPS, ONE, ADD,
        )  # fmt: skip
        if any_true(bad_G):
            report_bad_id(report, ids, begin_G, end_G, rows, tl.load(part + FEATURE))
