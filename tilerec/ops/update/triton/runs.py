"""A run's sum: one order of additions per run, wherever the run lies among the sorted occurrences.

Nouns (and those of `occurrences.py` and `sort.py`: occurrence, key, sentinel, place, scale, run)
  fold         a sum of one number after the other: ((a + b) + c) + d
  chunk        CHUNK occurrences of a run, counted from the run's first; its sum is the fold of its gradient rows
  super-chunk  CHUNKS chunks of a run, counted from the run's first; its sum is the fold of their sums
  rest         the occurrences of a run behind its last whole chunk
  block        neighbouring sorted occurrences that begin at a multiple of their number: the input of one program

A run's sum is a fold, too: of its super-chunks, then of the chunks behind them, then of the rows of its rest. All
borders are counted from the run's first occurrence. So a row's sum has the same bits whatever other rows a batch has,
and whatever number the row is sorted by. A run of less than two chunks is the fold of its rows: the CPU's bits (the
first chunk's sum is an intermediate result of that fold).

    chunks of 4, super-chunks of 2 chunks, a run of 14:   s = 8 rows, c = 4 rows, 2 rows of rest:   ((s + c) + r) + r'

Long runs: a row with a million occurrences would be a million steps of one program. Programs of their own sum chunks,
and super-chunks from the chunks' sums. No program knows where chunks begin, but at most one chunk begins in a block of
CHUNK occurrences. Two would belong to two runs, the first of which would end before the second begins, too early for a
chunk. So program b reads block b. If a chunk begins there, it contains the block's last occurrence. Its begin follows
from the begin of its run, which a search in the sorted keys finds. Its sum goes to number b. Neighbouring chunks of a
run have neighbouring numbers, so a run's program finds them. The cost without long runs: reading three keys per block,
and a few more for a run that continues from block to block.

    keys   3 5 5 5 | 5 5 5 5 | 5 5 7 7     blocks and chunks of 4: row 5's begin at 1 and 5, in blocks 0 and 1
    program of row 5: (partials[0] + partials[1]) + the row of occurrence 9

Super-chunks take no launch of their own, and no program waits for another. Each has a counter, which the launch that
makes keys sets to 0. A program that has summed one of its chunks adds 1. The program that brings the counter to CHUNKS
sums the super-chunk. Which program that is differs, but the order of the sum is that of the chunks, so the bits are the
same. Only programs whose chunk is part of a super-chunk read counters: those of rows with thousands of occurrences.

Why the last program sees the others' sums, in terms of PTX's memory model: all lanes of a program store their columns
(weak writes). A barrier of the program orders these before the atomic addition of one of its lanes, which releases them
to the GPU (`atom.acq_rel.gpu`: barriers and releases are cumulative, so lanes' stores count as those of the lane that
releases). Additions to one counter form a chain, each reading the value that the previous one wrote, so the last one
synchronizes with all of them, and acquires. A barrier lies between its addition and its lanes' loads. These are
ordinary loads (no `.nc`: the non-coherent cache may hold stale values of addresses that this launch writes). In machine
code: STG, BAR, MEMBAR.GPU, ATOMG.STRONG.GPU, CCTL.IVALL (invalidates L1), BAR, LDG.

A fold reads rows one at a time, each by the whole warp, and has AHEAD of them in flight before it adds the first. It
begins with -0.0, the neutral element of addition.

Legend: R rows of a tile, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.update.triton.status import STATUS_SIZE

CHUNK, CHUNKS = 128, 64

_WAYS = tl.constexpr(128)
"""Probes of a search per iteration."""
_AHEAD = tl.constexpr(8)
_COUNTERS = tl.constexpr(STATUS_SIZE)


@triton.jit
def table_of(meta, key, tables, STEPS: tl.constexpr):
    """Return the number of the table that has the key (a tensor of keys, or one); tables ascend by first key."""
    table = (key * 0).to(tl.int32)
    for step in tl.static_range(STEPS):
        probe = table + (1 << (STEPS - 1 - step))
        fits = probe < tables
        first = tl.load(meta + probe * 16, mask=fits, other=0)
        table = tl.where(fits & (first <= key.to(tl.int64)), probe, table)
    return table


@triton.jit
def begin_of_run(keys, key, low, high):
    """Return the begin of the run of `key`: the first position in [low, high] with that key; `high` must have it.

    Example: keys (3, 5, 5, 5), key 5, low 0, high 3 -> 1.
    """
    ways = tl.arange(0, _WAYS)
    while low < high:
        step = (high - low + _WAYS - 1) // _WAYS
        at = low + ways * step
        less = tl.sum((tl.load(keys + at, mask=at < high, other=key) < key).to(tl.int32), axis=0)
        high = tl.minimum(low + less * step, high)
        low = tl.where(less > 0, low + (less - 1) * step + 1, low)
    return low


@triton.jit
def end_of_run(keys, key, low, high):
    """Return the end of the run of `key`: the first position in [low, high] without it; position low - 1 must have it.

    Searches neighbours first, since most runs are short. Example: keys (3, 5, 5, 7), key 5, low 2, high 4 -> 3.
    """
    ways = tl.arange(0, _WAYS)
    step = (high - low) * 0 + 1
    while low < high:
        at = low + ways * step
        same = tl.sum((tl.load(keys + at, mask=at < high, other=-1) == key).to(tl.int32), axis=0)
        high = tl.where(same < _WAYS, tl.minimum(low + same * step, high), high)
        low = tl.where(same > 0, low + (same - 1) * step + 1, low)
        step = (high - low + _WAYS - 1) // _WAYS
    return low


@triton.jit
def piece_in_block(keys, begin, total, sentinel, SIZE: tl.constexpr):
    """Return the piece that begins in the block [begin, begin + SIZE), -1 if none does, and its run's first occurrence.

    A piece is SIZE occurrences of a run, at a multiple of SIZE from the run's first. The block ends at `total` or
    before.
    """
    last = begin + SIZE - 1
    key = tl.load(keys + last)
    goes_on = tl.load(keys + begin) == key
    follows = tl.load(keys + last + 1, mask=last + 1 < total, other=-1) == key
    piece = begin * 0 - 1
    first = begin * 0
    if (goes_on | follows) & (key.to(tl.int64) < sentinel):
        first = begin_of_run(keys, key, tl.where(goes_on, 0, begin), tl.where(goes_on, begin, last))
        at = begin + first % SIZE
        end = at + SIZE - 1
        if tl.load(keys + end, mask=end < total, other=-1) == key:
            piece = at
    return piece, first


@triton.jit
def gradient_rows(place, scale, grad, take, columns, inside, SCALED: tl.constexpr, VEC: tl.constexpr):
    """Return scaled gradient rows [R, C] that begin at `place` [R], fp32; zeros where not taken."""
    place = tl.multiple_of(place.to(tl.int64), VEC)
    g = tl.load(grad + (place[:, None] + columns), mask=take[:, None] & inside, other=0.0).to(tl.float32)
    if SCALED:
        g = g * scale[:, None]
    return g


@triton.jit
def nothing(COLUMNS: tl.constexpr):
    """Return -0.0 [1, C]: x + -0.0 is x, for every x."""
    return tl.zeros((1, COLUMNS), tl.float32) * -1.0


@triton.jit
def fold_rows(sums, first, count, places, scales, grad, columns, inside, SCALED: tl.constexpr, VEC: tl.constexpr):
    """Return `sums` [1, C] plus, one after the other, gradient rows of `count` sorted occurrences from `first` on."""
    for at in range(tl.zeros((), tl.int64), count, _AHEAD):
        for k in tl.static_range(_AHEAD):
            take = count - at > k
            i = first + at + k
            place = tl.multiple_of(tl.load(places + i, mask=take, other=0).to(tl.int64), VEC)
            own = inside & (columns * 0 + (count - at) > k)  # `take`, which the interpreter cannot broadcast
            g = tl.load(grad + (place + columns), mask=own, other=0.0).to(tl.float32)
            if SCALED:
                g = g * tl.load(scales + i, mask=take, other=0.0)
            sums = tl.where(take, sums + g, sums)
    return sums


@triton.jit
def fold_sums(sums, pieces, first, count, columns, PITCH: tl.constexpr):
    """Return `sums` [1, C] plus, one after the other, `count` sums of pieces from number `first` on."""
    for at in range(tl.zeros((), tl.int64), count, _AHEAD):
        for k in tl.static_range(_AHEAD):
            take = count - at > k
            g = tl.load(pieces + ((first + at + k) * PITCH + columns), mask=columns * 0 + (count - at) > k, other=0.0)
            sums = tl.where(take, sums + g, sums)
    return sums


@triton.jit
def one_row(tile, own_R):
    """Return the row [1, C] of an fp32 tile that `own_R` selects, bit for bit: an integer sum with zeros elsewhere."""
    bits = tl.where(own_R[:, None], tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def fold_tile(g, repeats_R, ROWS: tl.constexpr):
    """Return per row of a tile the fold of its run's rows down to it [R, C].

    `repeats_R` marks rows of the same run as the row above. Only these cost time; a row that begins a run stays
    unchanged.
    """
    if ROWS > 1:
        lanes = tl.arange(0, ROWS)
        repeats = tl.sum(repeats_R.to(tl.int32) << lanes, axis=0)
        for r in tl.static_range(1, ROWS):
            if (repeats >> r) & 1 != 0:
                g = tl.where((lanes == r)[:, None], one_row(g, lanes == r - 1) + g, g)
    return g


@triton.jit(do_not_specialize=["total", "sentinel", "tables", "chunks"])
def sum_chunks(
    keys, places, scales, grad, partials, supers, status, meta, total, sentinel, tables, chunks,
    STEPS: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr, VEC_D: tl.constexpr,
):  # fmt: skip
    """Sum the chunk that begins in block b, if one does, into `partials[b]` (fp32 [COLUMNS]).

    b is the program's number. Then sum the chunk's super-chunk into `supers[…]`, if there is one and all of its other
    chunks are summed.

    chunks: 0 to skip super-chunks, so that `supers` and the counters in `status` stay untouched; else CHUNKS. It is a
    runtime number, because the compiler would unroll a constant loop that few programs enter.
    """
    block = tl.program_id(0).to(tl.int64)
    at, first = piece_in_block(keys, block * CHUNK, total, sentinel, CHUNK)
    if at >= 0:
        key = tl.load(keys + at)
        dim = tl.load(meta + table_of(meta, key, tables, STEPS) * 16 + 1)
        columns = tl.arange(0, COLUMNS)[None, :]
        inside = columns < tl.multiple_of(dim, VEC_D)
        sums = fold_rows(nothing(COLUMNS), at, CHUNK, places, scales, grad, columns, inside, SCALED, VEC)
        tl.store(partials + (block * COLUMNS + columns), sums)
        if chunks > 0:
            size: tl.constexpr = CHUNK * CHUNKS
            begin = at - (at - first) % size
            if tl.load(keys + (begin + (size - 1)), mask=begin + (size - 1) < total, other=-1) == key:
                number = begin // size
                tl.debug_barrier()  # all lanes' stores come before the count
                if tl.atomic_add(status + (_COUNTERS + number), 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
                    tl.debug_barrier()  # the count comes before all lanes' loads
                    sums = fold_sums(nothing(COLUMNS), partials, begin // CHUNK, chunks, columns, COLUMNS)
                    tl.store(supers + (number * COLUMNS + columns), sums)


@triton.jit
def sum_run(
    key, first, keys, places, scales, grad, partials, supers, total, columns, inside, levels,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PITCH: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Return the sum [1, C] of the run of `key`, which begins at the sorted occurrence `first`.

    levels: 1 if chunks are summed, 2 if super-chunks are, too. A batch that is too short for the first has no run of
    two chunks; one too short for the second has no run of two super-chunks.
    """
    sums = nothing(COLUMNS)
    end = end_of_run(keys, key, first + 1, total.to(tl.int64))
    i = first
    if levels >= 2:
        count = (end - i) // (CHUNK * CHUNKS)
        sums = fold_sums(sums, supers, i // (CHUNK * CHUNKS), count, columns, PITCH)
        i += count * (CHUNK * CHUNKS)
    if levels >= 1:
        count = (end - i) // CHUNK
        sums = fold_sums(sums, partials, i // CHUNK, count, columns, PITCH)
        i += count * CHUNK
    return fold_rows(sums, i, end - i, places, scales, grad, columns, inside, SCALED, VEC)
