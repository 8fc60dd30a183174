"""Which row of a host table is in which line of device memory: one request for all cached tables of a batch.

Nouns (more in `storage/cached.py`)
  line      room for a row and its optimizer's state on the device; `ways` lines are a set, row r may have one of set
            `r % sets` only; lines behind the sets are spare
  books     what is known of a table's lines, `BOOKS` tensors of it one after the other:
              line_of  int32 [E]   the row's line; a negative number: none
              row_in   int64 [L]   the line's row; -1: none
              named    int64 [L]   serial of the last request that named the row
              flights  int32 [L]   a bit for each request that named the row; bits of batches that landed mean nothing
              counts   int32 [E]   how many requests have named the row, up to the largest number; [0]: LRU, not LFU
              dirty    bool  [L]   the line was updated since its row was read or written
              told     int64 [8]   what `header` says, added up over requests (`Told`)
  clock     int64 [3, T], per table: the request's serial (ascending, 1 to 2^31 - 2), its bit, and the bits of all
            batches in flight, its own among them. A line whose row has one of these bits is held: not given away
  segment   ids [begin, end) that read a table
  wanting   a distinct row that has no line, or a spare one, and so would like a line of its set
  plan      int64 [6, N + spare]: what is going to move (`Plan`); entry i < (number of wanting rows) is one of these,
            entry N + s is spare line s (of all tables, one after another); what is between them means nothing

A request is four ops, none of which needs a number of the device on the host:

    cache_ask_    the batch's distinct rows: hits are named and held, wanting rows sorted by set
    cache_plan    set by set, the lines that go first are given; who gets none has a spare one. Nothing has changed yet
    cache_move_   dirty rows that leave are written to the table; then (a second call) rows come in
    cache_seat_   the books say so

and `cache_lines_` turns ids into line numbers, as often as one likes. Between any two of them the host may be
interrupted: rows are read from lines by nobody before `cache_seat_`, and what is overwritten was written back before.

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
LINE_OF, ROW_IN, NAMED, FLIGHTS, COUNTS, DIRTY, TOLD = range(BOOKS)

NONE = torch.iinfo(torch.int32).min
"""In `line_of`: no line. What lies between this and 0 is no line, either: `NONE + serial` says that the request with
this serial has claimed the row."""

MOST = torch.iinfo(torch.int32).max
"""That is counted of a row's requests, and of serials."""

_NEVER = torch.iinfo(torch.int64).max


class Told(IntEnum):
    """Columns of a request's header, int64 [T, 8]."""

    ROWS = 0  # distinct ones
    MISSES = 1  # of them: without a line
    WANTING = 2
    SPARE = 3  # wanting rows that must have a spare line: conflict misses
    FREE = 4  # spare lines that may be given
    EVICTIONS = 5
    WRITES = 6  # dirty rows that leave
    SEATED = 7  # 1 when `told` has it


class Plan(IntEnum):
    """Rows of a plan."""

    TABLE = 0  # -1: nothing moves
    ROW = 1  # that gets the line; -1: nobody
    LINE = 2  # -1: it keeps its spare one
    LEAVES = 3  # the row that was there; -1: none
    FROM = 4  # the spare line that ROW had; -1: it comes from the table
    DIRTY = 5  # 1: LEAVES is, 2: FROM is; their sum


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


def lines_given(
    rows_M: Tensor, order_M: Tensor, liked_M: Tensor | None, held_L: Tensor, row_in_L: Tensor, named_L: Tensor,
    count_E: Tensor, sets: int, ways: int,
) -> Tensor:  # fmt: skip
    """For each row the line of its set that it gets, -1 for none.

    The k-th row of a set that wants one gets the k-th line to go, if there are so many: empty ones, then by `named`;
    with `liked_M` by `count_E` first, and only if that is not more than the row's own entry.

    Args:
        order_M: the rows' turns, by position.
        liked_M: how often each row was named, this time among them (LFU); None: LRU.

    Example: 1 set of 2 lines with rows (4, 6), named at (1, 2); rows (8, 2, 0) in this order -> lines (0, 1, -1).
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
    if liked_M is not None:
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
    if liked_M is not None:
        gets &= liked_M[order_M] >= value_M
    line_M = lines_SW[inverse_M, first_SW[inverse_M, way_M]].masked_fill(~gets, -1)
    given_M = torch.empty_like(rows_M)
    given_M[order_M] = line_M
    return given_M


def key_places(
    books: Sequence[Tensor], sets: Sequence[int]
) -> tuple[list[tuple[int, int, int]], int, torch.dtype]:
    """Per table its first key, keys of a set and rows of a set; the key behind the last; a type that holds them.

    Wanting rows have keys that ascend by table, set, with LFU times named (descending), and row:
    `first + (row % sets) * of_set + (2^31 - 1 - count) * rows_of_set + row // sets` (LRU: without the middle).

    Example: a table of 5 rows and 2 sets, LRU: rows 0 to 4 have keys 0, 3, 1, 4, 2.
    """
    at, places, lfu = 0, [], False
    for t, count in enumerate(sets):
        own = books[BOOKS * t : BOOKS * (t + 1)]
        each = -(-own[LINE_OF].shape[0] // max(count, 1))
        of_set = each * (MOST + 1 if own[COUNTS].numel() else 1)
        lfu |= own[COUNTS].numel() > 0
        places.append((at, of_set, each))
        at += max(count, 1) * of_set
    return places, at, torch.int64 if lfu or at > MOST else torch.int32


def spare_starts(books: Sequence[Tensor], sets: Sequence[int], ways: int) -> list[int]:
    """Per table where its spare lines begin among all tables', and how many there are in all."""
    starts = [0]
    for t, count in enumerate(sets):
        starts.append(starts[-1] + books[BOOKS * t + ROW_IN].shape[0] - count * ways)
    return starts


