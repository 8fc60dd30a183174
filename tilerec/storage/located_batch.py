"""The rows of a batch, wherever they are: the one way by which lookups and updates reach the rows of tables.

    with located(batch) as rows:       rows.weights[t][rows.ids] are the rows of table t; rows.slots(spec) their slots
        ...                            read them, or (writes=True) update them in place
        rows.looked_up(...)            or rows.updated(): the batch's rows may leave their cache

Without caches this is the identity: rows are in the leaves, and ids are row numbers. Rows of cached tables are loaded
into cache lines, and their ids become line numbers. Ids of one key may read several tables, in which they have
different lines. So with caches each feature has its own ids.

Example: a key with ids (7, 2) read by table a, whose rows 7 and 2 are in lines 0 and 5, and by b, which is not cached:
ids (0, 5, 7, 2), and features that begin at 0 and at 2.

Legend: T tables, F features, N ids, B bags.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from tilerec.ops.lookup.row_location import LookupLayout
from tilerec.ops.lookup.saved_rows import copy_rows, id_segments, positions_in_copies
from tilerec.ops.runtime.upload import upload
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.storage.batches_in_flight import Bags, Segments
from tilerec.storage.cache_request import WantedRows, lines_of_all, prefetch_all
from tilerec.storage.row_cache import RowCache, lock_caches

_NO_SINKS = torch.empty(0, dtype=torch.int64, device="cpu")


class RowSource(Protocol):
    """The owner of a table's rows (or of a tile's)."""

    cache: RowCache | None
    names: Tensor | None
    state: dict[str, Tensor]
    """The optimizer's slots by name, and other state."""

    @property
    def trained(self) -> bool:
        """True if a backward pass updates the rows."""

    def host(self) -> list[Tensor]:
        """Return the leaf and the slots."""

    def arrive(self) -> None:
        """Finish pending writes of other ranks."""


