"""A run's sum: one order of additions, which is the run's own, wherever it lies among the sorted occurrences.

Nouns (and those of `occurrences.py` and `sort.py`: occurrence, key, sentinel, place, scale, run)
  fold         a sum of one after the other: ((a + b) + c) + d
  chunk        CHUNK occurrences of a run, counted from the run's first; its sum is the fold of its gradient rows
  super-chunk  CHUNKS chunks of a run, counted from the run's first; its sum is the fold of their sums
  rest         what a run has behind its last whole chunk
  block        neighbouring sorted occurrences that begin at a multiple of their number: what one program looks at

A run's sum is a fold, too: of its super-chunks, then of the chunks behind them, then of the rows of its rest. All
borders are counted from the run's first occurrence, so a row's sum has the same bits whatever other rows a batch has,
and under whatever number the row is sorted. A run of less than two chunks is the fold of its rows (the first chunk's
sum is where that fold has come to): the CPU's bits.

    chunks of 4, super-chunks of 2 chunks, a run of 14:   s = 8 rows, c = 4 rows, 2 rows of rest:   ((s + c) + r) + r'

Long runs: a row with a million occurrences would be a million steps of one program. Chunks are summed by programs of
their own, super-chunks from those sums. No program knows where chunks begin, but at most one begins in a block of as
many occurrences: two would be of two runs, of which the first ends before the second begins, too early for a chunk.
So program b looks at block b. If a chunk begins there, it has the block's last occurrence; where it begins follows from
where its run begins, which a search in the sorted keys finds. Its sum goes to number b. Neighbouring chunks of a
run have neighbouring numbers, so a run's program finds them. What this costs where no run is long: reading three keys
per block, and a few more for a run that goes on from block to block.

    keys   3 5 5 5 | 5 5 5 5 | 5 5 7 7     blocks and chunks of 4: row 5's begin at 1 and 5, in blocks 0 and 1
    program of row 5: (partials[0] + partials[1]) + the row of occurrence 9

Super-chunks take no launch of their own, and no program waits for another. Each has a counter, which the launch that
makes keys sets to 0. Whoever has summed one of its chunks adds 1, and the program that finds the others done sums them:
the last one, whichever of them that is. The sum's order is that of the chunks, so it has the same bits, whoever adds it
up. Only programs whose chunk is part of a super-chunk look at counters: those of rows with thousands of occurrences.

Why the last one sees the others' sums, in the words of PTX's memory model: all lanes of a program store their columns
(weak writes); a barrier of the program orders these before the atomic addition of one of its lanes, which releases them
to the GPU (`atom.acq_rel.gpu`: barriers and releases are cumulative, so lanes' stores count as those of the lane that
releases). Additions to one counter follow each other, each reading what the one before wrote, so the last one
synchronizes with all of them, and acquires. A barrier lies between its addition and its lanes' loads, which are
ordinary ones (no `.nc`: what was written in this launch may not be read through a cache that nobody keeps up to date).
In machine code: STG, BAR, MEMBAR.GPU, ATOMG.STRONG.GPU, CCTL.IVALL (nothing in L1 is believed any more), BAR, LDG.

Rows of a fold are read one at a time, each by the whole warp, AHEAD of them on their way before the first is added. It
begins with -0.0, the number that changes nothing it is added to.

Legend: R rows of a tile, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.update.triton.report import TOLD

CHUNK, CHUNKS = 128, 64

_WAYS = tl.constexpr(128)
"""Probes of a search at a time."""
_AHEAD = tl.constexpr(8)
_COUNTERS = tl.constexpr(TOLD)


@triton.jit
def table_of(meta, key, tables, STEPS: tl.constexpr):
    """Which of the tables, ascending by first key, has the key (a tensor of keys, or one)."""
    table = (key * 0).to(tl.int32)
    for step in tl.static_range(STEPS):
        probe = table + (1 << (STEPS - 1 - step))
        fits = probe < tables
        first = tl.load(meta + probe * 16, mask=fits, other=0)
        table = tl.where(fits & (first <= key.to(tl.int64)), probe, table)
    return table


@triton.jit
def begin_of_run(keys, key, low, high):
    """Where the run of `key` begins: the first position in [low, high] that has it, `high` being one that does.

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
    """Where the run of `key` ends: the first position in [low, high] that is not its any more, `low` being right
    behind one that is. Neighbours first: most runs are short.

    Example: keys (3, 5, 5, 7), key 5, low 2, high 4 -> 3.
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
    """Where the piece (SIZE occurrences of a run, at a multiple of SIZE from the run's first) begins that begins in the
    block [begin, begin + SIZE), -1 if there is none, and its run's first. The block ends at `total` or before."""
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
    """Scaled gradient rows [R, C] that begin at `place` [R], fp32; zeros where not taken."""
    place = tl.multiple_of(place.to(tl.int64), VEC)
    g = tl.load(grad + (place[:, None] + columns), mask=take[:, None] & inside, other=0.0).to(tl.float32)
    if SCALED:
        g = g * scale[:, None]
    return g


@triton.jit
def nothing(COLUMNS: tl.constexpr):
    """-0.0 [1, C]: x + -0.0 is x, for every x."""
    return tl.zeros((1, COLUMNS), tl.float32) * -1.0


@triton.jit
def fold_rows(
    sums, first, count, places, scales, grad, columns, inside, SCALED: tl.constexpr, VEC: tl.constexpr
):
    """`sums` [1, C] and, one after the other, the gradient rows of `count` sorted occurrences from `first` on."""
    for at in range(tl.zeros((), tl.int64), count, _AHEAD):
        for k in tl.static_range(_AHEAD):
            take = count - at > k
            i = first + at + k
            place = tl.multiple_of(tl.load(places + i, mask=take, other=0).to(tl.int64), VEC)
            own = inside & (columns * 0 + (count - at) > k)  # `take`, which the interpreter cannot spread out
            g = tl.load(grad + (place + columns), mask=own, other=0.0).to(tl.float32)
            if SCALED:
                g = g * tl.load(scales + i, mask=take, other=0.0)
            sums = tl.where(take, sums + g, sums)
    return sums


@triton.jit
def fold_sums(sums, pieces, first, count, columns, PITCH: tl.constexpr):
    """`sums` [1, C] and, one after the other, `count` sums of pieces from number `first` on."""
    for at in range(tl.zeros((), tl.int64), count, _AHEAD):
        for k in tl.static_range(_AHEAD):
            take = count - at > k
            g = tl.load(
                pieces + ((first + at + k) * PITCH + columns), mask=columns * 0 + (count - at) > k, other=0.0
            )
            sums = tl.where(take, sums + g, sums)
    return sums


@triton.jit
def one_row(tile, own_R):
    """The row [1, C] of a tile of fp32 that `own_R` names, to the bit: as integers, the others being 0."""
    bits = tl.where(own_R[:, None], tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def fold_tile(g, repeats_R, ROWS: tl.constexpr):
    """Per row of a tile the fold of its run's rows down to it [R, C]; `repeats_R`: rows of the run of the row above.

    Costs what repeats: a row that begins a run is left as it is.
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
    keys, places, scales, grad, partials, supers, told, meta, total, sentinel, tables, chunks,
    STEPS: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr, VEC_D: tl.constexpr,
):  # fmt: skip
    """Program b sums the chunk that begins in block b into `partials[b]` (fp32 [COLUMNS]), if one does; and the
    super-chunk that it belongs to into `supers[…]`, if there is one and all of its other chunks are summed.

    chunks: 0 if super-chunks are not summed, so that `supers` and the counters behind `told` are left alone; else
    CHUNKS, as a number that the compiler does not know: it would unroll a loop that few programs come to.
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
                tl.debug_barrier()  # all lanes' stores, then the count
                if tl.atomic_add(told + (_COUNTERS + number), 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
                    tl.debug_barrier()  # the count, then all lanes' loads
                    sums = fold_sums(nothing(COLUMNS), partials, begin // CHUNK, chunks, columns, COLUMNS)
                    tl.store(supers + (number * COLUMNS + columns), sums)


@triton.jit
def sum_run(
    key, first, keys, places, scales, grad, partials, supers, total, columns, inside, levels,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PITCH: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """The sum [1, C] of the run of `key`, which begins at the sorted occurrence `first`.

    levels: 1 if chunks are summed, 2 if super-chunks are, too. A batch that is too short for the first has no run of
    two chunks, one too short for the second has none of two super-chunks.
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
