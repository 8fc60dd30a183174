"""Parts and bags, as the kernels of pooled lookups read them, and the reports of bad batches. Nouns as in `backend.py`.

A part is FIELDS numbers in a tensor on the device; a bag is two neighbouring offsets. A batch is bad if an id is
outside its table, or if offsets fall or leave the ids.

Legend: S parts, G rows of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.runtime.triton.rows import take_report
from tilerec.ops.runtime.triton.search import segment_at

CHUNK = tl.constexpr(256)
LONG = tl.constexpr(512)

# Fields of a part, int64 each.
FIELDS = tl.constexpr(10)
DISTANCE = tl.constexpr(0)  # of its table's first element from the base
ROWS = tl.constexpr(1)
DIM = tl.constexpr(2)
COLUMN = tl.constexpr(3)
KEY = tl.constexpr(4)
PLACE = tl.constexpr(5)  # of the feature's first column in the output (of variable batches: see `runs`)
STRIDE = tl.constexpr(6)  # from one bag's to the next one's
MEAN = tl.constexpr(7)
FEATURE = tl.constexpr(8)
PLANE = tl.constexpr(9)

_BLOCK = tl.constexpr(128)  # parts read at once
NEVER = tl.constexpr(9223372036854775807)

# A batch's tensors are views of any alignment, which differs from batch to batch: no special kernels for it.
ANYWHERE = ["ids", "offsets", "starts", "sample_weights"]

# A report's first number is  feature * 2 + one of these.
ID = tl.constexpr(0)
OFFSET = tl.constexpr(1)


@triton.jit
def run_of(part, runs, bags, VARIABLE: tl.constexpr, VEC: tl.constexpr):
    """Return a part's first bag, its number of bags, and the output's element where the feature begins.

    Variable batches read them from `runs`: three numbers per feature.
    """
    if VARIABLE:
        run = runs + tl.load(part + FEATURE) * 3
        first, count, place = tl.load(run), tl.load(run + 1), tl.multiple_of(tl.load(run + 2), VEC)
    else:
        count = tl.cast(bags, tl.int64)
        first, place = tl.load(part + KEY) * count, tl.multiple_of(tl.load(part + PLACE), VEC)
    return first, count, place


@triton.jit
def bounds_of(offsets, bag_G, has_G, id_count):
    """Return the begin and end of bags, and a mask of those with bad offsets (which count as empty)."""
    begin_G = tl.load(offsets + bag_G, mask=has_G, other=0)
    end_G = tl.load(offsets + bag_G + 1, mask=has_G, other=0)
    sound_G = (begin_G >= 0) & (begin_G <= end_G) & (end_G <= id_count)
    return tl.where(sound_G, begin_G, 0), tl.where(sound_G, end_G, 0), sound_G == 0


@triton.jit
def report_bad_bounds(report, offsets, bag_G, wrong_G, id_count, feature):
    """Report the first wrong bag's offset: its first if that lies outside of the ids, else its end."""
    bag = tl.min(tl.where(wrong_G, bag_G, NEVER), 0)
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    outside = (begin < 0) | (begin > id_count)
    position = tl.where(outside, bag, bag + 1)
    take_report(report, feature * 2 + OFFSET, position, tl.where(outside, begin, end))


@triton.jit
def report_uncovered(report, offsets, bags, id_count):
    """Report ids that lie in no bag, feature -1: the batch's offsets do not begin at 0 or do not end at `id_count`."""
    begin = tl.load(offsets)
    end = tl.load(offsets + bags)
    if (begin != 0) | (end != id_count):
        take_report(report, -2 + OFFSET, tl.where(begin != 0, 0, bags), tl.where(begin != 0, begin, end))


@triton.jit
def report_bad_id(report, ids, begin_G, end_G, rows, feature):
    """Report the first id outside [0, rows) at positions [begin, end) of a group; there is one."""
    found = tl.full((), NEVER, tl.int64)
    for p in range(tl.max(end_G - begin_G, 0)):
        at_G = begin_G + p
        id_G = tl.load(ids + at_G, mask=at_G < end_G, other=0).to(tl.int64)
        bad_G = (at_G < end_G) & ((id_G < 0) | (id_G >= rows))
        found = tl.minimum(found, tl.min(tl.where(bad_G, at_G, NEVER), 0))
    take_report(report, feature * 2 + ID, found, tl.load(ids + found).to(tl.int64))


@triton.jit
def any_true(flags_G):
    return tl.max(flags_G.to(tl.int32), 0) > 0


@triton.jit
def load_ids(ids, at_G, take_G, rows):
    """Return the ids at positions `at_G`, and a mask of those taken that are in their table."""
    id_G = tl.load(ids + at_G, mask=take_G, other=0).to(tl.int64)
    return id_G, take_G & (id_G >= 0) & (id_G < rows)


@triton.jit
def chunk_of(parts, part_count, plane, slot, offsets, runs, report, id_count, bags, VARIABLE: tl.constexpr):
    """Return the chunk of a slot (int64) in a plane: its part, its bag, and its positions, none if begin == end.

    Example: CHUNK 4, LONG 8, bag 5 is [7, 20): slot 3 -> bag 5, [11, 15); slot 5 -> nothing, its position 20 is behind.
    """
    at = slot * CHUNK
    number, readers = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for block in range(0, part_count, _BLOCK):
        number_S = block + tl.arange(0, _BLOCK)
        part_S = parts + number_S * FIELDS
        is_S = number_S < part_count
        is_S = is_S & (tl.load(part_S + PLANE, mask=is_S, other=-1) == plane)
        if VARIABLE:
            run_S = runs + tl.load(part_S + FEATURE, mask=is_S, other=0) * 3
            first_S, count_S = tl.load(run_S, mask=is_S, other=0), tl.load(run_S + 1, mask=is_S, other=0)
        else:
            count_S = tl.cast(bags, tl.int64)
            first_S = tl.load(part_S + KEY, mask=is_S, other=0) * count_S
        low_S = tl.load(offsets + first_S, mask=is_S, other=0)
        high_S = tl.load(offsets + first_S + count_S, mask=is_S, other=0)
        reads_S = (low_S <= at) & (at < high_S)  # False where is_S is False: both bounds are 0 there
        number = tl.maximum(number, tl.max(tl.where(reads_S, number_S, -1), 0))
        readers += tl.sum(reads_S.to(tl.int32), 0)
    begin, end, bag = at * 0, at * 0, at * 0
    part = parts + tl.maximum(number, 0) * FIELDS
    if number >= 0:
        first, count, _ = run_of(part, runs, bags, VARIABLE, 1)
        bag = segment_at(offsets + first, count, at)
        start, stop = tl.load(offsets + first + bag), tl.load(offsets + first + bag + 1)
        if (start >= 0) & (start <= at) & (at < stop) & (stop <= id_count) & (stop - start > LONG):
            begin = start + (at - start) // CHUNK * CHUNK
            end = tl.where(begin + CHUNK <= stop, begin + CHUNK, begin)
        if readers > 1:
            # Bags of different keys hold this position, so offsets fall between the keys; one plane cannot serve both.
            take_report(report, tl.load(part + FEATURE) * 2 + OFFSET, first, tl.load(offsets + first))
    return part, bag, begin, end