def tell_stranger(names: str, segment: int, position: int, id_: int, rows: int, table: int) -> None:
    """Raise the `InputError` for an id that is no row of its table."""
    if names:
        raise_bad_id(names, segment, position, id_, rows)
    raise_bad_row("cache_ask_", id_, segment, position, rows, table)


def cache_ask_reference(
    ids: Tensor, begins: Sequence[int], ends: Sequence[int], tables: Sequence[int], books: Sequence[Tensor],
    sets: Sequence[int], ways: int, clock: Tensor, names: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Name and hold the rows that a batch names; find those that want a line.

    Args:
        ids: int32 or int64.
        begins, ends, tables: per segment.
        books, sets, ways: per table, see the top of the file; a table of 0 sets has spare lines only.
        names: "feature@table" per segment, "," between, for messages; or empty.

    Returns:
        header: `Told`, of which the last five are zeros still.
        keys `[N]` ascending: of wanting rows those of `key_places`, then the key behind the last.
        order int64 `[N]`: an occurrence of the row that the key is of, counted over all segments.

    Raises:
        InputError: an id that is no row (on a GPU at a later op). The others are asked for.

    Example: 2 sets of 2 ways, rows 4, 6, 1 in lines 0, 1, 2; ids (6, 8, 6, 8): row 6 is named and held, 8 is wanting:
    distinct rows 2, misses 1, wanting 1; in a table of 9 rows keys (4, 10, 10, 10), and order begins with 1 or 3.
    """
    places, last, dtype = key_places(books, sets)
    serials, bits, _ = clock.tolist()
    header = torch.zeros(len(sets), 8, dtype=torch.int64, device=ids.device)
    total = sum(end - begin for begin, end in zip(begins, ends, strict=True))
    keys_N = torch.full((total,), last, dtype=dtype, device=ids.device)
    at, stranger = 0, None
    found: list[tuple[int, Tensor, Tensor]] = []  # table, rows, occurrences
    for s, (begin, end, t) in enumerate(zip(begins, ends, tables, strict=True)):
        rows_n = ids[begin:end].long()
        good = (rows_n >= 0) & (rows_n < books[BOOKS * t + LINE_OF].shape[0])
        if not good.all() and stranger is None:
            where = int((~good).nonzero()[0])
            stranger = (s, begin + where, int(rows_n[where]), books[BOOKS * t + LINE_OF].shape[0], t)
        found.append((t, rows_n[good], torch.arange(at, at + end - begin, device=ids.device)[good]))
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
        has = line_U >= 0
        named[line_U[has]] = serials[t]
        flights[line_U[has]] |= bits[t]
        line_of[rows_U[~has]] = NONE + serials[t]
        wanting = ~has | (line_U >= count * ways)
        first, of_set, each = places[t]
        rows_M = rows_U[wanting]
        key_M = first + (rows_M % max(count, 1)) * of_set + rows_M // max(count, 1)
        if counts.numel():
            key_M += (MOST - counts[rows_M].long()) * each
            own = counts[rows_U]
            counts[rows_U] = own + (own < MOST).to(torch.int32)
        keys_N[first_U[wanting]] = key_M.to(dtype)
        for column, number in ((Told.ROWS, rows_U), (Told.MISSES, rows_U[~has]), (Told.WANTING, rows_M)):
            header[t, column] = number.numel()
    if stranger is not None:
        tell_stranger(names, *stranger)
    sorted_N, order_N = torch.sort(keys_N, stable=True)
    return header, sorted_N, order_N


def cache_plan_reference(
    ids: Tensor, begins: Sequence[int], ends: Sequence[int], tables: Sequence[int], books: Sequence[Tensor],
    sets: Sequence[int], ways: int, clock: Tensor, header: Tensor, keys: Tensor, order: Tensor,
) -> Tensor:  # fmt: skip
    """Who gets which line, and who leaves: `Plan`. Fills the header; changes nothing else.

    Spare lines whose row nobody in flight names are free, and lose it. The k-th row (by key) that its set has no line
    for gets the k-th free one of its table.

    Args: as of `cache_ask_`; header, keys and order are what it returned.

    Returns:
        plan. Where `header` has SPARE beyond FREE it is not to be used: make more spare lines, and plan again.

    Example: above, LRU: row 4 was named longest ago, so the plan's first column is (table 0, row 8, line 0, leaves 4,
    from -1, dirty as line 0 is).
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
        wanting = int(header[t, Told.WANTING])
        rows_M = segment_ids[order[first : first + wanting]]
        line_M = line_of[rows_M].long()
        held_L = (row_in >= 0) & (flights & alive[t] != 0)
        liked_M = counts[rows_M].long() if counts.numel() else None
        turns_M = torch.arange(wanting, device=ids.device)
        given_M = lines_given(rows_M, turns_M, liked_M, held_L, row_in, named, counts, count, ways)
        evicted = given_M[given_M >= 0]
        evictions = int((row_in[evicted] >= 0).sum())
        spare = (given_M < 0) & (line_M < 0)
        free = (~held_L[count * ways :]).nonzero()[:, 0] + count * ways
        wanted = int(spare.sum())
        header[t, Told.SPARE], header[t, Told.FREE], header[t, Told.EVICTIONS] = (
            wanted,
            free.numel(),
            evictions,
        )
        header[t, Told.WRITES] = 0
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
            header[t, Told.WRITES] = int(leaves.sum()) + int(dirty[released].sum())
        first += wanting
    return plan


