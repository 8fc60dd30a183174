"""`RowCache`: device cache for the rows of a host table and their optimizer state.

Nouns (more in `cache_sets.py`)
  host    the table and the optimizer's slots: tensors `[rows, ...]` in host memory, or in a file
  lines   the same tensors `[lines, ...]` on the cache's device: line l holds one row and all of its state
  dirty   a line that was updated since its row was read or written back
  batch   ids of one lookup: in flight from the request that loads its rows until its update (without an update: until
          its lookup)

    prefetch (batch i + 1) ─► its rows get lines               any time before its lookup
    lookup   (batch i)     ─► ids become line numbers          at the lookup, and again at the update
    update   (batch i)     ─► its lines are changed, and dirty

A row is in one place at a time: in its line, or else in the table. Line numbers are never stored: lookup and update
each compute them when they run (`cache_request.py`). Rows evicted or flushed in between are loaded again first. So an
update always finds its rows, whatever was prefetched or skipped in between. Batches in flight hold their lines only to
avoid repeated transfers.

`settle` writes every dirty row back and empties all lines. After it the table is current and may be read and written.

Threads: every method holds the cache's lock. Code that reads or writes lines holds the lock meanwhile (`lock_caches`).

Exceptions midway (out of memory, Ctrl-C): evicted rows are written back before their lines are reassigned. Where the
row of a line is no longer certain, dirty rows that stayed in their lines are written back and the cache is emptied.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.cache.definition import HeaderColumn, Plan, entries_of
from tilerec.spec.cache import CacheParams
from tilerec.storage.batches_in_flight import BatchesInFlight
from tilerec.storage.cache_sets import CacheSets
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.cache_tensors import CacheTensors, bytes_per_row, identity_of
from tilerec.storage.file_rows import home_rows

WAYS = 32
"""Lines per set."""

SPARE_BYTES_IN_ADVANCE = 64 << 20
"""Bytes of spare lines that are allocated in advance, enough for all ids of a table's batches in flight. The limit is
the bytes of the table's sets if these are more. Within the limit the host need not read how many rows need one."""


