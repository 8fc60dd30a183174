"""Requests: load the rows of a batch into the lines of all cached tables that it reads, at once.

Nouns as in `ops/cache/definition.py`, and
  request  one cache's part: its books and lines, and its entries of the clock
  sure     the spare lines suffice in any case, so the host need not read how many the request needs

    prefetch_all   rows of a batch get lines. A batch in flight is not requested again
    lines_of_all   line numbers of a batch's ids; requests the batch first

The host does not wait for a device if all requests are sure. Otherwise it waits once, for the header, and adds the
missing spare lines.

Exceptions midway: until rows are loaded, only marks without meaning have changed, and dirty rows to be evicted are in
the table as well. After that the row of a line is no longer certain, and every cache is rescued: dirty rows that stay
in their lines are written to the table, and the cache is emptied.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.cache.definition import (
    MAX_COUNT,
    HeaderColumn,
    Plan,
    copy_rows,
    entries_of,
    moved_and_loaded,
    written_back,
)
from tilerec.ops.runtime.upload import capturing, upload
from tilerec.storage.batches_in_flight import Segments
from tilerec.storage.cache_tensors import CacheTensors
from tilerec.storage.row_cache import WAYS, RowCache, lock_caches, outside_of_inference

OPS = torch.ops.tilerec

_MAX_SORT_KEYS = 1 << 61


@dataclass(frozen=True)
class WantedRows:
    """Rows of one cached table that a batch reads."""

    cache: RowCache
    host: Sequence[Tensor]  # the table, then its optimizer's slots
    segments: Segments
    names: str = ""  # "feature@table" per segment, joined by ",", for messages; or empty


def prefetch_all(wanted: Sequence[WantedRows], ids: Tensor) -> None:
    """Load the rows of a batch into lines. They stay until its update; without an update, until its lookup.

    Raises:
        InputError: an id is no row. Nothing has changed. (On a GPU, a later op raises it.)
        ConfigError: a CUDA graph is being captured, or there is no memory for lines.
    """
    if wanted and capturing():
        raise ConfigError(
            f"Table '{wanted[0].cache.name}': a batch of this cached table is captured in a CUDA graph. The host "
            "assigns cache lines batch by batch, and every replay would repeat the lines of this batch. Capture "
            "uncached tables (uncache_tables), or run this step without a capture."
        )
    with lock_caches([own.cache for own in wanted]), outside_of_inference(), _on_device_of(ids):
        rest = list(wanted)
        while rest:
            now: dict[RowCache, WantedRows] = {}
            later = []
            for own in rest:
                cache = own.cache
                cache.over(own.host)
                known = cache.in_flight.find(ids, own.segments)
                if known is not None:
                    if not ids.is_inference():
                        continue
                    cache.in_flight.remove(known)  # inference tensors have no version: the ids may have changed
                if cache in now:  # two tables share these rows
                    later.append(own)
                else:
                    now[cache] = own
            _request_all(list(now.values()), ids)
            rest = later


def lines_of_all(
    wanted: Sequence[WantedRows],
    ids: Tensor,
    segments: Sequence[tuple[int, int]],
    tables: Sequence[int],
    writes: bool,
) -> Tensor:
    """Return the current line numbers of a batch's ids, segment after segment.

    Args:
        wanted: one element per cached table.
        segments: segments of the batch.
        tables: per segment, the index of its table in `wanted`; -1: an uncached table, whose ids stay as they are.
        writes: the caller will change these lines. If False, ids that are no rows get the line of zeros on a GPU: the
            request has already reported them.
    """
    prefetch_all(wanted, ids)
    lines = _lines(wanted, ids, segments, tables, writes)
    # Versions do not count writes that bypass torch (to a NumPy array that shares the ids' memory). On a GPU this check
    # would wait, and no NumPy array shares memory there.
    if ids.device.type == "cpu" and _any_missing(lines, segments, tables):
        for own in wanted:
            batch = own.cache.in_flight.find(ids, own.segments)
            if batch is not None:
                own.cache.in_flight.remove(batch)
        prefetch_all(wanted, ids)
        lines = _lines(wanted, ids, segments, tables, writes)
    return lines


def _lines(
    wanted: Sequence[WantedRows],
    ids: Tensor,
    segments: Sequence[tuple[int, int]],
    tables: Sequence[int],
    writes: bool,
) -> Tensor:
    held = [own.cache.tensors for own in wanted]
    for own in wanted if writes else ():
        own.cache.may_be_dirty = True
    none = writes or ids.device.type == "cpu"
    lines: Tensor = OPS.cache_lines_(
        ids, [begin for begin, _ in segments], [end for _, end in segments], tables,
        [own.sets.line_of_E for own in held], [own.dirty_L for own in held] if writes else [],
        [-1 if none else own.sets.row_in_L.shape[0] for own in held],
    )  # fmt: skip
    return lines


def _any_missing(lines: Tensor, segments: Sequence[tuple[int, int]], tables: Sequence[int]) -> bool:
    """Return True if an id of a cached table has no line."""
    if not lines.numel() or int(lines.min()) >= 0:
        return False
    parts = lines.split([end - begin for begin, end in segments])
    return any(t >= 0 and bool((own < 0).any()) for own, t in zip(parts, tables, strict=True))


def _request_all(wanted: Sequence[WantedRows], ids: Tensor) -> None:
    while wanted:
        requests = [_request_of(own, ids) for own in wanted]
        try:
            for chunk in in_chunks(requests):
                request(chunk, ids, WAYS)
                for part in chunk:
                    batch = part.cache.in_flight.add(ids, part.segments, part.serial, part.bit)
                    part.cache.count_request(batch.count)
            return
        except CacheEmptied:  # caches that hold their rows by now need no second request
            wanted = [own for own in wanted if own.cache.in_flight.find(ids, own.segments) is None]
            for own in wanted:
                own.cache.over(own.host)


def _on_device_of(ids: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of the ids the current one.

    A cache on "cuda" is on the GPU of its batches. A data loader's thread may have another GPU as its current one.
    """
    return torch.cuda.device(ids.device) if ids.is_cuda else nullcontext()


