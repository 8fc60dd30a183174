"""Sort of a small batch's occurrences, in one launch or two.

Nouns (and those of `occurrences.py`: occurrence, key, sentinel)
  block     BLOCK neighbouring occurrences, which one program describes and sorts in its registers
  rank      the number of all occurrences that sort before one: its index in the result

`torch.sort` starts a dozen GPU operations, whatever the size (numbers from 0 on, memory cleared, a histogram, its sums,
a pass for every 8 bits), and a batch of some ten thousand occurrences is too small to fill any of them. Here one launch
makes the keys and sorts them block by block. If there are several blocks, a second launch searches every occurrence's
key in all other blocks. Its rank is the sum of the results, and the launch writes it there. No two programs of a launch
communicate.

    keys 7 3 3 9 | 3 1 7 7, blocks of 4
    sorted       3 3 7 9 | 1 3 7 7         of occurrences 1 2 0 3 | 5 4 6 7
    ranks        1 2 4 7 | 0 3 5 6         the first 3: no occurrence before it here, one (the 1) there; equal keys of
                                           earlier blocks sort before, of later ones behind: the sort is stable

The search costs N / BLOCK times N reads, so batches of more than MOST occurrences use another sort. Within a block a
key and its lane are one number, `key * BLOCK + lane`: 32 bits of it if the tables have 2^20 rows or fewer, else 64.
Places and scales follow their keys, first through the program's shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.update.triton.occurrences import bag_of, scale_of
from tilerec.ops.update.triton.status import init_status

BLOCK, WARPS = 2048, 16
# The interpreter takes a second per block, so there only the tests of this file set MOST.
MOST = 0 if triton.knobs.runtime.interpret else 65_536
MOST_FEATURES = 1024
_RANKED, _AT_ONCE = 128, 8  # of a program of `rank_blocks`: occurrences, and blocks that it searches at once


@triton.jit(
    do_not_specialize=["features", "ids_count", "total", "sentinel", "status_count"],
    do_not_specialize_on_alignment=["ids", "offsets", "sample_weights"],
)
def sort_blocks(
    ids, offsets, sample_weights, meta, keys, places, scales, status, features, ids_count, total, sentinel,
    status_count,
    JAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MEANS: tl.constexpr, WIDE: tl.constexpr, FEATURES: tl.constexpr,
    HALVINGS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write keys, places and scales of occurrences b * BLOCK …, sorted by key; b is the program's number.

    All features' ends are in registers (FEATURES = 2 ^ HALVINGS of them), and each lane searches its feature there.
    Program 0 initializes the update's `status`.
    """
    if tl.program_id(0) == 0:
        init_status(status, status_count, BLOCK)
    f_F = tl.arange(0, FEATURES)
    some_F = f_F < features
    bag0_F = tl.load(meta + f_F * 8 + 2, mask=some_F, other=0)
    count_F = tl.load(meta + f_F * 8 + 3, mask=some_F, other=0)
    begin_F = bag0_F
    if JAGGED:
        some_F = some_F & (count_F > 0)
        begin_F = tl.load(offsets + bag0_F, mask=some_F, other=0).to(tl.int64)
        begin_F = tl.minimum(tl.maximum(begin_F, 0), ids_count)
        last_F = tl.load(offsets + bag0_F + count_F, mask=some_F, other=0).to(tl.int64)
        count_F = tl.minimum(tl.maximum(last_F, begin_F), ids_count) - begin_F
    end_F = tl.cumsum(count_F, axis=0)
    known = tl.minimum(tl.max(end_F, axis=0), total)
    lane = tl.arange(0, BLOCK)
    q = tl.program_id(0) * BLOCK + lane
    inside = q < known
    f = lane * 0  # will be the first feature that ends behind q
    for step in tl.static_range(HALVINGS):
        probe = f + (FEATURES >> (step + 1))
        f = tl.where(tl.gather(end_F, probe - 1, 0) <= q, probe, f)
    own = q - tl.gather(end_F - count_F, f, 0)
    p = tl.gather(begin_F, f, 0) + own
    at = meta + f * 8
    bag = own
    bag0 = tl.load(at + 2, mask=inside, other=0)
    if JAGGED:
        bags = tl.load(at + 3, mask=inside, other=0)
        bits = tl.max(tl.load(at + 7, mask=inside, other=0), axis=0)
        bag = bag_of(offsets, bag0, bags, p, inside, bits)
    id_ = tl.load(ids + p, mask=inside, other=-1).to(tl.int64)
    is_row = (id_ >= 0) & (id_ < tl.load(at + 1, mask=inside, other=0))
    key = tl.where(is_row, tl.load(at, mask=inside, other=0) + id_, sentinel)
    place = tl.load(at + 4, mask=inside, other=0) + bag * tl.load(at + 5, mask=inside, other=0)
    packed = (key << BITS) | lane
    if not WIDE:
        packed = packed.to(tl.int32)
    packed = tl.sort(packed)
    tl.store(keys + q, (packed >> BITS).to(keys.dtype.element_ty), mask=q < total)
    source = (packed & (BLOCK - 1)).to(tl.int32)
    tl.store(places + q, tl.gather(place.to(places.dtype.element_ty), source, 0), mask=q < total)
    if WEIGHTED or MEANS:
        averaged = inside & (tl.load(at + 6, mask=inside, other=0) != 0)
        scale = scale_of(offsets, sample_weights, p, bag0 + bag, averaged, inside, WEIGHTED, MEANS)
        tl.store(scales + q, tl.gather(scale, source, 0), mask=q < total)


