"""Managed collision over many ranks: ids are sent to the owners of their buckets, and row numbers are sent back.

Nouns
  owner    the rank of a bucket: rank r has buckets [c_r, c_r+1) of a table, contiguous and spread as evenly as possible
  home     the rank that a batch belongs to
  holder   a rank whose tiles contain a row, or any rank if the row is hot: it receives the row's number when the row
           loses its id

    header   home -> owner    number of ids of each feature, the clock, and flags                (the host waits)
    ids      home -> owner    feature by feature, in the order of the batch
             owner            sorts them by (feature, home, position), the order of the global batch, and maps them
    rows     owner -> home    row numbers, and to each holder the number of rows that lost their id  (the host waits)
    evicted  owner -> holder  those rows; skipped if no rank evicted any

The map equals the map that a single process makes of the global batch: no bit of it depends on the number of ranks. It
is independent of the tables' tilings: row numbers go through the ordinary exchange of the tables.

Legend: W ranks, T tables, F features of all tables, N ids of this batch, R ids received.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.modules.buckets import bucket_cuts
from tilerec.modules.id_counts import sums_at
from tilerec.modules.managed_collection import TableIds
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.table import Table
from tilerec.ops.hash.definition import zch_buckets
from tilerec.ops.runtime.upload import current_stream, upload
from tilerec.sharding.header import FLAG_BITS, LookupFacts, header_sizes_of, raise_difference
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.tile import Rectangle, Tile, Tiling

Ranges = tuple[tuple[int, int], ...]
"""Row ranges [r0, r1) that a rank holds: ascending, with gaps between them."""

# Header elements before the clocks: flags and the digest of `LookupFacts`, as in a lookup's header; then a bit per
# module that changes its map.
_FLAGS = 2
_REFUSED = 1
_FAILED = -1


class SentIds(NamedTuple):
    """Order and counts of the ids that were sent."""

    order_N: Tensor  # position in the batch of each id, in the order sent
    counts: list[list[int]]  # [W][F]
    headers: list[list[int]]  # [W], those received


class IdExchange:
    """Exchange of one collection's ids between the ranks.

    Args:
        group: the ranks whose batches form the global batch; its collectives run in the order of the `route` calls.
        modules: by table.
        features: features of each table, in the order in which their ids take rows.
        tables: the tables of the rows; their current tilings decide which ranks receive evictions.
        member_of: maps a rank of the group to its rank in these tilings.
        number: the collection's number among those that share the group; None: the next free one.
    """

    def __init__(
        self, group: Group, modules: Mapping[str, ManagedCollisionModule], features: Mapping[str, Sequence[str]],
        tables: Mapping[str, Table], member_of: Callable[[int], int], number: int | None = None,
    ) -> None:  # fmt: skip
        self.group, self.modules, self.tables, self.member_of = group, dict(modules), dict(tables), member_of
        self.features = [(t, name) for t, table in enumerate(modules) for name in features[table]]
        self.spans: list[tuple[int, int]] = []  # range of each table in `features`
        at = 0
        for table in modules:
            self.spans.append((at, at + len(features[table])))
            at += len(features[table])
        self.cuts = [bucket_cuts(module.buckets(), group.size) for module in modules.values()]
        room, width = header_sizes_of(group), _FLAGS + len(self.modules) + len(self.features)
        word = f"the ids of {', '.join(map(repr, list(self.modules)[:3]))}{', …' if len(self.modules) > 3 else ''}"
        self.facts = LookupFacts(room.number() if number is None else number, word, tuple(self.modules))
        self._room, self._width = room, width
        words = [2 * width] * group.size
        room.enter(self.facts.number, words, words, unit=2)
        self._indices: dict[tuple[int, torch.device, int], tuple[Tensor, Tensor]] = {}
        self._owned: dict[tuple[int, torch.device], tuple[tuple[int, ...], Tensor]] = {}
        self._tilings: list[Tiling | None] = []
        self._holders: list[list[Ranges]] = []
        self._hot: dict[int, tuple[HotRows, Tensor]] = {}

    def holders(self) -> list[list[Ranges]]:
        """Return the row ranges that each rank holds of each table; all rows if the table has no tiling."""
        tilings = [getattr(self.tables.get(table), "tiling", None) for table in self.modules]
        if not self._holders or any(a is not b for a, b in zip(tilings, self._tilings, strict=True)):
            everything: Ranges = ((0, 2**62),)
            self._tilings = tilings
            self._holders = [
                [
                    everything if tiling is None else row_ranges(tiling.tiles_of(self.member_of(rank)))
                    for tiling in tilings
                ]
                for rank in range(self.group.size)
            ]
        return self._holders

    def _owners(self, t: int, device: torch.device) -> Tensor:
        """Return the rank of each bucket of a table: int16, or int32 from 2^15 ranks on.

        int16 sorts many times faster than int64.
        """
        cuts, known = self.cuts[t], self._owned.get((t, device))
        if known is None or known[0] != cuts:
            dtype = torch.int16 if self.group.size < 1 << 15 else torch.int32
            held = upload([last - first for first, last in itertools.pairwise(cuts)], device)
            ranks = torch.arange(self.group.size, dtype=dtype, device=device)
            known = cuts, torch.repeat_interleave(ranks, held, output_size=cuts[-1])
            self._owned[t, device] = known
        return known[1]

    def refuse(self, failure: Exception) -> NoReturn:
        """Send every rank a header that refuses this rank's batch, then raise `failure`."""
        header_WH = torch.zeros(self.group.size, self._width, dtype=torch.int64, device=self.group.device)
        header_WH[:, 0] = _REFUSED
        self._exchange_headers(header_WH)
        raise failure

    def _exchange_headers(self, headers_WH: Tensor) -> Tensor:
        """Send row p to every rank p, and return the rows received from all ranks.

        On the wire, rows are padded to the size of the channel's headers.
        """
        words = self._room.sizes([0] * self.group.size, [0] * self.group.size)
        outs, ins = ([n // 2 for n in side] for side in words)
        place, taken = self._places(outs, ins, headers_WH.device)
        received = self._all_to_all("id header", headers_WH.reshape(-1).index_select(0, place), ins, outs)
        return received.index_select(0, taken).view(self.group.size, self._width)

    def _places(self, outs: list[int], ins: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the source position of each element sent, and the positions of the rows in the elements received.

        Padding repeats the first element of a header.
        """
        key = self._room.version, device, current_stream()
        if key not in self._indices:
            self._indices.clear()
            width = self._width
            place = [p * width + (i if i < width else 0) for p, size in enumerate(outs) for i in range(size)]
            starts = itertools.accumulate(ins[:-1], initial=0)
            taken = [start + i for start in starts for i in range(width)]
            self._indices[key] = upload(place, device), upload(taken, device)
        return self._indices[key]

    def __call__(self, batch: TableIds) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Map a batch: return rows by feature (-1: dropped), and by table the rows held here that lost their id.

        Raises:
            InputError: another rank refused its batch, or trains while this one evaluates; nothing has changed.
        """
        sent, received = self._send(batch)
        received_counts = [header[_FLAGS + len(self.modules) :] for header in sent.headers]
        ordered = _reordered(received, received_counts)
        failure: Exception | None = None
        try:
            rows_R, evicted = self._map(ordered, received_counts, sent.headers[0])
        except Exception as error:  # raised later: the other ranks wait for rows
            failure, rows_R = error, torch.full_like(ordered, -1)
            evicted = [ordered.new_empty(0)] * len(self.modules)
        turned = [list(column) for column in zip(*received_counts, strict=True)]
        home_rows = _reordered(rows_R, turned) if turned else rows_R
        return self._return_rows(batch, sent, home_rows, received_counts, evicted, failure)

    # ------------------------------------------------------------------------------------------------------- home

    def _send(self, batch: TableIds) -> tuple[SentIds, Tensor]:
        """Send the ids to the owners of their buckets; return a `SentIds` and the ids received."""
        group, count = self.group, len(self.features)
        owners, ids = [], []
        for t, (table, module) in enumerate(self.modules.items()):
            bucket_N = zch_buckets(batch[table], module.buckets())
            owners.append(self._owners(t, bucket_N.device).index_select(0, bucket_N))
            ids.append(batch[table])
        owner_N, ids_N = torch.cat(owners), torch.cat(ids)
        sizes = upload([batch.sizes[name] for _, name in self.features], ids_N.device)
        feature_N = torch.repeat_interleave(sizes, output_size=ids_N.numel())
        place_N = owner_N.to(torch.int64) * count + feature_N
        counts_WF = sums_at(place_N, None, group.size * count).view(group.size, count)
        writes = sum(module.writes << t for t, module in enumerate(self.modules.values()))
        prefix = [
            self.facts.digest() << FLAG_BITS,
            writes % (1 << 62),
            *(batch.times[table] for table in self.modules),
        ]
        head = upload(prefix, ids_N.device).expand(group.size, len(prefix))
        width = self._width
        received_WH = self._exchange_headers(torch.cat([head, counts_WF], dim=1))
        both = torch.cat([received_WH, counts_WF], dim=1).tolist()
        headers, counts = [row[:width] for row in both], [row[width:] for row in both]
        self._check(headers)
        order_N = torch.sort(owner_N, stable=True).indices
        received = self._all_to_all(
            "ids to map", ids_N[order_N], [sum(row[len(prefix) :]) for row in headers], [sum(row) for row in counts]
        )  # fmt: skip
        return SentIds(order_N, counts, headers), received

    def _check(self, headers: list[list[int]]) -> None:
        """Raise an `InputError` if the headers disagree; all ranks receive all headers, so all raise or none."""
        refused = [rank for rank, header in enumerate(headers) if header[0] & _REFUSED]
        if refused:
            raise InputError(
                f"Rank {refused[0]} refused its batch (its own error gives the reason), so no rank maps this step; see "
                "the error of that rank."
            )
        own = self.facts.digest()
        # The low half of the first element is the first word of a lookup's header.
        if any((header[0] & 0xFFFFFFFF) >> FLAG_BITS != own for header in headers):
            raise_difference(self.group, range(self.group.size), self.facts)
        modes = [header[1] for header in headers]
        if len(set(modes)) > 1:
            rank = next(rank for rank, mode in enumerate(modes) if mode != modes[0])
            t = next(t for t in range(len(self.modules)) if (modes[0] ^ modes[rank]) >> t & 1)
            words = ["trains" if modes[r] >> t & 1 else "evaluates" for r in (0, rank)]
            raise InputError(
                f"Table '{list(self.modules)[t]}': rank 0 {words[0]} and rank {rank} {words[1]}; call train() or "
                "eval() on all ranks alike."
            )

    def _return_rows(
        self, batch: TableIds, sent: SentIds, home_rows: Tensor, received_counts: list[list[int]],
        evicted: list[Tensor], failure: Exception | None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
        """Send rows to their homes, and rows that lost their id to their holders."""
        group, tables = self.group, len(self.modules)
        # Per holder and table, a mask of the rows that lost their id (-1: none). Their counts are on the device.
        holders = self.holders()
        hot = [self._is_hot(t, rows) for t, rows in enumerate(evicted)]
        masks = [
            [_within(rows, ranges) | hot_M for ranges, rows, hot_M in zip(own, evicted, hot, strict=True)]
            for own in holders
        ]
        counts_WT = torch.stack([torch.stack([here.sum() for here in own]) for own in masks])
        total = torch.stack([(rows >= 0).sum() for rows in evicted]).sum() - int(failure is not None)
        tails_WT1 = torch.cat([total.expand(group.size, 1), counts_WT], 1)
        own = home_rows.split([sum(counts) for counts in received_counts])
        message = torch.cat([part for rank in range(group.size) for part in (own[rank], tails_WT1[rank])])
        tail = 1 + tables
        ins = [sum(counts) + tail for counts in sent.counts]
        parts = self._all_to_all("mapped rows", message, ins, [sum(counts) + tail for counts in received_counts]).split(
            ins
        )
        both = torch.cat([torch.stack([part[-tail:] for part in parts]), tails_WT1], 1).tolist()
        tails, own_tails = [words[:tail] for words in both], [words[tail:] for words in both]
        if failure is not None:
            raise failure
        failed = [rank for rank, words in enumerate(tails) if words[0] == _FAILED]
        if failed:
            raise InputError(
                f"Rank {failed[0]} could not map the ids of its buckets (its own error gives the reason), so no rank "
                "continues with this batch; see the error of that rank."
            )
        back = torch.cat([part[: part.numel() - tail] for part in parts])
        rows_N = torch.empty_like(back)
        rows_N[sent.order_N] = back
        sizes = [batch.sizes[name] for _, name in self.features]
        rows = {name: part for (_, name), part in zip(self.features, rows_N.split(sizes), strict=True)}
        if not any(words[0] for words in tails):
            return rows, {}
        lost = [
            own[torch.nonzero_static(here, size=number)[:, 0]]
            for own_masks, (_, *numbers) in zip(masks, own_tails, strict=True)
            for own, here, number in zip(evicted, own_masks, numbers, strict=True)
        ]
        return rows, self._exchange_evicted(torch.cat(lost), [sum(words[1:]) for words in own_tails], tails)

    def _is_hot(self, t: int, rows_M: Tensor) -> Tensor:
        """Return a bool mask `[M]`: True where every rank holds a copy of a row. The host does not wait."""
        tiling = self._tilings[t]
        if tiling is None or tiling.head is None:
            return torch.zeros_like(rows_M, dtype=torch.bool)
        hot, known = tiling.head.hot, self._hot.get(t)
        if known is None or known[0] is not hot:
            known = self._hot[t] = hot, torch.from_numpy(hot.ids.copy()).to(rows_M.device)
        hot_H = known[1]
        return hot_H[torch.searchsorted(hot_H, rows_M).clamp_max(len(hot_H) - 1)] == rows_M

    def _exchange_evicted(self, lost: Tensor, outs: list[int], tails: list[list[int]]) -> dict[str, Tensor]:
        """Exchange the rows that lost their id; return, by table, those held here."""
        received = self._all_to_all("evicted rows", lost, [sum(words[1:]) for words in tails], outs)
        pieces = received.split([n for words in tails for n in words[1:]])
        tables = len(self.modules)
        return {table: torch.cat(pieces[t::tables]) for t, table in enumerate(self.modules)}

    # ------------------------------------------------------------------------------------------------------ owner

    def _map(self, ids_R: Tensor, counts: list[list[int]], first: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the rows of the ids received, in global batch order, and per table the rows that lost their id.

        Args:
            first: the header of rank 0, whose clocks all ranks use.
        """
        sizes = [sum(column) for column in zip(*counts, strict=True)]
        rows, evicted, at = [], [], 0
        for t, module in enumerate(self.modules.values()):
            own = sizes[slice(*self.spans[t])]
            mapped = module.map(ids_R[at : at + sum(own)], own, first[_FLAGS + t])
            at += sum(own)
            rows.append(mapped.rows_N)
            evicted.append(mapped.evicted_M)
        return torch.cat(rows), evicted

    def _all_to_all(self, name: str, out: Tensor, ins: list[int], outs: list[int]) -> Tensor:
        into = torch.empty(sum(ins), dtype=out.dtype, device=out.device)
        return self.group.all_to_all(name, into, out.contiguous(), ins, outs).wait()


def _reordered(values: Tensor, counts: list[list[int]]) -> Tensor:
    """Return the pieces of `values` in the order [j][i]; they are stored [i][j] with sizes `counts[i][j]`."""
    pieces = values.split([n for row in counts for n in row])
    width = len(counts[0])
    if not pieces or not width:
        return values
    return torch.cat([piece for j in range(width) for piece in pieces[j::width]])


def _within(rows_M: Tensor, ranges: Ranges) -> Tensor:
    """Return a bool mask `[M]`: True where a row is inside the ranges."""
    inside = torch.zeros_like(rows_M, dtype=torch.bool)
    for r0, r1 in ranges:
        inside |= (rows_M >= r0) & (rows_M < r1)
    return inside


def row_ranges(tiles: Sequence[Tile | Rectangle]) -> Ranges:
    """Return the row ranges of some rectangles; adjacent and overlapping ranges are joined."""
    joined: list[tuple[int, int]] = []
    for r0, r1 in sorted((tile.r0, tile.r1) for tile in tiles if tile.r0 < tile.r1):
        if joined and r0 <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], r1)
        else:
            joined.append((r0, r1))
    return tuple(joined)
