"""Software cache of host tables in device memory. One request assigns lines to the rows of a batch, for all its tables.

Terms (more in `storage/row_cache.py`)
  line      space for one row and its optimizer state on the device. `ways` lines form a set. Row r may be in a line of
            set `r % sets` or in a spare line. Spare lines follow the sets
  books     state of a table's cache: `BOOKS` tensors per table, in this order:
              line_of  int32 [E]   the row's line; negative: none
              row_in   int64 [L]   the line's row; -1: none
              named    int64 [L]   serial of the last request with the row
              flights  int32 [L]   one bit for each request with the row; bits of finished batches are ignored
              counts   int32 [E]   number of requests with the row, at most `MAX_COUNT`; shape [0]: LRU, not LFU
              dirty    bool  [L]   the line was updated since its row was read from or written to the table
              totals   int64 [8]   sum of `header` over all requests
  clock     int64 [3, T], per table: the request's serial (ascending, 1 to 2^31 - 2), its bit, and the bits of all
            batches in flight including this one. A line whose row has one of these bits is held: it is not reassigned
  segment   ids [begin, end) that read one table
  wanting   a distinct row without a line, or in a spare line: it needs a line of its set
  plan      int64 [6, N + spare]: the planned moves (`Plan`). Entry i < (number of wanting rows) is one wanting row.
            Entry N + s is spare line s, counted over all tables. Entries in between are undefined

A request consists of four ops. None of them needs a device value on the host:

    cache_ask_    finds the batch's distinct rows: hits are marked and held, wanting rows are sorted by set
    cache_plan    assigns lines set by set, in eviction order; the other rows get spare lines. Changes no books
    cache_move_   first call: writes evicted dirty rows to the table; second call: loads the new rows into their lines
    cache_seat_   records the moves in the books

`cache_lines_` converts ids to line numbers; it may run any number of times. The host may be interrupted between any two
of these ops: no row is read from a new line before `cache_seat_`, and overwritten rows were written back before.

Legend: T tables, E rows, L lines, N ids of all segments, W ways, M wanting rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.lookup.definition import raise_bad_id
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.update.checks import raise_bad_row

BOOKS = 7
LINE_OF, ROW_IN, NAMED, FLIGHTS, COUNTS, DIRTY, TOTALS = range(BOOKS)

NONE = torch.iinfo(torch.int32).min
"""Value in `line_of` for a row without a line. Every negative value means no line: `NONE + serial` marks a row that the
request with this serial has claimed."""

MAX_COUNT = torch.iinfo(torch.int32).max
"""Upper limit of a row's request count, and of serials."""

_NEVER = torch.iinfo(torch.int64).max


class HeaderColumn(IntEnum):
    """Columns of a request's header, int64 [T, 8], and of the running totals."""

    ROWS = 0  # distinct rows
    MISSES = 1  # distinct rows without a line
    WANTING = 2
    SPARE = 3  # wanting rows that need a spare line: conflict misses
    FREE = 4  # spare lines that can be assigned
    EVICTIONS = 5
    WRITES = 6  # evicted dirty rows
    SEATED = 7  # 1 once the header has been added to the totals


class Plan(IntEnum):
    """Rows of a plan, int64 [6, N + spare]."""

    TABLE = 0  # -1: no move
    ROW = 1  # row that gets the line; -1: none
    LINE = 2  # new line of ROW; -1: ROW stays in its spare line
    LEAVES = 3  # row evicted from LINE; -1: none
    FROM = 4  # spare line that holds ROW now; -1: ROW is loaded from the table
    DIRTY = 5  # 1 if LEAVES is dirty, plus 2 if FROM is dirty


