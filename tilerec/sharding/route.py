"""Route: send each id of a rank's batch to the rank that holds its row.

Nouns
  header   per pair of ranks, of static size: sizes of the payload, and flags
  payload  lengths of present bags (omitted if every bag has one id), local ids, weights, merge positions
  Routed   the result: as home, the destinations of rows; as owner, the ids to look up

    begin    sorts the ids by owner, and posts the header
    finish   waits for the headers of all ranks, and posts the payload; `Routed.wait` waits for the payloads

The header is the only host synchronization of a step. One device-to-host copy (`Headers`) contains the headers of the
other ranks and the results of this rank's device, its sizes and faults. Until then, results of `route_ids` have their
maximum length. A rank that refuses its own batch sets a flag in its header, so every rank raises and none hangs.

Legend: W ranks, K parts, P present bags, N ids, M merges, U bags of a merge (`merged_bags.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tilerec.comms.group import Group, Handle
from tilerec.errors import InputError
from tilerec.ops.exchange.definition import raise_fault
from tilerec.ops.gradient.definition import bag_starts
from tilerec.ops.runtime.upload import cached_per_stream, current_stream, upload
from tilerec.sharding.header import FLAG_BITS, LookupFacts, header_sizes_of, raise_difference
from tilerec.sharding.layout import ExchangeLayout
from tilerec.sharding.merged_bags import BagMarks, BagUnion, MergedBags
from tilerec.sharding.posted_headers import Headers, PostedHeaders, header_sizes
from tilerec.sharding.read_counts import ReadCounts
from tilerec.sharding.repeats import Repeats
from tilerec.storage.prefetched_results import StreamEvent
from tilerec.storage.tensor_mark import mark_of

REFUSED, WEIGHTS_NEED_GRAD = 1, 2
"""Flag bits of a header's first word; the bits above them are the digest of its rank's `LookupFacts`."""


@dataclass
class Routed:
    """A batch in transit to the owners. The backward uses it again; two may be alive at once."""

    # As home.
    bags: list[int]  # per slot: its bags, or its ids if unpooled
    counts: list[int]  # P of each part in wire order, then U of each merge
    slot_starts: list[int]  # per element of `counts`: start of its bag numbers in `slots`; -1: all bags
    slots: Tensor  # bag numbers; empty if all `slot_starts` are -1
    positions: Tensor | None  # of the ids sent, in the batch's values; None unless weights need gradients
    sent_ids: list[int]  # per owner
    # As owner.
    present: list[int]  # P of each received part, [home][part]
    received_ids: list[int]  # per home
    weights_need_grad: bool  # on any rank
    # As proxy.
    unions: list[int]  # U of each merge, [home][merge]
    member_counts: list[int]  # P of each member, [home][merge][part]
    # Filled by `wait`.
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    offsets: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    sample_weights: Tensor | None = None
    member_starts: list[int] = field(default_factory=list)
    member_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    pending: Any = None
    handle: Handle | None = None  # of the ids in transit
    # Tensors of a batch that the lookup reads without a copy, each with its mark when it was routed.
    in_place: tuple[tuple[Tensor, Any], ...] = ()
    repeats: Repeats | None = None  # set if the bags are distinct ids

    def check(self) -> None:
        """Raise an `InputError` if a batch that is read without a copy was written to after it was routed."""
        if any(mark_of(tensor) != mark for tensor, mark in self.in_place):
            raise InputError(
                "A batch was written to after it was routed, and a single rank's tables read batches without a copy "
                "(ids, offsets and sample weights, in the forward and in the backward); route a clone of it, or write "
                "to it after its backward."
            )

    def wait(self) -> Routed:
        """Wait until the ids have arrived, and unpack them."""
        if self.pending is not None:
            finish, self.pending, self.handle = self.pending, None, None
            finish()
        return self

    def receive(self) -> None:
        """Unpack the ids if they have arrived, which frees the messages; never blocks."""
        if self.handle is not None and self.handle.is_done():
            self.wait()


@dataclass(frozen=True)
class RouteInput:
    """The data of a jagged batch that routing reads."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    batches: list[int]  # as in `pooled_lookup`
    bags: list[int]  # per slot
    facts: LookupFacts = field(default_factory=LookupFacts)  # must be equal on all ranks
    samples: list[int] | None = None  # `batches` before repeated ids were left out; None: they are the same
    repeats: Repeats | None = None  # set if repeated ids were left out