def _entries(plan: Tensor, header: Tensor, ids: int, t: int) -> Tensor:
    """The plan's entries of a table: wanting rows, then spare lines."""
    own = torch.cat((plan[:, : int(header[:, Told.WANTING].sum())], plan[:, ids:]), 1)
    return own[:, own[Plan.TABLE] == t]


def _plain(tensor: Tensor) -> Tensor:
    """The same bytes in a type that torch moves by index."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def cache_move_reference_(
    plan: Tensor, header: Tensor, lines: Sequence[Tensor], host: Sequence[Tensor], tables: Sequence[int], ids: int,
    comes: bool,
) -> None:  # fmt: skip
    """Move what a plan says. Done twice it is as if done once.

    Args:
        lines, host: rows and slots by line, and by row; host tensors are such that the device reads and writes them.
        tables: per tensor.
        ids: N.
        comes: rows come in, from the table or from their spare lines; else dirty ones that leave are written to it.
    """
    for line, home, t in zip(lines, host, tables, strict=True):
        _, row_M, line_M, leaves_M, from_M, dirty_M = _entries(plan, header, ids, t)
        line, home = _plain(line), _plain(home)
        if not comes:
            out = (dirty_M % 2 == 1) & (leaves_M >= 0)
            home[leaves_M[out]] = line[line_M[out]]
            continue
        takes = (row_M >= 0) & (line_M >= 0)
        moved, loaded = takes & (from_M >= 0), takes & (from_M < 0)
        line[line_M[moved]] = line[from_M[moved]]
        line[line_M[loaded]] = home[row_M[loaded]]


def cache_seat_reference_(
    plan: Tensor, header: Tensor, books: Sequence[Tensor], clock: Tensor, ids: int
) -> None:
    """Let the books say what a plan has moved. Done twice it is as if done once.

    Example: above: row 8 has line 0, named and held by this request; row 4 has none.
    """
    serials, bits, _ = clock.tolist()
    for t in range(header.shape[0]):
        line_of, row_in, named, flights, _, dirty, told = books[BOOKS * t : BOOKS * (t + 1)]
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
        if not header[t, Told.SEATED]:
            told += header[t]
            header[t, Told.SEATED] = 1


def cache_lines_reference_(
    ids: Tensor, begins: Sequence[int], ends: Sequence[int], tables: Sequence[int], line_of: Sequence[Tensor],
    dirty: Sequence[Tensor], strangers: Sequence[int],
) -> Tensor:  # fmt: skip
    """The line of each id, segment after segment; a negative number where its row has none.

    Args:
        tables: per segment; -1: of no cached table, ids stay what they are.
        dirty: per table; these lines are going to be updated. Or none.
        strangers: per table, what an id is given that is no row; -1 where it is to be left out, or a line of zeros,
            where another op has told of it.

    Returns:
        int32, or the ids' type where some stay.

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
    return torch.cat(parts).to(lines_type(ids, tables)) if parts else ids.new_empty(0, dtype=torch.int32)


def lines_type(ids: Tensor, tables: Sequence[int]) -> torch.dtype:
    """Of what `cache_lines_` returns."""
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
        ids.new_empty(total, dtype=key_places(books, sets)[2]),
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
    made: Tensor = ids.new_empty(sum(ends) - sum(begins), dtype=lines_type(ids, tables))
    return made