LIBRARY.define(
    "cache_ask_(Tensor ids, int[] begins, int[] ends, int[] tables, Tensor(a!)[] books, int[] sets, int ways, "
    "Tensor clock, str names) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "cache_plan(Tensor ids, int[] begins, int[] ends, int[] tables, Tensor[] books, int[] sets, int ways, "
    "Tensor clock, Tensor(a!) header, Tensor keys, Tensor order) -> Tensor"
)
LIBRARY.define(
    "cache_move_(Tensor plan, Tensor header, Tensor(a!)[] lines, Tensor(b!)[] host, int[] tables, int ids, bool comes) "
    "-> ()"
)
LIBRARY.define("cache_seat_(Tensor plan, Tensor(a!) header, Tensor(b!)[] books, Tensor clock, int ids) -> ()")
LIBRARY.define(
    "cache_lines_(Tensor ids, int[] begins, int[] ends, int[] tables, Tensor[] line_of, Tensor(a!)[] dirty, "
    "int[] strangers) -> Tensor"
)


def assign_lines(
    rows_M: Tensor, order_M: Tensor, uses_M: Tensor | None, held_L: Tensor, row_in_L: Tensor, named_L: Tensor,
    count_E: Tensor, sets: int, ways: int,
) -> Tensor:  # fmt: skip
    """Return the line of its set that each row gets, or -1.

    The k-th wanting row of a set gets the k-th line in eviction order, if there is one: empty lines first, then by
    `named`. With `uses_M` the order is by `count_E` first, and a line is taken only if its row's count is at most the
    new row's.

    Args:
        order_M: positions of the rows in the order in which they get lines.
        uses_M: number of requests with each row, including this one (LFU); None: LRU.

    Example: 1 set of 2 lines with rows (4, 6), last used by requests (1, 2); rows (8, 2, 0) in this order -> lines
    (0, 1, -1).
    """
    if not sets or not rows_M.numel():
        return torch.full_like(rows_M, -1)
    set_M = rows_M % sets
    order_M = order_M[torch.argsort(set_M[order_M], stable=True)]
    set_S, inverse_M, count_S = torch.unique_consecutive(
        set_M[order_M], return_inverse=True, return_counts=True
    )
    rank_M = torch.arange(rows_M.numel(), device=rows_M.device) - (count_S.cumsum(0) - count_S)[inverse_M]
    lines_SW = set_S[:, None] * ways + torch.arange(ways, device=rows_M.device)
    row_SW, named_SW = row_in_L[lines_SW], named_L[lines_SW]
    empty_SW = row_SW < 0
    held_SW = ~empty_SW & held_L[lines_SW]
    by_age = named_SW.masked_fill(empty_SW, -1).masked_fill(held_SW, _NEVER)
    first_SW = torch.argsort(by_age, dim=1, stable=True)
    if uses_M is not None:
        count_SW = count_E[row_SW.clamp(min=0)].long()
        count_SW = count_SW.masked_fill(empty_SW, -1).masked_fill(held_SW, _NEVER)
        by_age = count_SW.gather(1, first_SW)
        again_SW = torch.argsort(by_age, dim=1, stable=True)
        by_age, first_SW = by_age.gather(1, again_SW), first_SW.gather(1, again_SW)
    else:
        by_age = by_age.gather(1, first_SW)
    way_M = rank_M.clamp(max=ways - 1)
    value_M = by_age[inverse_M, way_M]
    gets = (rank_M < ways) & (value_M != _NEVER)
    if uses_M is not None:
        gets &= uses_M[order_M] >= value_M
    line_M = lines_SW[inverse_M, first_SW[inverse_M, way_M]].masked_fill(~gets, -1)
    given_M = torch.empty_like(rows_M)
    given_M[order_M] = line_M
    return given_M


def key_ranges(
    books: Sequence[Tensor], sets: Sequence[int]
) -> tuple[list[tuple[int, int, int]], int, torch.dtype]:
    """Return each table's (first key, keys per set, rows per set), the end of all keys, and a dtype that holds it.

    Keys of wanting rows ascend by table, set, number of requests (LFU only, descending) and row:
    `first + (row % sets) * of_set + (2^31 - 1 - count) * rows_of_set + row // sets` (LRU: without the third term).

    Example: a table of 5 rows and 2 sets, LRU: rows 0 to 4 have keys 0, 3, 1, 4, 2.
    """
    at, places, lfu = 0, [], False
    for t, count in enumerate(sets):
        own = books[BOOKS * t : BOOKS * (t + 1)]
        each = -(-own[LINE_OF].shape[0] // max(count, 1))
        of_set = each * (MAX_COUNT + 1 if own[COUNTS].numel() else 1)
        lfu |= own[COUNTS].numel() > 0
        places.append((at, of_set, each))
        at += max(count, 1) * of_set
    return places, at, torch.int64 if lfu or at > MAX_COUNT else torch.int32


def spare_starts(books: Sequence[Tensor], sets: Sequence[int], ways: int) -> list[int]:
    """Return the start of each table's spare lines, counted over all tables, and last the number of spare lines."""
    starts = [0]
    for t, count in enumerate(sets):
        starts.append(starts[-1] + books[BOOKS * t + ROW_IN].shape[0] - count * ways)
    return starts


def raise_bad_row_id(names: str, segment: int, position: int, id_: int, rows: int, table: int) -> None:
    """Raise the `InputError` for an id that is not a row of its table."""
    if names:
        raise_bad_id(names, segment, position, id_, rows)
    raise_bad_row("update_rows_", id_, segment, position, rows, table)


def cache_ask_reference(
    ids: Tensor, begins: Sequence[int], ends: Sequence[int], tables: Sequence[int], books: Sequence[Tensor],
    sets: Sequence[int], ways: int, clock: Tensor, names: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Mark and hold the batch's rows; find the rows that need a line.

    Args:
        ids: int32 or int64.
        begins, ends, tables: per segment.
        books, sets, ways: per table, see the top of the file; a table with 0 sets has only spare lines.
        names: "feature@table" per segment, separated by ",", for messages; or empty.

    Returns:
        header: see `HeaderColumn`; the last five columns are still zero.
        keys `[N]` ascending: the keys of wanting rows (`key_ranges`), padded with the end of all keys.
        order int64 `[N]`: position, over all segments, of one occurrence of each key's row.

    Raises:
        InputError: an id that is not a row of its table; nothing has changed. (On a GPU, all other ids are processed,
            and a later op raises it.)

    Example: 2 sets of 2 ways, rows 4, 6, 1 in lines 0, 1, 2; ids (6, 8, 6, 8): row 6 is marked and held, row 8 is
    wanting: distinct rows 2, misses 1, wanting 1. With 9 rows, keys are (4, 10, 10, 10); order begins with 1 or 3.
    """
    places, last, dtype = key_ranges(books, sets)
    serials, bits, _ = clock.tolist()
    header = torch.zeros(len(sets), 8, dtype=torch.int64, device=ids.device)
    total = sum(end - begin for begin, end in zip(begins, ends, strict=True))
    keys_N = torch.full((total,), last, dtype=dtype, device=ids.device)
    at = 0
    found: list[tuple[int, Tensor, Tensor]] = []  # table, rows, occurrences
    for s, (begin, end, t) in enumerate(zip(begins, ends, tables, strict=True)):
        rows_n, rows = ids[begin:end].long(), books[BOOKS * t + LINE_OF].shape[0]
        bad_n = (rows_n < 0) | (rows_n >= rows)
        if bad_n.any():
            where = int(bad_n.nonzero()[0])
            raise_bad_row_id(names, s, begin + where, int(rows_n[where]), rows, t)
        found.append((t, rows_n, torch.arange(at, at + end - begin, device=ids.device)))
        at += end - begin
    for t, count in enumerate(sets):
        line_of, _, named, flights, counts, _, _ = books[BOOKS * t : BOOKS * (t + 1)]
        rows_n = torch.cat(
            [line_of.new_empty(0, dtype=torch.int64), *[rows for own, rows, _ in found if own == t]]
        )
        where_n = torch.cat([rows_n.new_empty(0), *[where for own, _, where in found if own == t]])
        rows_U, inverse = torch.unique(rows_n, return_inverse=True)
        first_U = torch.full_like(rows_U, total).scatter_reduce(0, inverse, where_n, "amin")
        line_U = line_of[rows_U].long()
        has_line = line_U >= 0
        named[line_U[has_line]] = serials[t]
        flights[line_U[has_line]] |= bits[t]
        line_of[rows_U[~has_line]] = NONE + serials[t]
        wanting = ~has_line | (line_U >= count * ways)
        first, of_set, each = places[t]
        rows_M = rows_U[wanting]
        key_M = first + (rows_M % max(count, 1)) * of_set + rows_M // max(count, 1)
        if counts.numel():
            key_M += (MAX_COUNT - counts[rows_M].long()) * each
            own = counts[rows_U]
            counts[rows_U] = own + (own < MAX_COUNT).to(torch.int32)
        keys_N[first_U[wanting]] = key_M.to(dtype)
        for column, number in (
            (HeaderColumn.ROWS, rows_U),
            (HeaderColumn.MISSES, rows_U[~has_line]),
            (HeaderColumn.WANTING, rows_M),
        ):
            header[t, column] = number.numel()
    sorted_N, order_N = torch.sort(keys_N, stable=True)
    return header, sorted_N, order_N


def cache_plan_reference(
    ids: Tensor, begins: Sequence[int], ends: Sequence[int], tables: Sequence[int], books: Sequence[Tensor],
    sets: Sequence[int], ways: int, clock: Tensor, header: Tensor, keys: Tensor, order: Tensor,
) -> Tensor:  # fmt: skip
    """Return the planned assignments and evictions (`Plan`). Fills the header and changes nothing else.

    Spare lines whose row is in no batch in flight are free; they lose this row. The k-th row (by key) that gets no line
    in its set gets the k-th free spare line of its table.

    Args: as of `cache_ask_`; header, keys and order are its results.

    Returns:
        plan. It is unusable if SPARE exceeds FREE in `header`: add spare lines, and plan again.

    Example: above, LRU: row 4 was used longest ago, so the plan's first column is (table 0, row 8, line 0, leaves 4,
    from -1, dirty if line 0 is).
    """
    starts = spare_starts(books, sets, ways)
    alive = clock[2].tolist()
    total = keys.shape[0]
    plan = torch.full((6, total + starts[-1]), -1, dtype=torch.int64, device=ids.device)
    plan[Plan.DIRTY] = 0
    segment_ids = torch.cat(
        [ids[begin:end].long() for begin, end in zip(begins, ends, strict=True)] or [ids[:0].long()]
    )
    first = 0
    for t, count in enumerate(sets):
        line_of, row_in, named, flights, counts, dirty, _ = books[BOOKS * t : BOOKS * (t + 1)]
        wanting = int(header[t, HeaderColumn.WANTING])
        rows_M = segment_ids[order[first : first + wanting]]
        line_M = line_of[rows_M].long()
        held_L = (row_in >= 0) & (flights & alive[t] != 0)
        uses_M = counts[rows_M].long() if counts.numel() else None
        turns_M = torch.arange(wanting, device=ids.device)
        given_M = assign_lines(rows_M, turns_M, uses_M, held_L, row_in, named, counts, count, ways)
        evicted = given_M[given_M >= 0]
        evictions = int((row_in[evicted] >= 0).sum())
        spare = (given_M < 0) & (line_M < 0)
        free = (~held_L[count * ways :]).nonzero()[:, 0] + count * ways
        wanted = int(spare.sum())
        header[t, HeaderColumn.SPARE], header[t, HeaderColumn.FREE], header[t, HeaderColumn.EVICTIONS] = (
            wanted,
            free.numel(),
            evictions,
        )
        header[t, HeaderColumn.WRITES] = 0
        if wanted <= free.numel():
            given_M[spare] = free[:wanted]
            released = free[wanted:]
            released = released[row_in[released] >= 0]
            takes = given_M >= 0
            own = plan[:, first : first + wanting]
            own[Plan.TABLE] = t
            own[Plan.ROW], own[Plan.LINE] = rows_M, given_M
            own[Plan.LEAVES] = row_in[given_M.clamp(min=0)].masked_fill(~takes, -1) if takes.any() else -1
            own[Plan.FROM] = line_M.clamp(min=-1).masked_fill(~takes, -1)
            leaves = (own[Plan.LEAVES] >= 0).long()
            comes = (own[Plan.FROM] >= 0).long()
            if dirty.numel():
                leaves *= dirty[given_M.clamp(min=0)]
                comes *= dirty[own[Plan.FROM].clamp(min=0)]
            own[Plan.DIRTY] = leaves + 2 * comes
            at = released + (total + starts[t] - count * ways)
            plan[Plan.TABLE, at], plan[Plan.LINE, at] = t, released
            plan[Plan.LEAVES, at], plan[Plan.DIRTY, at] = row_in[released], dirty[released].long()
            header[t, HeaderColumn.WRITES] = int(leaves.sum()) + int(dirty[released].sum())
        first += wanting
    return plan


def _entries(plan: Tensor, header: Tensor, ids: int, t: int) -> Tensor:
    """Return a table's entries of the plan: wanting rows, then spare lines."""
    counts = header[:, HeaderColumn.WANTING].tolist()
    first = sum(counts[:t])
    spare = (plan[Plan.TABLE, ids:] == t).nonzero()[:, 0]
    wanting = plan[:, first : first + counts[t]]
    return torch.cat((wanting, plan[:, ids + spare]), 1) if spare.numel() else wanting


def _indexable(tensor: Tensor) -> Tensor:
    """Return the same bytes in a dtype that torch can index."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def cache_move_reference_(
    plan: Tensor, header: Tensor, lines: Sequence[Tensor], host: Sequence[Tensor], tables: Sequence[int], ids: int,
    comes: bool,
) -> None:  # fmt: skip
    """Move rows as planned. Idempotent.

    Args:
        lines, host: rows and slots, by line and by row; the device can read and write the host tensors.
        tables: per tensor.
        ids: N.
        comes: True loads rows into their lines, from the table or from spare lines. False writes evicted dirty rows to
            the table.
    """
    for t in dict.fromkeys(tables):
        _, row_M, line_M, leaves_M, from_M, dirty_M = _entries(plan, header, ids, t)
        out_M = (dirty_M % 2 == 1) & (leaves_M >= 0)
        takes_M = (row_M >= 0) & (line_M >= 0)
        moved_M, loaded_M = takes_M & (from_M >= 0), takes_M & (from_M < 0)
        for own, line, home in zip(tables, map(_indexable, lines), map(_indexable, host), strict=True):
            if own != t:
                continue
            if not comes:
                home[leaves_M[out_M]] = line[line_M[out_M]]
                continue
            line[line_M[moved_M]] = line[from_M[moved_M]]
            line[line_M[loaded_M]] = home[row_M[loaded_M]]


def cache_seat_reference_(
    plan: Tensor, header: Tensor, books: Sequence[Tensor], clock: Tensor, ids: int
) -> None:
    """Record a plan's moves in the books. Idempotent.

    Example: above: row 8 is in line 0, marked and held by this request; row 4 has no line.
    """
    serials, bits, _ = clock.tolist()
    for t in range(header.shape[0]):
        line_of, row_in, named, flights, _, dirty, totals = books[BOOKS * t : BOOKS * (t + 1)]
        _, row_M, line_M, leaves_M, from_M, dirty_M = _entries(plan, header, ids, t)
        line_of[leaves_M[leaves_M >= 0]] = NONE
        released = (row_M < 0) & (leaves_M >= 0)
        row_in[line_M[released]] = -1
        dirty[line_M[released]] = False
        takes = (row_M >= 0) & (line_M >= 0)
        moved = takes & (from_M >= 0)
        row_in[from_M[moved]] = -1
        dirty[from_M[moved]] = False
        bits_M = torch.full_like(line_M, bits[t]).int()
        bits_M[moved] |= flights[from_M[moved]]
        line_of[row_M[takes]] = line_M[takes].int()
        row_in[line_M[takes]] = row_M[takes]
        named[line_M[takes]] = serials[t]
        flights[line_M[takes]] = bits_M[takes]
        dirty[line_M[takes]] = dirty_M[takes] >= 2
        if not header[t, HeaderColumn.SEATED]:
            totals += header[t]
            header[t, HeaderColumn.SEATED] = 1


def cache_lines_reference_(
    ids: Tensor, begins: Sequence[int], ends: Sequence[int], tables: Sequence[int], line_of: Sequence[Tensor],
    dirty: Sequence[Tensor], strangers: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the line of each id, segment after segment; negative if its row has none.

    Args:
        tables: per segment; -1: not a cached table, its ids are returned unchanged.
        dirty: per table; marks these lines as dirty, since an update follows. May be empty.
        strangers: per table, the result for ids that are not rows of it: -1 to skip the id, or a line of zeros. Another
            op has reported the id.

    Returns:
        int32, or the dtype of the ids if some are returned unchanged.

    Example: rows 7 and 2 in lines 0 and 5, a table of 9 rows, ids (2, 7, 11), stranger 6 -> (5, 0, 6).
    """
    parts = []
    for begin, end, t in zip(begins, ends, tables, strict=True):
        own = ids[begin:end]
        if t < 0:
            parts.append(own)
            continue
        rows = line_of[t].shape[0]
        good = (own >= 0) & (own < rows)
        line = torch.full_like(own, strangers[t], dtype=torch.int32)
        line[good] = line_of[t][own[good].long()].clamp(min=-1)
        if dirty:
            dirty[t][line[good & (line >= 0)].long()] = True
        parts.append(line)
    return torch.cat(parts).to(lines_dtype(ids, tables)) if parts else ids.new_empty(0, dtype=torch.int32)


def lines_dtype(ids: Tensor, tables: Sequence[int]) -> torch.dtype:
    """Return the dtype of the result of `cache_lines_`."""
    return ids.dtype if min(tables, default=0) < 0 else torch.int32


LIBRARY.impl("cache_ask_", cache_ask_reference, "CompositeExplicitAutograd")
LIBRARY.impl("cache_plan", cache_plan_reference, "CompositeExplicitAutograd")
LIBRARY.impl("cache_move_", cache_move_reference_, "CompositeExplicitAutograd")
LIBRARY.impl("cache_seat_", cache_seat_reference_, "CompositeExplicitAutograd")
LIBRARY.impl("cache_lines_", cache_lines_reference_, "CompositeExplicitAutograd")


@LIBRARY.fake("cache_ask_")
def _fake_ask(
    ids: Any, begins: Any, ends: Any, tables: Any, books: Any, sets: Any, ways: Any, clock: Any, names: Any
) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(ends) - sum(begins)
    return (
        ids.new_empty(len(sets), 8, dtype=torch.int64),
        ids.new_empty(total, dtype=key_ranges(books, sets)[2]),
        ids.new_empty(total, dtype=torch.int64),
    )


@LIBRARY.fake("cache_plan")
def _fake_plan(
    ids: Any, begins: Any, ends: Any, tables: Any, books: Any, sets: Any, ways: Any, clock: Any, header: Any,
    keys: Any, order: Any,
) -> Tensor:  # fmt: skip
    made: Tensor = header.new_empty(6, keys.shape[0] + spare_starts(books, sets, ways)[-1])
    return made


@LIBRARY.fake("cache_move_")
def _fake_move(plan: Any, header: Any, lines: Any, host: Any, tables: Any, ids: Any, comes: Any) -> None: ...


@LIBRARY.fake("cache_seat_")
def _fake_seat(plan: Any, header: Any, books: Any, clock: Any, ids: Any) -> None: ...


@LIBRARY.fake("cache_lines_")
def _fake_lines(
    ids: Any, begins: Any, ends: Any, tables: Any, line_of: Any, dirty: Any, strangers: Any
) -> Tensor:
    made: Tensor = ids.new_empty(sum(ends) - sum(begins), dtype=lines_dtype(ids, tables))
    return made
