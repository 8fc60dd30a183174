"""The kernel that sums runs and applies a rule while the row is in registers.

Nouns (and those of `sort.py` and `runs.py`: occurrence, key, run, chunk)
  span     neighbouring sorted occurrences; its program updates the rows whose runs begin there
  tile     ROWS sorted occurrences of a span that are read at once, times COLUMNS >= the row's columns

One program, one warp (up to 512 numbers a tile). A tile's reads depend on each other in two steps only: keys and
places; then weights, slots and gradients. The kernel loads all of a tile's rows before it adds or writes anything.
Inside a tile, a row adds the sum of the row above if both belong to one run (`runs.fold_tile`), in registers. The last
occurrence of a run holds its sum, and there the rule runs. A run that continues carries its sum into the next tile. A
run that continues behind the span is summed first (`runs.sum_run`), and the tiles leave its rows out.

    keys of a tile     3 3 5 7 7     (the tile before ended with key 3, sum c)
    gradients          a b d e f
    sums               c+a  (c+a)+b  d  e  e+f
    rows updated       -    3        5  -  7 (or continues in the next tile)

Legend: N occurrences, R rows of a tile, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.update.triton.counts import read_pace
from tilerec.ops.update.triton.runs import (
    begin_of_run,
    fold_tile,
    gradient_rows,
    nothing,
    one_row,
    sum_run,
    table_of,
)
from tilerec.ops.update.triton.slots import load_slots, names_of_rows, store_rows, store_slots
from tilerec.ops.update.triton.status import record_not_finite


@triton.jit
def _run_rule(
    g, w, s, dim, h, e, inside,
    TERMS: tl.constexpr, APPLY: tl.constexpr, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr,
    SUMS0: tl.constexpr, SUMS1: tl.constexpr,
):  # fmt: skip
    """Return the new rows and slots: sum the terms of the rule's phases over each row, then apply the rule."""
    z0 = 0.0
    z1 = 0.0
    z2 = 0.0
    if SUMS0 >= 1:
        x0, x1 = TERMS(0, g, w, s, (z0, z1, z2), dim, h, e, MODE, WD, ROW_STEP)
        z0 = tl.sum(tl.where(inside, x0, 0.0), axis=1)[:, None]
        if SUMS0 >= 2:
            z1 = tl.sum(tl.where(inside, x1, 0.0), axis=1)[:, None]
    if SUMS1 >= 1:
        x0, x1 = TERMS(1, g, w, s, (z0, z1, z2), dim, h, e, MODE, WD, ROW_STEP)
        z1 = tl.sum(tl.where(inside, x0, 0.0), axis=1)[:, None]
        if SUMS1 >= 2:
            z2 = tl.sum(tl.where(inside, x1, 0.0), axis=1)[:, None]
    return APPLY(g, w, s, (z0, z1, z2), dim, h, e, MODE, WD, ROW_STEP)


@triton.jit
def _skip_not_finite(sums, take_R, name_R, numbers, status):
    """Record rows whose summed gradient is not finite; return the mask without them, and zeros for their sums."""
    bad = take_R & (tl.max(tl.where(tl.abs(sums) < float("inf"), 0, 1), axis=1) != 0)
    skips = tl.sum(bad.to(tl.int64), axis=0)
    if skips > 0:
        code = tl.where(bad, (tl.load(numbers + 10) << 40) | name_R, 0x7FFFFFFFFFFFFFFF)
        record_not_finite(status, skips, tl.min(code, axis=0))
    take_R = take_R & (bad == 0)
    return take_R, tl.where(take_R[:, None], sums, 0.0)


