"""Lookup and combine: rows travel from their owners to the home ranks, and gradients travel back.

    lookup    owners read and pool rows; a proxy adds up the parts of its host; rows are sent to their homes
    combine   rows are written into the output, one column block at a time; parts of one block are added
    backward  the same records, transposed: output gradients are sent to the owners of the rows

The whole output is the result of one autograd function. An output that the loss does not use therefore gets zeros as
its gradient, and every rank that calls backward takes part in its collectives.

Legend: W ranks, B samples, C columns of the output, P present bags of a part.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.comms.group import Group, Handle
from tilerec.ops.backends import outputs_from, reused_empty
from tilerec.ops.gradient.definition import next_serial, register_saved_rows, sort_in_advance
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.lookup.row_location import LookupLayout
from tilerec.ops.lookup.saved_rows import SavedRows
from tilerec.sharding.layout import ExchangeLayout, HomeSegment, OwnerSegment
from tilerec.sharding.route import LocalHandle, Routed
from tilerec.sharding.wire import RowWire
from tilerec.storage.located_batch import FeatureBatch, RowSource
from tilerec.storage.table_rows import TableRows


class BagLocation(NamedTuple):
    """Location of a slot's bags in the flat output: bag b begins at element `base + b * stride`."""

    base: int
    stride: int


@dataclass
class PooledRows:
    """Rows in transit to this rank, and rows of its batch that it holds itself."""

    routed: Routed
    handle: Handle
    local: Tensor  # rows of this rank's own bags that this rank holds
    reader: SavedRows | None = None  # where sample weights need gradients: the rows as they were read

    def without_rows(self) -> PooledRows:
        """Return a copy without the rows, which the backward does not need."""
        nothing = self.local[:0].clone()
        return PooledRows(self.routed, LocalHandle(nothing), nothing, self.reader)


class SegmentArguments(NamedTuple):
    """Arguments of the ops `place_rows_` and `pick_rows`, one element per segment."""

    counts: list[int]
    widths: list[int]
    slot_starts: list[int]
    places: list[int]
    strides: list[int]
    adds: list[int]


def sizes_per_peer(segments: Sequence[Sequence[Any]], counts: Sequence[int]) -> list[int]:
    """Return the number of elements in each peer's segments."""
    return [sum(counts[s.count] * s.width for s in own) for own in segments]


class RowSegments(NamedTuple):
    """Segments of rows exchanged between this rank and every other rank, in memory order."""

    counts: list[int]
    widths: list[int]
    per_peer: list[int]  # number of segments of each peer; 0 for this rank

    def sizes(self) -> list[int]:
        """Return the number of elements of each segment."""
        return [count * width for count, width in zip(self.counts, self.widths, strict=True)]

    def sums(self, sizes: Sequence[int]) -> list[int]:
        """Return the sum of the segments' `sizes` for each peer."""
        ends = list(itertools.accumulate(self.per_peer, initial=0))
        return [sum(sizes[begin:end]) for begin, end in itertools.pairwise(ends)]


@dataclass
class _Decoded:
    """Handle of rows that arrive in another number format; `wait` decodes them."""

    handle: Handle
    decoder: RowWire
    rows: RowSegments
    decoded: Tensor | None = None

    def wait(self) -> Tensor:
        if self.decoded is None:
            self.decoded = self.decoder.decode(self.handle.wait(), self.rows.counts, self.rows.widths)
        return self.decoded

    def is_done(self) -> bool:
        return self.handle.is_done()


