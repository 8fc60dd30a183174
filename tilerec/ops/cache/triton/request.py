"""`cache_ask_` on GPUs: find the distinct rows that a batch requests from all caches, in one launch and a sort.

Nouns as in `definition.py`.

The kernel finds distinct rows without sorting all ids. Each occurrence atomically raises `line_of` of its row to the
claim of this request, a negative number above the claims of earlier requests. Lines are not negative, so a row that
has a line keeps it. Of a row without a line, exactly one occurrence reads a number older than its own claim; this
occurrence represents the row. Of a row with a line, the occurrence that sets the request's bit in `flights` represents
it. Which occurrence that is may differ from run to run, and no result depends on it. Wanting rows are then sorted by
keys that differ from row to row, so their order is the same in every run.

Example: none = -2^31, serial 5; ids (8, 8), row 8 has none. The first occurrence reads -2^31 and leaves 5 - 2^31; the
second reads that and does nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.cache.definition import BOOKS, LINE_OF, MAX_COUNT, NONE, HeaderColumn, raise_bad_row_id
from tilerec.ops.cache.triton.books import (
    C_BIT,
    C_SERIAL,
    S_BEGIN,
    S_COUNT,
    S_START,
    S_TABLE,
    S_TILE,
    T_COUNTS,
    T_EACH,
    T_FIRST_KEY,
    T_FIRST_SPARE,
    T_FLIGHTS,
    T_LFU,
    T_LINE_OF,
    T_NAMED,
    T_OF_SET,
    T_ROWS,
    T_SETS,
    kernel_books,
    tile_items,
    upload_segments,
)
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.runtime.triton.reports import new_report, post, raise_due
from tilerec.ops.runtime.triton.rows import take_report
from tilerec.ops.runtime.triton.search import segment_at

_NONE, _MOST = tl.constexpr(NONE), tl.constexpr(MAX_COUNT)
H_ROWS, H_MISSES, H_WANTING = (
    tl.constexpr(int(t)) for t in (HeaderColumn.ROWS, HeaderColumn.MISSES, HeaderColumn.WANTING)
)


@triton.jit(
    do_not_specialize=["segment_count", "table_count", "last_key"],
    do_not_specialize_on_alignment=["ids", "segments", "tables", "clock", "ints", "longs"],
)
def ask_kernel(
    ids, segments, tables, clock, ints, longs, header, unsorted, report, segment_count, table_count, last_key,
    TILE: tl.constexpr,
):  # fmt: skip
    """Process a tile of a segment's ids: name, hold and claim rows, and write keys of wanting rows.

    See the top of the file.
    """
    program = tl.program_id(0).to(tl.int64)
    segment = segment_at(segments + S_TILE * segment_count, segment_count, program)
    s = segments + segment
    at = (program - tl.load(s + S_TILE * segment_count)) * TILE + tl.arange(0, TILE)
    here = at < tl.load(s + S_COUNT * segment_count)
    begin = tl.load(s + S_BEGIN * segment_count)
    table = tl.load(s + S_TABLE * segment_count)
    own = tables + table
    row = tl.load(ids + begin + at, mask=here, other=0).to(tl.int64)
    good = here & (row >= 0) & (row < tl.load(own + T_ROWS * table_count))
    bad = here & ~good
    if tl.sum(bad.to(tl.int32), 0) > 0:
        first_bad = tl.min(tl.where(bad, at, 1 << 62), 0)
        take_report(report, segment, begin + first_bad, tl.sum(tl.where(at == first_bad, row, 0), 0))
    serial = tl.load(clock + C_SERIAL * table_count + table)
    bit = tl.load(clock + C_BIT * table_count + table).to(tl.int32)
    claim = (serial + _NONE).to(tl.int32)
    line_of = ints + tl.load(own + T_LINE_OF * table_count)
    line = tl.atomic_max(line_of + row, claim + tl.zeros_like(at).to(tl.int32), mask=good, sem="relaxed")
    has = good & (line >= 0)
    claimed = good & (line < 0) & (line != claim)
    flights = ints + tl.load(own + T_FLIGHTS * table_count)
    before = tl.atomic_or(flights + line, bit + tl.zeros_like(line), mask=has, sem="relaxed")
    hit = has & ((before & bit) == 0)
    tl.store(longs + tl.load(own + T_NAMED * table_count) + line, serial + tl.zeros_like(at), mask=hit)
    represents = claimed | hit
    wanting = claimed | (hit & (line >= tl.load(own + T_FIRST_SPARE * table_count)))
    count = tl.zeros_like(line)
    lfu = tl.load(own + T_LFU * table_count) != 0
    if lfu:
        counts = ints + tl.load(own + T_COUNTS * table_count) + row
        count = tl.load(counts, mask=represents, other=0)
        tl.store(counts, tl.minimum(count.to(tl.int64) + 1, _MOST).to(tl.int32), mask=represents)
    sets = tl.load(own + T_SETS * table_count)
    each = tl.load(own + T_EACH * table_count)
    key = tl.load(own + T_FIRST_KEY * table_count) + row // sets
    key += (row % sets) * tl.load(own + T_OF_SET * table_count)
    if lfu:
        key += (_MOST - count.to(tl.int64)) * each
    key = tl.where(wanting, key, last_key.to(tl.int64))
    start = tl.load(s + S_START * segment_count)
    tl.store(unsorted + start + at, key.to(unsorted.dtype.element_ty), mask=here)
    totals = header + table * 8
    row_count = tl.sum(represents.to(tl.int64), 0)
    miss_count = tl.sum(claimed.to(tl.int64), 0)
    wanting_count = tl.sum(wanting.to(tl.int64), 0)
    tl.atomic_add(totals + H_ROWS, row_count, mask=row_count > 0, sem="relaxed")
    tl.atomic_add(totals + H_MISSES, miss_count, mask=miss_count > 0, sem="relaxed")
    tl.atomic_add(totals + H_WANTING, wanting_count, mask=wanting_count > 0, sem="relaxed")


def cache_ask_(
    ids: Tensor, begins: Sequence[int], ends: Sequence[int], tables: Sequence[int], books: Sequence[Tensor],
    sets: Sequence[int], ways: int, clock: Tensor, names: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `definition.py`. Runs a fill with zeros, a launch and `torch.sort`."""
    raise_due(ids.device)
    ids = ids.contiguous()
    read = kernel_books(books, sets, ways)
    tile = tile_items(ids)
    segments, tiles, total = upload_segments(tuple(begins), tuple(ends), tuple(tables), tile, ids.device)
    header = torch.zeros(len(sets), 8, dtype=torch.int64, device=ids.device)
    keys_N = torch.empty(total, dtype=read.key_type, device=ids.device)
    if total:
        report = new_report(ids.device)
        launch(
            ask_kernel, (tiles,), ids, segments, read.tables, clock, read.ints, read.longs, header, keys_N, report,
            len(tables), read.count, read.last_key, TILE=tile, num_warps=1,
        )  # fmt: skip
        rows = [books[BOOKS * t + LINE_OF].shape[0] for t in tables]
        of_segment = tuple(tables)

        def raise_(segment: int, position: int, id_: int) -> None:
            raise_bad_row_id(names, segment, position, id_, rows[segment], of_segment[segment])

        post(report, raise_)
    sorted_N, order_N = torch.sort(keys_N)
    return header, sorted_N, order_N
