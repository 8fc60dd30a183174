"""A run's sum: its gradients added up, in tiles, in chunks, and across programs.

Nouns (of `occurrences.py` and `sort.py`: occurrence, key, sentinel, place, scale, run, chunk, super-chunk)
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def gradient_rows(
    occurrences, places, scales, grad, i, take, columns, inside, SCALED: tl.constexpr, VEC: tl.constexpr
):
    """Scaled gradient rows [R, C] of the sorted occurrences `i`, fp32; zeros where not taken."""
    q = tl.load(occurrences + i, mask=take, other=0)
    place = tl.multiple_of(tl.load(places + q, mask=take, other=0).to(tl.int64), VEC)
    g = tl.load(grad + (place[:, None] + columns), mask=take[:, None] & inside, other=0.0).to(tl.float32)
    if SCALED:
        scale = tl.load(scales + q, mask=take, other=0.0)
        g = g * scale[:, None]
    return g


@triton.jit(do_not_specialize=["total", "sentinel", "tables"])
def sum_chunks(
    keys, occurrences, places, scales, grad, partials, meta, total, sentinel, tables,
    STEPS: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr, VEC_D: tl.constexpr,
):  # fmt: skip
    """Program c sums chunk c into `partials[c]` (fp32 [COLUMNS]) if it is whole."""
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    key = tl.load(keys + begin)
    if (tl.load(keys + begin + CHUNK - 1) == key) & (key.to(tl.int64) < sentinel):
        dim = tl.load(meta + table_of(meta, key, tables, STEPS) * 16 + 1)
        columns = tl.arange(0, COLUMNS)[None, :]
        inside = columns < tl.multiple_of(dim, VEC_D)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, CHUNK, ROWS):
            i = begin + at + tl.arange(0, ROWS)
            take = i < total
            sums += gradient_rows(occurrences, places, scales, grad, i, take, columns, inside, SCALED, VEC)
        tl.store(
            partials + tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS), tl.sum(sums, axis=0)
        )


@triton.jit(do_not_specialize=["sentinel"])
def sum_super_chunks(
    keys, partials, supers, sentinel,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program s adds the partials of super-chunk s's chunks into `supers[s]` if it is whole."""
    first = tl.program_id(0).to(tl.int64) * CHUNKS
    key = tl.load(keys + first * CHUNK)
    if (tl.load(keys + (first + CHUNKS) * CHUNK - 1) == key) & (key.to(tl.int64) < sentinel):
        columns = tl.arange(0, COLUMNS)[None, :]
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, CHUNKS, ROWS):
            chunk = first + at + tl.arange(0, ROWS)
            sums += tl.load(partials + (chunk[:, None] * COLUMNS + columns))
        tl.store(
            supers + tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS), tl.sum(sums, axis=0)
        )


@triton.jit
def finish_run(
    sums, key, i, keys, occurrences, places, scales, grad, partials, supers, total, inside,
    levels, SCALED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PITCH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """`sums` [COLUMNS] and what the run of `key` has from sorted occurrence `i` on.

    In steps of up to ROWS pieces, the largest that fit: single occurrences up to the next chunk, whole chunks up to the
    next super-chunk, whole super-chunks, and down again at the run's end.
    """
    lanes = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    going = (i < total) & (tl.load(keys + i, mask=i < total, other=-1) == key)
    while going:
        piece = tl.full((), 1, tl.int64)
        until = total.to(tl.int64)
        if levels >= 1:
            until = tl.minimum(total, (i // CHUNK + 1) * CHUNK)
            end = i + CHUNK - 1
            fits = (i % CHUNK == 0) & (end < total)
            if tl.load(keys + end, mask=fits, other=-1) == key:
                piece = tl.full((), CHUNK, tl.int64)
                until = total.to(tl.int64)
                if levels >= 2:
                    until = tl.minimum(total, (i // (CHUNK * CHUNKS) + 1) * (CHUNK * CHUNKS))
                    end = i + CHUNK * CHUNKS - 1
                    fits = (i % (CHUNK * CHUNKS) == 0) & (end < total)
                    if tl.load(keys + end, mask=fits, other=-1) == key:
                        piece = tl.full((), CHUNK * CHUNKS, tl.int64)
                        until = total.to(tl.int64)
        end_R = i + (lanes + 1) * piece - 1
        take = end_R < until
        take = take & (tl.load(keys + end_R, mask=take, other=-1) == key)
        if piece == 1:
            rows = gradient_rows(
                occurrences, places, scales, grad, i + lanes, take, columns, inside, SCALED, VEC
            )
            sums += tl.sum(rows, axis=0)
        elif piece == CHUNK:
            at = (i // CHUNK + lanes) * PITCH
            sums += tl.sum(tl.load(partials + at[:, None] + columns, mask=take[:, None], other=0.0), axis=0)
        else:
            at = (i // (CHUNK * CHUNKS) + lanes) * PITCH
            sums += tl.sum(tl.load(supers + at[:, None] + columns, mask=take[:, None], other=0.0), axis=0)
        i += tl.sum(take.to(tl.int64), axis=0) * piece
        going = (i < total) & (tl.load(keys + i, mask=i < total, other=-1) == key)
    return sums