@dataclass
class LocalHandle:
    """Handle of a tensor that is on this rank already, if every rank holds all rows that it looks up."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor

    def is_done(self) -> bool:
        return True


class Router:
    """Router of the batches of one module."""

    def __init__(
        self, layout: ExchangeLayout, group: Group, *, weighted: bool, each_id: bool, wide: torch.dtype,
        names: Sequence[int] = (), everyone: Group | None = None,
    ) -> None:  # fmt: skip
        """Args: see `ReplicaGroups` for `names` and `everyone`."""
        self._ranks = tuple(names) or tuple(range(group.size))
        self.layout, self.group, self.everyone = layout, group, everyone
        self.weighted, self.each_id, self.wide = weighted, each_id, wide
        self.id_dtype = torch.int64 if any(part.r1 - part.r0 >= 1 << 31 for part in layout.parts) else torch.int32
        self._id_words = 2 if self.id_dtype == torch.int64 else 1
        self._weight_words = 2 if wide == torch.float64 else 1
        self.reads = ReadCounts(len(layout.slots), [route.slot for route in layout.routes])
        self._cuts = [cut for route in layout.routes for cut in route.cuts]
        tilings = [layout.tables[layout.slots[route.slot].table].tiling for route in layout.routes]
        self._heads = [tiling.held.rows - tiling.rows for tiling in tilings]
        self._ranges = [len(route.parts) for route in layout.routes]
        self._wire = [layout.wire[p] if p >= 0 else -1 for route in layout.routes for p in route.parts]
        self._names = ",".join(
            f"{layout.slots[route.slot].feature}@{layout.tables[layout.slots[route.slot].table].name}"
            for route in layout.routes
        )
        self._sent_sizes = [len(parts) for parts in layout.sent]
        self._merges_to: list[list[int]] = [
            [m for m, merge in enumerate(layout.own_merges) if merge.proxy == owner] for owner in range(layout.size)
        ]
        wire_slots = [0] * len(layout.parts)
        for p, part in enumerate(layout.parts):
            wire_slots[layout.wire[p]] = part.slot
        self._slot_of = wire_slots + [layout.parts[merge.parts[0]].slot for merge in layout.own_merges]
        self._merged_bags = MergedBags(layout)
        self._room = header_sizes_of(group)
        self._indices: dict[tuple[torch.device, int], Tensor] = {}  # on devices, per stream
        # A single rank with one row range per table: its lookups can read batches as they are.
        self._single_range = layout.size == 1 and everyone is None and self._ranges == [1] * len(layout.slots)
        self._lay_out_headers()

    def _lay_out_headers(self) -> None:
        """Lay out the headers, each as long as the longest of its channel."""
        self._version = self._room.version
        self._header_out, self._header_in = self._room.sizes(*header_sizes(self.layout))
        self._header_index = self._index_header()
        self._indices.clear()

    def _index_header(self) -> list[int]:
        """Return each header word's index in [flags, (P, N) of each part in wire order, note, U of each merge]."""
        layout, index, wire, end = self.layout, list[int](), 0, 0
        note = 1 + 2 * len(layout.parts)
        for size, merges, room in zip(self._sent_sizes, self._merges_to, self._header_out, strict=True):
            index.append(0)
            index.extend(range(1 + 2 * wire, 1 + 2 * (wire + size)))
            wire += size
            for m in merges:
                index.append(note + 1 + m)
                index.extend(1 + 2 * layout.wire[p] for p in layout.own_merges[m].parts)
            end += room
            index.extend([0] * (end - len(index)))  # not read
            if self._room.carries_notes:
                index[-1] = note
        return index

    def begin_refused(self, failure: Exception, device: torch.device, note: int = 0) -> BegunRoute:
        """Post headers that refuse this rank's batch; `finish` raises `failure`."""
        nothing = torch.zeros(1 + 2 * len(self.layout.parts), dtype=torch.int64, device=device)
        sizes_M = torch.zeros(len(self.layout.own_merges), dtype=torch.int64, device=device)
        return BegunRoute(headers=self._post_headers(REFUSED, nothing, sizes_M, note), failure=failure)

    def __call__(self, batch: RouteInput, keys: Sequence[int]) -> Routed:
        """Send a batch's ids to their owners: `begin` and `finish`. Collective."""
        return self.finish(self.begin(batch, keys))

    def begin(self, batch: RouteInput, keys: Sequence[int], note: int = 0) -> BegunRoute:
        """Sort a batch's ids by owner, and post the headers. Collective; never waits, and raises nothing.

        Args:
            batch: see `RouteInput`.
            keys: per route, the position of its key in the batch.
            note: a number (int32) for the other ranks, if the channel carries notes; see `PostedHeaders.notes`.
        """
        weights = batch.weights if self.weighted else None
        if self._single_range and self._can_read_in_place(batch, keys):
            try:
                return BegunRoute(routed=self._routed_in_place(batch, weights, keys))
            except Exception as error:
                return BegunRoute(failure=error)
        try:
            summary, lengths, local, slots, positions = torch.ops.tilerec.route_ids(
                batch.ids, batch.offsets, keys, batch.batches, self._cuts, self._ranges, self._wire, self.each_id,
                self.id_dtype, self._names, weights is not None,
            )  # fmt: skip
        except Exception as error:
            return self.begin_refused(error, self.group.device, note)
        sorted_ids = summary, lengths, local, slots, positions
        flags = WEIGHTS_NEED_GRAD * (weights is not None and weights.requires_grad)
        # 31 bits in all: the word has a sign.
        flags |= batch.facts.digest() << FLAG_BITS
        marks = self._merged_bags.mark(slots, summary[1:].view(-1, 2), batch.bags)
        headers = self._post_headers(flags, summary, marks.sizes_M, note)
        if batch.ids.is_cpu:  # its errors have been raised; only errors of a GPU are looked up in the ids by `finish`
            batch = replace(batch, ids=batch.ids.new_empty(0))
        return BegunRoute(headers=headers, home=_HomeBatch(batch, weights, keys, flags, sorted_ids, marks))

    def finish(self, begun: BegunRoute) -> Routed:
        """Wait for the headers of all ranks, and post the payload. Collective, once per `begin`, in the same order.

        Raises:
            InputError: the batch of this rank or of another rank cannot be routed; every rank raises.
        """
        if begun.routed is not None:
            return begun.routed
        headers = None if begun.headers is None else begun.headers.read()
        if begun.failure is not None:
            raise begun.failure
        home = begun.home
        assert home is not None, "neither routed in place nor refused"
        assert headers is not None, "posted with the batch"
        batch = home.batch
        summary, lengths, local, slots, positions = home.sorted_ids
        if headers.fault:
            raise_fault(headers.fault, batch.ids, batch.offsets, self._cuts, self._ranges, self._names, self._heads)
        self._check(headers, home.flags, batch.facts)
        repeated = batch.repeats.counts if batch.repeats is not None else {}
        self.reads.add(summary[1:].view(-1, 2), home.keys, batch.samples or batch.batches, repeated)
        # The host has the sizes now: cut the tensors to them.
        present, moved = (sum(column) for column in zip((0, 0), *headers.counts, strict=True))
        if slots.numel() > present:
            lengths, slots = lengths[:present], slots[:present]
        if local.numel() > moved:
            local, positions = local[:moved], positions[:moved]
        unions = self._merged_bags.unite(home.marks, headers.counts, headers.sizes)
        return self._exchange_payloads(batch, home.weights, headers, lengths, local, slots, positions, unions)

    def _can_read_in_place(self, batch: RouteInput, keys: Sequence[int]) -> bool:
        """Return True if each key is read by one route, in batch order, as far as host-side sizes show."""
        if list(keys) != list(range(len(keys))):
            return False
        if self.each_id:
            return batch.ids.numel() == sum(batch.bags)
        bags = sum(batch.bags) if len(batch.batches) == 1 else sum(batch.batches)
        return batch.offsets.numel() == bags + 1

    def _routed_in_place(self, batch: RouteInput, weights: Tensor | None, keys: Sequence[int]) -> Routed:
        """Return a batch that stays on this rank as routed, without sorting, counting, sending or waiting.

        Only the lookup reads the ids. Bags without ids count as present.
        """
        device, bags, needs = batch.ids.device, batch.bags, weights is not None and weights.requires_grad
        ids = batch.ids.contiguous() if batch.ids.dtype in (torch.int32, torch.int64) else batch.ids.to(torch.int64)
        offsets = batch.offsets.to(torch.int64).contiguous()
        firsts, counts = bag_starts(keys, batch.batches)
        edges = upload([*firsts, *(first + count for first, count in zip(firsts, counts, strict=True))], device)
        begins_K, ends_K = offsets[edges].view(2, -1)
        sample_weights = None if weights is None else weights.detach().to(self.wide).contiguous()
        self.reads.add(torch.stack((ends_K - begins_K, ends_K - begins_K), dim=1), keys, batch.batches)
        read = [tensor for tensor in (ids, offsets, sample_weights) if tensor is not None]
        return Routed(
            bags, list(bags), [-1] * len(bags), torch.empty(0, dtype=torch.int32, device=device),
            _counting(ids.numel(), device) if needs else None, [ids.numel()], list(bags), [ids.numel()], needs, [], [],
            ids=ids, offsets=_counting(ids.numel() + 1, device) if self.each_id else offsets,
            sample_weights=sample_weights, in_place=tuple([(tensor, mark_of(tensor)) for tensor in read]),
        )  # fmt: skip

    def _check(self, headers: Headers, flags: int, facts: LookupFacts) -> None:
        """Raise an `InputError` on all ranks if one of them cannot continue."""
        refused = [home for home, header in enumerate(headers.received) if header[0] & REFUSED]
        if refused:
            raise InputError(
                f"Rank {self._ranks[refused[0]]} refused its batch (its own error gives the reason), so no rank routes "
                "this step; see the error of that rank."
            )
        if headers.refusals:
            who = f"{headers.refusals} ranks refused their"
            if headers.refusals == 1:
                who = f"Rank {headers.refusers} refused its"
            raise InputError(
                f"{who} batch in another sharding group (the error there gives the reason), so no rank routes this "
                "step."
            )
        if any(header[0] >> FLAG_BITS != flags >> FLAG_BITS for header in headers.received):
            raise_difference(self.group, self._ranks, facts)

    # ------------------------------------------------------------------------------------------------ home

    def _post_headers(self, flags: int, summary: Tensor, sizes_M: Tensor, note: int) -> PostedHeaders:
        """Send headers to every rank.

        Args:
            summary: first result of `route_ids`: the fault, sent to other ranks as a flag only, and the counts.
        """
        device = summary.device
        if self._room.version != self._version:
            self._lay_out_headers()
        fault = None
        if device.type == "cpu":  # the CPU op has raised its faults already
            words_out = torch.constant_pad_nd(summary, (0, 1), note)
            words_out[0] = flags
        else:
            fault = summary[:1].view(torch.int32)
            # A fault sets REFUSED, which is 1; flags that contain REFUSED already come without a fault.
            words_out = torch.cat(((summary[:1] != 0) + flags, torch.constant_pad_nd(summary[1:], (0, 1), note)))
        values = (torch.cat((words_out, sizes_M)) if sizes_M.numel() else words_out).to(torch.int32)
        out = values.index_select(0, self._index_on(device))
        into = torch.empty(sum(self._header_in), dtype=torch.int32, device=device)
        handle = self.group.all_to_all("header", into, out, self._header_in, self._header_out)
        refusals = None
        if self.everyone is not None:  # both collectives are in flight when the host waits
            refused = values[:1] & REFUSED
            own = torch.cat((refused, refused * self.everyone.rank))
            refusals = self.everyone.all_reduce_("refusals", own)
        sent = StreamEvent(device) if device.type == "cuda" else None
        return PostedHeaders(
            handle, refusals, fault, values, len(self.layout.parts), sizes_M.numel(), self._header_in, sent
        )

    def _index_on(self, device: torch.device) -> Tensor:
        """Return the header's index on the device. Each stream has its own copy, so no stream waits for another."""
        key = device, current_stream()
        if key not in self._indices:
            self._indices[key] = upload(self._header_index, device)
        return self._indices[key]

    def _exchange_payloads(
        self, batch: RouteInput, weights: Tensor | None, headers: Headers, lengths: Tensor, local: Tensor,
        slots: Tensor, positions: Tensor, unions: list[BagUnion],
    ) -> Routed:  # fmt: skip
        layout, counts, received = self.layout, headers.counts, headers.received
        values = [(local.view(torch.int32), self._id_words)]
        if weights is not None:
            values.append((weights.detach()[positions].to(self.wide).view(torch.int32), self._weight_words))
        payload, out_splits, sent_ids = self._packed(lengths, values, counts, unions)
        expected = self._expected(received, weights is not None)
        if layout.alone:
            handle: Handle = LocalHandle(payload)
        else:
            into = torch.empty(sum(expected.sizes), dtype=torch.int32, device=payload.device)
            handle = self.group.all_to_all("ids", into, payload, expected.sizes, out_splits)

        # Bag numbers of parts, then of merges, concatenated; -1 stands for a full list of bags.
        own_counts = [*(p_k for p_k, _ in counts), *(union.slots.numel() for union in unions)]
        starts = list(itertools.accumulate(own_counts, initial=0))[:-1]
        all_slots = torch.cat([slots, *(union.slots for union in unions)]) if unions else slots
        slot_starts = [
            -1 if count == batch.bags[slot] else start
            for count, slot, start in zip(own_counts, self._slot_of, starts, strict=True)
        ]
        weights_need_grad = any(header[0] & WEIGHTS_NEED_GRAD for header in received)
        # A batch stays alive until its backward, so keep only tensors that will be read.
        routed = Routed(
            batch.bags, own_counts, slot_starts,
            _compact(all_slots) if max(slot_starts, default=-1) >= 0 else all_slots.new_empty(0),
            _compact(positions) if weights_need_grad else None, sent_ids, expected.present, expected.ids,
            weights_need_grad, expected.unions, expected.members, repeats=batch.repeats,
        )  # fmt: skip
        sent = StreamEvent(payload.device) if payload.is_cuda else None
        routed.handle = handle
        routed.pending = lambda: self._receive(routed, handle, sent, expected, weights is not None)
        return routed

    def _packed(
        self, lengths: Tensor, values: list[tuple[Tensor, int]], counts: list[tuple[int, int]],
        unions: list[BagUnion],
    ) -> tuple[Tensor, list[int], list[int]]:  # fmt: skip
        """Return the payload, its size for each owner, and the number of ids for each owner.

        Args:
            values: words of the ids, then of the weights if there are any, each with the words of one id.
        """
        pieces: list[Tensor] = []
        splits, sent_ids = [], []
        k = p_at = n_at = 0
        for size, merges in zip(self._sent_sizes, self._merges_to, strict=True):
            first, n = len(pieces), 0
            length_runs = _Runs()
            for p_k, n_k in counts[k : k + size]:
                if not self.each_id and p_k != n_k:
                    length_runs.add(p_at, p_k)
                p_at += p_k
                n += n_k
            pieces.extend([lengths[begin:end] for begin, end in length_runs.runs])
            k += size
            pieces.extend([part[n_at * words : (n_at + n) * words] for part, words in values])
            n_at += n
            for m in merges:
                union = unions[m]
                pieces.extend(ranks for ranks in union.ranks if ranks.numel() != union.slots.numel())
            sent_ids.append(n)
            splits.append(sum(piece.numel() for piece in pieces[first:]))
        return torch.cat(pieces) if pieces else lengths, splits, sent_ids

    # ------------------------------------------------------------------------------------------------ owner

    def _expected(self, received: list[list[int]], weighted: bool) -> _Expected:
        """Return the contents of the payloads that arrive.

        Args:
            received: see `Headers`.
        """
        found = _Expected()
        at = members_at = 0
        for parts, merges, header in zip(self.layout.received, self.layout.merging, received, strict=True):
            begin, n, h = at, 0, 1 + 2 * len(parts)
            for p_k, n_k in zip(header[1:h:2], header[2:h:2], strict=True):
                found.present.append(p_k)
                n += n_k
                if self.each_id or p_k == n_k:
                    found.lengths.add(_ONES, p_k)
                else:
                    found.lengths.add(at, p_k)
                    at += p_k
            found.ids.append(n)
            found.id_words.append((at, at + n * self._id_words))
            at += n * self._id_words
            if weighted:
                found.weight_words.append((at, at + n * self._weight_words))
                at += n * self._weight_words
            for merge in merges:
                union, own = header[h], header[h + 1 : h + 1 + len(merge.parts)]
                h += 1 + len(merge.parts)
                found.unions.append(union)
                found.members.extend(own)
                for count in own:
                    if count == union:
                        found.member_starts.append(-1)
                        continue
                    found.member_starts.append(members_at)
                    found.member_words.append((at, at + count))
                    at += count
                    members_at += count
            found.sizes.append(at - begin)
        return found

    def _receive(
        self, routed: Routed, handle: Handle, sent: StreamEvent | None, expected: _Expected, weighted: bool
    ) -> None:
        """Unpack the payloads: concatenate the ids of all homes, and compute the offsets of their bags.

        Args:
            sent: on a GPU, the point in the stream where the batch was sent; another stream may be current now.
        """
        payload = handle.wait()
        if sent is not None:
            sent.wait([payload])
        assert payload.numel() == sum(expected.sizes), "headers must describe the payloads"
        routed.ids = _joined(expected.id_words, payload).view(self.id_dtype)
        routed.offsets = _offsets(expected.lengths, payload)
        if weighted:
            routed.sample_weights = _joined(expected.weight_words, payload).view(self.wide)
        routed.member_starts = expected.member_starts
        routed.member_slots = _joined(expected.member_words, payload)


