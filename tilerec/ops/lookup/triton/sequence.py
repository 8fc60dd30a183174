"""Kernel of sequence lookups: a row for every id. Nouns as in `backend.py`.

Legend: G rows of a group, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.lookup.triton.parts import ANYWHERE, ID, NEVER, OFFSET, load_ids
from tilerec.ops.runtime.triton.rows import load_tiles, store_tiles, take_report, tile_columns
from tilerec.ops.runtime.triton.search import segment_at, segments_of


@triton.jit(do_not_specialize=["id_count", "feature_count"], do_not_specialize_on_alignment=ANYWHERE)
def sequence_kernel(
    base, out, ids, starts, features, report, id_count, feature_count,
    GROUP: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr, OUT_VEC: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Copy the rows of GROUP ids, a tile of each, with all loads in flight together. Grid: (runs of ids, tiles).

    GROUP is eight rows for each team of lanes: a store between two rows would delay the second's load. features: per
    feature its table's distance, rows (-1: another launch serves it), dim. CHECK: check the starts.

    Example: rows [[1, 2], [3, 4]], ids [0, 1, 1] -> [[1, 2], [3, 4], [3, 4]].
    """
    if CHECK and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        check_starts_of(report, starts, feature_count, id_count)
    dim = tl.multiple_of(tl.load(features + 2), VEC)
    columns, inside = tile_columns(tl.program_id(1) * TILE, dim, TILE, VEC)
    begin = tl.program_id(0).to(tl.int64) * GROUP
    low = segment_at(starts, feature_count, begin)
    high = segment_at(starts, feature_count, begin + (GROUP - 1))
    at_G = begin + tl.arange(0, GROUP)
    feature_G = features + segments_of(starts, at_G, low, high) * 3
    distance_G = tl.multiple_of(tl.load(feature_G), VEC)
    rows_G = tl.load(feature_G + 1)
    take_G = (at_G < id_count) & (rows_G >= 0)
    id_G, sound_G = load_ids(ids, at_G, take_G, rows_G)
    bad_G = tl.where(take_G & (sound_G == 0), at_G, NEVER)
    rows_GC = load_tiles(base, distance_G + id_G * dim, sound_G, columns, inside, VEC)
    store_tiles(out, at_G * tl.multiple_of(dim, OUT_VEC), take_G, columns, inside, rows_GC, OUT_VEC)
    at = tl.min(bad_G, 0)
    if at < id_count:
        take_report(report, segment_at(starts, feature_count, at) * 2 + ID, at, tl.load(ids + at).to(tl.int64))


@triton.jit
def check_starts_of(report, starts, feature_count, id_count):
    """Report the first start that falls, lies outside of the ids, or is the first or last and not at their end."""
    wrong = tl.full((), NEVER, tl.int64)
    for i in range(0, feature_count + 1, 128):
        at = tl.cast(i, tl.int64) + tl.arange(0, 128)
        is_start = at <= feature_count
        start = tl.load(starts + at, mask=is_start, other=0)
        before = tl.load(starts + at - 1, mask=is_start & (at > 0), other=0)
        bad = (start < before) | (start > id_count) | ((at == 0) & (start != 0))
        bad = is_start & (bad | ((at == feature_count) & (start != id_count)))
        wrong = tl.minimum(wrong, tl.min(tl.where(bad, at, NEVER), 0))
    if wrong <= feature_count:
        take_report(report, tl.maximum(wrong - 1, 0) * 2 + OFFSET, wrong, tl.load(starts + wrong))