@dataclass(eq=False)
class FeatureBatch:
    """A batch of ids, and the table and bags of each feature (a `RowLocation` of `ops/lookup`).

    Args:
        sources: owner of each table's rows.
        leaves: parameter of each table. `torch.func.functional_call` may have put another one into the module.
        ids: int32 or int64 [N].
        offsets: int [bags + 1]; None: every id is its own bag.
        sample_weights: float [N], or None.
        tables: per feature, its table.
        starts: per feature, its first bag; without offsets, its first id.
        bags: per feature, its number of bags; without offsets, of ids.
        names: "feature@table" per feature, joined by ",", for messages; or empty.
        known_segments: range of each feature's ids, if the host knows it; else None.
    """

    sources: Sequence[RowSource]
    leaves: Sequence[Tensor]
    ids: Tensor
    offsets: Tensor | None
    sample_weights: Tensor | None
    tables: Sequence[int]
    starts: Sequence[int]
    bags: Sequence[int]
    names: str = ""
    known_segments: list[tuple[int, int]] | None = None

    @cached_property
    def segments(self) -> list[tuple[int, int]]:
        """Range [begin, end) of each feature's ids.

        On a GPU this waits for the offsets, unless a cache has recorded the ranges for a batch in flight.
        """
        if self.known_segments is not None:
            return self.known_segments
        if self.offsets is None:
            return [(start, start + count) for start, count in zip(self.starts, self.bags, strict=True)]
        if self.offsets.device.type != "cpu":
            recorded = self._recorded_segments(self.offsets)
            if recorded is not None:
                return recorded
        return id_segments(self.offsets, self.starts, self.bags)

    def _recorded_segments(self, offsets: Tensor) -> list[tuple[int, int]] | None:
        found: list[tuple[int, int]] = []
        for table, start, count in zip(self.tables, self.starts, self.bags, strict=True):
            cache = self.sources[table].cache
            known = (0, 0) if not count else None
            if count and cache is not None:
                known = cache.in_flight.known_segment(self.ids, offsets, start, count)
            if known is None:
                return None
            found.append(known)
        return found

    def ids_of(self, table: int) -> Tensor:
        """Return the ids that read a table, `[n]`. On a GPU this may wait, see `segments`."""
        parts = [self.ids[b:e] for t, (b, e) in zip(self.tables, self.segments, strict=True) if t == table]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self.ids[:0]

    @property
    def is_cached(self) -> bool:
        """True if one of the tables that a feature reads has a cache."""
        return any([self.sources[t].cache is not None for t in self.tables])  # noqa: C419 - a list takes a third of a generator's time

    def only(self, features: Sequence[int]) -> FeatureBatch:
        """Return the batch restricted to these features."""
        names = self.names.split(",") if self.names else []
        known = self.known_segments
        return replace(
            self,
            tables=[self.tables[f] for f in features],
            starts=[self.starts[f] for f in features],
            bags=[self.bags[f] for f in features],
            names=",".join([names[f] for f in features]) if names else "",
            known_segments=None if known is None else [known[f] for f in features],
        )

    def per_cached_table(self) -> list[tuple[int, list[int], Segments]]:
        """Return for each cached table that a feature reads: its number, its features, and their segments."""
        features: dict[int, list[int]] = {}
        for f, t in enumerate(self.tables):
            if self.sources[t].cache is not None:
                features.setdefault(t, []).append(f)
        segments = self.segments if features else []
        return [(t, own, tuple([segments[f] for f in own])) for t, own in sorted(features.items())]

    def wanted(self) -> list[tuple[int, list[int], WantedRows]]:
        """Return for each cached table that a feature reads: its number, its features, and the rows wanted of it."""
        named = self.names.split(",") if self.names else []
        found = []
        for t, features, segments in self.per_cached_table():
            source = self.sources[t]
            assert source.cache is not None
            own = ",".join([named[f] for f in features]) if named else ""
            found.append((t, features, WantedRows(source.cache, source.host(), segments, own)))
        return found

    # Reads: the ops of `ops/lookup` over the tensors that hold the rows. `updates`: the batch's update is still to
    # come, so its rows should stay where they are.

    def pooled_lookup(self, layout: LookupLayout, dtype: torch.dtype, *, updates: bool) -> tuple[Tensor, Tensor]:
        """Return the output and the ticket of `pooled_lookup`."""
        tables, keys, means, batches = layout
        with located(self) as rows:
            keys, batches = rows.bag_layout(keys, batches)
            out, ticket = torch.ops.tilerec.pooled_lookup(
                rows.weights, _NO_SINKS, rows.ids, rows.offsets, rows.sample_weights, tables, keys, means, batches,
                dtype, self.names,
            )  # fmt: skip
            rows.looked_up(updates=updates)
        return out, ticket

    def sequence_lookup(self, dtype: torch.dtype, *, updates: bool) -> tuple[Tensor, Tensor]:
        """Return the output and the ticket of `sequence_lookup`."""
        with located(self) as rows:
            starts = upload([*rows.starts, rows.ids.numel()], rows.ids.device)
            out, ticket = torch.ops.tilerec.sequence_lookup(
                rows.weights, _NO_SINKS, rows.ids, starts, self.tables, dtype, self.names
            )
            rows.looked_up(updates=updates)
        return out, ticket

    def sample_weight_grad(
        self, grad: Tensor, layout: LookupLayout, saved_rows: Sequence[Tensor] | None, *, updates: bool
    ) -> Tensor:
        """Return the gradient of the sample weights, [N].

        Args:
            saved_rows: per feature, copies of its rows to read instead.
        """
        tables, keys, means, batches = layout
        with located(self) as rows:
            weights, ids = rows.weights, rows.ids
            if saved_rows is not None:
                weights, ids, tables = saved_rows, rows.positions_in_copies(), range(len(saved_rows))
            keys, batches = rows.bag_layout(keys, batches)
            values_n = torch.ops.tilerec.sample_weight_grad(
                weights, ids, rows.offsets, grad, tables, keys, means, batches
            )
            rows.looked_up(updates=updates)
            return rows.per_id(values_n)

    def copies(self, features: Sequence[int], *, updates: bool) -> list[Tensor]:
        """Return copies of the rows of these features, one per id.

        Loads only these features' rows: the cache of another table may be settled already, for a later write.
        """
        with located(self.only(features)) as rows:
            copies = rows.copies()
            rows.looked_up(updates=updates)
        return copies

    def prefetch(self) -> None:
        """Load the rows of cached tables into lines, ahead of the batch's lookup, and record its bags there."""
        for t in dict.fromkeys(self.tables):
            self.sources[t].arrive()
        wanted = self.wanted()
        prefetch_all([own for _, _, own in wanted], self.ids)
        self._record_bags(wanted)

    def _record_bags(self, wanted: Sequence[tuple[int, list[int], WantedRows]]) -> None:
        """Record the bags of a requested batch, so that its lookup needs no readback from the device."""
        if self.offsets is None:
            return
        for _, features, own in wanted:
            batch = own.cache.in_flight.find(self.ids, own.segments)
            if batch is not None and batch.bags is None:
                ranges = [(self.starts[f], self.bags[f], *self.segments[f]) for f in features]
                batch.bags = Bags.of(self.offsets, ranges)