def _compact(part: Tensor) -> Tensor:
    """Return a tensor to keep for long: `part`, or a copy if `part` keeps over twice its own memory alive."""
    return part.clone() if part.untyped_storage().nbytes() > 2 * part.nbytes else part


@dataclass(frozen=True)
class _HomeBatch:
    """A batch whose headers are in flight, as its home needs it to send the ids."""

    batch: RouteInput
    weights: Tensor | None
    keys: Sequence[int]
    flags: int
    sorted_ids: Sequence[Tensor]  # the results of `route_ids`
    marks: BagMarks


@dataclass(frozen=True)
class BegunRoute:
    """A batch between `Router.begin` and `Router.finish`: routed in place, refused, or with its headers in flight."""

    routed: Routed | None = None
    failure: Exception | None = None
    headers: PostedHeaders | None = None
    home: _HomeBatch | None = None


_ONES = -1


class _Runs:
    """Ranges of a tensor to concatenate, with adjacent ranges joined; a run that begins at `_ONES` is ones instead."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []  # [begin, end], or [_ONES, count]

    def add(self, begin: int, count: int) -> None:
        """Append a range of `count` elements, or `count` ones if `begin` is `_ONES`."""
        last = self.runs[-1] if self.runs else None
        if begin == _ONES:
            if last is not None and last[0] == _ONES:
                last[1] += count
            else:
                self.runs.append([_ONES, count])
        elif last is not None and last[0] != _ONES and last[1] == begin:
            last[1] += count
        else:
            self.runs.append([begin, begin + count])


@dataclass(frozen=True)
class _Expected:
    """Contents of the payloads that this rank receives; the first lists are those of `Routed`.

    Words are ranges of the payloads, which are concatenated in the order of their homes.
    """

    ids: list[int] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    unions: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    member_starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # words from each home
    lengths: _Runs = field(default_factory=_Runs)  # of all bags
    id_words: list[tuple[int, int]] = field(default_factory=list)
    weight_words: list[tuple[int, int]] = field(default_factory=list)
    member_words: list[tuple[int, int]] = field(default_factory=list)


def _offsets(lengths: _Runs, payload: Tensor) -> Tensor:
    """Return the offsets of bags whose lengths are the runs of the payload."""
    if all(begin == _ONES for begin, _ in lengths.runs):
        return _counting(sum([count for _, count in lengths.runs]) + 1, payload.device)
    pieces = [_ones(end, payload.device) if begin == _ONES else payload[begin:end] for begin, end in lengths.runs]
    lengths_P = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    offsets = torch.zeros(lengths_P.numel() + 1, dtype=torch.int64, device=payload.device)
    torch.cumsum(lengths_P, 0, out=offsets[1:])
    return offsets


def _joined(ranges: list[tuple[int, int]], payload: Tensor) -> Tensor:
    pieces = [payload[begin:end] for begin, end in ranges]
    return torch.cat(pieces) if pieces else payload.new_empty(0)


@cached_per_stream(8)
def _many_ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=torch.int32, device=device)


def _ones(count: int, device: torch.device) -> Tensor:
    """Return a read-only tensor of ones: lengths of bags with one id each."""
    return _many_ones(1 << max(10, count.bit_length()), device)[:count]


@cached_per_stream(8)
def _counting_up(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _counting(count: int, device: torch.device) -> Tensor:
    """Return a read-only tensor `[count]` of 0, 1, 2, …"""
    return _counting_up(1 << max(10, count.bit_length()), device)[:count]