@dataclass
class CacheRequest:
    """One cache's part of a request."""

    cache: RowCache
    made: CacheTensors
    segments: Segments
    serial: int
    bit: int
    alive: int  # bits of all batches in flight and of this one
    names: str
    sure: bool


def _request_of(own: WantedRows, ids: Tensor) -> CacheRequest:
    """Return a cache's part of a request, with room for its rows where that is cheap."""
    cache = own.cache
    if cache.in_flight.last_serial >= MAX_COUNT - 1:
        cache.settle()
        cache.in_flight.last_serial = 0
    cache.in_flight.release_oldest(ids)
    held, sure = cache.with_room(sum([end - begin for begin, end in own.segments]))
    bit, alive = cache.in_flight.next_bit(held.sets.flights_L)
    return CacheRequest(cache, held, own.segments, cache.in_flight.next_serial(), bit, alive, own.names, sure)


class CacheEmptied(Exception):
    """A cache was rebuilt without rows: there was no memory for its lines and a longer copy at once."""


def request(requests: Sequence[CacheRequest], ids: Tensor, ways: int) -> None:
    """Load the rows of a batch.

    Raises:
        InputError: an id is no row; raised by a later op.
        CacheEmptied: a cache was emptied; the caller repeats the request.
    """
    begins = [begin for ask in requests for begin, _ in ask.segments]
    ends = [end for ask in requests for _, end in ask.segments]
    tables = [t for t, ask in enumerate(requests) for _ in ask.segments]
    numbers = [ask.serial for ask in requests] + [ask.bit for ask in requests] + [ask.alive for ask in requests]
    clock = upload(numbers, ids.device).view(3, len(requests))
    sets = [ask.made.sets.sets for ask in requests]
    names = ",".join([ask.names for ask in requests]) if all([ask.names for ask in requests]) else ""  # noqa: C419
    books = [book for ask in requests for book in ask.made.books()]
    header, keys, order = OPS.cache_ask_(ids, begins, ends, tables, books, sets, ways, clock, names)
    while True:
        plan = OPS.cache_plan(ids, begins, ends, tables, books, sets, ways, clock, header, keys, order)
        if not _more(requests, header):
            break
        header[:, HeaderColumn.SPARE : HeaderColumn.SEATED] = 0
        books = [book for ask in requests for book in ask.made.books()]
    _move(requests, plan, header, books, clock, keys.shape[0])


def _more(requests: Sequence[CacheRequest], header: Tensor) -> bool:
    """Add the spare lines that are missing; return True if there were any. Waits for the device unless all are sure."""
    if all([ask.sure for ask in requests]):  # noqa: C419
        return False
    made = False
    for ask, counters in zip(requests, header.tolist(), strict=True):
        missing = counters[HeaderColumn.SPARE] - counters[HeaderColumn.FREE]
        if missing > 0:
            before = ask.made.sets
            ask.made, made = ask.cache.with_spare(before.spare + missing), True
            if ask.made.sets is not before:
                raise CacheEmptied
    return made


def _move(
    requests: Sequence[CacheRequest],
    plan: Tensor,
    header: Tensor,
    books: list[Tensor],
    clock: Tensor,
    ids: int,
) -> None:
    lines: list[Tensor] = []
    host: list[Tensor] = []
    tables: list[int] = []
    unreadable: list[int] = []  # tables whose rows the device cannot read
    for t, ask in enumerate(requests):
        here = ask.made.home.here
        if here is None:
            unreadable.append(t)
            continue
        lines += ask.made.lines
        host += here
        tables += [t] * len(here)
    OPS.cache_move_(plan, header, lines, host, tables, ids, False)
    for t in unreadable:
        _write_back(requests[t].made, entries_of(plan, header, ids, t))
    try:
        OPS.cache_move_(plan, header, lines, host, tables, ids, True)
        for t in unreadable:
            _load(requests[t].made, entries_of(plan, header, ids, t))
        OPS.cache_seat_(plan, header, books, clock, ids)
    except BaseException:
        with ExitStack() as rescues:  # rescues every cache, even if one rescue is interrupted
            for t, ask in enumerate(requests):
                rescues.callback(ask.cache.rescue, plan, header, ids, t)
        raise


def _write_back(made: CacheTensors, entries: Tensor) -> None:
    own = written_back(entries)
    made.home.write_from(made.lines, own[Plan.LINE], own[Plan.LEAVES])


def _load(made: CacheTensors, entries: Tensor) -> None:
    moved, loaded = moved_and_loaded(entries)
    for lines in made.lines:
        copy_rows(lines, moved[Plan.LINE], lines, moved[Plan.FROM])
    made.home.read_into(made.lines, loaded[Plan.LINE], loaded[Plan.ROW])


def in_chunks(requests: Sequence[CacheRequest]) -> list[list[CacheRequest]]:
    """Split the requests into chunks whose keys fit one sort: usually one chunk (with LFU up to a billion rows)."""
    chunks: list[list[CacheRequest]] = [[]]
    keys = 0
    for ask in requests:
        sets = ask.made.sets
        own = sets.line_of_E.shape[0] << (31 if sets.count_E.numel() else 0)
        if chunks[-1] and keys + own > _MAX_SORT_KEYS:
            chunks.append([])
            keys = 0
        chunks[-1].append(ask)
        keys += own
    return [chunk for chunk in chunks if chunk]
