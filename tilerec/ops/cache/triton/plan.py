"""`cache_plan` on GPUs: assign lines to wanting rows, in two launches and a sum of flags between them.

Nouns as in `definition.py`, and
  rank    of a wanting row: its position among the wanting rows of its set, by key
  turn    of a way: its position in the eviction order of its set

  give_kernel   per wanting row: the way of its set whose turn is its rank, or a flag that it needs a spare line; per
                spare line: a flag that it is free
  torch.cumsum  of the flags
  plan_kernel   gives the k-th row with a flag the k-th free spare line of its table, and writes the plan

Example: a set of 4 ways, named at (7, 3, held, empty): turns (2, 1, 3, 0). Its first wanting row gets way 3, the second
way 1, the third way 0. The way of the fourth is held, so that row needs a spare line.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.cache.definition import SERIAL_BITS, HeaderColumn, Plan
from tilerec.ops.cache.triton.books import (
    C_ALIVE,
    S_BEGIN,
    S_START,
    S_TABLE,
    T_COUNTS,
    T_DIRTY,
    T_FIRST_KEY,
    T_FIRST_SPARE,
    T_FLIGHTS,
    T_LFU,
    T_LINE_OF,
    T_NAMED,
    T_OF_SET,
    T_ROW_IN,
    T_SETS,
    T_SPARE,
    Books,
    kernel_books,
    tile_items,
    upload_segments,
)
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.runtime.triton.search import segments_of

H_WANTING, H_SPARE, H_FREE, H_EVICTIONS, H_WRITES = (
    tl.constexpr(int(t))
    for t in (
        HeaderColumn.WANTING,
        HeaderColumn.SPARE,
        HeaderColumn.FREE,
        HeaderColumn.EVICTIONS,
        HeaderColumn.WRITES,
    )
)
P_TABLE, P_ROW, P_LINE, P_LEAVES, P_FROM, P_DIRTY = (tl.constexpr(int(row)) for row in Plan)
_HELD, _SERIAL_BITS = tl.constexpr(1 << 62), tl.constexpr(SERIAL_BITS)
PROGRAMS = 4096
"""Most programs of a grid. Each loops over entries, since only the device has the number of wanting rows."""


@triton.jit
def count_wanting_rows(header, table_count, TABLES: tl.constexpr):
    """Return the number of wanting rows of all tables."""
    table = tl.arange(0, TABLES)
    return tl.sum(tl.load(header + table * 8 + H_WANTING, mask=table < table_count, other=0), 0)


@triton.jit
def _table_and_row(ids, segments, order, item, here, segment_count):
    """Return the table and the row of sorted entries."""
    occurrence = tl.load(order + item, mask=here, other=0)
    s = segments_of(segments + S_START * segment_count, occurrence, 0, segment_count - 1)
    start = tl.load(segments + S_START * segment_count + s)
    begin = tl.load(segments + S_BEGIN * segment_count + s)
    row = tl.load(ids + begin + (occurrence - start), mask=here, other=0).to(tl.int64)
    return tl.load(segments + S_TABLE * segment_count + s), row


@triton.jit(
    do_not_specialize=["total", "spares", "segment_count", "table_count"],
    do_not_specialize_on_alignment=["ids", "segments", "tables", "clock", "ints", "longs"],
)
def give_kernel(
    ids, segments, tables, clock, ints, longs, header, keys, order, given, flags, total, spares, segment_count,
    table_count, TABLES: tl.constexpr, ENTRIES: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Assign lines of sets to wanting rows. See the top of the file."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    wanting = count_wanting_rows(header, table_count, TABLES)
    way = tl.arange(0, WAYS)
    first = program * ENTRIES
    while first < wanting:
        item = first + tl.arange(0, ENTRIES)
        here = item < wanting
        table, row = _table_and_row(ids, segments, order, item, here, segment_count)
        own = tables + table
        set_ = row % tl.load(own + T_SETS * table_count)
        set_key = tl.load(own + T_FIRST_KEY * table_count) + set_ * tl.load(own + T_OF_SET * table_count)
        before = item[:, None] - 1 - way[None, :]
        others = tl.load(keys + before, mask=here[:, None] & (before >= 0), other=-1).to(tl.int64)
        rank = tl.sum((others >= set_key[:, None]).to(tl.int32), 1)
        exists = here & (tl.load(own + T_FIRST_SPARE * table_count) > 0)
        line = set_[:, None] * WAYS + way[None, :]
        inside = exists[:, None] & (line >= 0)
        resident = tl.load(longs + (tl.load(own + T_ROW_IN * table_count)[:, None] + line), mask=inside, other=-1)
        age = tl.load(longs + (tl.load(own + T_NAMED * table_count)[:, None] + line), mask=inside, other=0)
        bits = tl.load(ints + (tl.load(own + T_FLIGHTS * table_count)[:, None] + line), mask=inside, other=0)
        alive = tl.load(clock + C_ALIVE * table_count + table).to(tl.int32)
        empty = resident < 0
        held = inside & (empty == 0) & ((bits & alive[:, None]) != 0)
        lfu = exists & (tl.load(own + T_LFU * table_count) != 0)
        counts = ints + tl.load(own + T_COUNTS * table_count)
        frequency = tl.load(counts[:, None] + resident, mask=lfu[:, None] & (empty == 0), other=0)
        score = (frequency.to(tl.int64) << _SERIAL_BITS) + age
        score = tl.where(empty, -1, tl.where(held, _HELD, score))
        goes_before = (score[:, None, :] < score[:, :, None]) | (
            (score[:, None, :] == score[:, :, None]) & (way[None, None, :] < way[None, :, None])
        )
        turn = tl.sum(goes_before.to(tl.int32), 2)
        chosen = inside & (turn == rank[:, None]) & (held == 0)
        assigned = tl.sum(chosen.to(tl.int32), 1) > 0
        evicted_frequency = tl.sum(tl.where(chosen, score >> _SERIAL_BITS, 0), 1)
        row_frequency = tl.load(counts + row, mask=lfu, other=0).to(tl.int64)
        assigned = assigned & (row_frequency >= evicted_frequency)
        tl.store(given + item, tl.where(assigned, tl.sum(tl.where(chosen, line, 0), 1), -1).to(tl.int32), mask=here)
        had = tl.load(ints + tl.load(own + T_LINE_OF * table_count) + row, mask=here, other=0)
        needs = here & (assigned == 0) & (had < 0)
        tl.store(flags + item, needs.to(tl.int32), mask=here)
        tl.atomic_add(header + table * 8 + H_SPARE, needs.to(tl.int64), mask=needs, sem="relaxed")
        first += programs * ENTRIES
    first = program * TILE
    while first < spares:
        item = first + tl.arange(0, TILE)
        here = item < spares
        table, line = spare_line(tables, item, table_count)
        own = tables + table
        resident = tl.load(longs + tl.load(own + T_ROW_IN * table_count) + line, mask=here, other=-1)
        bits = tl.load(ints + tl.load(own + T_FLIGHTS * table_count) + line, mask=here, other=0)
        alive = tl.load(clock + C_ALIVE * table_count + table).to(tl.int32)
        free = here & ((resident < 0) | ((bits & alive) == 0))
        tl.store(flags + total + item, free.to(tl.int32), mask=here)
        tl.atomic_add(header + table * 8 + H_FREE, free.to(tl.int64), mask=free, sem="relaxed")
        first += programs * TILE


@triton.jit
def spare_line(tables, item, table_count):
    """Return the table and the line of spare lines that are numbered over all tables."""
    table = segments_of(tables + T_SPARE * table_count, item, 0, table_count - 1)
    own = tables + table
    line = tl.load(own + T_FIRST_SPARE * table_count) + item - tl.load(own + T_SPARE * table_count)
    return table, line


@triton.jit(
    do_not_specialize=["total", "spares", "segment_count", "table_count"],
    do_not_specialize_on_alignment=["ids", "segments", "tables", "ints", "longs", "bytes"],
)
def plan_kernel(
    ids, segments, tables, ints, longs, bytes, header, keys, order, given, flags, sums, plan, total, spares,
    segment_count, table_count, TABLES: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Assign spare lines and write the plan. See the top of the file.

    sums: inclusive sums of flags. STEPS: of the search for the k-th free spare line, 2^STEPS > spares.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    wanting = count_wanting_rows(header, table_count, TABLES)
    width = total.to(tl.int64) + spares
    first = program * TILE
    while first < wanting:
        item = first + tl.arange(0, TILE)
        here = item < wanting
        table, row = _table_and_row(ids, segments, order, item, here, segment_count)
        own = tables + table
        had = tl.load(ints + tl.load(own + T_LINE_OF * table_count) + row, mask=here, other=0).to(tl.int64)
        line = tl.load(given + item, mask=here, other=-1).to(tl.int64)
        of_set = here & (line >= 0)
        needs = here & (tl.load(flags + item, mask=here, other=0) != 0)
        # Rank among the rows of its table that need a spare line: subtract the rows of the tables before it.
        rank = tl.load(sums + item, mask=needs, other=1) - 1
        for other in range(table_count):
            rank -= tl.where(table > other, tl.load(header + other * 8 + H_SPARE), 0)
        start = tl.load(own + T_SPARE * table_count)
        end = tl.load(own + T_SPARE * table_count + 1, mask=table + 1 < table_count, other=0)
        end = tl.where(table + 1 < table_count, end, spares)
        before = tl.load(sums + total + start - 1, mask=needs & (total + start > 0), other=0)
        # Search the last spare line up to which at most `rank` lines are free; the next line is the row's.
        passed = start - 1
        for step in tl.static_range(STEPS):
            tried = passed + (1 << (STEPS - 1 - step))
            few = tl.load(sums + total + tried, mask=needs & (tried < end), other=9223372036854775807)
            passed = tl.where(few <= before + rank, tried, passed)
        spare = passed + 1
        found = needs & (spare < end)
        first_spare = tl.load(own + T_FIRST_SPARE * table_count)
        line = tl.where(found, first_spare + spare - start, line)
        takes = of_set | found
        leaves = tl.load(longs + tl.load(own + T_ROW_IN * table_count) + line, mask=takes, other=-1)
        from_ = tl.where(takes & (had >= 0), had, -1)
        dirty = bytes + tl.load(own + T_DIRTY * table_count)
        out = tl.load(dirty + line, mask=takes & (leaves >= 0), other=0).to(tl.int64)
        moves = tl.load(dirty + from_, mask=from_ >= 0, other=0).to(tl.int64)
        tl.store(plan + P_TABLE * width + item, table, mask=here)
        tl.store(plan + P_ROW * width + item, row, mask=here)
        tl.store(plan + P_LINE * width + item, line, mask=here)
        tl.store(plan + P_LEAVES * width + item, leaves, mask=here)
        tl.store(plan + P_FROM * width + item, from_, mask=here)
        tl.store(plan + P_DIRTY * width + item, out + 2 * moves, mask=here)
        evicts = of_set & (leaves >= 0)
        tl.atomic_add(header + table * 8 + H_EVICTIONS, evicts.to(tl.int64), mask=evicts, sem="relaxed")
        tl.atomic_add(header + table * 8 + H_WRITES, out, mask=out > 0, sem="relaxed")
        first += programs * TILE
    first = program * TILE
    while first < spares:
        item = first + tl.arange(0, TILE)
        here = item < spares
        table, line = spare_line(tables, item, table_count)
        own = tables + table
        free = tl.load(flags + total + item, mask=here, other=0) != 0
        start = tl.load(own + T_SPARE * table_count)
        before = tl.load(sums + total + start - 1, mask=here & (total + start > 0), other=0)
        rank = tl.load(sums + total + item, mask=here, other=0) - before - 1
        taken = rank < tl.load(header + table * 8 + H_SPARE)
        leaves = tl.load(longs + tl.load(own + T_ROW_IN * table_count) + line, mask=here, other=-1)
        released = here & free & (taken == 0) & (leaves >= 0)
        out = tl.load(bytes + tl.load(own + T_DIRTY * table_count) + line, mask=released, other=0).to(tl.int64)
        none = item * 0 - 1
        at = plan + total + item
        tl.store(at + P_TABLE * width, tl.where(released, table, -1), mask=here)
        tl.store(at + P_ROW * width, none, mask=here)
        tl.store(at + P_LINE * width, tl.where(released, line, -1), mask=here)
        tl.store(at + P_LEAVES * width, tl.where(released, leaves, -1), mask=here)
        tl.store(at + P_FROM * width, none, mask=here)
        tl.store(at + P_DIRTY * width, out, mask=here)
        tl.atomic_add(header + table * 8 + H_WRITES, out, mask=out > 0, sem="relaxed")
        first += programs * TILE


def programs_for(entries: int, each: int, values: Tensor) -> tuple[int]:
    """Return a grid for at most `entries` entries, `each` per step of a program."""
    most = PROGRAMS if tile_items(values) == 128 else 2
    return (max(1, min(-(-entries // each), most)),)


def cache_plan(
    ids: Tensor, begins: Sequence[int], ends: Sequence[int], tables: Sequence[int], books: Sequence[Tensor],
    sets: Sequence[int], ways: int, clock: Tensor, header: Tensor, keys: Tensor, order: Tensor,
) -> Tensor:  # fmt: skip
    """See `definition.py`. Never waits: programs read the number of wanting rows from the header."""
    ids = ids.contiguous()
    read: Books = kernel_books(books, sets, ways)
    tile = tile_items(ids)
    segments, _, total = upload_segments(tuple(begins), tuple(ends), tuple(tables), tile, ids.device)
    plan = torch.empty(6, total + read.spares, dtype=torch.int64, device=ids.device)
    if not sets or not plan.shape[1]:
        return plan
    given = torch.empty(total, dtype=torch.int32, device=ids.device)
    flags = torch.zeros(total + read.spares, dtype=torch.int32, device=ids.device)
    entries = 1 if tile == 128 else 64
    tables_padded = triton.next_power_of_2(len(sets))
    grid = programs_for(max(total, -(-read.spares // tile)), entries, ids)
    launch(
        give_kernel, grid, ids, segments, read.tables, clock, read.ints, read.longs, header, keys, order, given, flags,
        total, read.spares, len(tables), read.count, TABLES=tables_padded, ENTRIES=entries, WAYS=ways, TILE=tile,
        num_warps=1,
    )  # fmt: skip
    sums = torch.cumsum(flags, 0)
    grid = programs_for(max(total, read.spares), tile, ids)
    launch(
        plan_kernel, grid, ids, segments, read.tables, read.ints, read.longs,
        read.bytes, header, keys, order, given, flags, sums, plan, total, read.spares, len(tables), read.count,
        TABLES=tables_padded, STEPS=read.spares.bit_length(), TILE=tile, num_warps=1,
    )  # fmt: skip
    return plan
