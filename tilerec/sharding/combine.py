"""Lookup and combine: rows come back to the rank whose batch it is; gradients take the way back.

    lookup    owners read and pool rows; sums of a host's parts meet on a proxy; rows travel home
    combine   rows are put into the output, column block by column block; parts of one block are added
    backward  the same records, transposed: output gradients travel to the rows' owners

One autograd function has the whole output as its result, so an output that the loss skips still gives zeros, and
every rank that calls backward takes part in its collectives.

Legend: W ranks, B samples, C columns of the output, P present bags of a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.comms.group import Group, Handle
from tilerec.ops.backends import reused_empty
from tilerec.ops.gradient import GradientRecord, next_serial
from tilerec.sharding.layout import Layout, OwnerSegment
from tilerec.sharding.route import Routed
from tilerec.sharding.wire import RowWire


class Place(NamedTuple):
    """Where a slot's bags lie in the output: bag b at element `base + b * stride`."""

    base: int
    stride: int


@dataclass
class Looked:
    """Rows on their way home."""

    routed: Routed
    handle: Handle


class Segments(NamedTuple):
    """Arguments of `place_rows_` and `pick_rows`."""

    counts: list[int]
    widths: list[int]
    slot_starts: list[int]
    places: list[int]
    strides: list[int]
    adds: list[int]


def sizes_per_peer(segments: Sequence[Sequence[Any]], counts: Sequence[int]) -> list[int]:
    """Elements of each peer's segments."""
    return [sum(counts[s.count] * s.width for s in own) for own in segments]


class Rows(NamedTuple):
    """Segments of rows between this rank and every other, in the order in which they lie."""

    counts: list[int]
    widths: list[int]
    per_peer: list[int]  # how many of them are each peer's

    def sums(self, sizes: Sequence[int]) -> list[int]:
        """Sizes of segments, added up per peer."""
        ends = list(itertools.accumulate(self.per_peer, initial=0))
        return [sum(sizes[begin:end]) for begin, end in itertools.pairwise(ends)]


@dataclass
class _Decoded:
    """Rows that came in another number format."""

    handle: Handle
    decoder: RowWire
    rows: Rows
    decoded: Tensor | None = None

    def wait(self) -> Tensor:
        if self.decoded is None:
            self.decoded = self.decoder.decode(self.handle.wait(), self.rows.counts, self.rows.widths)
        return self.decoded


