"""`cache_move_` on GPUs: copy rows and their state between host memory and lines, one launch per direction.

Nouns as in `definition.py`, and
  mover   one tensor of a table with its lines: rows or an optimizer slot, in units of 4 bytes (2 or 1 if rows do not
          divide by 4)

The device itself reads and writes host rows over the host link, at device addresses of that memory
(`storage/host_rows.py`). A warp requests 128 neighbouring bytes at a time, the best size for the link, and keeps
several rows in flight. A link of 55 GB/s and 1.5 us needs 80 KB in flight, which 40 programs have.

    mover 0 of table 0: rows of 64 fp32, 64 units; mover 1: a row-wise slot, 1 unit. A row that comes in: 65 units.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.cache.triton.books import tile_items
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
from tilerec.ops.runtime.triton.addresses import cached_per_stream, upload
from tilerec.ops.runtime.triton.launch import launch

_UNITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}

# Rows of `movers`, int64 [3, M]; the movers of a table are neighbours.
M_LINES, M_HOST, M_WIDTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(
    do_not_specialize=["total", "spares", "table_count", "mover_count", "most"],
    do_not_specialize_on_alignment=["units", "movers"],
)
def carry_kernel(
    plan, header, units, firsts, movers, total, spares, table_count, mover_count, most, COMES: tl.constexpr,
    TABLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the rows of ROWS plan entries at a time. See the top of the file.

    COMES: 1 copies rows into lines, 0 copies dirty rows that leave back to the host.
    firsts: per table its first mover, and the number of movers at the end; most: largest number of movers of a table.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    wanting = count_wanting_rows(header, table_count, TABLES)
    width = total.to(tl.int64) + spares
    entries = wanting
    if COMES == 0:  # the entries of released spare lines follow
        entries += spares
    first = program * ROWS
    while first < entries:
        entry = first + tl.arange(0, ROWS)
        here = entry < entries
        item = tl.where(entry < wanting, entry, total + entry - wanting)
        table = tl.load(plan + P_TABLE * width + item, mask=here, other=-1)
        line = tl.load(plan + P_LINE * width + item, mask=here, other=-1)
        if COMES:
            row = tl.load(plan + P_ROW * width + item, mask=here, other=-1)
            from_ = tl.load(plan + P_FROM * width + item, mask=here, other=-1)
            copied = here & (table >= 0) & (line >= 0) & (row >= 0)
        else:
            row = tl.load(plan + P_LEAVES * width + item, mask=here, other=-1)
            from_ = row * 0 - 1
            dirty = tl.load(plan + P_DIRTY * width + item, mask=here, other=0)
            copied = here & (table >= 0) & (line >= 0) & (row >= 0) & ((dirty & 1) != 0)
        mover = tl.load(firsts + table, mask=copied, other=0)
        end = tl.load(firsts + table + 1, mask=copied, other=0)
        for _ in range(most):
            active = copied & (mover < end)
            lines = tl.load(movers + M_LINES * mover_count + mover, mask=active, other=0)
            host = tl.load(movers + M_HOST * mover_count + mover, mask=active, other=0)
            count = tl.load(movers + M_WIDTH * mover_count + mover, mask=active, other=0)
            host_start = host + row * count
            line_start = lines + line * count
            source = host_start
            target = line_start
            if COMES:
                source = tl.where(from_ >= 0, lines + from_ * count, host_start)
            else:
                source = line_start
                target = host_start
            widest = tl.max(count, 0)
            column = widest * 0
            while column < widest:
                columns = column + tl.arange(0, COLUMNS)[None, :]
                inside = active[:, None] & (columns < count[:, None])
                values = tl.load(units + (source[:, None] + columns), mask=inside, other=0)
                tl.store(units + (target[:, None] + columns), values, mask=inside)
                column += COLUMNS
            mover += 1
        first += programs * ROWS


@cached_per_stream(64)
def _movers(
    addresses: tuple[int, ...], widths: tuple[int, ...], tables: tuple[int, ...], count: int, start: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, int, int]:  # fmt: skip
    """Return the first mover of each table, `movers` [3, M], the most movers of a table, and the bytes of a unit.

    All rows are whole numbers of units long and begin at multiples of a unit.
    """
    unit = next(unit for unit in (4, 2, 1) if all(number % unit == 0 for number in (*addresses, *widths)))
    half = len(addresses) // 2
    order = sorted(range(half), key=lambda k: tables[k])
    firsts = [sum(t < table for t in tables) for table in range(count + 1)]
    apart = [[(addresses[k + part] - start) // unit for k in order] for part in (0, half)]
    made = upload([*apart[0], *apart[1], *[widths[k] // unit for k in order]], device)
    most = max([b - a for a, b in itertools.pairwise(firsts)], default=0)
    return upload(firsts, device), made, most, unit


def cache_move_(
    plan: Tensor, header: Tensor, lines: Sequence[Tensor], host: Sequence[Tensor], tables: Sequence[int], ids: int,
    comes: bool,
) -> None:  # fmt: skip
    """See `definition.py`."""
    some = [k for k, own in enumerate(lines) if own.numel()]
    if not some or not plan.shape[1]:
        return
    if len(some) < len(lines):
        lines, host = [lines[k] for k in some], [host[k] for k in some]
        tables = [tables[k] for k in some]
    start = lines[0]
    firsts, movers, most, unit = _movers(
        tuple([own.data_ptr() for own in (*lines, *host)]),
        tuple([own.stride(0) * own.element_size() for own in lines]),
        tuple(tables), header.shape[0], start.data_ptr(), plan.device,
    )  # fmt: skip
    units = start.view(torch.uint8).view(-1).view(_UNITS[unit])
    rows = 4 if tile_items(plan) == 128 else 64
    launch(
        carry_kernel, programs_for(plan.shape[1], rows, plan), plan, header, units, firsts, movers, ids,
        plan.shape[1] - ids, header.shape[0], movers.shape[0] // 3, most, COMES=comes,
        TABLES=triton.next_power_of_2(header.shape[0]), ROWS=rows, COLUMNS=128, num_warps=1,
    )  # fmt: skip