@contextmanager
def outside_of_inference() -> Iterator[None]:
    """Leave torch's inference mode: training updates lines that an evaluation has loaded."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _locked(method: Any) -> Any:
    """Decorate a method to run under the cache's lock and outside of torch's inference mode."""

    @functools.wraps(method)
    def run(self: RowCache, *args: Any, **kwargs: Any) -> Any:
        with self.lock, outside_of_inference():
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
        device: device of the lines. None: the table's device (unless it is in files, a simulation: it costs time and
            saves nothing).
        folder: of the files with the table and its slots. None: they are in host memory.
    """

    def __init__(
        self, name: str, params: CacheParams | None, device: torch.device | None = None, folder: str | None = None
    ) -> None:  # fmt: skip
        self.name, self.params, self.device, self.folder = name, params, device, folder
        self.in_flight = BatchesInFlight()
        self.lock = threading.RLock()
        self.may_be_dirty = False  # False: no line is
        self._stats = CacheStats()  # without the device's counts since they were last read
        self._tensors: CacheTensors | None = None
        self._stream: Any = None  # stream of the last call

    @property
    def tensors(self) -> CacheTensors:
        """The cache's tensors, since its first request."""
        assert self._tensors is not None, "a request creates them"
        return self._tensors

    # ------------------------------------------------------------------------------------------------ statistics

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
        if self._tensors is None:
            return
        self._wait_for_other_stream()
        counters = self._tensors.counters.tolist()
        self._tensors.counters.zero_()
        stats = self._stats
        stats.rows += counters[HeaderColumn.ROWS]
        stats.misses += counters[HeaderColumn.MISSES]
        stats.hits += counters[HeaderColumn.ROWS] - counters[HeaderColumn.MISSES]
        stats.conflict_misses += counters[HeaderColumn.SPARE]
        stats.evictions += counters[HeaderColumn.EVICTIONS]
        stats.write_backs += counters[HeaderColumn.WRITES]

    def count_request(self, ids: int) -> None:
        """Count a request of this number of ids."""
        self._stats.requests += 1
        self._stats.ids += ids

    # ------------------------------------------------------------------------------------------------ write back

    @_locked
    def settle(self) -> None:
        """Write dirty rows back and empty all lines. The host tensors may be read and written until the next batch."""
        self._flush()
        if self._tensors is not None:
            self._wait_for_device(self._tensors)
        held, self._tensors = self._tensors, None  # an exception below leaves no half-emptied cache behind
        self.in_flight.clear()
        if held is not None:
            held.sets.forget()
            self._tensors = held

    @_locked
    def leave(self, rows_M: Tensor) -> None:
        """Run `settle` for some rows (int64, on any device). Batches in flight request all of their rows again."""
        held = self._tensors
        if held is None:
            return
        self._wait_for_other_stream()
        lines = held.sets.line_of_E[rows_M.to(held.dirty_L.device)].long()
        lines = torch.unique(lines[lines >= 0])
        self._write_back(held, lines)
        try:
            held.sets.empty(lines)
        except BaseException:
            self._rescue(held, held.dirty_L)
            raise
        self._wait_for_device(held)
        self.in_flight.clear()

    @_locked
    def drop(self) -> None:
        """Run `settle` and release the memory; called before the table is replaced."""
        self.settle()
        self._read_counts()
        self._tensors = None

    def _flush(self) -> None:
        held = self._tensors
        if held is None or not self.may_be_dirty:
            return
        self._wait_for_other_stream()
        self._write_back(held, held.dirty_L.nonzero()[:, 0])
        self.may_be_dirty = False

    def _write_back(self, held: CacheTensors, lines: Tensor) -> None:
        """Write the dirty ones of these lines to the table, and mark them clean."""
        if not self.may_be_dirty or not lines.numel():
            return
        lines = lines[held.dirty_L[lines]]
        if not lines.numel():
            return
        rows = held.sets.row_in_L[lines]
        held.home.write_from(held.lines, lines, rows)
        held.dirty_L[lines] = False
        self._stats.write_backs += rows.numel()

    def rescue(self, plan: Tensor, header: Tensor, ids: int, t: int) -> None:
        """Write dirty rows back and empty the cache after a plan, in which it is table `t`, failed midway."""
        held, entries = self.tensors, entries_of(plan, header, ids, t)
        lines, old = entries[Plan.LINE], entries[Plan.FROM]
        moved = (old >= 0) & (entries[Plan.DIRTY] >= 2)
        dirty_L = held.dirty_L.clone()
        dirty_L[lines[lines >= 0]] = False
        dirty_L[old[old >= 0]] = False
        held.home.write_from(held.lines, old[moved], entries[Plan.ROW][moved])
        self._rescue(held, dirty_L)

    def _rescue(self, held: CacheTensors, dirty_L: Tensor) -> None:
        """Write the lines of `dirty_L` back and empty the cache."""
        lines = dirty_L.nonzero()[:, 0]
        held.home.write_from(held.lines, lines, held.sets.row_in_L[lines])
        self._wait_for_device(held)
        self._read_counts()
        self._tensors, self.may_be_dirty = None, False
        self.in_flight.clear()

    # ------------------------------------------------------------------------------------------------ memory

    @_locked
    def over(self, host: Sequence[Tensor]) -> CacheTensors:
        """Return the tensors of the cache over these host tensors; make them anew if they are over others."""
        self._wait_for_other_stream()
        held = self._tensors
        if held is not None and held.identity == identity_of(host) and self._device_of(host) == held.lines[0].device:
            return held
        self.drop()
        self._tensors = self._make(host, 0)
        return self._tensors

    def _device_of(self, host: Sequence[Tensor]) -> torch.device:
        device = host[0].device if self.device is None else self.device
        here = torch.device("cuda")
        return torch.device("cuda", torch.cuda.current_device()) if device == here else device

    def _make(self, host: Sequence[Tensor], spare: int) -> CacheTensors:
        rows, device = host[0].shape[0], self._device_of(host)
        line_bytes = bytes_per_row(host)
        sets = 0
        if self.params is not None and rows:
            sets = -(-max(1, round(self.params.load_factor * rows)) // WAYS)
            sets = self._within_reserve(sets, line_bytes, device)
        count = sets * WAYS + spare
        try:
            lines = [torch.empty((count + 1, *t.shape[1:]), dtype=t.dtype, device=device) for t in host]
            for tensor in lines:
                tensor[count:].zero_()
            dirty_L = torch.zeros(count, dtype=torch.bool, device=device)
            algorithm = (self.params or CacheParams()).algorithm
            books = CacheSets(rows, sets, WAYS, spare, algorithm, device)
            counters = torch.zeros(8, dtype=torch.int64, device=device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"Table '{self.name}': no memory on {device} for {count} cache lines of {line_bytes} bytes (and 4 to 8 "
                f"bytes for each of {rows} rows). Lower load_factor, or shard the table over more ranks."
            ) from error
        self.in_flight.lines_were_made()
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
        return CacheTensors(
            home_rows([t.detach() for t in host], device), identity_of(host), lines, dirty_L, books, counters
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

    def with_room(self, count: int) -> tuple[CacheTensors, bool]:
        """Return the cache, grown if that is cheap, and True if spare lines suffice for a request in any case.

        They suffice if there is one for each of its `count` ids and for each id of the batches in flight.
        """
        held = self.tensors
        sets = held.sets
        rows = sets.line_of_E.shape[0]
        if sets.first_spare >= rows:  # the sets have a line for every row
            return held, True
        most = min(rows, count + sum([batch.count for batch in self.in_flight]))
        if sets.spare < most:
            if most > sets.first_spare and most * held.line_bytes > SPARE_BYTES_IN_ADVANCE:
                return held, False
            held = self.with_spare(most)
        return held, held.sets.spare >= most

    def with_spare(self, lines: int) -> CacheTensors:
        """Return the cache with at least `lines` spare lines.

        If there is no memory for a tensor and its longer copy at once, the cache is emptied. Batches in flight then
        request their rows again.
        """
        held = self.tensors
        spare = max(lines, 2 * held.sets.spare, WAYS)
        more = spare - held.sets.spare
        like = held.lines[0]
        try:
            for k, tensor in enumerate(held.lines):
                held.lines[k] = torch.cat((tensor, tensor.new_empty(more, *tensor.shape[1:])))
                held.lines[k][-1:].zero_()
            dirty_L = torch.cat((held.dirty_L, held.dirty_L.new_zeros(more)))
            # Lines beyond those of the sets do no harm.
            self._tensors = held = held._replace(dirty_L=dirty_L)
            held.sets.grow(spare)
            return held
        except (RuntimeError, MemoryError):
            self.drop()
        try:
            self._tensors = self._make(held.home.tensors, spare)
        except ConfigError as error:
            raise ConfigError(
                f"Table '{self.name}': no memory on {like.device} for {spare} spare cache lines, which hold the rows "
                "of a batch that find no line in their sets. Lower the batch size or load_factor."
            ) from error
        return self._tensors

    # ------------------------------------------------------------------------------------------------ streams

    def _wait_for_device(self, held: CacheTensors) -> None:
        """Wait until the device has finished with the host rows, before the host reads or writes them."""
        if held.lines[0].device.type == "cuda":
            self._wait_for_other_stream()
            torch.cuda.current_stream(held.lines[0].device).synchronize()

    def _wait_for_other_stream(self) -> None:
        """Make the current stream wait for the stream of the last call."""
        held = self._tensors
        if held is None or held.lines[0].device.type != "cuda":
            return
        stream = torch.cuda.current_stream(held.lines[0].device)
        if self._stream != stream:
            stream.wait_stream(self._stream)
            for tensor in held.tensors():  # the allocator reuses their memory only after this stream's work
                tensor.record_stream(stream)
        self._stream = stream

    # ------------------------------------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        assert not self.may_be_dirty, "settle runs before a copy"
        return {
            "name": self.name, "params": self.params, "device": self.device, "folder": self.folder,
            "stats": replace(self.stats),
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        RowCache.__init__(self, state["name"], state["params"], state["device"], state["folder"])
        self._stats = state["stats"]


def stats_of(caches: Iterable[RowCache | None], reset: bool) -> CacheStats:
    """Return the summed statistics of the caches of a table's rows; `reset` zeroes them."""
    total = CacheStats()
    for cache in caches:
        if cache is not None:
            for field in fields(total):
                setattr(total, field.name, getattr(total, field.name) + getattr(cache.stats, field.name))
            if reset:
                cache.stats = CacheStats()
    return total
