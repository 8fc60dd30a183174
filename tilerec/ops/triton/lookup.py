"""Lookups on the GPU: `pooled_lookup`, `sequence_lookup` and `sample_weight_grad` in Triton.

`tilerec/ops/lookup.py` says what they mean, with worked examples; here is how they are laid out.

Nouns
  tile, group, vec   of rows that are read: see `rows.py`
  part     a tile of one feature: columns [column, column + TILE) of its rows and of its place in the output
  family   the parts whose tables have one data type and whose tiles one width; a family is one launch, whatever its
           tables and features
  chunk    CHUNK ids in a row of a bag longer than LONG, counted from the bag's first id; the ids behind its last whole
           chunk are its rest
  slot     the number of a chunk: its first position divided by CHUNK, rounded up. Whole chunks do not overlap, so no
           two have the same, and every bag knows its own without being told
  plane    the slots of one part of one reader of a key: parts that read the same ids have different planes
  reader   features that read the same key are its readers 0, 1, 2 …

A program of the pooled forward has GROUP bags of one part. It loads the ids of the next STEPS positions of each bag,
then the tiles of all of these rows, and only then adds: so much is under way at a time. The sums run in fp32 in the
order of the occurrences, as on the CPU, and so have the CPU's bits (multiplications and additions are not fused).

A bag of a million ids would keep one program busy long after the others are done. So chunks are summed first, by a
launch of their own, a program per slot, and the bag's program adds up the sums of its chunks, in their order, and then
its rest. No length is known on the host: there is a program for every slot that N ids can have, and it searches for the
bag that its slot lies in; nearly always there is nothing to do.

  CHUNK 4, LONG 8, bag [7, 20): chunks [7, 11) [11, 15) [15, 19) in slots 2, 3, 4; the rest is [19, 20)

Where ids are few (one per bag on average, or fewer), a program has four groups of bags. If no bag of them has two ids,
it copies the rows of all at once; else it takes one group after the other.

Legend: F features, T tables, N ids, S parts of a family, G rows of a group, C columns of a tile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.gradient import bag_starts, new_ticket, pooled_blocks
from tilerec.ops.library import LIBRARY
from tilerec.ops.lookup import (
    _pooled_lookup_reference,
    _sample_weight_grad_reference,
    _sequence_lookup_reference,
    check_devices,
    raise_bad_id,
)
from tilerec.ops.lookup_checks import (
    INDEX_TYPES,
    check_batch,
    check_contiguous,
    check_gradient,
    check_layout,
    check_starts,
    pooled_shape,
    raise_bad_offsets,
    raise_no_rows,
    raise_other_dim,
)
from tilerec.ops.triton.addresses import constants, kept, upload
from tilerec.ops.triton.library import on_own_device
from tilerec.ops.triton.reports import new_report, post, raise_due
from tilerec.ops.triton.rows import (
    group_rows,
    load_tiles,
    reads,
    store_tiles,
    tell,
    tile_columns,
    tile_width,
)
from tilerec.ops.triton.search import segment_at, segments_of

CHUNK = tl.constexpr(256)
LONG = tl.constexpr(512)

# What a part says about itself, int64 each.
FIELDS = tl.constexpr(10)
_DISTANCE = tl.constexpr(0)  # of its table's first element from the base
_ROWS = tl.constexpr(1)
_DIM = tl.constexpr(2)
_COLUMN = tl.constexpr(3)
_KEY = tl.constexpr(4)
_PLACE = tl.constexpr(5)  # of the feature's first column in the output (of variable batches: see `runs`)
_STRIDE = tl.constexpr(6)  # from one bag's to the next one's
_MEAN = tl.constexpr(7)
_FEATURE = tl.constexpr(8)
_PLANE = tl.constexpr(9)

_BLOCK = tl.constexpr(128)  # parts that are looked at at once
_NEVER = tl.constexpr(9223372036854775807)

# A batch's tensors are views that may begin anywhere, in the next batch elsewhere: no kernels for that.
_ANYWHERE = ["ids", "offsets", "starts", "sample_weights"]

# What a report's first number says, besides the feature: feature * 2 + one of these.
_ID = tl.constexpr(0)
_OFFSET = tl.constexpr(1)


# ------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _run(part, runs, bags, VARIABLE: tl.constexpr, VEC: tl.constexpr):
    """A part's first bag, its number of bags, and the output's element where the feature begins.

    For variable batches from `runs`: three numbers per feature.
    """
    if VARIABLE:
        run = runs + tl.load(part + _FEATURE) * 3
        first, count, place = tl.load(run), tl.load(run + 1), tl.multiple_of(tl.load(run + 2), VEC)
    else:
        count = tl.cast(bags, tl.int64)
        first, place = tl.load(part + _KEY) * count, tl.multiple_of(tl.load(part + _PLACE), VEC)
    return first, count, place


@triton.jit
def _bounds(offsets, bag_G, has_G, id_count):
    """Where bags begin and end, and which of them say so wrongly (these are taken for empty)."""
    begin_G = tl.load(offsets + bag_G, mask=has_G, other=0)
    end_G = tl.load(offsets + bag_G + 1, mask=has_G, other=0)
    sound_G = (begin_G >= 0) & (begin_G <= end_G) & (end_G <= id_count)
    return tl.where(sound_G, begin_G, 0), tl.where(sound_G, end_G, 0), sound_G == 0


@triton.jit
def _tell_bounds(report, offsets, bag_G, wrong_G, id_count, feature):
    """Report the first wrong bag's offset: its first if that lies outside of the ids, else its end."""
    bag = tl.min(tl.where(wrong_G, bag_G, _NEVER), 0)
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    outside = (begin < 0) | (begin > id_count)
    position = tl.where(outside, bag, bag + 1)
    tell(report, feature * 2 + _OFFSET, position, tl.where(outside, begin, end))


