"""One request for all cached tables of a batch, on a GPU; `CacheSets.request` and `seat` do the same table by table.

Nouns as in `ops/cache/definition.py`, and
  ask    one cache's part of a request: its books and lines, and its entries of the clock
  sure   the spare lines suffice in any case, so the host need not read how many the request needs

The host does not wait if all requests are sure. Otherwise it waits once, for the header, and adds the missing spares.

Exceptions midway: until rows are loaded, only marks without meaning have changed, and dirty rows to be evicted are in
the table as well. After that the row of a line is no longer certain, and every cache is rescued: dirty rows that stay
in their lines are written to the table, and the cache is emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.ops.cache.definition import HeaderColumn, Plan
from tilerec.ops.runtime.upload import upload
from tilerec.storage.cache_sets import CacheSets
from tilerec.storage.host_rows import HostRows

OPS = torch.ops.tilerec

_MAX_SORT_KEYS = 1 << 61


class CacheTensors(NamedTuple):
    """The tensors of a cache over its current host tensors."""

    host: list[HostRows]
    marks: tuple[Any, ...]
    lines: list[Tensor]
    dirty_L: Tensor
    sets: CacheSets
    counters: Tensor  # int64 [8]; see ops/cache/definition.py

    def books(self) -> list[Tensor]:
        sets = self.sets
        return [
            sets.line_of_E, sets.row_in_L, sets.named_L, sets.flights_L, sets.count_E, self.dirty_L, self.counters,
        ]  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the cache."""
        return [*self.lines, *self.books()]


@dataclass
class CacheRequest:
    """One cache's part of a request."""

    made: CacheTensors
    segments: Sequence[tuple[int, int]]
    serial: int
    bit: int
    alive: int
    names: str
    sure: bool
    grow: Callable[[int], CacheTensors]  # takes the number of spare lines that the cache must have
    rescue: Callable[[Tensor], None]  # takes this cache's entries of the plan


class CacheEmptied(Exception):
    """A cache was rebuilt without rows: there was no memory for its lines and a longer copy at once."""


def request(requests: Sequence[CacheRequest], ids: Tensor, ways: int) -> None:
    """Load the rows of a batch.

    Raises:
        InputError: an id is no row; raised by a later op.
        Emptied: a cache was emptied; the caller repeats the request.
    """
    begins = [begin for ask in requests for begin, _ in ask.segments]
    ends = [end for ask in requests for _, end in ask.segments]
    tables = [t for t, ask in enumerate(requests) for _ in ask.segments]
    numbers = (
        [ask.serial for ask in requests] + [ask.bit for ask in requests] + [ask.alive for ask in requests]
    )
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
            ask.made, made = ask.grow(before.spare + missing), True
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
        here = [view for view in [rows.here for rows in ask.made.host] if view is not None]
        if len(here) < len(ask.made.lines):
            unreadable.append(t)
            continue
        lines += ask.made.lines
        host += here
        tables += [t] * len(here)
    OPS.cache_move_(plan, header, lines, host, tables, ids, False)
    for t in unreadable:
        _write_back(requests[t].made, _entries(plan, header, ids, t))
    try:
        OPS.cache_move_(plan, header, lines, host, tables, ids, True)
        for t in unreadable:
            _load(requests[t].made, _entries(plan, header, ids, t))
        OPS.cache_seat_(plan, header, books, clock, ids)
    except BaseException:
        with ExitStack() as rescues:  # rescues every cache, even if one rescue is interrupted
            for t, ask in enumerate(requests):
                rescues.callback(_rescue, ask, plan, header, ids, t)
        raise


def _rescue(ask: CacheRequest, plan: Tensor, header: Tensor, ids: int, t: int) -> None:
    ask.rescue(_entries(plan, header, ids, t))


def _entries(plan: Tensor, header: Tensor, ids: int, t: int) -> Tensor:
    """Return the plan's entries of a table. Waits for the device."""
    own = torch.cat((plan[:, : int(header[:, HeaderColumn.WANTING].sum())], plan[:, ids:]), 1)
    return own[:, own[Plan.TABLE] == t]


def _write_back(made: CacheTensors, entries: Tensor) -> None:
    own = entries[:, (entries[Plan.LEAVES] >= 0) & (entries[Plan.DIRTY] % 2 == 1)]
    for lines, rows in zip(made.lines, made.host, strict=True):
        rows.write_from(lines, own[Plan.LINE], own[Plan.LEAVES])


def _load(made: CacheTensors, entries: Tensor) -> None:
    entries = entries[:, (entries[Plan.ROW] >= 0) & (entries[Plan.LINE] >= 0)]
    moved = entries[:, entries[Plan.FROM] >= 0]
    loaded = entries[:, entries[Plan.FROM] < 0]
    for lines, rows in zip(made.lines, made.host, strict=True):
        rows.move(lines, moved[Plan.FROM], moved[Plan.LINE])
        rows.read_into(lines, loaded[Plan.LINE], loaded[Plan.ROW])


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
