"""Collection of row gradients during a backward pass, and their delivery at its end.

Terms
  sink     receives the row gradients of one table: an attached optimizer, or a sparse `.grad`
  record   one lookup's row gradients, not materialised (`ops/update/definition.py` describes its format)
  pass     one run of autograd's engine; all records of a table in it are summed before its sink receives them

A table may be looked up several times in one step: two collections share it, or a module is called twice. Each lookup's
backward submits its record. At the end of the pass each sink receives all of its records at once. So a table is updated
exactly once per backward pass, after the last gradient computation that reads its weights.

Ops accept only tensors and numbers, so they identify a sink by an integer, its handle. This also lets a compiled graph
submit to it. The table of handles holds weak references to sinks.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tilerec.errors import CommsError, InputError, TilerecError
from tilerec.ops.gradient.concatenate import joined
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.lookup.saved_rows import SavedRows
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.update.calls import SumCall
from tilerec.torch_private import after_backward, disable_dynamo, graph_task_id


class GradientSink(ABC):
    """Receiver of one table's row gradients at the end of a backward pass."""

    def __init__(self) -> None:
        self.handle = next(_HANDLES)
        # Lookups whose backward reads the rows, each with its indices of this table (several if tables are tied). None
        # before the first one: most tables never have any.
        self.readers: weakref.WeakKeyDictionary[SavedRows, tuple[int, ...]] | None = None
        self.earlier: list[_RejectingSink] = []  # sinks of former handles that lookups may still use
        _SINKS[self.handle] = self

    def about_to_write(self) -> None:
        """Make lookups whose backward reads the rows save them; called before the rows are written."""
        while self.readers:
            try:
                reader, tables = self.readers.popitem()
            except KeyError:  # another thread has just released the last ones
                return
            for table in tables:
                reader.keep(table)

    def refuse_earlier(self, reason: str) -> None:
        """Reject gradients of earlier lookups with this reason, since the table's rows are renumbered."""
        self.earlier = [*self.earlier, _RejectingSink(self.handle, reason)]
        self.handle = next(_HANDLES)
        _SINKS[self.handle] = self

    @abstractmethod
    def batch_key(self) -> Hashable:
        """Return a key; sinks of one class with equal keys may take a record together."""

    @abstractmethod
    def take(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
        """Apply a record whose features all belong to `sinks`; each sink has at least one feature."""

    def order(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:  # noqa: B027 - most have none
        """Sort the ids of a later batch in advance, for its `take`; `record.grad` is not read."""

    def merge(self, sinks: Sequence[GradientSink], records: Sequence[GradientRecord]) -> GradientRecord:
        """Merge several lookups of each of `sinks` into one record.

        On the CPU the record contains each lookup's row sums, in the order of the forwards. On other devices the host
        would have to wait for the number of these rows. There the lookups' occurrences are concatenated, and one sum
        covers all.
        """
        handles = [sink.handle for sink in sinks]
        if records[0].grad.device.type != "cpu":
            named = [(record, features_of(record, handles)) for record in records]
            return joined([r.only(sorted(f for own in of.values() for f in own)) for r, of in named])
        sums: dict[int, list[tuple[Tensor, Tensor]]] = {handle: [] for handle in handles}
        for record in records:
            own = features_of(record, handles)
            for handle, part in zip(own, sum_rows_of_tables(record, list(own.values())), strict=True):
                sums[handle].append(part)
        return _record_of_sums(records[0].serial, sums)


class _RejectingSink(GradientSink):
    """Sink that raises an `InputError` for every record."""

    def __init__(self, handle: int, reason: str) -> None:
        self.handle, self.reason = handle, reason
        self.readers, self.earlier = None, []
        _SINKS[handle] = self

    def batch_key(self) -> Hashable:
        return self.handle

    def take(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
        raise InputError(self.reason)


def live_sinks() -> list[GradientSink]:
    """Return all sinks of this process."""
    return list(_SINKS.values())


_HANDLES = itertools.count(1)
_SINKS: weakref.WeakValueDictionary[int, GradientSink] = weakref.WeakValueDictionary()
_SERIALS = itertools.count()


@functools.cache
def _hook_optimizer_steps() -> None:
    """Register a hook, once: torch's optimizers call it before they step a table's leaf."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _notify_readers(optimizer)
    elif any([hasattr(p, "_tilerec_sink") for group in optimizer.param_groups for p in group["params"]]):  # noqa: C419
        # A compiled step breaks its graph here, as torch does before a step: compiled code does not count all of its
        # writes (those of fused optimizers).
        _notify_readers_eagerly(optimizer)


def _notify_readers(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            sink = _SINKS.get(getattr(parameter, "_tilerec_sink", -1))
            if sink is not None and sink.readers:
                sink.about_to_write()


_notify_readers_eagerly = disable_dynamo(_notify_readers)


def register_saved_rows(handles: Mapping[int, int], reader: SavedRows) -> None:
    """Make sinks call `reader.keep` before their rows are written. `handles`: by the reader's index of the table."""
    _hook_optimizer_steps()
    for table, handle in handles.items():
        sink = _SINKS.get(handle)
        if sink is not None:
            if sink.readers is None:
                sink.readers = weakref.WeakKeyDictionary()
            sink.readers[reader] = (*sink.readers.get(reader, ()), table)


def new_ticket() -> Tensor:
    """Return a lookup's ticket, int64 `[2]` on the CPU: its serial number, and the pass that used it (-1: none)."""
    return torch.frombuffer(array("q", (next_serial(), -1)), dtype=torch.int64)  # a third of torch.tensor's time


def next_serial() -> int:
    """Return the next lookup's serial number; serials follow the order of the forwards."""
    return next(_SERIALS)


class _BackwardPass:
    """Records of one backward pass. Only the pass references them, so they are freed with a pass that fails."""

    def __init__(self) -> None:
        self.records: list[GradientRecord] = []

    def finish(self) -> None:
        deliver(self.records)


_PASSES: weakref.WeakValueDictionary[int, _BackwardPass] = weakref.WeakValueDictionary()


def _collect(record: GradientRecord) -> None:
    """Store the record until the running backward pass ends (passes nest, and run in several threads)."""
    task = graph_task_id()
    if task == -1:  # outside of autograd's engine: no pass will end
        deliver([record])
        return
    running = _PASSES.get(task)
    if running is None:
        running = _PASSES[task] = _BackwardPass()
        after_backward(running.finish)
    running.records.append(record)


def submit(record: GradientRecord) -> None:
    """Submit a lookup's row gradients, from its backward; features with sink -1 are dropped."""
    if -1 in record.sinks:
        record = record.only([f for f, handle in enumerate(record.sinks) if handle != -1])
    if record.sinks:
        _collect(record)


def deliver(records: Sequence[GradientRecord]) -> None:
    """Pass records to their sinks: tables in one record together, tables in several records merged.

    If a sink raises a `TilerecError` (a non-finite gradient), the other sinks still receive their records, since other
    ranks may wait for them. The first of these errors is raised at the end.
    """
    failures: list[TilerecError] = []

    def take(sinks: Sequence[GradientSink], *own: GradientRecord) -> None:
        try:
            sinks[0].take(sinks, own[0] if len(own) == 1 else sinks[0].merge(sinks, own))
        except CommsError:  # no other rank can continue
            raise
        except TilerecError as error:
            failures.append(error)

    records = sorted(records, key=lambda record: record.serial)
    seen = Counter([handle for record in records for handle in dict.fromkeys(record.sinks)])
    once = [handle for handle, count in seen.items() if count == 1]
    with torch.no_grad():
        for record in records:
            for sinks, own in _batchable_parts(once if len(records) == 1 else _handles_in(once, record), record):
                take(sinks, own)
        for handles in _mergeable([handle for handle, count in seen.items() if count > 1], records):
            for sinks in _batchable_sinks(handles):
                take(sinks, *[r for r in records if any(sink.handle in r.sinks for sink in sinks)])
    if failures:
        raise failures[0]


def _batchable_sinks(handles: Iterable[int]) -> list[list[GradientSink]]:
    """Return the live sinks with these handles, grouped by which may take a record together."""
    groups: dict[Hashable, list[GradientSink]] = {}
    for handle in handles:
        sink = _SINKS.get(handle)
        if sink is not None:
            groups.setdefault((sink.__class__, sink.batch_key()), []).append(sink)
    return list(groups.values())


def _mergeable(handles: Sequence[int], records: Sequence[GradientRecord]) -> list[list[int]]:
    """Group handles so that the merged records of a group have one dtype, and all or none have sample weights.

    Both depend only on the lookups of each table. So replicas of a tile send its gradients in one format, whatever
    other tables their ranks hold. The order of groups is the same on all ranks.
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    for handle in handles:
        own = [record for record in records if handle in record.sinks]
        dtype = functools.reduce(torch.promote_types, [record.grad.dtype for record in own])
        weighted = any(record.sample_weights is not None for record in own)
        groups.setdefault((str(dtype), weighted), []).append(handle)
    return [own for _, own in sorted(groups.items())]


def _handles_in(handles: Collection[int], record: GradientRecord) -> list[int]:
    named = set(record.sinks)
    return [handle for handle in handles if handle in named]


def _batchable_parts(
    handles: Iterable[int], record: GradientRecord
) -> Iterator[tuple[list[GradientSink], GradientRecord]]:
    """Yield groups of sinks, each with its part of the record; the record contains all handles."""
    for sinks in _batchable_sinks(handles):
        own = {sink.handle for sink in sinks}
        yield sinks, record.only([f for f, handle in enumerate(record.sinks) if handle in own])


def sort_in_advance(record: GradientRecord) -> None:
    """Make the sinks of a later lookup sort its ids in advance. `grad` may be any tensor on the ids' device."""
    for sinks, own in _batchable_parts(dict.fromkeys(record.sinks), record):
        sinks[0].order(sinks, own)


def features_of(record: GradientRecord, handles: Sequence[int]) -> dict[int, list[int]]:
    """Return each sink's features, in the order of `handles`; sinks without features in the record are omitted.

    Example: sinks (7, 9, 7), handles (9, 8, 7) -> {9: [1], 7: [0, 2]}.
    """
    features: dict[int, list[int]] = {handle: [] for handle in handles}
    for f, handle in enumerate(record.sinks):
        if handle in features:
            features[handle].append(f)
    return {handle: own for handle, own in features.items() if own}


def _record_of_sums(serial: int, sums: dict[int, list[tuple[Tensor, Tensor]]]) -> GradientRecord:
    """Combine row sums of several tables and lookups into one record, in which every row is its own bag."""
    parts = [part for own in sums.values() for part in own]
    counts = [sum(rows_U.numel() for rows_U, _ in own) for own in sums.values()]
    dims = [own[0][1].shape[1] for own in sums.values()]
    sizes = [count * dim for count, dim in zip(counts, dims, strict=True)]
    return GradientRecord(
        serial, torch.cat([grads_UD.reshape(-1) for _, grads_UD in parts]), torch.cat([rows_U for rows_U, _ in parts]),
        None, None, tuple(sums), tuple(dims), tuple(itertools.accumulate(counts[:-1], initial=0)), tuple(counts),
        tuple(itertools.accumulate(sizes[:-1], initial=0)), tuple(dims), (0,) * len(dims),
    )  # fmt: skip


def sum_rows(record: GradientRecord, rows: int = 0) -> tuple[Tensor, Tensor]:
    """Return the distinct rows `[U]` and summed gradients `[U, D]` of a record whose features all read one table.

    `rows`: number of the table's rows; 0: unknown.
    """
    return sum_rows_of_tables(record, [range(len(record.sinks))], [rows])[0]


def sum_rows_of_tables(
    record: GradientRecord, features: Sequence[Sequence[int]], rows: Sequence[int] = (),
    ordered: Sequence[Tensor] | None = None,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """Return the distinct rows `[U]` and summed gradients `[U, D]` of each table, computed by one op.

    Args:
        features: per table, the features of the record that read it, at least one, ascending.
        rows: number of rows per table, if known. Otherwise a GPU searches for the largest id, and the host waits.
        ordered: as for the op.
    """
    if not features:
        return []
    table_of = {f: t for t, own in enumerate(features) for f in own}
    named = sorted(table_of)
    dims = [record.dims[own[0]] for own in features]
    record = record.only(named)
    known = list(rows) if rows and record.ids.device.type != "cpu" else [0] * len(dims)
    call = SumCall(record.gradients([table_of[f] for f in named]), known, dims, ordered)
    found, grads, counts = torch.ops.tilerec.sum_row_gradients_of_tables.default(*call.packed())
    distinct = counts.tolist()
    blocks = grads.split([count * dim for count, dim in zip(distinct, dims, strict=True)])
    return [
        (rows_U, block.view(count, dim))
        for rows_U, block, count, dim in zip(found.split(distinct), blocks, distinct, dims, strict=True)
    ]


def _use_ticket(ticket: Tensor) -> int:
    """Mark the ticket as used by the running pass; return its serial number."""
    serial, spent_by = ticket.tolist()
    task = graph_task_id()
    if spent_by not in (-1, task) or (spent_by != -1 and task == -1):
        raise RuntimeError(
            "A lookup's backward ran a second time (retain_graph=True), but its tables took their gradients in the "
            "first (an attached optimizer updates, a sparse .grad adds up). Look the features up again, or give the "
            "tables dense gradients and step them yourself."
        )
    # Write through NumPy to bypass autograd: only this lookup reads the ticket. (It also takes a fifth of the time of
    # indexing a tensor.)
    ticket.numpy()[1] = task if task != -1 else -2
    return int(serial)


@LIBRARY.op(
    "submit_pooled_(Tensor(a!) sinks, Tensor ticket, Tensor grad, Tensor ids, Tensor offsets, Tensor? sample_weights, "
    "int[] dims, int[] tables, int[] keys, int[] means, SymInt[] batches) -> ()"
)
def submit_pooled(
    sinks: Tensor, ticket: Tensor, grad: Tensor, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None,
    dims: Sequence[int], *layout: Sequence[int],
) -> None:  # fmt: skip
    """Submit a pooled lookup's output gradient. `sinks` [T] is declared as mutated because the tables behind it are.

    `layout`: the fields of a `PooledLayout`.

    Callers may bypass the dispatcher (`runtime/dispatch.py`): the function computes nothing that a profile would miss.
    """
    tables, keys, means, batches = map(tuple, layout)
    own_dims, starts, bags, places, strides = _pooled_layout(tuple(dims), tables, keys, batches)
    handles = sinks.tolist()
    submit(
        GradientRecord(
            _use_ticket(ticket), grad.contiguous(), ids, offsets, sample_weights, tuple([handles[t] for t in tables]),
            own_dims, starts, bags, places, strides, means,
        )
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _pooled_layout(
    dims: tuple[int, ...], tables: tuple[int, ...], keys: tuple[int, ...], batches: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return dims, starts, bags, gradient starts and strides per feature of a pooled lookup; cached over steps."""
    of_features = tuple([dims[t] for t in tables])
    starts, bags = bag_starts(keys, batches)
    places, strides = pooled_blocks(of_features, bags, len(batches) == 1)
    return of_features, tuple(starts), tuple(bags), tuple(places), tuple(strides)


@LIBRARY.op(
    "submit_sequence_(Tensor(a!) sinks, Tensor ticket, Tensor grad, Tensor ids, Tensor starts, int[] tables) -> ()"
)
def submit_sequence(
    sinks: Tensor, ticket: Tensor, grad: Tensor, ids: Tensor, starts: Tensor, tables: Sequence[int],
    first_ids: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Submit a sequence lookup's output gradient [N, D]: every id is its own bag.

    Args:
        starts: per feature, the first row of its gradients, and last their number.
        first_ids: per feature, the position of its first id; None: `starts`.
    """
    bounds, handles = starts.tolist(), sinks.tolist()
    bags = tuple([end - begin for begin, end in itertools.pairwise(bounds)])
    places = tuple([begin * grad.shape[1] for begin in bounds[:-1]])
    dims = (grad.shape[1],) * len(bags)
    submit(
        GradientRecord(
            _use_ticket(ticket), grad.contiguous(), ids, None, None, tuple([handles[t] for t in tables]), dims,
            tuple(bounds[:-1] if first_ids is None else first_ids), bags, places, dims, (0,) * len(bags),
        )
    )  # fmt: skip


def bag_starts(keys: Sequence[int], batches: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first bag and the number of bags of each feature.

    Example: keys [0, 2], batches [4] -> ([0, 8], [4, 4]); batches [4, 1, 2] (variable) -> ([0, 5], [4, 2]).
    """
    if len(batches) == 1:
        return [key * batches[0] for key in keys], [batches[0]] * len(keys)
    first = list(itertools.accumulate(batches, initial=0))
    return [first[key] for key in keys], [batches[key] for key in keys]


def pooled_blocks(dims: Sequence[int], bags: Sequence[int], uniform: bool) -> tuple[list[int], list[int]]:
    """Return starts and strides: feature f's bag b begins at element `starts[f] + b * strides[f]` of the pooled output.

    Uniform batches have the shape `[B, C]` with features side by side; variable ones are flat, feature after feature.
    """
    starts, total = [], 0
    for dim, count in zip(dims, bags, strict=True):
        starts.append(total)
        total += dim if uniform else dim * count
    return starts, [total] * len(dims) if uniform else list(dims)