@triton.jit(
    do_not_specialize=[
        "total", "span", "levels", "tables", "first_key", "end_key", "step", "grad_scale", "h0", "h1", "h2", "h3",
        "h4", "h5", "h6", "h7", "e0", "e1",
    ]
)  # fmt: skip
def update_runs(
    keys, places, scales, grad, weights, slot0, slot1, slot2, partials, supers, meta, paces, names, status,
    runs, rows_out, total, span, levels, tables, first_key, end_key, step, grad_scale, h0, h1, h2, h3, h4, h5, h6, h7,
    e0, e1,
    TERMS: tl.constexpr, APPLY: tl.constexpr, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr,
    SUMS0: tl.constexpr, SUMS1: tl.constexpr, KIND0: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr,
    KEEPS: tl.constexpr, READS: tl.constexpr, GRAD_SCALED: tl.constexpr, SCALED: tl.constexpr, ROUND: tl.constexpr,
    PER_TABLE: tl.constexpr, NAMED: tl.constexpr, COMPACT: tl.constexpr, STEPS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PITCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr, VEC_D: tl.constexpr, VEC_G: tl.constexpr, VEC_S: tl.constexpr,
):  # fmt: skip
    """Update the rows in [first_key, end_key) whose runs begin in span s; s is the program's number.

    COMPACT: write row number `runs` [N] of the run instead of the key's row, and store the key's row in `rows_out`.
    This mode returns sums instead of applying them.

    Example: keys (2, 2, 4), gradients (1), (3), (5), span 2, "sgd", lr 0.1: program 0 reads 1 and 3 and writes w[2] -=
    0.4; program 1 writes w[4] -= 0.5.
    """
    begin = tl.program_id(0).to(tl.int64) * span
    end = tl.minimum(begin + span, total)
    before = tl.load(keys + begin - 1, mask=begin > 0, other=-1)
    final = tl.load(keys + end - 1)
    # Skip spans in which no run of this group begins.
    if (final != before) & (final >= first_key) & (tl.load(keys + begin) < end_key):
        lanes = tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)[None, :]
        carry = nothing(COLUMNS)
        slots = (slot0, slot1, slot2)
        # First sum the last run if it continues behind the span: registers are still free now.
        through = nothing(COLUMNS)
        until = end
        if (tl.load(keys + end, mask=end < total, other=-1) == final) & (final < end_key):
            until = begin_of_run(keys, final, begin, end - 1)
            width = tl.multiple_of(tl.load(meta + table_of(meta, final, tables, STEPS) * 16 + 1), VEC_D)
            through = sum_run(
                final, until, keys, places, scales, grad, partials, supers, total, columns,
                columns < width, levels, SCALED, CHUNK, CHUNKS, PITCH, COLUMNS, VEC_G,
            )  # fmt: skip
        # From here on count occurrences from the span's first: 32 bits, and fewer registers.
        count = (end - begin).to(tl.int32)
        summed = (until - begin).to(tl.int32)  # `through` includes the occurrences from here on
        known = tl.minimum(total - begin, count + 1).to(tl.int32)
        earliest = tl.where(begin > 0, 0, 1)  # first occurrence of the span that has one before it
        keys += begin
        places += begin
        scales += begin
        if COMPACT:
            runs += begin
        for at in range(0, count, ROWS):
            i = at + lanes
            here = i < count
            key = tl.load(keys + i, mask=here, other=-1)
            place = tl.load(places + i, mask=i < summed, other=0)
            scale = 0.0
            if SCALED:
                scale = tl.load(scales + i, mask=i < summed, other=0.0)
            prior = tl.load(keys + i - 1, mask=here & (i >= earliest), other=-1)
            following = tl.load(keys + i + 1, mask=i + 1 < known, other=-1)
            edge = tl.minimum(count - at, ROWS) - 1
            left = (here & (key != before) & (key >= first_key) & (key < end_key)).to(tl.int32)
            # One iteration per table, nearly always one: its numbers are equal in all lanes and take few registers.
            while tl.max(left, axis=0) > 0:
                key0 = tl.min(tl.where(left != 0, key.to(tl.int64), 0x7FFFFFFFFFFFFFFF), axis=0)
                table = table_of(meta, key0, tables, STEPS)
                numbers = meta + table * 16
                first = tl.load(numbers)
                dim = tl.multiple_of(tl.load(numbers + 1), VEC_D)
                behind_table = first + tl.load(numbers + 14)
                mine = (left != 0) & (key < behind_table)
                left = tl.where(mine, 0, left)
                inside = columns < dim
                take = mine & ((key != following) | (i == count - 1))
                key_row = key.to(tl.int64) - first
                row = key_row
                if COMPACT:
                    row = tl.load(runs + i, mask=take, other=0) - tl.load(numbers + 6)
                start = tl.multiple_of(tl.load(numbers + 2), VEC) + row * dim
                own = mine & (i < summed)
                g = gradient_rows(place, scale, grad, own, columns, inside, SCALED, VEC_G)
                if READS:
                    w = tl.load(
                        weights + (tl.multiple_of(start, VEC)[:, None] + columns),
                        mask=take[:, None] & inside,
                        other=0.0,
                    ).to(tl.float32)
                else:
                    w = tl.zeros((ROWS, COLUMNS), tl.float32)
                firsts = (tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5))
                s = load_slots(slots, firsts, row, dim, take, columns, inside, KIND0, KIND1, KIND2, VEC_S)
                repeats = own & (key == prior)
                g = tl.where((repeats & (lanes == 0))[:, None], carry + g, g)
                sums = fold_tile(g, repeats, ROWS)
                carry = one_row(sums, lanes == edge)
                sums = tl.where((mine & (i >= summed))[:, None], through, sums)
                name = names_of_rows(names, numbers, key_row, take, NAMED)
                if KEEPS:
                    take, sums = _skip_not_finite(sums, take, name, numbers, status)
                if GRAD_SCALED:
                    sums = tl.div_rn(sums, grad_scale)
                t, p0, p1, r0, r7 = step, e0, e1, h0, h7
                if PER_TABLE:
                    t, p0, p1, r0, r7 = read_pace(paces, tl.load(numbers + 10))
                whole_dim = tl.zeros((ROWS, 1), tl.float32) + tl.load(numbers + 11).to(tl.float32)
                w, s = _run_rule(
                    sums, w, s, whole_dim, (r0, h1, h2, h3, h4, h5, h6, r7), (p0, p1), inside,
                    TERMS, APPLY, MODE, WD, ROW_STEP, SUMS0, SUMS1,
                )  # fmt: skip
                if COLUMNS > 512:
                    # Several warps have read the row's slots, and one of them writes the new values.
                    tl.debug_barrier()
                store_rows(weights, w, start, take, columns, inside, numbers, name, t, ROUND, ROWS, COLUMNS, VEC)
                store_slots(slots, s, firsts, row, dim, take, columns, inside, KIND0, KIND1, KIND2, VEC_S)
                if COMPACT:
                    tl.store(rows_out + tl.load(runs + i, mask=take, other=0), key_row, mask=take)