@triton.jit(do_not_specialize=["total"])
def rank_blocks(
    keys, places, scales, sorted_keys, sorted_places, sorted_scales, total,
    SCALED: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, RANKED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Rank the occurrences c * RANKED … of their sorted block and write them to their ranks; c is the program's number.

    Searches in AT_ONCE blocks run side by side, and neighbouring lanes search neighbouring keys.
    """
    q = tl.program_id(0) * RANKED + tl.arange(0, RANKED)
    here = q < total
    own = (tl.program_id(0) * RANKED) // BLOCK
    key = tl.load(keys + q, mask=here, other=0)
    rank = q - own * BLOCK
    for first in range(0, tl.cdiv(total, BLOCK), AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)[:, None]
        size = tl.where(block == own, 0, tl.minimum(total - block * BLOCK, BLOCK))
        found = tl.zeros((AT_ONCE, RANKED), tl.int32)  # occurrences of the block that sort before
        for step in range(BITS + 1):
            probe = found + (BLOCK >> step)
            take = (probe <= size) & here[None, :]
            other = tl.load(keys + (block * BLOCK + probe - 1), mask=take, other=0)
            before = (other < key[None, :]) | ((other == key[None, :]) & (block < own))
            found = tl.where(take & before, probe, found)
        rank += tl.sum(found, axis=0)
    tl.store(sorted_keys + rank, key, mask=here)
    tl.store(sorted_places + rank, tl.load(places + q, mask=here, other=0), mask=here)
    if SCALED:
        tl.store(sorted_scales + rank, tl.load(scales + q, mask=here, other=0.0), mask=here)


def is_small(total: int, features: int, bits: int) -> bool:
    """Return True if a batch is sorted here. `bits`: of the largest key."""
    return total <= MOST and features <= MOST_FEATURES and bits + BLOCK.bit_length() <= 63


def sort_small(
    ids: Tensor, offsets: Tensor, sample_weights: Tensor, meta: Tensor, keys: Tensor, places: Tensor, scales: Tensor,
    status: Tensor, features: int, total: int, sentinel: int, jagged: bool, weighted: bool, means: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return keys ascending, and the place and scale of each; initialize `status`.

    keys, places, scales: memory that the launches write. The others: as in `occurrence_keys`.
    """
    bits = BLOCK.bit_length() - 1
    ranked = min(_RANKED, BLOCK)
    halvings = max(5, (features - 1).bit_length())
    launch(
        sort_blocks, (-(-total // BLOCK),), ids, offsets, sample_weights, meta, keys, places, scales, status, features,
        ids.numel(), total, sentinel, status.numel(),
        JAGGED=jagged, WEIGHTED=weighted, MEANS=means, WIDE=sentinel.bit_length() + bits > 31, FEATURES=1 << halvings,
        HALVINGS=halvings, BLOCK=BLOCK, BITS=bits, num_warps=WARPS,
    )  # fmt: skip
    if total <= BLOCK:
        return keys, places, scales
    ordered, sorted_places = torch.empty_like(keys), torch.empty_like(places)
    sorted_scales = torch.empty_like(scales) if weighted or means else scales
    launch(
        rank_blocks, (-(-total // ranked),), keys, places, scales, ordered, sorted_places, sorted_scales, total,
        SCALED=weighted or means, BLOCK=BLOCK, BITS=bits, RANKED=ranked, AT_ONCE=_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return ordered, sorted_places, sorted_scales
