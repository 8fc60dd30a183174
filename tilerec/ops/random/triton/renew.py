"""Reinitialization of rows on a GPU: `tilerec/ops/random/renew.py`, which has the nouns. The host never waits.

Most entries name no row (their id evicted no other), so a program reads many entries and returns if none of them names
a row. Otherwise it writes the rows of all of its entries under masks: as many stores as rows.

Rows [5, -1, 9, 5] of a tile of rows 4 to 7: the program's entries 0 and 3 name row 1 of the tile, and write the same
values there.

Legend: N entries, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tilerec.ops.random.renew import RenewCall, renew_rows_reference_
from tilerec.ops.random.triton.backend import round_to_nearest, words
from tilerec.ops.runtime.triton.rows import reads

_ENTRIES = 64  # of a program: 512 bytes of row numbers, read by one warp at once
_ELEMENTS = 512  # of a store: 16 in each lane


@triton.jit
def _local(rows_N, n, count, row_offset, held):
    """Return the rows of a program's entries, counted from the tile's first, and a mask of rows in the tile."""
    row = tl.load(rows_N + n, mask=n < count, other=-1)
    local = row - row_offset
    return local, (row >= 0) & (local >= 0) & (local < held)


@triton.jit(
    do_not_specialize=["count", "row_offset", "held", "width", "column_offset", "k0", "k1"],
    do_not_specialize_on_alignment=["rows_N"],
)
def values_kernel(
    tile, rows_N, count, row_offset, held, width, column_offset, k0, k1, low, high,
    ENTRIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the initial values of rows.

    Columns begin at a multiple of 4 of the whole table, as groups of four words do.
    """
    row_offset, held, width = row_offset.to(tl.int64), held.to(tl.int64), width.to(tl.int64)
    column_offset = column_offset.to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * ENTRIES
    _, here = _local(rows_N, begin + tl.arange(0, ENTRIES), count, row_offset, held)
    if tl.max(here.to(tl.int32), axis=0) > 0:
        shift = column_offset % 4
        first = column_offset - shift + tl.program_id(1).to(tl.int64) * COLUMNS
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :] - shift
        for part in range(0, ENTRIES, ROWS):
            local, inside = _local(rows_N, begin + part + tl.arange(0, ROWS), count, row_offset, held)
            if tl.max(inside.to(tl.int32), axis=0) > 0:
                place = (local + row_offset)[:, None]
                zero = place * 0
                random = words(place, zero + first, zero, zero + k0, zero + k1, ROWS, COLUMNS, True)
                u = (random >> 8).to(tl.int32)
                values = low + (high - low) * (u.to(tl.float32) * 5.9604644775390625e-08)
                tl.store(
                    tile + local[:, None] * width + column,
                    round_to_nearest(values, tile.dtype.element_ty),
                    mask=inside[:, None] & (column >= 0) & (column < width),
                )


@triton.jit(do_not_specialize=["count", "row_offset", "held", "width"], do_not_specialize_on_alignment=["rows_N"])
def number_kernel(
    beside, rows_N, count, row_offset, held, width, number,
    ENTRIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store one number in all columns of reinitialized rows."""
    row_offset, held, width = row_offset.to(tl.int64), held.to(tl.int64), width.to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * ENTRIES
    _, here = _local(rows_N, begin + tl.arange(0, ENTRIES), count, row_offset, held)
    if tl.max(here.to(tl.int32), axis=0) > 0:
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        for part in range(0, ENTRIES, ROWS):
            local, inside = _local(rows_N, begin + part + tl.arange(0, ROWS), count, row_offset, held)
            value = tl.zeros((ROWS, COLUMNS), tl.float32) + number
            tl.store(
                beside + local[:, None] * width + column,
                value.to(beside.dtype.element_ty),
                mask=inside[:, None] & (column < width),
            )


def renew_rows_(call: RenewCall) -> None:
    """See `tilerec/ops/random/renew.py`. Runs a launch for the tile and one for each tensor beside it."""
    rows_N, tile, beside, row_offset, column_offset, key, low, high, numbers = call
    if not all(reads(tensor.dtype, tensor.device) and tensor.is_contiguous() for tensor in call.reset):
        renew_rows_reference_(call)
        return
    held = call.reset[0].shape[0] if call.reset else 0
    rows_N = rows_N.contiguous()
    count = rows_N.shape[0]
    if not count or not held:
        return
    if tile is not None and tile.shape[1]:
        span = tile.shape[1] + column_offset % 4
        columns = min(max(triton.next_power_of_2(span), 4), 256)
        values_kernel[triton.cdiv(count, _ENTRIES), triton.cdiv(span, columns)](
            tile, rows_N, count, row_offset, held, tile.shape[1], column_offset, key[0] & 0xFFFFFFFF,
            key[1] & 0xFFFFFFFF, float(low), float(high), ENTRIES=_ENTRIES,
            ROWS=min(_ENTRIES, _ELEMENTS // columns), COLUMNS=columns, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    for tensor, number in zip(beside, numbers, strict=True):
        width = tensor.numel() // held
        columns = min(triton.next_power_of_2(max(width, 1)), 256)
        number_kernel[triton.cdiv(count, _ENTRIES), triton.cdiv(max(width, 1), columns)](
            tensor, rows_N, count, row_offset, held, width, float(number), ENTRIES=_ENTRIES,
            ROWS=min(_ENTRIES, _ELEMENTS // columns), COLUMNS=columns, num_warps=1,
        )  # fmt: skip


KERNELS: dict[str, Callable[..., Any]] = {"renew_rows_": renew_rows_}
"""Kernels by op name."""