@dataclass(eq=False)
class LocatedRows:
    """A batch whose ids index the tensors that hold its rows; a context, within which this is so."""

    batch: FeatureBatch
    weights: Sequence[Tensor]  # per table, the tensor with its rows: its leaf, or cache lines
    ids: Tensor
    offsets: Tensor | None  # as many bags per feature as in the batch
    sample_weights: Tensor | None
    starts: Sequence[int]  # per feature, its first bag; without offsets, its first id

    def __enter__(self) -> LocatedRows:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def slots(self, spec: OptimizerSpec) -> list[Tensor]:
        """Return the slots of the optimizer of all tables, table after table, indexed like `weights`."""
        names = [slot.name for slot in spec.slots]
        return [source.state[name] for source in self.batch.sources for name in names]

    @property
    def row_names(self) -> list[Tensor] | None:
        """Per table the row at each index of its tensors, empty for the identity; None if all are the identity."""
        if all([source.names is None for source in self.batch.sources]):  # noqa: C419 - a list takes a third of a generator's time
            return None
        none = self.batch.ids.new_empty(0, dtype=torch.int64)
        return [none if source.names is None else source.names for source in self.batch.sources]

    def bag_layout(self, keys: Sequence[int], batches: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the arguments `keys` and `batches` of a lookup op. Args: those of the batch as it was given."""
        return keys, batches

    def copies(self) -> list[Tensor]:
        """Return copies of each feature's rows, one per id."""
        tables, ids = self.batch.tables, self.batch.ids
        return [
            copy_rows(self.weights[t], ids[begin:end])
            for t, (begin, end) in zip(tables, self.batch.segments, strict=True)
        ]

    def positions_in_copies(self) -> Tensor:
        """Return the position of each id's row among `copies` of its feature."""
        return positions_in_copies(self.ids, self.batch.segments)

    def per_id(self, values_n: Tensor) -> Tensor:
        """Return values of `ids` summed per id of the batch, `[N]`."""
        return values_n

    def looked_up(self, *, updates: bool) -> None:
        """Record that the batch was looked up. `updates`: the update of trained tables is still to come."""

    def updated(self) -> None:
        """Record that the batch was updated."""


class _RowsInLines(LocatedRows):
    """A batch with rows in cache lines: each feature has its own ids."""

    def __init__(self, batch: FeatureBatch, *, writes: bool) -> None:
        self._batch, self._writes = batch, writes
        self._locks = lock_caches([batch.sources[t].cache for t in dict.fromkeys(batch.tables)])

    def __enter__(self) -> LocatedRows:
        self._locks.__enter__()
        try:
            self._place(self._batch, self._writes)
        except BaseException as error:
            self._locks.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._locks.__exit__(*error)

    def _place(self, batch: FeatureBatch, writes: bool) -> None:
        for t in dict.fromkeys(batch.tables):
            batch.sources[t].arrive()
        wanted = batch.wanted()
        table_of = {t: k for k, (t, _, _) in enumerate(wanted)}
        segments = batch.segments
        ids = lines_of_all(
            [own for _, _, own in wanted], batch.ids, segments, [table_of.get(t, -1) for t in batch.tables], writes
        )  # fmt: skip
        batch._record_bags(wanted)
        self._held: dict[int, RowCache] = {t: own.cache for t, _, own in wanted}
        weights = [
            self._held[t].tensors.lines[0] if t in self._held else leaf.detach() for t, leaf in enumerate(batch.leaves)
        ]
        sizes = [end - begin for begin, end in segments]
        firsts = list(itertools.accumulate(sizes, initial=0))
        offsets, sample_weights = batch.offsets, batch.sample_weights
        starts = firsts[:-1]
        if offsets is not None:
            starts = list(itertools.accumulate(batch.bags, initial=0))[:-1]
        if offsets is None or not self._lines_up(batch, offsets):
            if offsets is not None:
                offsets = _offsets_of_features(batch, offsets, firsts)
            if sample_weights is not None:
                parts = [sample_weights[begin:end] for begin, end in segments]
                sample_weights = torch.cat(parts) if parts else sample_weights[:0]
        super().__init__(batch, weights, ids, offsets, sample_weights, starts)

    @staticmethod
    def _lines_up(batch: FeatureBatch, offsets: Tensor) -> bool:
        """Return True if the features' ids and bags are consecutive and cover all of the batch."""
        at = bag = 0
        for (begin, end), start, count in zip(batch.segments, batch.starts, batch.bags, strict=True):
            if (begin, start) != (at, bag):
                return False
            at, bag = end, bag + count
        return (at, bag + 1) == (batch.ids.shape[0], offsets.shape[0])

    def slots(self, spec: OptimizerSpec) -> list[Tensor]:
        names = [slot.name for slot in spec.slots]
        return [
            slot
            for t, source in enumerate(self.batch.sources)
            for slot in (self._held[t].tensors.lines[1:] if t in self._held else [source.state[name] for name in names])
        ]

    @property
    def row_names(self) -> list[Tensor] | None:
        none = self.batch.ids.new_empty(0, dtype=torch.int64)
        own = [none if source.names is None else source.names for source in self.batch.sources]
        return [self._held[t].tensors.sets.names if t in self._held else names for t, names in enumerate(own)]

    def bag_layout(self, keys: Sequence[int], batches: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        features = list(range(len(self.batch.tables)))
        # Two numbers of bags or more keep the op from the uniform layout.
        return features, batches if len(batches) == 1 else [*self.batch.bags, 0]

    def _own_segments(self) -> list[tuple[int, int]]:
        """Return per feature the range of its ids in `ids`."""
        sizes = [end - begin for begin, end in self.batch.segments]
        return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))

    def copies(self) -> list[Tensor]:
        own = self._own_segments()
        return [copy_rows(self.weights[t], self.ids[slice(*own[f])]) for f, t in enumerate(self.batch.tables)]

    def positions_in_copies(self) -> Tensor:
        return positions_in_copies(self.ids, self._own_segments())

    def per_id(self, values_n: Tensor) -> Tensor:
        out = values_n.new_zeros(self.batch.ids.numel())
        sizes = [end - begin for begin, end in self.batch.segments]
        for (begin, end), own in zip(self.batch.segments, values_n.split(sizes), strict=True):
            out[begin:end] += own
        return out

    def looked_up(self, *, updates: bool) -> None:
        for t, _, segments in self.batch.per_cached_table():
            trained = updates and self.batch.sources[t].trained
            self._held[t].in_flight.look_up(self.batch.ids, segments, updates=trained)

    def updated(self) -> None:
        for t, _, segments in self.batch.per_cached_table():
            self._held[t].in_flight.update(self.batch.ids, segments)


def _offsets_of_features(batch: FeatureBatch, offsets: Tensor, firsts: Sequence[int]) -> Tensor:
    """Return the offsets of the features' bags, feature after feature. `firsts`: new first id of each feature."""
    parts = [offsets.new_zeros(1)]
    for start, count, (begin, _), first in zip(batch.starts, batch.bags, batch.segments, firsts, strict=False):
        parts.append(offsets[start + 1 : start + count + 1] + (first - begin))
    return torch.cat(parts)


def located(batch: FeatureBatch, *, writes: bool = False) -> LocatedRows:
    """Return the batch's rows, as a context.

    Within the context no row changes its place: caches are locked. Rows of cached tables are loaded first, if they are
    not in lines yet.

    Args:
        writes: the caller will change these rows.

    Raises:
        InputError: on entry, an id of a cached table is no row of it. (On a GPU, a later op raises it.)
    """
    if batch.is_cached:
        return _RowsInLines(batch, writes=writes)
    return LocatedRows(batch, batch.leaves, batch.ids, batch.offsets, batch.sample_weights, batch.starts)
