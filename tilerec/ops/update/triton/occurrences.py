"""Occurrences of a step's ids: the row of each, the position of its gradient, and the factor of its gradient.

Nouns as in `tilerec/ops/update/order.py`: occurrence, key, sentinel, place, scale.

Only the device has the number of occurrences, since offsets are there. The host has a bound: the number of all ids
times the most features that read one bag. That bound is N if no two features share a key. Occurrences are packed in
front, sentinels fill the rest.

    two features of two bags each, offsets (0, 2, 3, 3, 5)
    occurrence   0  1  2 | 3  4        feature 1's first is number 3, since feature 0 has three
    position     0  1  2 | 3  4
    bag          0  0  1 | 1  1        position 3 lies behind offsets (3, 3) and before 5: the second of its bags

Legend: F features, N occurrences (bound).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.update.triton.status import init_status

PER_FEATURE = 8
"""Numbers per feature in its tensor: first key, rows, first bag, bags, gradient start, gradient stride, mean, bits of
bags."""


@triton.jit
def bag_of(offsets, bag0, bags, p, inside, bits):
    """Return the number of the bag, within its feature, of each position `p`.

    Bisection takes log2(bags) reads, which neighbours share, whatever the lengths of the bags. bits: 2 ^ bits <= bags -
    1 < 2 ^ (bits + 1), or more.
    """
    bag = p * 0
    jump = tl.full((), 1, tl.int64) << bits
    for _ in range(bits + 1):
        probe = bag + jump
        in_bags = inside & (probe < bags)
        starts = tl.load(offsets + bag0 + probe, mask=in_bags, other=0).to(tl.int64)
        bag = tl.where(in_bags & (starts <= p), probe, bag)
        jump = jump >> 1
    return bag


@triton.jit
def scale_of(offsets, sample_weights, p, first, averaged, inside, WEIGHTED: tl.constexpr, MEANS: tl.constexpr):
    """Return the factor of each position's gradient row. `first`: its bag; `averaged`: the bag takes a mean."""
    scale = (p * 0).to(tl.float32) + 1.0
    if WEIGHTED:
        scale = tl.load(sample_weights + p, mask=inside, other=0.0).to(tl.float32)
    if MEANS:
        low = tl.load(offsets + first, mask=averaged, other=0).to(tl.int64)
        high = tl.load(offsets + first + 1, mask=averaged, other=1).to(tl.int64)
        share = tl.div_rn((p * 0).to(tl.float32) + 1.0, (high - low).to(tl.float32))
        scale = scale * share  # in this order: the CPU's bits
    return scale


@triton.jit(
    do_not_specialize=["features", "ids_count", "total", "sentinel", "programs", "status_count"],
    do_not_specialize_on_alignment=["ids", "offsets", "sample_weights"],
)
def occurrence_keys(
    ids, offsets, sample_weights, meta, keys, places, scales, status, features, ids_count, total, sentinel,
    status_count, programs,
    JAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MEANS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write keys, places and scales of feature f's occurrences c * BLOCK …, with a stride of programs * BLOCK.

    The program's number is f * programs + c; programs of f = F write sentinels behind the last occurrence.

    One axis for both: a grid's second axis ends at 65,535. Each program sums the numbers of occurrences of the features
    before it: F numbers, read from cache. Program 0 initializes the update's `status`.
    """
    if tl.program_id(0) == 0:
        init_status(status, status_count, BLOCK)
    f = tl.program_id(0) // programs
    before = tl.zeros((), tl.int64)
    for first in range(0, f, FEATURES):
        other = first + tl.arange(0, FEATURES)
        take = other < f
        begin = tl.load(meta + other * 8 + 2, mask=take, other=0)
        count = tl.load(meta + other * 8 + 3, mask=take, other=0)
        if JAGGED:
            some = take & (count > 0)
            last = tl.load(offsets + begin + count, mask=some, other=0).to(tl.int64)
            start = tl.load(offsets + begin, mask=some, other=0).to(tl.int64)
            start = tl.minimum(tl.maximum(start, 0), ids_count)
            last = tl.minimum(tl.maximum(last, start), ids_count)
            before += tl.sum(last - start, axis=0)
        else:
            before += tl.sum(count, axis=0)
    step = programs * BLOCK
    lanes = (tl.program_id(0) % programs) * BLOCK + tl.arange(0, BLOCK)
    if f == features:
        for x in range(before, total, step):
            q = x + lanes
            tl.store(keys + q, tl.full((BLOCK,), sentinel, keys.dtype.element_ty), mask=q < total)
    else:
        first_key = tl.load(meta + f * 8)
        rows = tl.load(meta + f * 8 + 1)
        bag0 = tl.load(meta + f * 8 + 2)
        bags = tl.load(meta + f * 8 + 3)
        grad0 = tl.load(meta + f * 8 + 4)
        stride = tl.load(meta + f * 8 + 5)
        mean = tl.load(meta + f * 8 + 6)
        bits = tl.load(meta + f * 8 + 7)
        begin = bag0
        count = bags
        if JAGGED:
            begin = tl.load(offsets + bag0, mask=bags > 0, other=0).to(tl.int64)
            begin = tl.minimum(tl.maximum(begin, 0), ids_count)
            last = tl.load(offsets + bag0 + bags, mask=bags > 0, other=0).to(tl.int64)
            count = tl.minimum(tl.maximum(last, begin), ids_count) - begin
        count = tl.minimum(count, total - before)
        for x in range(tl.zeros((), tl.int64), count, step):
            own = x + lanes
            inside = own < count
            p = begin + own
            bag = own
            if JAGGED:
                bag = bag_of(offsets, bag0, bags, p, inside, bits)
            id_ = tl.load(ids + p, mask=inside, other=-1).to(tl.int64)
            key = tl.where((id_ >= 0) & (id_ < rows), first_key + id_, sentinel)
            q = before + own
            tl.store(keys + q, key.to(keys.dtype.element_ty), mask=inside)
            tl.store(places + q, (grad0 + bag * stride).to(places.dtype.element_ty), mask=inside)
            if WEIGHTED or MEANS:
                averaged = inside & (own * 0 + mean != 0)
                scale = scale_of(offsets, sample_weights, p, bag0 + bag, averaged, inside, WEIGHTED, MEANS)
                tl.store(scales + q, scale, mask=inside)
