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

SERIAL_BITS = 31
"""Lines of a set are evicted in the order of `(count << SERIAL_BITS) + named`; the count is 0 with LRU."""

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
    rows_M: Tensor, uses_M: Tensor | None, alive: int, books: Sequence[Tensor], sets: int, ways: int
) -> Tensor:
    """Return the line of its set that each row gets, or -1.

    The k-th wanting row of a set gets the k-th line in eviction order, if there is one: empty lines first, then by
    `named`. With `uses_M` the order is by `counts` first, and a line is taken only if its row's count is at most the
    new row's.

    Args:
        rows_M: wanting rows by key, so those of a set are neighbours.
        uses_M: number of requests with each row, including this one (LFU); None: LRU.
        alive: bits of all batches in flight.
        books: of the table.

    Example: 1 set of 2 lines with rows (4, 6), last used by requests (1, 2); rows (8, 2, 0) in this order -> lines
    (0, 1, -1).
    """
    if not sets or not rows_M.numel():
        return torch.full_like(rows_M, -1)
    set_S, set_of_M, count_S = torch.unique_consecutive(rows_M % sets, return_inverse=True, return_counts=True)
    rank_M = torch.arange(rows_M.numel(), device=rows_M.device) - (count_S.cumsum(0) - count_S)[set_of_M]
    rounds_S, order_S = count_S.clamp(max=ways).sort(descending=True)
    set_S = set_S[order_S]

    def of_sets(book: Tensor) -> Tensor:
        return book[: sets * ways].view(sets, ways).index_select(0, set_S)

    row_SW, score_SW = of_sets(books[ROW_IN]), of_sets(books[NAMED])
    if uses_M is not None:
        count_SW = books[COUNTS].take(row_SW.clamp(min=0))
        score_SW += count_SW.long() << SERIAL_BITS
    score_SW.masked_fill_(of_sets(books[FLIGHTS]) & alive != 0, _NEVER).masked_fill_(row_SW < 0, -1)
    rounds = int(rounds_S[0])
    left_K = (rounds_S > torch.arange(rounds, device=rows_M.device)[:, None]).sum(1)
    least_KS, way_KS = score_SW.new_zeros(2, rounds, set_S.numel())
    for k, count in enumerate(left_K.tolist()):  # most sets take part in few rounds, which cost less than a sort
        left = score_SW[:count]
        least, way = left.min(dim=1)  # of equals the first
        left.scatter_(1, way[:, None], _NEVER)
        least_KS[k, :count], way_KS[k, :count] = least, way
    place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(order_S.numel(), device=rows_M.device))
    place_M = rank_M.clamp(max=rounds - 1) * set_S.numel() + place_S[set_of_M]
    least_M, line_M = least_KS.take(place_M), way_KS.take(place_M) + rows_M % sets * ways
    gets_M = (rank_M < ways) & (least_M != _NEVER)
    if uses_M is not None:
        gets_M &= uses_M >= least_M >> SERIAL_BITS
    return line_M.masked_fill_(~gets_M, -1)


def key_ranges(books: Sequence[Tensor], sets: Sequence[int]) -> tuple[list[tuple[int, int, int]], int, torch.dtype]:
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
    rows_of: list[list[Tensor]] = [[] for _ in sets]
    occurrences_of: list[list[Tensor]] = [[] for _ in sets]
    total = 0
    for s, (begin, end, t) in enumerate(zip(begins, ends, tables, strict=True)):
        rows_n, rows = ids[begin:end].long(), books[BOOKS * t + LINE_OF].shape[0]
        bad_n = (rows_n < 0) | (rows_n >= rows)
        if bad_n.any():
            where = int(bad_n.nonzero()[0])
            raise_bad_row_id(names, s, begin + where, int(rows_n[where]), rows, t)
        rows_of[t].append(rows_n)
        occurrences_of[t].append(torch.arange(total, total + end - begin, device=ids.device))
        total += end - begin
    keys_N = torch.full((total,), last, dtype=dtype, device=ids.device)
    order_N = torch.zeros(total, dtype=torch.int64, device=ids.device)
    at = 0
    for t, count in enumerate(sets):
        if not rows_of[t]:
            continue
        line_of, _, named, flights, counts, _, _ = books[BOOKS * t : BOOKS * (t + 1)]
        rows_n = torch.cat(rows_of[t])
        line_n = line_of.index_select(0, rows_n)
        hits, misses = (line_n >= 0).nonzero()[:, 0], (line_n < 0).nonzero()[:, 0]
        lines, absent = line_n.index_select(0, hits).long(), rows_n.index_select(0, misses)
        first_hit = _one_each(named, lines, hits)
        first_miss = _one_each(line_of, absent, (misses + NONE).int())
        named.index_fill_(0, lines, serials[t])
        flights.index_copy_(0, lines, flights.index_select(0, lines) | bits[t])
        line_of.index_fill_(0, absent, NONE + serials[t])
        absent_n = misses.masked_select(first_miss)
        wanting = torch.cat((absent_n, hits.masked_select(first_hit & (lines >= count * ways))))
        first, of_set, each = places[t]
        rows_M = rows_n.index_select(0, wanting)
        key_M = first + (rows_M % max(count, 1)) * of_set + rows_M // max(count, 1)
        if counts.numel():
            key_M += (MAX_COUNT - counts.index_select(0, rows_M).long()) * each
            own = counts.index_select(0, rows_n)
            counts.index_copy_(0, rows_n, own + (own < MAX_COUNT).int())
        end = at + wanting.numel()
        sorted_M, turn_M = torch.sort(key_M)
        keys_N[at:end] = sorted_M
        order_N[at:end] = torch.cat(occurrences_of[t]).index_select(0, wanting.index_select(0, turn_M))
        at = end
        header[t, HeaderColumn.MISSES], header[t, HeaderColumn.WANTING] = absent_n.numel(), wanting.numel()
        header[t, HeaderColumn.ROWS] = absent_n.numel() + int(first_hit.sum())
    return header, keys_N, order_N


