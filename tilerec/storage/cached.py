"""`RowCache`: device cache for the rows of a host table and their optimizer state.

Nouns (more in `cache_sets.py`)
  host    the table and the optimizer's slots: tensors `[rows, ...]` in host memory
  lines   the same tensors `[lines, ...]` on the cache's device: line l holds one row and all of its state
  dirty   a line that was updated since its row was read or written back
  batch   ids of one lookup: in flight from the request that loads its rows until its update (without an update: until
          its lookup)

    prefetch (batch i + 1) ─► its rows get lines               any time before its lookup
    lookup   (batch i)     ─► ids become line numbers          at the lookup, and again at the update
    update   (batch i)     ─► its lines are changed, and dirty

A row is in one place at a time: in its line, or else in the table. Line numbers are never stored: lookup and update
each compute them when they run. Rows evicted or flushed in between are loaded again first. So an update always finds
its rows, whatever was prefetched or skipped in between. Batches in flight hold their lines only to avoid repeated
transfers.

`settle` writes every dirty row back and empties all lines. After it the table is current and may be read and written.

Threads: every method holds the cache's lock. Code that reads or writes lines holds the lock meanwhile (`lock_caches`).

Exceptions midway (out of memory, Ctrl-C): evicted rows are written back before their lines are reassigned. Where the
row of a line is no longer certain, dirty rows that stayed in their lines are written back and the cache is emptied.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.backends import gpu_kernels_serve
from tilerec.ops.cache.definition import MAX_COUNT, HeaderColumn, Plan
from tilerec.ops.runtime.upload import capturing
from tilerec.spec.cache import CacheParams
from tilerec.storage.cache_request import CacheEmptied, CacheRequest, CacheTensors, in_chunks, request
from tilerec.storage.cache_sets import CacheSets, SpareLinesNeeded
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.host_rows import HostRows

WAYS = 32
"""Lines per set."""

SPARE_BYTES_IN_ADVANCE = 64 << 20
"""Bytes of spare lines that are allocated in advance, enough for all ids of a table's batches in flight. The limit is
the bytes of the table's sets if these are more. Within the limit the host need not read how many rows need one."""

_BITS = (1 << 31) - 1

MAX_BATCHES_IN_FLIGHT = 16
"""Maximum number of batches that hold their lines; a further prefetch or lookup releases the oldest batch's lines."""

Segments = tuple[tuple[int, int], ...]
"""Ranges [begin, end) of a batch's ids that read one table."""


@dataclass(frozen=True, eq=False)
class Bags:
    """Bag ranges of a batch under one offsets tensor; other offsets may divide the same ids into as many bags."""

    offsets: Tensor
    version: int
    ranges: tuple[tuple[int, int, int, int], ...]
    """Per range: first bag, number of bags, first id, end of ids."""

    def has_offsets(self, offsets: Tensor) -> bool:
        return self.version == _version(offsets) and _same_memory(self.offsets, offsets)


def bags_of(offsets: Tensor, ranges: Sequence[tuple[int, int, int, int]]) -> Bags:
    """Return `Bags` of these ranges for the offsets in their current version."""
    return Bags(offsets, _version(offsets), tuple(ranges))


Refuse = Callable[[int, int, int], None]
"""Raises the error for a bad id; takes the number of its segment, its position among the batch's ids, and the id."""


@dataclass(eq=False)
class _Batch:
    """A batch in flight. It keeps its ids alive, so no other batch can be allocated at their address."""

    ids: Tensor
    version: int
    segments: Segments
    serial: int
    rows_U: Tensor | None  # distinct rows of the batch; None: its lines are marked by `bit`
    bit: int = 0
    count: int = 0  # number of its ids that read this table
    looked: bool = False  # it was looked up, and its update is still to come
    bags: Bags | None = None  # per segment, if known

    def matches(self, ids: Tensor, segments: Segments) -> bool:
        return self.has(ids) and self.segments == tuple(sorted(segments))

    def has(self, ids: Tensor) -> bool:
        return self.version == _version(ids) and _same_memory(self.ids, ids)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same address, shape, strides and dtype."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _identity(host: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the identity of host tensors: address, shape and dtype of each."""
    return tuple((t.data_ptr(), tuple(t.shape), t.dtype) for t in host)


