"""`cache_seat_` on GPUs: write the moves of a plan to the books, in one launch.

Nouns as in `definition.py`, which also has an example.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.cache.definition import NONE, HeaderColumn
from tilerec.ops.cache.triton.books import (
    C_BIT,
    C_SERIAL,
    T_DIRTY,
    T_FLIGHTS,
    T_LINE_OF,
    T_NAMED,
    T_ROW_IN,
    T_TOTALS,
    kernel_books,
    tile_items,
)
from tilerec.ops.cache.triton.plan import (
    P_DIRTY,
    P_FROM,
    P_LEAVES,
    P_LINE,
    P_ROW,
    P_TABLE,
    count_wanting_rows,
    programs_for,
)
from tilerec.ops.runtime.triton.launch import launch

_NONE = tl.constexpr(NONE)
_SEATED = tl.constexpr(int(HeaderColumn.SEATED))


@triton.jit(
    do_not_specialize=["total", "spares", "table_count"],
    do_not_specialize_on_alignment=["tables", "clock", "ints", "longs", "bytes"],
)
def seat_kernel(
    plan, header, tables, clock, ints, longs, bytes, total, spares, table_count, TABLES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Apply a plan's entries to the books. The first program adds the header to the tables' totals (`totals`), once."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    wanting = count_wanting_rows(header, table_count, TABLES)
    width = total.to(tl.int64) + spares
    first = program * TILE
    while first < wanting + spares:
        entry = first + tl.arange(0, TILE)
        here = entry < wanting + spares
        item = tl.where(entry < wanting, entry, total + entry - wanting)
        table = tl.load(plan + P_TABLE * width + item, mask=here, other=-1)
        row = tl.load(plan + P_ROW * width + item, mask=here, other=-1)
        line = tl.load(plan + P_LINE * width + item, mask=here, other=-1)
        leaves = tl.load(plan + P_LEAVES * width + item, mask=here, other=-1)
        from_ = tl.load(plan + P_FROM * width + item, mask=here, other=-1)
        dirty = tl.load(plan + P_DIRTY * width + item, mask=here, other=0)
        sits = here & (table >= 0) & (line >= 0)
        takes = sits & (row >= 0)
        moved = takes & (from_ >= 0)
        own = tables + tl.where(sits, table, 0)
        line_of = ints + tl.load(own + T_LINE_OF * table_count)
        row_in = longs + tl.load(own + T_ROW_IN * table_count)
        flights = ints + tl.load(own + T_FLIGHTS * table_count)
        dirties = bytes + tl.load(own + T_DIRTY * table_count)
        serial = tl.load(clock + C_SERIAL * table_count + tl.where(sits, table, 0))
        bits = tl.load(clock + C_BIT * table_count + tl.where(sits, table, 0)).to(tl.int32)
        bits = bits | tl.load(flights + from_, mask=moved, other=0)
        tl.store(line_of + leaves, (leaves * 0 + _NONE).to(tl.int32), mask=sits & (leaves >= 0))
        tl.store(row_in + from_, row * 0 - 1, mask=moved)
        tl.store(dirties + from_, (row * 0).to(tl.uint8), mask=moved)
        tl.store(line_of + row, line.to(tl.int32), mask=takes)
        tl.store(row_in + line, row, mask=sits)  # -1 where no row comes
        tl.store(longs + tl.load(own + T_NAMED * table_count) + line, serial, mask=takes)
        tl.store(flights + line, bits, mask=takes)
        tl.store(dirties + line, (dirty >= 2).to(tl.uint8), mask=sits)
        first += programs * TILE
    if program == 0:
        some = tl.arange(0, TABLES)
        listed = some < table_count
        due = listed & (tl.load(header + some * 8 + _SEATED, mask=listed, other=1) == 0)
        totals = longs + tl.load(tables + T_TOTALS * table_count + some, mask=listed, other=0)
        for column in tl.static_range(7):
            seen = tl.load(totals + column, mask=due, other=0)
            tl.store(totals + column, seen + tl.load(header + some * 8 + column, mask=due, other=0), mask=due)
        tl.debug_barrier()
        tl.store(header + some * 8 + _SEATED, (some * 0 + 1).to(tl.int64), mask=due)


def cache_seat_(plan: Tensor, header: Tensor, books: Sequence[Tensor], clock: Tensor, ids: int) -> None:
    """See `definition.py`."""
    count = header.shape[0]
    if not count:
        return
    # This kernel does not use the number of sets: 0 sets declare all lines of a table as spare.
    read = kernel_books(books, (0,) * count, 1)
    tile = tile_items(plan)
    launch(
        seat_kernel, programs_for(plan.shape[1], tile, plan), plan, header, read.tables, clock, read.ints, read.longs,
        read.bytes, ids, plan.shape[1] - ids, count, TABLES=triton.next_power_of_2(count), TILE=tile, num_warps=1,
    )  # fmt: skip