@triton.jit
def _tell_id(report, ids, begin_G, end_G, rows, feature):
    """Report the first id outside [0, rows) at positions [begin, end) of a group; there is one."""
    found = tl.full((), _NEVER, tl.int64)
    for p in range(tl.max(end_G - begin_G, 0)):
        at_G = begin_G + p
        id_G = tl.load(ids + at_G, mask=at_G < end_G, other=0).to(tl.int64)
        bad_G = (at_G < end_G) & ((id_G < 0) | (id_G >= rows))
        found = tl.minimum(found, tl.min(tl.where(bad_G, at_G, _NEVER), 0))
    tell(report, feature * 2 + _ID, found, tl.load(ids + found).to(tl.int64))


@triton.jit
def _some(flags_G):
    return tl.max(flags_G.to(tl.int32), 0) > 0


@triton.jit
def _load_ids(ids, at_G, take_G, rows):
    """Ids at positions `at_G`, and which of those taken are in their table."""
    id_G = tl.load(ids + at_G, mask=take_G, other=0).to(tl.int64)
    return id_G, take_G & (id_G >= 0) & (id_G < rows)


@triton.jit
def _add_rows(
    sums_GC, base, ids, sample_weights, begin_G, end_G, distance, rows, dim, columns, inside,
    VEC: tl.constexpr, STEPS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add the rows of the ids at positions [begin, end) of each bag, in their order; also says which hold bad ids.

    The compiler moves the loads of a turn (STEPS positions) in front of its additions.
    """
    bad_G = begin_G < 0
    for p in range(0, tl.max(end_G - begin_G, 0), STEPS):
        for u in tl.static_range(STEPS):
            at_G = begin_G + (p + u)
            take_G = at_G < end_G
            id_G, sound_G = _load_ids(ids, at_G, take_G, rows)
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
    begin_G, end_G, wrong_G = _bounds(offsets, first + bag_G, has_G, id_count)
    length_G = end_G - begin_G
    sums_GC = tl.zeros([bag_G.shape[0], TILE], tl.float32)
    rest_G = begin_G
    if SPLIT:
        slot_columns, _all = tile_columns(0, dim, TILE, VEC)
        chunks_G = tl.where(length_G > LONG, length_G // CHUNK, 0)
        slot_G = tl.load(part + _PLANE) * slots + (begin_G + (CHUNK - 1)) // CHUNK
        for j in range(0, tl.max(chunks_G, 0), STEPS):
            for u in tl.static_range(STEPS):
                start_G = (slot_G + (j + u)) * TILE
                sums_GC += load_tiles(chunk_sums, start_G, j + u < chunks_G, slot_columns, inside, OUT_VEC)
        rest_G = begin_G + chunks_G * CHUNK
    sums_GC, bad_G = _add_rows(
        sums_GC, base, ids, sample_weights, rest_G, end_G, distance, rows, dim, columns, inside, VEC, STEPS, WEIGHTED
    )  # fmt: skip
    divisor_G = tl.where(tl.load(part + _MEAN) != 0, tl.maximum(length_G, 1), 1).to(tl.float32)
    sums_GC = tl.div_rn(sums_GC, tl.broadcast_to(divisor_G[:, None], sums_GC.shape))
    store_tiles(out, place + bag_G * stride, has_G, columns, inside, sums_GC, OUT_VEC)
    if _some(bad_G):
        _tell_id(report, ids, rest_G, end_G, rows, tl.load(part + _FEATURE))
    if _some(wrong_G):
        _tell_bounds(report, offsets, first + bag_G, wrong_G, id_count, tl.load(part + _FEATURE))


@triton.jit(do_not_specialize=["id_count", "bags", "slots"], do_not_specialize_on_alignment=_ANYWHERE)
def pooled_kernel(
    base, out, ids, offsets, sample_weights, parts, runs, chunk_sums, report, id_count, bags, slots,
    GROUP: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr, OUT_VEC: tl.constexpr, STEPS: tl.constexpr,
    WEIGHTED: tl.constexpr, VARIABLE: tl.constexpr, SPLIT: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    """Sum the rows of WAVES groups of GROUP bags, of one part. Grid: (runs of WAVES * GROUP bags, parts).

    bags: of every feature, if all have as many. slots: of a plane of `chunk_sums`.
    Example: rows [[1, 2], [3, 4]], ids [0, 1, 1], offsets [0, 2, 2, 3] -> [[4, 6], [0, 0], [3, 4]].
    """
    part = parts + tl.program_id(1) * FIELDS
    first, count, place = _run(part, runs, bags, VARIABLE, OUT_VEC)
    distance = tl.multiple_of(tl.load(part + _DISTANCE), VEC)
    rows = tl.load(part + _ROWS)
    dim = tl.multiple_of(tl.load(part + _DIM), VEC)
    column = tl.multiple_of(tl.load(part + _COLUMN), TILE)
    stride = tl.multiple_of(tl.load(part + _STRIDE), OUT_VEC)
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
        begin_G, end_G, wrong_G = _bounds(offsets, first + bag_G, has_G, id_count)
        if tl.max(end_G - begin_G + wrong_G.to(tl.int64) * 2, 0) < 2:
            id_G, sound_G = _load_ids(ids, begin_G, begin_G < end_G, rows)
            rows_GC = load_tiles(base, distance + id_G * dim, sound_G, columns, inside, VEC)
            if WEIGHTED:
                rows_GC = rows_GC * tl.load(sample_weights + begin_G, mask=sound_G, other=0.0)[:, None]
            # A sum begins at +0, which turns -0 into +0, and so must a row that is alone.
            store_tiles(out, place + bag_G * stride, has_G, columns, inside, rows_GC + 0.0, OUT_VEC)
            if _some((begin_G < end_G) & (sound_G == 0)):
                _tell_id(report, ids, begin_G, end_G, rows, tl.load(part + _FEATURE))
        else:
            for wave in range(WAVES):
                _pool(
                    base, out, ids, offsets, sample_weights, part, chunk_sums, report, id_count, slots,
                    begin + wave * GROUP + tl.arange(0, GROUP), first, count, place, stride, distance, rows, dim,
                    columns, inside, TILE, VEC, OUT_VEC, STEPS, WEIGHTED, SPLIT,
                )  # fmt: skip


@triton.jit
def _chunk(parts, part_count, plane, offsets, runs, report, id_count, bags, VARIABLE: tl.constexpr):
    """The chunk of a program's slot in a plane: its part, its bag, and its positions, none if begin == end.

    Example: CHUNK 4, LONG 8, bag 5 is [7, 20): slot 3 -> bag 5, [11, 15); slot 5 -> nothing, its position 20 is behind.
    """
    at = tl.program_id(0).to(tl.int64) * CHUNK
    number, readers = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for block in range(0, part_count, _BLOCK):
        number_S = block + tl.arange(0, _BLOCK)
        part_S = parts + number_S * FIELDS
        is_S = number_S < part_count
        is_S = is_S & (tl.load(part_S + _PLANE, mask=is_S, other=-1) == plane)
        if VARIABLE:
            run_S = runs + tl.load(part_S + _FEATURE, mask=is_S, other=0) * 3
            first_S, count_S = tl.load(run_S, mask=is_S, other=0), tl.load(run_S + 1, mask=is_S, other=0)
        else:
            count_S = tl.cast(bags, tl.int64)
            first_S = tl.load(part_S + _KEY, mask=is_S, other=0) * count_S
        low_S = tl.load(offsets + first_S, mask=is_S, other=0)
        high_S = tl.load(offsets + first_S + count_S, mask=is_S, other=0)
        reads_S = (low_S <= at) & (at < high_S)  # none where is_S is not: there both are 0
        number = tl.maximum(number, tl.max(tl.where(reads_S, number_S, -1), 0))
        readers += tl.sum(reads_S.to(tl.int32), 0)
    begin, end, bag = at * 0, at * 0, at * 0
    part = parts + tl.maximum(number, 0) * FIELDS
    if number >= 0:
        first, count, _ = _run(part, runs, bags, VARIABLE, 1)
        bag = segment_at(offsets + first, count, at)
        start, stop = tl.load(offsets + first + bag), tl.load(offsets + first + bag + 1)
        if (start >= 0) & (start <= at) & (at < stop) & (stop <= id_count) & (stop - start > LONG):
            begin = start + (at - start) // CHUNK * CHUNK
            end = tl.where(begin + CHUNK <= stop, begin + CHUNK, begin)
        if readers > 1:
            # Features of different keys hold this position, so offsets fall between them; one plane cannot serve both.
            tell(report, tl.load(part + _FEATURE) * 2 + _OFFSET, first, tl.load(offsets + first))
    return part, bag, begin, end


@triton.jit(
    do_not_specialize=["id_count", "bags", "slots", "part_count"], do_not_specialize_on_alignment=_ANYWHERE
)
def chunk_kernel(
    base, ids, offsets, sample_weights, parts, runs, chunk_sums, report, id_count, bags, slots, part_count,
    TILE: tl.constexpr, VEC: tl.constexpr, STEPS: tl.constexpr, WEIGHTED: tl.constexpr,
    VARIABLE: tl.constexpr,
):  # fmt: skip
    """Sum the rows of one slot's chunk, if it has one. Grid: (slots, planes)."""
    plane = tl.program_id(1)
    part, _bag, begin, end = _chunk(parts, part_count, plane, offsets, runs, report, id_count, bags, VARIABLE)
    if begin < end:
        distance = tl.multiple_of(tl.load(part + _DISTANCE), VEC)
        rows = tl.load(part + _ROWS)
        dim = tl.multiple_of(tl.load(part + _DIM), VEC)
        column = tl.multiple_of(tl.load(part + _COLUMN), TILE)
        columns, inside = tile_columns(column, dim, TILE, VEC)
        begin_G = begin + tl.arange(0, 1)
        end_G = begin_G + CHUNK
        sums_GC, bad_G = _add_rows(
            tl.zeros([1, TILE], tl.float32), base, ids, sample_weights, begin_G, end_G, distance, rows, dim, columns,
            inside, VEC, STEPS, WEIGHTED,
        )  # fmt: skip
        start_G = (plane.to(tl.int64) * slots + tl.program_id(0) + tl.arange(0, 1)) * TILE
        slot_columns, _all = tile_columns(0, dim, TILE, VEC)
        store_tiles(chunk_sums, start_G, begin_G >= 0, slot_columns, inside, sums_GC, VEC)
        if _some(bad_G):
            _tell_id(report, ids, begin_G, end_G, rows, tl.load(part + _FEATURE))


@triton.jit(do_not_specialize=["id_count", "feature_count"], do_not_specialize_on_alignment=_ANYWHERE)
def sequence_kernel(
    base, out, ids, starts, features, report, id_count, feature_count,
    GROUP: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr, OUT_VEC: tl.constexpr, STEPS: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Copy the rows of STEPS * GROUP ids, a tile of each. Grid: (runs of ids, tiles).

    features: of each, its table's distance, rows (-1: another launch serves it), dim. CHECK: look at the starts.
    Example: rows [[1, 2], [3, 4]], ids [0, 1, 1] -> [[1, 2], [3, 4], [3, 4]].
    """
    if CHECK and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        _check_starts(report, starts, feature_count, id_count)
    dim = tl.multiple_of(tl.load(features + 2), VEC)
    columns, inside = tile_columns(tl.program_id(1) * TILE, dim, TILE, VEC)
    begin = tl.program_id(0).to(tl.int64) * (GROUP * STEPS)
    low = segment_at(starts, feature_count, begin)
    high = segment_at(starts, feature_count, begin + (GROUP * STEPS - 1))
    bad_G = tl.full([GROUP], _NEVER, tl.int64)
    for u in tl.static_range(STEPS):
        at_G = begin + u * GROUP + tl.arange(0, GROUP)
        feature_G = features + segments_of(starts, at_G, low, high) * 3
        distance_G = tl.multiple_of(tl.load(feature_G), VEC)
        rows_G = tl.load(feature_G + 1)
        take_G = (at_G < id_count) & (rows_G >= 0)
        id_G, sound_G = _load_ids(ids, at_G, take_G, rows_G)
        bad_G = tl.where(take_G & (sound_G == 0), tl.minimum(bad_G, at_G), bad_G)
        rows_GC = load_tiles(base, distance_G + id_G * dim, sound_G, columns, inside, VEC)
        out_G = at_G * tl.multiple_of(dim, OUT_VEC)
        store_tiles(out, out_G, take_G, columns, inside, rows_GC, OUT_VEC)
    at = tl.min(bad_G, 0)
    if at < id_count:
        tell(report, segment_at(starts, feature_count, at) * 2 + _ID, at, tl.load(ids + at).to(tl.int64))


@triton.jit
def _check_starts(report, starts, feature_count, id_count):
    """Report the first start that falls, lies outside of the ids, or (first and last) not at their ends."""
    wrong = tl.full((), _NEVER, tl.int64)
    for i in range(0, feature_count + 1, 128):
        at = tl.cast(i, tl.int64) + tl.arange(0, 128)
        is_start = at <= feature_count
        start = tl.load(starts + at, mask=is_start, other=0)
        before = tl.load(starts + at - 1, mask=is_start & (at > 0), other=0)
        bad = (start < before) | (start > id_count) | ((at == 0) & (start != 0))
        bad = is_start & (bad | ((at == feature_count) & (start != id_count)))
        wrong = tl.minimum(wrong, tl.min(tl.where(bad, at, _NEVER), 0))
    if wrong <= feature_count:
        tell(report, tl.maximum(wrong - 1, 0) * 2 + _OFFSET, wrong, tl.load(starts + wrong))


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
            id_G, sound_G = _load_ids(ids, at_G, take_G, rows)
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


@triton.jit(do_not_specialize=["id_count", "bags"], do_not_specialize_on_alignment=_ANYWHERE)
def sample_weight_kernel(
    base, out, ids, offsets, grad, parts, runs, report, id_count, bags,
    GROUP: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr, GRAD_VEC: tl.constexpr, STEPS: tl.constexpr,
    ONE: tl.constexpr, ADD: tl.constexpr, VARIABLE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Products of GROUP bags of one feature, but of the chunks of long ones. Grid: (runs of bags, features).

    Example: rows [[1, 2], [3, 4]], ids [0, 1, 1], offsets [0, 2, 3], grad [[1, 0], [1, 1]] -> [1, 3, 7].
    """
    part = parts + tl.program_id(1) * FIELDS
    first, count, place = _run(part, runs, bags, VARIABLE, GRAD_VEC)
    rows = tl.load(part + _ROWS)
    bag_G = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    has_G = bag_G < count
    begin_G, end_G, wrong_G = _bounds(offsets, first + bag_G, has_G, id_count)
    length_G = end_G - begin_G
    rest_G = begin_G
    if SPLIT:
        rest_G = begin_G + tl.where(length_G > LONG, length_G // CHUNK * CHUNK, 0)
    divisor_G = tl.where(tl.load(part + _MEAN) != 0, tl.maximum(length_G, 1), 1).to(tl.float32)
    grad_G = place + bag_G * tl.multiple_of(tl.load(part + _STRIDE), GRAD_VEC)
    bad_G = _multiply_rows(
        out, base, ids, grad, rest_G, end_G, has_G, grad_G, divisor_G,
        tl.multiple_of(tl.load(part + _DISTANCE), VEC), rows, tl.multiple_of(tl.load(part + _DIM), VEC),
        TILE, VEC, GRAD_VEC, STEPS, ONE, ADD,
    )  # fmt: skip
    if _some(bad_G):
        _tell_id(report, ids, rest_G, end_G, rows, tl.load(part + _FEATURE))
    if _some(wrong_G):
        _tell_bounds(report, offsets, first + bag_G, wrong_G, id_count, tl.load(part + _FEATURE))


@triton.jit(do_not_specialize=["id_count", "bags", "part_count"], do_not_specialize_on_alignment=_ANYWHERE)
def sample_weight_chunk_kernel(
    base, out, ids, offsets, grad, parts, runs, report, id_count, bags, part_count,
    TILE: tl.constexpr, VEC: tl.constexpr, GRAD_VEC: tl.constexpr, STEPS: tl.constexpr,
    ONE: tl.constexpr, ADD: tl.constexpr, VARIABLE: tl.constexpr,
):  # fmt: skip
    """Products of one slot's chunk, if it has one. Grid: (slots,)."""
    part, bag, begin, end = _chunk(parts, part_count, 0, offsets, runs, report, id_count, bags, VARIABLE)
    if begin < end:
        first, _, place = _run(part, runs, bags, VARIABLE, GRAD_VEC)
        rows = tl.load(part + _ROWS)
        length = tl.load(offsets + first + bag + 1) - tl.load(offsets + first + bag)
        divisor = tl.where(tl.load(part + _MEAN) != 0, length, 1).to(tl.float32)
        begin_G = begin + tl.arange(0, 1)
        end_G = begin_G + CHUNK
        grad_G = place + (bag + tl.arange(0, 1)) * tl.multiple_of(tl.load(part + _STRIDE), GRAD_VEC)
        bad_G = _multiply_rows(
            out, base, ids, grad, begin_G, end_G, begin_G >= 0, grad_G, divisor + tl.zeros([1], tl.float32),
            tl.multiple_of(tl.load(part + _DISTANCE), VEC), rows, tl.multiple_of(tl.load(part + _DIM), VEC),
            TILE, VEC, GRAD_VEC, STEPS, ONE, ADD,
        )  # fmt: skip
        if _some(bad_G):
            _tell_id(report, ids, begin_G, end_G, rows, tl.load(part + _FEATURE))


# ------------------------------------------------------------------------------------------------ host

OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
_STEPS = 8  # positions of a turn
_WAVES = 4  # groups of a program where ids are few
_GRID_Y = 65535  # parts of one launch


@dataclass(frozen=True)
class Family:
    """Parts of one launch, and what its kernel is compiled for."""

    parts: Tensor  # int64 [S, FIELDS], on the device
    count: int
    planes: int
    table: int  # one of its tables: distances count from its memory
    tile: int
    vec: int
    out_vec: int
    one: bool  # rows are one tile (sample_weight_grad)
    reader: int  # of sample_weight_grad: its number

    @property
    def group(self) -> int:
        """Bags of a program: one for each team."""
        return group_rows(self.tile, self.vec)

    @property
    def chunk_steps(self) -> int:
        """Positions of a turn over a chunk: so many that its one team reads as much as a program's teams elsewhere."""
        return _STEPS * min(self.group, 4)


@dataclass(frozen=True)
class Layout:
    """What stays the same from call to call."""

    dims: tuple[int, ...]  # per feature
    rows: tuple[int, ...]  # per feature
    last_key: int  # -1: no features
    families: tuple[Family, ...]


class _Kind(NamedTuple):
    """What parts of one family have in common."""

    reader: int  # sample_weight_grad: a launch for each, in their order; else 0
    dtype: torch.dtype
    tile: int
    one: bool


def _ceil(number: int, parts: int) -> int:
    return -(-number // parts)  # triton.cdiv is a jitted function and takes ten times as long


def _power_of_two(values: Sequence[int], most: int) -> int:
    """The largest power of two up to `most` that divides every one of these."""
    divisor = math.gcd(most, *values)
    return divisor & -divisor


@kept(128)
def _layout(
    tables: tuple[int, ...],
    keys: tuple[int, ...],
    means: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    pointers: tuple[int, ...],
    out_size: int,
    uniform: bool,
    cut: bool,
    device: torch.device,
    names: str,
) -> Layout:
    """The families of a pooled lookup, or of the gradient of its sample weights.

    out_size: bytes of an element of the output. cut: rows wider than a tile make several parts.
    """
    check_layout(shapes, tables, keys, means, True)
    _check_memory(pointers, shapes, tables, names)
    dims = tuple([shapes[t][1] for t in tables])
    places, _ = pooled_blocks(dims, [0] * len(dims), True)
    readers: Counter[int] = Counter()
    members: dict[_Kind, list[tuple[int, int, int]]] = {}  # feature, column, reader
    for f, (t, key) in enumerate(zip(tables, keys, strict=True)):
        tile = tile_width(dims[f], dtypes[t].itemsize)
        kind = _Kind(0 if cut else readers[key], dtypes[t], tile, not cut and dims[f] <= tile)
        for column in range(0, dims[f], tile) if cut else (0,):
            members.setdefault(kind, []).append((f, column, readers[key]))
        readers[key] += 1
    families = []
    for kind, parts in sorted(members.items(), key=lambda item: item[0].reader):
        own = [tables[f] for f, _, _ in parts]
        start, distances = _distances(own, pointers, shapes, kind.dtype.itemsize)
        width = 1 + max(reader for _, _, reader in parts)
        numbers: list[int] = []
        for (f, column, reader), distance in zip(parts, distances, strict=True):
            plane = column // kind.tile * width + reader if cut else 0
            stride = sum(dims) if uniform else dims[f]
            numbers += [
                distance, shapes[tables[f]][0], dims[f], column, keys[f], places[f], stride, means[f], f, plane
            ]  # fmt: skip
        places_of_rows = [pointers[t] // kind.dtype.itemsize for t in own if math.prod(shapes[t])]
        families.append(
            Family(
                constants(tuple(numbers), device),
                len(parts),
                1 + max(numbers[9 :: FIELDS.value]),
                start,
                kind.tile,
                _power_of_two([*places_of_rows, *(dims[f] for f, _, _ in parts)], 16 // kind.dtype.itemsize),
                # Places and strides in the output are sums of dims, times numbers of bags.
                _power_of_two(dims, 16 // out_size),
                kind.one,
                kind.reader,
            )
        )
    rows = tuple([shapes[t][0] for t in tables])
    return Layout(dims, rows, max(keys, default=-1), tuple(families))


def _distances(
    tables: Sequence[int], pointers: Sequence[int], shapes: Sequence[Sequence[int]], size: int
) -> tuple[int, list[int]]:
    """A table to count from (the first with elements), and the distances of each in elements (`addresses.py`)."""
    start = next((t for t in tables if math.prod(shapes[t])), tables[0])
    return start, [(pointers[t] - pointers[start]) // size if math.prod(shapes[t]) else 0 for t in tables]


def _layout_of(
    weights: Sequence[Tensor], ids: Tensor, tables: Sequence[int], keys: Sequence[int], means: Sequence[int],
    out_size: int, uniform: bool, cut: bool, names: str,
) -> Layout:  # fmt: skip
    try:
        layout = _layout(
            tuple(tables), tuple(keys), tuple(means), tuple([w.shape for w in weights]),
            tuple([w.dtype for w in weights]), tuple([w.data_ptr() for w in weights]), out_size, uniform, cut,
            ids.device, names,
        )  # fmt: skip
    except InputError:
        if all(0 <= t < len(weights) for t in tables):
            check_devices(weights, ids, tables, names)  # a table on "meta" has no memory either
        raise
    _check_tables(weights, ids, tables, names)
    return layout


def _serves(weights: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    return dtype in OUTPUTS and all([reads(w.dtype, device) for w in weights])  # noqa: C419 - faster for few items


def _check_tables(weights: Sequence[Tensor], ids: Tensor, tables: Sequence[int], names: str) -> None:
    check_devices(weights, ids, tables, names)
    check_contiguous(weights)


def _check_memory(
    pointers: Sequence[int], shapes: Sequence[Sequence[int]], tables: Sequence[int], names: str
) -> None:
    for f, t in enumerate(tables):
        if not pointers[t] and 0 not in shapes[t]:
            raise_no_rows(names, tables, f)


def _check_same_device(ids: Tensor, **others: Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and other.device != ids.device:
            raise InputError(
                f"A lookup's {name} are on {other.device}, the ids on {ids.device}; move one of them with .to()."
            )


def _flat(values: Tensor, dtypes: Sequence[torch.dtype] = INDEX_TYPES) -> Tensor:
    """In memory as it looks, and of one of these types."""
    return (values if values.dtype in dtypes else values.to(dtypes[0])).contiguous()


@dataclass(frozen=True)
class _Told:
    """Turns a report into the error its caller sees."""

    names: str
    tables: tuple[int, ...]
    rows: tuple[int, ...]  # per feature
    ids: int
    pooled: bool = True

    def __call__(self, what: int, position: int, value: int) -> None:
        feature, kind = divmod(what, 2)
        if kind == _OFFSET.value:
            raise_bad_offsets(self.names, self.tables, feature, position, value, self.ids, self.pooled)
        raise_bad_id(self.names, feature, position, value, self.rows[feature])


@dataclass
class _Batch:
    """A pooled batch as kernels read it; `runs` are of variable batches: first bag, bags, place per feature."""

    ids: Tensor
    offsets: Tensor
    bags: int  # of every feature; 0 for variable batches
    most_bags: int
    runs: Tensor | None = None
    slots: int = field(init=False)
    few: bool = field(init=False)  # ids: at most one per bag, on average
    split: bool = field(init=False)  # whether there can be a long bag

    def __post_init__(self) -> None:
        count = self.ids.shape[0]
        self.slots = _ceil(count, CHUNK.value)
        self.few = count < self.offsets.shape[0]
        self.split = count > LONG.value


def _batch_of(
    layout: Layout, ids: Tensor, offsets: Tensor, keys: Sequence[int], batches: Sequence[int]
) -> _Batch:
    ids, offsets = _flat(ids), _flat(offsets, (torch.int64,))
    if len(batches) == 1:
        return _Batch(ids, offsets, batches[0], batches[0])
    starts, bags = bag_starts(keys, batches)
    places, _ = pooled_blocks(layout.dims, bags, False)
    runs = [number for run in zip(starts, bags, places, strict=True) for number in run]
    return _Batch(ids, offsets, 0, max(bags, default=0), upload(runs, ids.device))


def _launches(family: Family) -> list[tuple[Tensor, int]]:
    """Parts and their number, for as many launches as the grid's second axis asks for: nearly always one."""
    if family.count <= _GRID_Y:
        return [(family.parts, family.count)]
    step = FIELDS.value
    return [
        (family.parts[first * step :], min(family.count - first, _GRID_Y))
        for first in range(0, family.count, _GRID_Y)
    ]


def pooled_lookup(
    weights: Sequence[Tensor],
    sinks: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    tables: Sequence[int],
    keys: Sequence[int],
    means: Sequence[int],
    batches: Sequence[int],
    dtype: torch.dtype,
    names: str,
) -> tuple[Tensor, Tensor]:
    """`tilerec::pooled_lookup`."""
    check_batch(ids, offsets, sample_weights)
    if not _serves(weights, dtype, ids.device):
        return _pooled_lookup_reference(
            weights, sinks, ids, offsets, sample_weights, tables, keys, means, batches, dtype, names
        )
    _check_same_device(ids, offsets=offsets, sample_weights=sample_weights)
    device, uniform = ids.device, len(batches) == 1
    raise_due(device)
    layout = _layout_of(weights, ids, tables, keys, means, dtype.itemsize, uniform, True, names)
    shape = pooled_shape(layout.dims, layout.last_key, keys, batches, offsets, names)
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.numel() == 0:
        return out, new_ticket()
    batch = _batch_of(layout, ids, offsets, keys, batches)
    if sample_weights is not None:
        sample_weights = sample_weights.to(torch.float32).contiguous()
    report = new_report(device)
    with torch.cuda.device_of(ids):
        for family in layout.families:
            _sum_family(family, weights[family.table], out, batch, sample_weights, report)
    post(report, _Told(names, tuple(tables), layout.rows, ids.shape[0]))
    return out, new_ticket()


def _sum_family(
    family: Family, base: Tensor, out: Tensor, batch: _Batch, sample_weights: Tensor | None, report: Tensor
) -> None:
    ids, offsets = batch.ids, batch.offsets
    weighted, variable = sample_weights is not None, batch.runs is not None
    # Arguments that a kernel does not read must still be pointers.
    sample, runs = (
        ids if sample_weights is None else sample_weights,
        family.parts if batch.runs is None else batch.runs,
    )
    chunk_sums: Tensor = ids
    if batch.split:
        chunk_sums = torch.empty(
            family.planes * batch.slots * family.tile, dtype=torch.float32, device=ids.device
        )
        chunk_kernel[(batch.slots, family.planes)](
            base, ids, offsets, sample, family.parts, runs, chunk_sums, report, ids.shape[0], batch.bags, batch.slots,
            family.count, TILE=family.tile, VEC=family.vec,
            STEPS=family.chunk_steps, WEIGHTED=weighted, VARIABLE=variable, **_OPTIONS,
        )  # fmt: skip
    group, waves = family.group, _WAVES if batch.few else 1
    for parts, count in _launches(family):
        pooled_kernel[(_ceil(batch.most_bags, group * waves), count)](
            base, out, ids, offsets, sample, parts, runs, chunk_sums, report, ids.shape[0], batch.bags, batch.slots,
            GROUP=group, TILE=family.tile, VEC=family.vec, OUT_VEC=family.out_vec, STEPS=_STEPS, WEIGHTED=weighted,
            VARIABLE=variable, SPLIT=batch.split, WAVES=waves, **_OPTIONS,
        )  # fmt: skip


def sample_weight_grad(
    weights: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    grad: Tensor,
    tables: Sequence[int],
    keys: Sequence[int],
    means: Sequence[int],
    batches: Sequence[int],
) -> Tensor:
    """`tilerec::sample_weight_grad`."""
    check_batch(ids, offsets, None)
    if not _serves(weights, grad.dtype, ids.device):
        return _sample_weight_grad_reference(weights, ids, offsets, grad, tables, keys, means, batches)
    _check_same_device(ids, offsets=offsets, grad=grad)
    device, uniform = ids.device, len(batches) == 1
    raise_due(device)
    layout = _layout_of(weights, ids, tables, keys, means, grad.dtype.itemsize, uniform, False, "")
    wanted = pooled_shape(layout.dims, layout.last_key, keys, batches, offsets, "")
    check_gradient(grad, wanted, math.prod(wanted))
    out = torch.zeros(ids.shape[0], dtype=torch.float32, device=device)
    batch = _batch_of(layout, ids, offsets, keys, batches)
    if not batch.most_bags:
        return out
    grad = grad.contiguous()
    report = new_report(device)
    with torch.cuda.device_of(ids):
        for family in layout.families:
            _multiply_family(family, weights[family.table], out, batch, grad, report)
    names = ",".join(f"{f}@{t}" for f, t in enumerate(tables))
    post(report, _Told(names, tuple(tables), layout.rows, ids.shape[0]))
    return out


def _multiply_family(
    family: Family, base: Tensor, out: Tensor, batch: _Batch, grad: Tensor, report: Tensor
) -> None:
    ids, offsets, variable = batch.ids, batch.offsets, batch.runs is not None
    runs = family.parts if batch.runs is None else batch.runs
    if batch.split:
        sample_weight_chunk_kernel[(batch.slots,)](
            base, out, ids, offsets, grad, family.parts, runs, report, ids.shape[0], batch.bags, family.count,
            TILE=family.tile, VEC=family.vec, GRAD_VEC=family.out_vec, STEPS=family.chunk_steps, ONE=family.one,
            ADD=family.reader > 0, VARIABLE=variable, **_OPTIONS,
        )  # fmt: skip
    for parts, count in _launches(family):
        sample_weight_kernel[(_ceil(batch.most_bags, family.group), count)](
            base, out, ids, offsets, grad, parts, runs, report, ids.shape[0], batch.bags, GROUP=family.group,
            TILE=family.tile, VEC=family.vec, GRAD_VEC=family.out_vec, STEPS=_STEPS, ONE=family.one,
            ADD=family.reader > 0, VARIABLE=variable, SPLIT=batch.split, **_OPTIONS,
        )  # fmt: skip


class _Rows(NamedTuple):
    """The features of one data type in a sequence lookup."""

    features: Tensor  # int64 [F, 3], on the device
    table: int
    tile: int
    vec: int
    out_vec: int


@kept(128)
def _sequence_layout(
    tables: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    pointers: tuple[int, ...],
    names: str,
    out_size: int,
    device: torch.device,
) -> tuple[_Rows, ...]:
    check_layout(shapes, tables, (), (), False)
    _check_memory(pointers, shapes, tables, names)
    dim = shapes[tables[0]][1]
    for f, t in enumerate(tables):
        if shapes[t][1] != dim:
            raise_other_dim(names, tables, f, shapes[t][1], dim)
    families = []
    for dtype in dict.fromkeys(dtypes[t] for t in tables):
        own = [t for t in dict.fromkeys(tables) if dtypes[t] == dtype]
        start, distances = _distances(own, pointers, shapes, dtype.itemsize)
        distance = dict(zip(own, distances, strict=True))
        numbers = [
            n for t in tables for n in (distance.get(t, 0), shapes[t][0] if t in distance else -1, dim)
        ]
        places = [pointers[t] // dtype.itemsize for t in own if math.prod(shapes[t])]
        families.append(
            _Rows(
                constants(tuple(numbers), device),
                start,
                tile_width(dim, dtype.itemsize),
                _power_of_two([*places, dim], 16 // dtype.itemsize),
                _power_of_two([dim], 16 // out_size),
            )
        )
    return tuple(families)


def sequence_lookup(
    weights: Sequence[Tensor],
    sinks: Tensor,
    ids: Tensor,
    starts: Tensor,
    tables: Sequence[int],
    dtype: torch.dtype,
    names: str,
) -> tuple[Tensor, Tensor]:
    """`tilerec::sequence_lookup`; starts may be on the ids' device or on the CPU."""
    check_batch(ids, starts, None)
    check_starts(starts, len(tables))
    if not tables or not _serves(weights, dtype, ids.device):
        return _sequence_lookup_reference(weights, sinks, ids, starts, tables, dtype, names)
    device = ids.device
    raise_due(device)
    families = _sequence_layout(
        tuple(tables), tuple([w.shape for w in weights]), tuple([w.dtype for w in weights]),
        tuple([w.data_ptr() for w in weights]), names, dtype.itemsize, device,
    )  # fmt: skip
    _check_tables(weights, ids, tables, names)
    told = _Told(
        names, tuple(tables), tuple([weights[t].shape[0] for t in tables]), ids.shape[0], pooled=False
    )
    known = starts.device != device
    if known:
        starts = _known_starts(starts, told, device)
    else:
        _check_same_device(ids, starts=starts)
        starts = _flat(starts, (torch.int64,))
    count, dim = ids.shape[0], weights[tables[0]].shape[1]
    out = torch.empty((count, dim), dtype=dtype, device=device)
    ids = _flat(ids)
    report = new_report(device)
    with torch.cuda.device_of(ids):
        for number, family in enumerate(families):
            group = group_rows(family.tile, family.vec)
            # One program at least: the starts of no ids are looked at, too.
            grid = (max(_ceil(count, group * _STEPS), 1), _ceil(dim, family.tile))
            sequence_kernel[grid](
                weights[family.table], out, ids, starts, family.features, report, count, len(tables), GROUP=group,
                TILE=family.tile, VEC=family.vec, OUT_VEC=family.out_vec, STEPS=_STEPS, CHECK=number == 0 and not known,
                **_OPTIONS,
            )  # fmt: skip
    post(report, told)
    return out, new_ticket()


def _known_starts(starts: Tensor, told: _Told, device: torch.device) -> Tensor:
    """Starts that the host knows, on their way to the device; an `InputError` for wrong ones."""
    if starts.device.type != "cpu":
        raise InputError(
            f"A lookup's starts are on {starts.device}, the ids on {device}; move one of them with .to()."
        )
    bounds = starts.tolist()
    for i, bound in enumerate(bounds):
        before = bounds[i - 1] if i else 0
        if (
            not before <= bound <= told.ids
            or (i == 0 and bound)
            or (i == len(bounds) - 1 and bound != told.ids)
        ):
            told(max(i - 1, 0) * 2 + _OFFSET.value, i, bound)
    return upload(bounds, device)


def register(key: str = "CUDA") -> None:
    """Let the kernels serve the three ops on this device type."""
    for name, kernel in (
        ("pooled_lookup", pooled_lookup),
        ("sequence_lookup", sequence_lookup),
        ("sample_weight_grad", sample_weight_grad),
    ):
        LIBRARY.impl(name, on_own_device(kernel), key, allow_override=True)