class RowExchange:
    """Exchange of one module's rows and gradients between the owners of rows and the home ranks."""

    def __init__(self, layout: ExchangeLayout, group: Group, wide: torch.dtype, *, each_id: bool) -> None:
        self.layout, self.group, self.wide, self.each_id = layout, group, wide, each_id
        # Rows for this rank's own bags come first: they stay on this rank. All rows after them are sent.
        me = layout.rank
        self._local = layout.direct[me]
        self._direct = [[] if home == me else own for home, own in enumerate(layout.direct)]
        self._to_homes: list[OwnerSegment] = [*self._local, *(s for own in self._direct for s in own)]
        self._to_proxies: list[OwnerSegment] = [s for own in layout.inner for s in own]
        self._read_segments = self._to_homes + self._to_proxies
        self._tables = [s.leaf for s in self._read_segments]
        self._keys = [s.count for s in self._read_segments]
        self._widths = [s.width for s in self._read_segments]
        # A row's gradients are summed in the order (slot, home), as for the concatenated batches.
        self._order = sorted(
            range(len(self._read_segments)),
            key=lambda i: (self._read_segments[i].slot, self._read_segments[i].home),
        )
        # Leaf of each feature of a record.
        self.leaf_order = [self._read_segments[i].leaf for i in self._order]
        # Segments received as home: this rank's own, parallel to `_local`, then those of other ranks in rank order.
        self._local_home = layout.home[me]
        self._per_owner = [0 if owner == me else len(own) for owner, own in enumerate(layout.home)]
        self._home = [s for owner, own in enumerate(layout.home) if owner != me for s in own]
        self._home_widths = [s.width for s in self._home]
        self._local_slots, self._home_slots = [s.slot for s in self._local_home], [s.slot for s in self._home]
        merges = [(h, merge) for h, own in enumerate(layout.merging) for merge in own]
        self._merge_units = [
            (m, h, unit.width) for m, (h, merge) in enumerate(merges) for unit in layout.parts[merge.parts[0]].units
        ]
        # Tables of the segments at either end of the exchange between owners (or proxies) and homes.
        table_of = [slot.table for slot in layout.slots]
        at_home = [table_of[s.slot] for s in self._home]
        at_owner: list[int] = []
        self._merged: list[list[tuple[int, int]]] = []  # per home: (merge, width) of merged rows sent there
        for home, own in enumerate(self._direct):
            at_owner.extend(table_of[s.slot] for s in own)
            merged = [(m, width) for m, h, width in self._merge_units if h == home]
            at_owner.extend(table_of[layout.parts[merges[m][1].parts[0]].slot] for m, _ in merged)
            self._merged.append(merged)
        self._owner_segments = [len(a) + len(b) for a, b in zip(self._direct, self._merged, strict=True)]
        self._owner_widths = [
            width
            for own, merged in zip(self._direct, self._merged, strict=True)
            for width in [*(s.width for s in own), *(w for _, w in merged)]
        ]
        forward = [table.wire.forward for table in layout.tables]
        backward = [table.wire.backward for table in layout.tables]
        self._rows_out = RowWire([forward[t] for t in at_owner], forward, wide)
        self._rows_in = RowWire([forward[t] for t in at_home], forward, wide)
        self._grads_out = RowWire([backward[t] for t in at_home], backward, wide)
        self._grads_in = RowWire([backward[t] for t in at_owner], backward, wide)
        here = [table_of[s.slot] for s in self._local]
        self._rows_here = RowWire([forward[t] for t in here], forward, wide)
        self._grads_here = RowWire([backward[t] for t in here], backward, wide)
        # Table of each element of the count lists of `Routed`.
        wire_tables = [0] * len(layout.parts)
        for p, part in enumerate(layout.parts):
            wire_tables[layout.wire[p]] = table_of[part.slot]
        own_merges = [table_of[layout.parts[merge.parts[0]].slot] for merge in layout.own_merges]
        self._table_of_count = wire_tables + own_merges
        self._table_of_present = [table_of[layout.parts[p].slot] for parts in layout.received for p in parts]
        self._table_of_union = [table_of[layout.parts[merge.parts[0]].slot] for _, merge in merges]
        self._table_of_member = [table_of[layout.parts[p].slot] for _, merge in merges for p in merge.parts]
        self._names = ",".join(
            f"{layout.slots[s.slot].feature}@{layout.tables[layout.slots[s.slot].table].name}"
            for s in self._read_segments
        )

    # ------------------------------------------------------------------------------------------------ forward

    @torch.no_grad()
    def lookup(
        self, routed: Routed, sources: Sequence[RowSource], leaves: Sequence[Tensor], *, updates: bool
    ) -> PooledRows:
        """Read the rows of every rank's bags that this rank holds, and send them to their homes.

        Args:
            sources, leaves: owner of the rows and parameter of each leaf.
            updates: the batch's update will follow.
        """
        routed.wait().check()
        layout = self.layout
        if self._read_segments:
            batch = self._batch(routed, sources, leaves)
            with outputs_from(self.group.send_buffer):
                rows, _ = batch.pooled_lookup(self._lookup_layout(routed), self.wide, updates=updates)
        else:
            rows = torch.empty(0, dtype=self.wide, device=routed.offsets.device)
        here = sum(routed.present[s.count] * s.width for s in self._local)
        local, rows = self._wire_round_trip(self._rows_here, rows[:here], routed), rows[here:]
        if layout.hierarchical:
            rows = self._merge(routed, rows)
        received = self._home_rows(routed)
        handle = self._send("rows", rows, None, self._owner_rows(routed), received, self._rows_out, self._rows_in)
        return PooledRows(routed, handle, local)

    def _batch(self, routed: Routed, sources: Sequence[RowSource], leaves: Sequence[Tensor]) -> FeatureBatch:
        """Return the batch that this rank looks up; its features are the parts of `_read_segments`."""
        first = list(itertools.accumulate(routed.present, initial=0))
        return FeatureBatch(
            sources, leaves, routed.ids, routed.offsets, routed.sample_weights, self._tables,
            [first[key] for key in self._keys], [routed.present[key] for key in self._keys], self._names,
        )  # fmt: skip

    def _lookup_layout(self, routed: Routed) -> LookupLayout:
        # One more key, without bags, keeps the op from the uniform layout.
        return self._tables, self._keys, [0] * len(self._keys), [*routed.present, 0]

    def prefetch(self, routed: Routed, sources: Sequence[TableRows]) -> None:
        """Load the rows that a batch reads into the caches of these tables."""
        self._batch(routed.wait(), sources, [source.leaf for source in sources]).prefetch()

    def _wire_round_trip(self, wire: RowWire, rows: Tensor, routed: Routed) -> Tensor:
        """Return local rows after a round trip through the wire format.

        Values then do not depend on the ranks that hold a table.
        """
        if wire.plain:
            return rows
        counts, widths = [routed.present[s.count] for s in self._local], [s.width for s in self._local]
        return wire.decode(wire.encode(rows, counts, widths), counts, widths)

    def _receive_buffer(self, decoder: RowWire, received: RowSegments, device: torch.device) -> Tensor:
        return reused_empty(sum(decoder.sizes(received.counts, received.widths)), decoder.wire_dtype, device)

    def _send(
        self, name: str, rows: Tensor, into: Tensor | None, sent: RowSegments, received: RowSegments, encoder: RowWire,
        decoder: RowWire,
    ) -> Handle:  # fmt: skip
        """Send rows to their homes, or gradients to the owners, in the tables' wire formats."""
        if self.layout.alone:
            return LocalHandle(rows[:0] if into is None else into)
        out_splits = sent.sums(encoder.sizes(sent.counts, sent.widths))
        in_splits = received.sums(decoder.sizes(received.counts, received.widths))
        wire = rows if encoder.plain else encoder.encode(rows, sent.counts, sent.widths)
        handle = self.group.all_to_all(name, into, wire, in_splits, out_splits)
        return handle if decoder.plain else _Decoded(handle, decoder, received)

    def _home_rows(self, routed: Routed) -> RowSegments:
        return RowSegments([routed.counts[s.count] for s in self._home], self._home_widths, self._per_owner)

    def _owner_rows(self, routed: Routed) -> RowSegments:
        counts: list[int] = []
        for own, merged in zip(self._direct, self._merged, strict=True):
            counts.extend([routed.present[s.count] for s in own])
            counts.extend([routed.unions[m] for m, _ in merged])
        return RowSegments(counts, self._owner_widths, self._owner_segments)

    def combine(self, looked: PooledRows, places: Sequence[BagLocation], size: int) -> Tensor:
        """Write the rows into a flat output and return it.

        Args:
            places: per slot.
            size: elements of the output.
        """
        routed = looked.routed
        local = self._segments(self._local_home, routed, places)
        others = self._segments(self._home, routed, places)
        out = reused_empty(size, self.wide, looked.local.device)
        fresh = self._has_gaps(routed, (local, others))  # start from zeros
        if local.counts:
            self._place_(out, looked.local, routed, local, self._local_slots, fresh)
            fresh = False
        rows = looked.handle.wait()
        if others.counts or fresh:
            self._place_(out, rows, routed, others, self._home_slots, fresh)
        return out

    def _has_gaps(self, routed: Routed, segments: Sequence[SegmentArguments]) -> bool:
        """Return True if some elements of the output get no row, or a sum of rows."""
        repeats, slots = routed.repeats, (self._local_slots, self._home_slots)
        partial = [
            slot
            for own, own_slots in zip(segments, slots, strict=True)
            for start, adds, slot in zip(own.slot_starts, own.adds, own_slots, strict=True)
            if start >= 0 or adds
        ]
        return bool(partial) if repeats is None else repeats.gaps or any(repeats.firsts[s] < 0 for s in partial)

    def _place_(
        self, out: Tensor, rows: Tensor, routed: Routed, segments: SegmentArguments, slots: list[int], fresh: bool
    ) -> None:
        if routed.repeats is None:
            torch.ops.tilerec.place_rows_(out, rows, routed.slots, *segments, fresh)
        else:
            routed.repeats.place_(out, rows, routed.slots, segments, slots, fresh)

    def _pick_(self, rows: Tensor, grad: Tensor, routed: Routed, segments: SegmentArguments, slots: list[int]) -> None:
        if routed.repeats is None:
            torch.ops.tilerec.pick_rows_(rows, grad, routed.slots, *segments[:-1])
        else:
            routed.repeats.pick_(rows, grad, routed.slots, segments[:-1], slots)

    def _segments(self, home: Sequence[HomeSegment], routed: Routed, places: Sequence[BagLocation]) -> SegmentArguments:
        """Return the positions in the output of the rows of these segments."""
        return SegmentArguments(
            [routed.counts[s.count] for s in home],
            [s.width for s in home],
            [routed.slot_starts[s.count] for s in home],
            [places[s.slot].base + s.c0 for s in home],
            [places[s.slot].stride for s in home],
            [int(s.adds) for s in home],
        )

    # ------------------------------------------------------------------------------------------------ within hosts

    def _inner_sizes(self, routed: Routed) -> tuple[list[int], list[int]]:
        to_proxies = sizes_per_peer(self.layout.inner, routed.present)
        from_siblings = [sum(routed.member_counts[s.member] * s.width for s in own) for own in self.layout.siblings]
        return to_proxies, from_siblings

    def _merge_segments(self, routed: Routed) -> tuple[SegmentArguments, list[int]]:
        """Return the positions of the siblings' rows in the merged rows, and the merged elements of each home."""
        places: dict[tuple[int, int], int] = {}
        per_home = [0] * self.layout.size
        at = 0
        unit_of: dict[int, int] = {}
        for m, home, width in self._merge_units:
            u = unit_of.get(m, 0)
            unit_of[m] = u + 1
            places[(m, u)] = at
            at += routed.unions[m] * width
            per_home[home] += routed.unions[m] * width
        own = [s for segments in self.layout.siblings for s in segments]
        widths = [s.width for s in own]
        return (
            SegmentArguments(
                [routed.member_counts[s.member] for s in own],
                widths,
                [routed.member_starts[s.member] for s in own],
                [places[(s.merge, s.unit)] for s in own],
                widths,
                [1] * len(own),
            ),
            per_home,
        )

    def _merge(self, routed: Routed, rows: Tensor) -> Tensor:
        """Send rows to their proxies and add up the rows that siblings send to this rank.

        Returns:
            The rows to send to homes: for each home its direct rows, then its merged ones.
        """
        direct = sizes_per_peer(self._direct, routed.present)
        to_proxies, from_siblings = self._inner_sizes(routed)
        cut = sum(direct)
        into = reused_empty(sum(from_siblings), rows.dtype, rows.device)
        self.group.all_to_all("rows in host", into, rows[cut:], from_siblings, to_proxies).wait()
        segments, per_home = self._merge_segments(routed)
        merged = torch.zeros(sum(per_home), dtype=rows.dtype, device=rows.device)
        torch.ops.tilerec.place_rows_(merged, into, routed.member_slots, *segments)
        pieces = [
            piece for pair in zip(rows[:cut].split(direct), merged.split(per_home), strict=True) for piece in pair
        ]
        return torch.cat(pieces)

    def _unmerge(self, routed: Routed, grads: Tensor) -> Tensor:
        """Send the gradients of merged rows to every sibling that contributed to them: the transpose of `_merge`."""
        direct = sizes_per_peer(self._direct, routed.present)
        to_proxies, from_siblings = self._inner_sizes(routed)
        segments, per_home = self._merge_segments(routed)
        pieces = grads.split([size for pair in zip(direct, per_home, strict=True) for size in pair])
        merged = torch.cat(pieces[1::2])
        out = torch.ops.tilerec.pick_rows(merged, routed.member_slots, *segments[:-1])
        into = reused_empty(sum(to_proxies), grads.dtype, grads.device)
        self.group.all_to_all("gradients in host", into, out, to_proxies, from_siblings).wait()
        return torch.cat([*pieces[0::2], into])

    # ------------------------------------------------------------------------------------------------ backward

    def thawed(self, looked: PooledRows, live: Sequence[bool]) -> PooledRows:
        """Return the lookup with the bag counts of frozen tables set to 0, so that none of their gradients are sent.

        Args:
            live: per table, False if it is frozen.
        """
        return replace(looked, routed=self._without_frozen(looked.routed, live))

    def _without_frozen(self, routed: Routed, live: Sequence[bool]) -> Routed:
        if all(live):
            return routed

        def kept(counts: Sequence[int], tables: Sequence[int]) -> list[int]:
            return [count if live[t] else 0 for count, t in zip(counts, tables, strict=True)]

        return replace(
            routed,
            counts=kept(routed.counts, self._table_of_count),
            present=kept(routed.present, self._table_of_present),
            unions=kept(routed.unions, self._table_of_union),
            member_counts=kept(routed.member_counts, self._table_of_member),
        )

    def send_back(self, looked: PooledRows, grad: Tensor, places: Sequence[BagLocation]) -> Tensor:
        """Return the gradients of the rows that this rank looked up, in lookup order. Collective.

        Args:
            grad: flat gradient of this rank's output; the other homes send theirs.
        """
        routed, layout = looked.routed, self.layout
        others = self._segments(self._home, routed, places)
        with outputs_from(self.group.send_buffer):
            out = reused_empty(sum(self._home_rows(routed).sizes()), grad.dtype, grad.device)
        self._pick_(out, grad, routed, others, self._home_slots)
        received = self._owner_rows(routed)
        here = sum(routed.present[s.count] * s.width for s in self._local)
        # One buffer for local and received gradients, so that received ones need no copy.
        plain = self._grads_in.plain and not layout.hierarchical
        both = reused_empty(here + sum(received.sizes()), grad.dtype, grad.device) if plain else None
        into = self._receive_buffer(self._grads_in, received, grad.device) if both is None else both[here:]
        handle = self._send("gradients", out, into, self._home_rows(routed), received, self._grads_out, self._grads_in)
        local = grad.new_empty(here) if both is None else both[:here]
        self._pick_(local, grad, routed, self._segments(self._local_home, routed, places), self._local_slots)
        rows = handle.wait()
        if both is not None:
            return both
        if layout.hierarchical:
            rows = self._unmerge(routed, rows)
        return torch.cat([self._wire_round_trip(self._grads_here, local, routed), rows])

    def record(self, routed: Routed, grads: Tensor, sinks: Sequence[int], present: Sequence[int]) -> GradientRecord:
        """Return the gradients as row gradients of this rank's leaves.

        Args:
            sinks: handle per leaf. present: bags of each received part, of frozen tables too.
        """
        bag_starts = list(itertools.accumulate(present, initial=0))
        sizes = [routed.present[s.count] * s.width for s in self._read_segments]
        grad_starts = list(itertools.accumulate(sizes, initial=0))
        own, repeats, me = [self._read_segments[i] for i in self._order], routed.repeats, self.layout.rank
        return GradientRecord(
            serial=next_serial(),
            grad=grads,
            ids=routed.ids,
            offsets=None if self.each_id else routed.offsets,
            sample_weights=routed.sample_weights,
            sinks=tuple([sinks[s.leaf] for s in own]),
            dims=tuple([s.width for s in own]),
            starts=tuple([bag_starts[s.count] for s in own]),
            bags=tuple([routed.present[s.count] for s in own]),
            grad_starts=tuple([grad_starts[i] for i in self._order]),
            grad_strides=tuple([s.width for s in own]),
            means=(0,) * len(own),
            order=tuple([s.slot * self.layout.size + s.home for s in own]),
            distinct=() if repeats is None else tuple([s.home == me and repeats.firsts[s.slot] >= 0 for s in own]),
        )

    def order(self, routed: Routed, sinks: Sequence[int], trained: Sequence[bool]) -> None:
        """Sort a batch's rows ahead of its update, in the order in which `record` will list them.

        Args:
            sinks: handle per leaf.
            trained: per table.
        """
        if not self._read_segments:
            return
        if routed.in_place and routed.weights_need_grad:  # an optimizer may change the batch's own weights
            return
        live = [True] * len(trained) if routed.weights_need_grad else trained
        fewer = self._without_frozen(routed.wait(), live)
        sort_in_advance(self.record(fewer, routed.ids, sinks, routed.present))

    def reader(self, routed: Routed, sources: Sequence[TableRows], bare: Sequence[TableRows]) -> SavedRows:
        """Return the reader of the rows that the gradients of sample weights need.

        Args:
            sources: of the leaves, cached or not.
            bare: of tables of which this rank holds no rows: a write that all ranks make is detected in them, too.
        """
        batch = self._batch(routed, sources, [source.leaf for source in sources])
        every = [*sources, *bare]
        watched = {t: rows.leaf for t, rows in enumerate(every) if rows.cache is None}
        copy = functools.partial(batch.copies, updates=True)
        reader = SavedRows(self._tables, watched, lambda t: every[t].name, copy)
        register_saved_rows({t: rows.handle for t, rows in enumerate(every)}, reader)
        return reader

    def sample_weight_grads(
        self, routed: Routed, grads: Tensor, sources: Sequence[RowSource], leaves: Sequence[Tensor], count: int,
        saved_rows: Sequence[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """Return the gradients of the sample weights of this rank's batch, `[count]`. A separate collective.

        Args:
            sources, leaves: as of `lookup`.
            saved_rows: copies that the reader kept; None: the tables still hold the rows unchanged.
        """
        if self._read_segments:
            batch = self._batch(routed, sources, leaves)
            own = batch.sample_weight_grad(grads, self._lookup_layout(routed), saved_rows, updates=True)
        else:
            own = torch.empty(0, dtype=torch.float32, device=grads.device)
        own = own.to(self.wide)
        assert routed.positions is not None, "some rank's weights need gradients"
        into = torch.empty(sum(routed.sent_ids), dtype=self.wide, device=grads.device)
        self.group.all_to_all("weight gradients", into, own, routed.sent_ids, routed.received_ids).wait()
        return torch.zeros(count, dtype=self.wide, device=grads.device).index_add_(0, routed.positions, into)