def _one_each(book: Tensor, at: Tensor, marks: Tensor) -> Tensor:
    """Return a mask with one True for each distinct index in `at`. Overwrites `book` there; the marks are distinct."""
    return book.scatter_(0, at, marks).gather(0, at) == marks


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
    plan = torch.empty(6, total + starts[-1], dtype=torch.int64, device=ids.device)
    plan[:, total:] = -1
    plan[Plan.DIRTY, total:] = 0
    segment_ids = torch.cat([ids[begin:end] for begin, end in zip(begins, ends, strict=True)] or [ids[:0]])
    first = 0
    for t, count in enumerate(sets):
        own_books = books[BOOKS * t : BOOKS * (t + 1)]
        line_of, row_in, _, flights, counts, dirty, _ = own_books
        wanting, first_spare = int(header[t, HeaderColumn.WANTING]), count * ways
        rows_M = segment_ids.index_select(0, order[first : first + wanting]).long()
        line_M = line_of.index_select(0, rows_M).long()
        uses_M = counts.index_select(0, rows_M).long() if counts.numel() else None
        given_M = assign_lines(rows_M, uses_M, alive[t], own_books, count, ways)
        spare = ((given_M < 0) & (line_M < 0)).nonzero()[:, 0]
        used = (row_in[first_spare:] >= 0) & (flights[first_spare:] & alive[t] != 0)
        free = (~used).nonzero()[:, 0] + first_spare
        header[t, HeaderColumn.SPARE], header[t, HeaderColumn.FREE] = spare.numel(), free.numel()
        evicted = row_in.index_select(0, given_M.masked_select(given_M >= 0))
        header[t, HeaderColumn.EVICTIONS] = int((evicted >= 0).sum())
        header[t, HeaderColumn.WRITES] = 0
        if spare.numel() <= free.numel():
            given_M[spare] = free[: spare.numel()]
            own = plan[:, first : first + wanting]
            own[Plan.TABLE] = t
            own[Plan.ROW], own[Plan.LINE] = rows_M, given_M
            own[Plan.LEAVES] = _read(row_in, given_M)
            own[Plan.FROM] = line_M.clamp(min=-1).masked_fill(given_M < 0, -1)
            writes = (own[Plan.LEAVES] >= 0) & (_read(dirty, given_M) > 0)
            own[Plan.DIRTY] = writes + 2 * (_read(dirty, own[Plan.FROM]) > 0)
            released = free[spare.numel() :]
            released = released.masked_select(row_in.index_select(0, released) >= 0)
            leaves, out = row_in.index_select(0, released), dirty.index_select(0, released).long()
            none = torch.full_like(released, -1)
            plan[:, released + (total + starts[t] - first_spare)] = torch.stack(
                (none * 0 + t, none, released, leaves, none, out)
            )
            header[t, HeaderColumn.WRITES] = int(writes.sum()) + int(out.sum())
        first += wanting
    return plan


def _read(book: Tensor, at: Tensor) -> Tensor:
    """Return an int64 tensor with the entries of a book; -1 for negative indices."""
    return book.index_select(0, at.clamp(min=0)).long().masked_fill_(at < 0, -1)