def _locked(method: Any) -> Any:
    """Decorate a method to run under the cache's lock and outside of torch's inference mode.

    Training updates lines that an evaluation has loaded, so they must not be inference tensors.
    """

    @functools.wraps(method)
    def run(self: RowCache, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            if not torch.is_inference_mode_enabled():
                return method(self, *args, **kwargs)
            with torch.inference_mode(False), torch.no_grad():
                return method(self, *args, **kwargs)

    return run


@contextmanager
def lock_caches(caches: Iterable[RowCache | None]) -> Iterator[None]:
    """Hold the locks of these caches, so that prefetches of other threads move no lines meanwhile."""
    with ExitStack() as stack:
        for cache in sorted(
            {cache for cache in caches if cache is not None}, key=id
        ):  # a fixed lock order avoids deadlocks
            stack.enter_context(cache.lock)
        yield


@final
class RowCache:
    """The cache of one table (or of one tile of it).

    Args:
        name: the table's name, for messages.
        params: number of lines and eviction algorithm. None: only spare lines, so that rows are on the device as long
            as their batch is in flight.
        device: device of the lines. None: the table's device (a simulation: it costs time and saves nothing).
    """

    def __init__(self, name: str, params: CacheParams | None, device: torch.device | None = None) -> None:
        self.name, self.params, self.device = name, params, device
        self._stats = CacheStats()  # without the device's counts since they were last read
        self._made: CacheTensors | None = None
        self._clean = _BITS  # bits that are set for no line
        self._flight: list[_Batch] = []
        self._serial = 0
        self._dirty = False  # whether any line may be dirty
        self._stream: Any = None  # stream of the last call
        self.lock = threading.RLock()

    # ------------------------------------------------------------------------------------------------ per batch

    @property
    def stats(self) -> CacheStats:
        """Requests, hits and transfers so far. On a GPU, reading this waits for the device."""
        with self.lock:
            self._read_counts()
            return self._stats

    @stats.setter
    def stats(self, stats: CacheStats) -> None:
        with self.lock:
            self._read_counts()
            self._stats = stats

    @_locked
    def _read_counts(self) -> None:
        """Add the device's counts to `_stats` and zero them."""
        made = self._made
        if made is None or not _uses_kernels(made):
            return
        self._wait_for_other_stream()
        counters = made.counters.tolist()
        made.counters.zero_()
        stats = self._stats
        stats.rows += counters[HeaderColumn.ROWS]
        stats.misses += counters[HeaderColumn.MISSES]
        stats.hits += counters[HeaderColumn.ROWS] - counters[HeaderColumn.MISSES]
        stats.conflict_misses += counters[HeaderColumn.SPARE]
        stats.evictions += counters[HeaderColumn.EVICTIONS]
        stats.write_backs += counters[HeaderColumn.WRITES]

    def prefetch(self, host: Sequence[Tensor], ids: Tensor, segments: Segments, refuse: Refuse) -> None:
        """Load the rows of a batch into lines. They stay until its update; without an update, until its lookup.

        Args:
            host: the table, then its optimizer's slots.
            ids: ids of a batch, on the cache's device; `segments` of them are rows of this table.
            refuse: called for the first id that is no row, before anything changes. (On a GPU, a later op raises.)
        """
        prefetch_all([RowRequest(self, host, segments, refuse)], ids)

    @_locked
    def lines_of(
        self,
        host: Sequence[Tensor],
        ids: Tensor,
        segments: Segments,
        refuse: Refuse,
        bags: Bags | None = None,
    ) -> list[Tensor]:
        """Return the line numbers (int32) of each segment's ids, valid until the next call of any method."""
        prefetch_all([RowRequest(self, host, segments, refuse)], ids)
        made, batch = self._made, self._batch(ids, segments)
        assert made is not None
        assert batch is not None
        batch.bags = batch.bags or bags
        lines = self._lines(made, ids, segments)
        # `_version` does not count writes that bypass torch (to a NumPy array that shares the ids' memory). On a GPU
        # this check would wait, and no NumPy array shares memory there.
        if ids.device.type == "cpu" and any(int(own.min()) < 0 for own in lines if own.numel()):
            self._flight.remove(batch)
            self._request(made, ids, segments, refuse)
            made = self._made
            assert made is not None
            self._flight[-1].bags = bags
            lines = self._lines(made, ids, segments)
        return lines

    def _lines(self, made: CacheTensors, ids: Tensor, segments: Segments) -> list[Tensor]:
        line_of_E, rows_of = made.sets.line_of_E, [ids[begin:end].long() for begin, end in segments]
        if ids.device.type != "cpu" or not line_of_E.numel():
            return [line_of_E[own] for own in rows_of]
        inside = [own.clamp(0, line_of_E.shape[0] - 1) for own in rows_of]  # ids may be out of range
        return [line_of_E[a].masked_fill_(a != own, -1) for a, own in zip(inside, rows_of, strict=True)]

    def lines_of_rows(self, rows_U: Tensor) -> Tensor:
        """Return the line numbers (int64) of rows that all have a line."""
        assert self._made is not None
        return self._made.sets.line_of_E[rows_U].long()

    @_locked
    def looked_up(self, ids: Tensor, segments: Segments, *, updates: bool) -> None:
        """Record that a batch was looked up. `updates`: its update is still to come."""
        batch = self._batch(ids, segments)
        if batch is None:
            return
        if updates:
            batch.looked = True
        elif not batch.looked:  # else this is an evaluation between a training lookup and its update
            self._flight.remove(batch)

    @_locked
    def updates(self, ids: Tensor, segments: Segments) -> None:
        """Mark the lines of a batch dirty before its update; all its rows must have lines."""
        assert self._made is not None
        self._dirty = True
        for begin, end in segments:
            self._made.dirty_L.index_fill_(0, self._made.sets.line_of_E[ids[begin:end].long()].long(), True)

    @_locked
    def updated(self, ids: Tensor, segments: Segments) -> None:
        """Record that a batch was updated: it and the batches looked up before it are no longer in flight."""
        batch = self._batch(ids, segments)
        last = self._serial if batch is None else batch.serial
        self._flight = [
            other
            for other in self._flight
            if other is not batch and not (other.looked and other.serial <= last)
        ]

    @property
    def lines(self) -> list[Tensor]:
        """The rows and every slot of the optimizer, indexed by line."""
        assert self._made is not None
        return self._made.lines

    @property
    def names(self) -> Tensor:
        """The row in each line, int64."""
        assert self._made is not None
        return self._made.sets.names if _uses_kernels(self._made) else self._made.sets.row_in_L

    def knows(self, ids: Tensor, segments: Segments, bags: Bags) -> None:
        """Record the bags of a batch's ids."""
        batch = self._batch(ids, segments)
        if batch is not None:
            batch.bags = batch.bags or bags

    def known_segment(self, ids: Tensor, offsets: Tensor, start: int, count: int) -> tuple[int, int] | None:
        """Return the range [begin, end) of these bags' ids if it is recorded for a batch in flight; else None.

        This saves reading the offsets from the device.
        """
        for batch in self._flight:
            if batch.bags is not None and batch.has(ids) and batch.bags.has_offsets(offsets):
                for first, bags, begin, end in batch.bags.ranges:
                    if (first, bags) == (start, count):
                        return begin, end
        return None

    # ------------------------------------------------------------------------------------------------ whole

    @_locked
    def settle(self) -> None:
        """Write dirty rows back and empty all lines. The host tensors may be read and written until the next batch."""
        self._flush()
        if self._made is not None:
            self._wait_for_device(self._made)
        made, self._made = self._made, None  # an exception below leaves no half-emptied cache behind
        self._flight.clear()
        if made is not None:
            made.sets.forget()
            self._made = made

    @_locked
    def leave(self, rows_M: Tensor) -> None:
        """Run `settle` for some rows (int64, on any device). Batches in flight request all of their rows again."""
        made = self._made
        if made is None:
            return
        self._wait_for_other_stream()
        lines = made.sets.line_of_E[rows_M.to(made.dirty_L.device)].long()
        lines = torch.unique(lines[lines >= 0])
        self._write_back(made, made.sets.row_in_L[lines], lines)
        try:
            made.sets.empty(lines)
        except BaseException:
            self._rescue(made, lines[:0], lines[:0], made.dirty_L)
            raise
        self._wait_for_device(made)
        self._flight.clear()

    @_locked
    def drop(self) -> None:
        """Run `settle` and release the memory; called before the table is replaced."""
        self.settle()
        self._read_counts()
        self._made = None

    def _flush(self) -> None:
        made = self._made
        if made is None or not self._dirty:
            return
        self._wait_for_other_stream()
        lines = made.dirty_L.nonzero()[:, 0]
        self._write_back(made, made.sets.row_in_L[lines], lines)
        self._dirty = False

    def _wait_for_device(self, made: CacheTensors) -> None:
        """Wait until the device has finished with the host rows, before the host reads or writes them."""
        if made.lines[0].device.type == "cuda":
            self._wait_for_other_stream()
            torch.cuda.current_stream(made.lines[0].device).synchronize()

    # ------------------------------------------------------------------------------------------------ inside

    def _over(self, host: Sequence[Tensor]) -> CacheTensors:
        """Return the cache over these tensors; rebuild it if they are not those of the last call."""
        self._wait_for_other_stream()
        made = self._made
        if (
            made is not None
            and made.marks == _identity(host)
            and self._device_of(host) == made.lines[0].device
        ):
            return made
        self.drop()
        self._made = self._make(host, 0)
        return self._made

    def _device_of(self, host: Sequence[Tensor]) -> torch.device:
        device = host[0].device if self.device is None else self.device
        here = torch.device("cuda")
        return torch.device("cuda", torch.cuda.current_device()) if device == here else device

    def _make(self, host: Sequence[Tensor], spare: int) -> CacheTensors:
        rows, device = host[0].shape[0], self._device_of(host)
        line_bytes = sum(t.element_size() * t[:1].numel() for t in host)
        sets = 0
        if self.params is not None and rows:
            sets = -(-max(1, round(self.params.load_factor * rows)) // WAYS)
            sets = self._within_reserve(sets, line_bytes, device)
        count = sets * WAYS + spare
        try:
            # On a GPU there is one more line, of zeros: ids that are no rows read it.
            zeros = int(_has_kernels(device))
            lines = [torch.empty((count + zeros, *t.shape[1:]), dtype=t.dtype, device=device) for t in host]
            for tensor in lines if zeros else ():
                tensor[count:].zero_()
            dirty_L = torch.zeros(count, dtype=torch.bool, device=device)
            algorithm = (self.params or CacheParams()).algorithm
            made = CacheSets(rows, sets, WAYS, spare, algorithm, device)
            counters = torch.zeros(8, dtype=torch.int64, device=device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"Table '{self.name}': no memory on {device} for {count} cache lines of {line_bytes} bytes (and 4 to 8 "
                f"bytes for each of {rows} rows). Lower load_factor, or shard the table over more ranks."
            ) from error
        self._clean = _BITS
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
        return CacheTensors(
            [HostRows(t.detach(), device) for t in host], _identity(host), lines, dirty_L, made, counters
        )

    def _within_reserve(self, sets: int, line_bytes: int, device: torch.device) -> int:
        """Return the number of sets, reduced so that the reserved memory stays free."""
        if self.params is None or not self.params.reserved_memory or device.type != "cuda":
            return sets
        free, _ = torch.cuda.mem_get_info(device)
        fit = max(0, int((free - self.params.reserved_memory) // (line_bytes * WAYS)))
        if fit < sets:
            warnings.warn(
                f"Table '{self.name}': its cache has {fit * WAYS} lines, not the {sets * WAYS} of load_factor="
                f"{self.params.load_factor}, because reserved_memory leaves no room for more.",
                stacklevel=2,
            )
        return min(sets, fit)

    def _batch(self, ids: Tensor, segments: Segments) -> _Batch | None:
        return next((batch for batch in self._flight if batch.matches(ids, segments)), None)

    def _release_oldest(self, ids: Tensor) -> None:
        """Drop the oldest batch in flight if there are MAX_BATCHES_IN_FLIGHT.

        Prefer a batch of other ids: for these ids another table of the same lookup has just found its lines.
        """
        if len(self._flight) >= MAX_BATCHES_IN_FLIGHT:
            others = [batch for batch in self._flight if not batch.has(ids)]
            self._flight.remove(others[0] if others else self._flight[0])

    def _request(self, made: CacheTensors, ids: Tensor, segments: Segments, refuse: Refuse) -> None:
        """Load a batch's rows and add it to the batches in flight."""
        rows_U, count = self._distinct(made, ids, segments, refuse)
        self._release_oldest(ids)
        self._serial += 1
        batch = _Batch(ids, _version(ids), tuple(sorted(segments)), self._serial, rows_U)
        while True:
            moves = made.sets.request(
                rows_U, self._serial, [b.rows_U for b in self._flight if b.rows_U is not None]
            )
            if not isinstance(moves, SpareLinesNeeded):
                break
            made = self._with_spare(made, moves.lines)
        self._write_back(made, moves.leaving_rows, moves.leaving_lines)
        dirty_L = made.dirty_L
        moved = dirty_L[moves.old_lines]
        try:
            made.sets.seat(moves)
            for lines, host in zip(made.lines, made.host, strict=True) if moves.old_lines.numel() else ():
                host.move(lines, moves.old_lines, moves.new_lines)
            dirty_L[moves.new_lines] = moved
            dirty_L[moves.old_lines] = False
            if moves.loaded_rows.numel():
                for lines, host in zip(made.lines, made.host, strict=True):
                    host.read_into(lines, moves.loaded_lines, moves.loaded_rows)
            self._flight.append(batch)
        except BaseException:
            # Moved rows are still in their old lines: no other row got those.
            dirty_L = dirty_L.clone()
            dirty_L[moves.new_lines] = False
            dirty_L[moves.old_lines] = moved
            self._rescue(made, moves.old_rows, moves.old_lines, dirty_L)
            raise
        stats, misses = self._stats, moves.loaded_rows.numel()
        stats.requests += 1
        stats.ids += count
        stats.rows += rows_U.numel()
        stats.hits += rows_U.numel() - misses
        stats.misses += misses
        stats.conflict_misses += moves.conflicts
        stats.evictions += moves.evictions

    def _ask(self, want: RowRequest, ids: Tensor) -> CacheRequest:
        """Return this cache's part of a request for several caches."""
        if self._serial >= MAX_COUNT - 1:
            self.settle()
            self._serial = 0
        made = self._made
        assert made is not None
        count = sum([end - begin for begin, end in want.segments])
        self._release_oldest(ids)
        made, sure = self._with_room(made, count)
        alive = 0
        for batch in self._flight:
            alive |= batch.bit
        if not self._clean:
            made.sets.flights_L.bitwise_and_(alive)
            self._clean = _BITS & ~alive
        bit = self._clean & -self._clean
        self._clean &= ~bit
        self._serial += 1

        def grow(spare: int) -> CacheTensors:
            assert self._made is not None
            return self._with_spare(self._made, spare)

        return CacheRequest(
            made, want.segments, self._serial, bit, alive | bit, want.names, sure, grow, self._rescue_plan
        )

    def _with_room(self, made: CacheTensors, count: int) -> tuple[CacheTensors, bool]:
        """Return the cache, grown if that is cheap, and True if spare lines suffice in any case.

        They suffice if there is one for each of `count` ids and each id of the batches in flight.
        """
        sets = made.sets
        rows = sets.line_of_E.shape[0]
        if sets.first_spare >= rows:  # the sets have a line for every row
            return made, True
        most = min(rows, count + sum([batch.count for batch in self._flight]))
        if sets.spare < most:
            line_bytes = sum([t.element_size() * t[:1].numel() for t in made.lines])
            if most > sets.first_spare and most * line_bytes > SPARE_BYTES_IN_ADVANCE:
                return made, False
            made = self._with_spare(made, most)
        return made, made.sets.spare >= most

    def _add_in_flight(self, ask: CacheRequest, want: RowRequest, ids: Tensor) -> None:
        """Add a batch to those in flight, once its rows are loaded."""
        count = sum([end - begin for begin, end in want.segments])
        self._flight.append(
            _Batch(ids, _version(ids), tuple(sorted(want.segments)), ask.serial, None, ask.bit, count)
        )
        self._stats.requests += 1
        self._stats.ids += count

    def _rescue_plan(self, entries: Tensor) -> None:
        """Write dirty rows back and empty the cache after a plan failed midway; `entries` are this cache's entries."""
        made = self._made
        assert made is not None
        lines, old = entries[Plan.LINE], entries[Plan.FROM]
        moved = (old >= 0) & (entries[Plan.DIRTY] >= 2)
        dirty_L = made.dirty_L.clone()
        dirty_L[lines[lines >= 0]] = False
        dirty_L[old[old >= 0]] = False
        stayed = dirty_L.nonzero()[:, 0]
        for tensor, host in zip(made.lines, made.host, strict=True):
            host.write_from(tensor, stayed, made.sets.row_in_L[stayed])
            host.write_from(tensor, old[moved], entries[Plan.ROW][moved])
        self._wait_for_device(made)
        self._read_counts()
        self._made, self._dirty = None, False
        self._flight.clear()

    def _rescue(self, made: CacheTensors, rows: Tensor, lines: Tensor, dirty_L: Tensor) -> None:
        """Write the lines of `dirty_L` back and empty the cache; `lines` still hold `rows`, despite the sets' books."""
        row_in_L = made.sets.row_in_L.clone()
        row_in_L[lines] = rows
        lines = dirty_L.nonzero()[:, 0]
        for tensor, host in zip(made.lines, made.host, strict=True):
            host.write_from(tensor, lines, row_in_L[lines])
        self._wait_for_device(made)
        self._made, self._dirty = None, False
        self._flight.clear()

    def _distinct(
        self, made: CacheTensors, ids: Tensor, segments: Segments, refuse: Refuse
    ) -> tuple[Tensor, int]:
        """Return the distinct rows of a batch, ascending, and the number of its ids."""
        parts = [ids[begin:end] for begin, end in segments]
        rows_N = torch.cat(parts).long()
        rows_U = torch.unique(rows_N)
        rows = made.sets.line_of_E.shape[0]
        if rows_U.numel() and (int(rows_U[0]) < 0 or int(rows_U[-1]) >= rows):
            for s, (part, (begin, _)) in enumerate(zip(parts, segments, strict=True)):
                bad = ((part < 0) | (part >= rows)).nonzero()
                if bad.numel():
                    refuse(s, begin + int(bad[0]), int(part[int(bad[0])]))
        return rows_U, rows_N.numel()

    def _with_spare(self, made: CacheTensors, lines: int) -> CacheTensors:
        """Return the cache with at least `lines` spare lines.

        If there is no memory for a tensor and its longer copy at once, the cache is emptied. Batches in flight then
        request their rows again.
        """
        spare = max(lines, 2 * made.sets.spare, WAYS)
        more = spare - made.sets.spare
        like = made.lines[0]
        try:
            for k, tensor in enumerate(made.lines):
                made.lines[k] = torch.cat((tensor, tensor.new_empty(more, *tensor.shape[1:])))
                if _uses_kernels(made):  # the line of zeros comes last
                    made.lines[k][-1:].zero_()
            dirty_L = torch.cat((made.dirty_L, made.dirty_L.new_zeros(more)))
            # Lines beyond those of the sets do no harm.
            self._made = made = made._replace(dirty_L=dirty_L)
            made.sets.grow(spare)
            return made
        except (RuntimeError, MemoryError):
            self.drop()
        host = [rows.tensor for rows in made.host]
        try:
            self._made = self._make(host, spare)
        except ConfigError as error:
            raise ConfigError(
                f"Table '{self.name}': no memory on {like.device} for {spare} spare cache lines, which hold the rows "
                "of a batch that find no line in their sets. Lower the batch size or load_factor."
            ) from error
        return self._made

    def _write_back(self, made: CacheTensors, rows: Tensor, lines: Tensor) -> None:
        """Write the dirty ones of these lines to the table, and mark them clean."""
        if not self._dirty or not rows.numel():
            return
        dirty = made.dirty_L[lines]
        rows, lines = rows[dirty], lines[dirty]
        if not rows.numel():
            return
        for tensor, host in zip(made.lines, made.host, strict=True):
            host.write_from(tensor, lines, rows)
        made.dirty_L[lines] = False
        self._stats.write_backs += rows.numel()

    def _wait_for_other_stream(self) -> None:
        """Make the current stream wait for the stream of the last call."""
        made = self._made
        if made is None or made.lines[0].device.type != "cuda":
            return
        stream = torch.cuda.current_stream(made.lines[0].device)
        if self._stream != stream:
            stream.wait_stream(self._stream)
            for tensor in made.tensors():  # the allocator reuses their memory only after this stream's work
                tensor.record_stream(stream)
        self._stream = stream

    # ------------------------------------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        assert not self._dirty, "settle runs before a copy"
        return {"name": self.name, "params": self.params, "device": self.device, "stats": replace(self.stats)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RowCache.__init__(self, state["name"], state["params"], state["device"])
        self._stats = state["stats"]


@dataclass(frozen=True)
class RowRequest:
    """A batch's request to one cache: the rows of `host` that `segments` of its ids name."""

    cache: RowCache
    host: Sequence[Tensor]
    segments: Segments
    refuse: Refuse
    names: str = ""  # "feature@table" per segment, joined by ",", for messages; or empty


def _has_kernels(device: torch.device) -> bool:
    """Return True if kernels of this device serve the requests of several caches at once."""
    return gpu_kernels_serve(device)


def _uses_kernels(made: CacheTensors) -> bool:
    return _has_kernels(made.dirty_L.device)


def prefetch_all(wants: Sequence[RowRequest], ids: Tensor) -> None:
    """Run `RowCache.prefetch` for several caches; on a GPU as one request."""
    if wants and capturing():
        raise ConfigError(
            f"Table '{wants[0].cache.name}': a batch of this cached table is captured in a CUDA graph. The host "
            "assigns cache lines batch by batch, and every replay would repeat the lines of this batch. Capture "
            "uncached tables (uncache_tables), or run this step without a capture."
        )
    with lock_caches([want.cache for want in wants]), _outside_of_inference(), _on_device_of(ids):
        rest = list(wants)
        while rest:
            now: dict[int, RowRequest] = {}
            later = []
            for want in rest:
                cache = want.cache
                made = cache._over(want.host)
                known = cache._batch(ids, want.segments)
                if known is not None and not (_uses_kernels(made) and ids.is_inference()):
                    continue
                if known is not None:  # inference tensors have no version: the ids may have changed
                    cache._flight.remove(known)
                if not _uses_kernels(made):
                    cache._request(made, ids, want.segments, want.refuse)
                elif id(cache) in now:  # two tables share these rows
                    later.append(want)
                else:
                    now[id(cache)] = want
            _request_all(list(now.values()), ids)
            rest = later


def _request_all(wants: Sequence[RowRequest], ids: Tensor) -> None:
    while wants:
        asks = [want.cache._ask(want, ids) for want in wants]
        want_of = {id(ask): want for ask, want in zip(asks, wants, strict=True)}
        try:
            for chunk in in_chunks(asks):
                request(chunk, ids, WAYS)
                for ask in chunk:
                    want_of[id(ask)].cache._add_in_flight(ask, want_of[id(ask)], ids)
            return
        except CacheEmptied:  # caches that hold their rows by now need no second request
            wants = [want for want in wants if want.cache._batch(ids, want.segments) is None]
            for want in wants:
                want.cache._over(want.host)


def _on_device_of(ids: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of the ids the current one.

    A cache on "cuda" is on the GPU of its batches. A data loader's thread may have another GPU as its current one.
    """
    return torch.cuda.device(ids.device) if ids.is_cuda else nullcontext()


@contextmanager
def _outside_of_inference() -> Iterator[None]:
    """Leave torch's inference mode: training updates lines that an evaluation has loaded."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def lines_of_all(
    wants: Sequence[RowRequest],
    ids: Tensor,
    segments: Sequence[tuple[int, int]],
    tables: Sequence[int],
    writes: bool,
) -> Tensor:
    """Return the current line numbers of a batch's ids, segment after segment, on a GPU.

    Args:
        wants: one request per cached table.
        segments: segments of the batch.
        tables: per segment, the index of its request in `wants`; -1: an uncached table, whose ids stay as they are.
        writes: the caller will change these lines. If False, ids that are no rows get the line of zeros: the request
            has already reported them.
    """
    prefetch_all(wants, ids)
    made = [want.cache._made for want in wants]
    sets = [own.sets for own in made if own is not None]
    for want in wants if writes else ():
        want.cache._dirty = True
    lines: Tensor = torch.ops.tilerec.cache_lines_(
        ids, [begin for begin, _ in segments], [end for _, end in segments], tables, [own.line_of_E for own in sets],
        [own.dirty_L for own in made if own is not None] if writes else [],
        [-1 if writes else own.row_in_L.shape[0] for own in sets],
    )  # fmt: skip
    return lines


def served_by_kernels(wants: Sequence[RowRequest]) -> bool:
    """Return True if `lines_of_all` serves all of these caches."""
    return bool(wants) and all([_has_kernels(want.cache._device_of(want.host)) for want in wants])  # noqa: C419