class Combiner:
    """Rows and gradients of one module, between their owners and the homes."""

    def __init__(self, layout: Layout, group: Group, wide: torch.dtype, *, each_id: bool) -> None:
        self.layout, self.group, self.wide, self.each_id = layout, group, wide, each_id
        self._to_homes: list[OwnerSegment] = [s for own in layout.direct for s in own]
        self._to_proxies: list[OwnerSegment] = [s for own in layout.inner for s in own]
        self._looked_up = self._to_homes + self._to_proxies
        self._tables = [s.leaf for s in self._looked_up]
        self._keys = [s.count for s in self._looked_up]
        self._widths = [s.width for s in self._looked_up]
        # Sums of a row's gradients run in the order (slot, home), as they would over the concatenated batches.
        self._order = sorted(
            range(len(self._looked_up)), key=lambda i: (self._looked_up[i].slot, self._looked_up[i].home)
        )
        # Leaf of each feature of a record.
        self.leaf_order = [self._looked_up[i].leaf for i in self._order]
        self._home = [s for own in layout.home for s in own]
        self._home_widths = [s.width for s in self._home]
        merges = [(h, merge) for h, own in enumerate(layout.merging) for merge in own]
        self._merge_units = [
            (m, h, unit.width)
            for m, (h, merge) in enumerate(merges)
            for unit in layout.parts[merge.parts[0]].units
        ]
        # Tables of the segments at either end of the exchange between owners (or proxies) and homes.
        table_of = [slot.table for slot in layout.slots]
        at_home = [table_of[s.slot] for s in self._home]
        at_owner: list[int] = []
        self._merged: list[list[tuple[int, int]]] = []  # per home: (merge, width) of the merged rows it gets
        for home, own in enumerate(layout.direct):
            at_owner.extend(table_of[s.slot] for s in own)
            merged = [(m, width) for m, h, width in self._merge_units if h == home]
            at_owner.extend(table_of[layout.parts[merges[m][1].parts[0]].slot] for m, _ in merged)
            self._merged.append(merged)
        self._owner_segments = [len(a) + len(b) for a, b in zip(layout.direct, self._merged, strict=True)]
        self._owner_widths = [
            width
            for own, merged in zip(layout.direct, self._merged, strict=True)
            for width in [*(s.width for s in own), *(w for _, w in merged)]
        ]
        forward = [table.wire.forward for table in layout.tables]
        backward = [table.wire.backward for table in layout.tables]
        self._rows_out = RowWire([forward[t] for t in at_owner], forward, wide)
        self._rows_in = RowWire([forward[t] for t in at_home], forward, wide)
        self._grads_out = RowWire([backward[t] for t in at_home], backward, wide)
        self._grads_in = RowWire([backward[t] for t in at_owner], backward, wide)
        # Table of each of a `Routed`'s counts.
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
            for s in self._looked_up
        )

    # ------------------------------------------------------------------------------------------------ forward

    @torch.no_grad()
    def lookup(self, routed: Routed, leaves: Sequence[Tensor]) -> Looked:
        """Read the rows that other ranks' (and my own) bags ask for, and send them home."""
        routed.wait()
        layout = self.layout
        if self._looked_up:
            rows, _ = torch.ops.tilerec.pooled_lookup(
                list(leaves), torch.empty(0, dtype=torch.int64), routed.ids, routed.offsets, routed.sample_weights,
                self._tables, self._keys, [0] * len(self._keys), [*routed.present, 0], self.wide, self._names,
            )  # fmt: skip
        else:
            rows = torch.empty(0, dtype=self.wide, device=routed.offsets.device)
        if layout.hierarchical:
            rows = self._merge(routed, rows)
        return Looked(
            routed,
            self._send(
                "rows", rows, self._owner_rows(routed), self._home_rows(routed), self._rows_out, self._rows_in
            ),
        )

    def _send(
        self, name: str, rows: Tensor, sent: Rows, received: Rows, encoder: RowWire, decoder: RowWire
    ) -> Handle:
        """Rows to their homes, or gradients to their owners, in their number formats."""
        out_splits = sent.sums(encoder.sizes(sent.counts, sent.widths))
        in_splits = received.sums(decoder.sizes(received.counts, received.widths))
        wire = rows if encoder.plain else encoder.encode(rows, sent.counts, sent.widths)
        into = reused_empty(sum(in_splits), decoder.wire_dtype, rows.device)
        handle = self.group.all_to_all(name, into, wire, in_splits, out_splits)
        return handle if decoder.plain else _Decoded(handle, decoder, received)

    def _home_rows(self, routed: Routed) -> Rows:
        return Rows(
            [routed.counts[s.count] for s in self._home],
            self._home_widths,
            [len(s) for s in self.layout.home],
        )

    def _owner_rows(self, routed: Routed) -> Rows:
        counts: list[int] = []
        for own, merged in zip(self.layout.direct, self._merged, strict=True):
            counts.extend([routed.present[s.count] for s in own])
            counts.extend([routed.unions[m] for m, _ in merged])
        return Rows(counts, self._owner_widths, self._owner_segments)

    def combine(self, looked: Looked, places: Sequence[Place], size: int) -> Tensor:
        """Put the rows into a flat output of `size` elements; `places`: per slot."""
        segments, whole = self._home_segments(looked.routed, places)
        rows = looked.handle.wait()
        out = reused_empty(size, self.wide, rows.device)
        if not whole:
            out.zero_()
        torch.ops.tilerec.place_rows_(out, rows, looked.routed.slots, *segments)
        return out

    def _home_segments(self, routed: Routed, places: Sequence[Place]) -> tuple[Segments, bool]:
        """Where rows go; and whether they fill the output, each element once."""
        counts = [routed.counts[s.count] for s in self._home]
        starts = [routed.slot_starts[s.count] for s in self._home]
        segments = Segments(
            counts,
            self._home_widths,
            starts,
            [places[s.slot].base + s.c0 for s in self._home],
            [places[s.slot].stride for s in self._home],
            [int(s.adds) for s in self._home],
        )
        return segments, all(start < 0 for start in starts) and not any(segments.adds)

    # ------------------------------------------------------------------------------------------------ within hosts

    def _inner_sizes(self, routed: Routed) -> tuple[list[int], list[int]]:
        to_proxies = sizes_per_peer(self.layout.inner, routed.present)
        from_siblings = [
            sum(routed.member_counts[s.member] * s.width for s in own) for own in self.layout.siblings
        ]
        return to_proxies, from_siblings

    def _merge_segments(self, routed: Routed) -> tuple[Segments, list[int]]:
        """Where siblings' rows go in the merged rows; elements of merged rows per home."""
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
            Segments(
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
        """Send rows to their proxies, add what siblings send; rows for homes: direct ones, then merged ones."""
        direct = sizes_per_peer(self.layout.direct, routed.present)
        to_proxies, from_siblings = self._inner_sizes(routed)
        cut = sum(direct)
        into = reused_empty(sum(from_siblings), rows.dtype, rows.device)
        self.group.all_to_all("rows in host", into, rows[cut:], from_siblings, to_proxies).wait()
        segments, per_home = self._merge_segments(routed)
        merged = torch.zeros(sum(per_home), dtype=rows.dtype, device=rows.device)
        torch.ops.tilerec.place_rows_(merged, into, routed.member_slots, *segments)
        pieces = [
            piece
            for pair in zip(rows[:cut].split(direct), merged.split(per_home), strict=True)
            for piece in pair
        ]
        return torch.cat(pieces)

    def _unmerge(self, routed: Routed, grads: Tensor) -> Tensor:
        """The transpose of `_merge`: gradients of merged rows go to every sibling that fed them."""
        direct = sizes_per_peer(self.layout.direct, routed.present)
        to_proxies, from_siblings = self._inner_sizes(routed)
        segments, per_home = self._merge_segments(routed)
        pieces = grads.split([size for pair in zip(direct, per_home, strict=True) for size in pair])
        merged = torch.cat(pieces[1::2])
        out = torch.ops.tilerec.pick_rows(merged, routed.member_slots, *segments[:-1])
        into = reused_empty(sum(to_proxies), grads.dtype, grads.device)
        self.group.all_to_all("gradients in host", into, out, to_proxies, from_siblings).wait()
        return torch.cat([*pieces[0::2], into])

    # ------------------------------------------------------------------------------------------------ backward

    def thawed(self, looked: Looked, live: Sequence[bool]) -> Looked:
        """As if the frozen tables had had no bags: nothing of theirs travels back. `live`: per table."""
        if all(live):
            return looked
        routed = looked.routed

        def kept(counts: Sequence[int], tables: Sequence[int]) -> list[int]:
            return [count if live[t] else 0 for count, t in zip(counts, tables, strict=True)]

        fewer = replace(
            routed,
            counts=kept(routed.counts, self._table_of_count),
            present=kept(routed.present, self._table_of_present),
            unions=kept(routed.unions, self._table_of_union),
            member_counts=kept(routed.member_counts, self._table_of_member),
        )
        return Looked(fewer, looked.handle)

    def send_back(self, looked: Looked, grad: Tensor, places: Sequence[Place]) -> Tensor:
        """Gradients of the rows I looked up, in lookup order, from the flat gradients of every home's output."""
        routed, layout = looked.routed, self.layout
        segments, _ = self._home_segments(routed, places)
        out = torch.ops.tilerec.pick_rows(grad, routed.slots, *segments[:-1])
        rows = self._send(
            "gradients",
            out,
            self._home_rows(routed),
            self._owner_rows(routed),
            self._grads_out,
            self._grads_in,
        ).wait()
        return self._unmerge(routed, rows) if layout.hierarchical else rows

    def record(
        self, routed: Routed, grads: Tensor, sinks: Sequence[int], present: Sequence[int]
    ) -> GradientRecord:
        """The gradients as row gradients of my leaves.

        Args:
            sinks: handle per leaf.
            present: bags of each received part, of frozen tables too.
        """
        bag_starts = list(itertools.accumulate(present, initial=0))
        sizes = [routed.present[s.count] * s.width for s in self._looked_up]
        grad_starts = list(itertools.accumulate(sizes, initial=0))
        own = [self._looked_up[i] for i in self._order]
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
        )

    def sample_weight_grads(
        self, routed: Routed, grads: Tensor, leaves: Sequence[Tensor], count: int
    ) -> Tensor:
        """Gradients of my batch's sample weights `[count]`; a collective of its own."""
        if self._looked_up:
            own = torch.ops.tilerec.sample_weight_grad(
                list(leaves), routed.ids, routed.offsets, grads, self._tables, self._keys, [0] * len(self._keys),
                [*routed.present, 0],
            )  # fmt: skip
        else:
            own = torch.empty(0, dtype=torch.float32, device=grads.device)
        own = own.to(self.wide)
        into = torch.empty(sum(routed.sent_ids), dtype=self.wide, device=grads.device)
        self.group.all_to_all("weight gradients", into, own, routed.sent_ids, routed.received_ids).wait()
        return torch.zeros(count, dtype=self.wide, device=grads.device).index_add_(0, routed.positions, into)