def entries_of(plan: Tensor, header: Tensor, ids: int, t: int) -> Tensor:
    """Return a table's entries of the plan: wanting rows, then released spare lines. Waits for the device."""
    counts = header[:, HeaderColumn.WANTING].tolist()
    first = sum(counts[:t])
    spare = (plan[Plan.TABLE, ids:] == t).nonzero()[:, 0]
    wanting = plan[:, first : first + counts[t]]
    return torch.cat((wanting, plan[:, ids + spare]), 1) if spare.numel() else wanting


def _those(entries: Tensor, chosen: Tensor) -> Tensor:
    return entries.index_select(1, chosen.nonzero()[:, 0])


def _seated(entries: Tensor) -> Tensor:
    """Return the entries whose row gets a line."""
    return _those(entries, (entries[Plan.ROW] >= 0) & (entries[Plan.LINE] >= 0))


def moved_and_loaded(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries whose row comes from a spare line, and those whose row comes from the table."""
    takes = _seated(entries)
    return _those(takes, takes[Plan.FROM] >= 0), _those(takes, takes[Plan.FROM] < 0)


def written_back(entries: Tensor) -> Tensor:
    """Return the entries whose evicted row is dirty."""
    return _those(entries, (entries[Plan.LEAVES] >= 0) & (entries[Plan.DIRTY] & 1 == 1))


def indexable(tensor: Tensor) -> Tensor:
    """Return the same bytes in a dtype that torch indexes: it does not index all 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def copy_rows(target: Tensor, at: Tensor, source: Tensor, rows: Tensor) -> None:
    """Run `target[at] = source[rows]`, for rows of any dtype."""
    indexable(target).index_copy_(0, at, indexable(source).index_select(0, rows))


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
        entries = entries_of(plan, header, ids, t)
        pairs = [(line, home) for own, line, home in zip(tables, lines, host, strict=True) if own == t]
        if not comes:
            out = written_back(entries)
            for line, home in pairs:
                copy_rows(home, out[Plan.LEAVES], line, out[Plan.LINE])
            continue
        moved, loaded = moved_and_loaded(entries)
        for line, home in pairs:
            copy_rows(line, moved[Plan.LINE], line, moved[Plan.FROM])
            copy_rows(line, loaded[Plan.LINE], home, loaded[Plan.ROW])


def cache_seat_reference_(plan: Tensor, header: Tensor, books: Sequence[Tensor], clock: Tensor, ids: int) -> None:
    """Record a plan's moves in the books. Idempotent.

    Example: above: row 8 is in line 0, marked and held by this request; row 4 has no line.
    """
    serials, bits, _ = clock.tolist()
    for t in range(header.shape[0]):
        line_of, row_in, named, flights, _, dirty, totals = books[BOOKS * t : BOOKS * (t + 1)]
        entries = entries_of(plan, header, ids, t)
        leaves_M = entries[Plan.LEAVES]
        line_of.index_fill_(0, leaves_M.masked_select(leaves_M >= 0), NONE)
        released = entries[Plan.LINE].masked_select((entries[Plan.ROW] < 0) & (leaves_M >= 0))
        _, row_M, line_M, _, from_M, dirty_M = _seated(entries)
        left = torch.cat((released, from_M.masked_select(from_M >= 0)))
        row_in.index_fill_(0, left, -1)
        dirty.index_fill_(0, left, False)
        line_of.index_copy_(0, row_M, line_M.int())
        row_in.index_copy_(0, line_M, row_M)
        named.index_fill_(0, line_M, serials[t])
        flights.index_copy_(0, line_M, (_read(flights, from_M).masked_fill_(from_M < 0, 0) | bits[t]).int())
        dirty.index_copy_(0, line_M, dirty_M >= 2)
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
        line = own.new_full(own.shape, strangers[t], dtype=torch.int32)
        if rows:
            row = own.clamp(0, rows - 1)
            found = line_of[t].index_select(0, row).clamp_(min=-1)
            line = torch.where(row == own, found, line)
            if dirty:
                marked = found.masked_select((row == own) & (found >= 0))
                dirty[t].index_fill_(0, marked.long(), True)
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
def _fake_lines(ids: Any, begins: Any, ends: Any, tables: Any, line_of: Any, dirty: Any, strangers: Any) -> Tensor:
    made: Tensor = ids.new_empty(sum(ends) - sum(begins), dtype=lines_dtype(ids, tables))
    return made
