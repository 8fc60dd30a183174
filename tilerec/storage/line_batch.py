"""A batch translated to cache lines: each feature has its own ids, and ids of cached tables are line numbers.

Nouns
  holder  the object that has a table: its rows, and their cache if they have one
  placed  a batch, feature by feature: ids of cached tables are line numbers, ids of other tables are unchanged

Ids of one key may read several tables, in which they have different lines. So features do not share ids here.

Example: a key with ids (7, 2) read by table a, whose rows 7 and 2 are in lines 0 and 5, and by b, which is not cached:
ids (0, 5, 7, 2), and features that begin at 0 and at 2.

Legend: F features, N ids, B bags.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilerec.ops.lookup.saved_rows import copy_rows, id_segments, positions_in_copies
from tilerec.storage.cached import RowCache, RowRequest, Segments, bags_of, lines_of_all, served_by_kernels


class RowSource(Protocol):
    """The object that has a table's rows."""

    cache: RowCache | None

    @property
    def trained(self) -> bool:
        """True if a backward pass updates the table."""

    def host(self) -> list[Tensor]:
        """Return the table and its optimizer's slots."""


Refuse = Callable[[int, int, int], None]
"""Raises the error for a bad id; takes the number of its feature, its position among the batch's ids, and the id."""


@dataclass(frozen=True)
class LineBatch:
    """A batch's rows in cache lines, ready for the lookup and update ops."""

    tensors: list[list[Tensor]]  # per table: cache lines or leaf with its rows, then its slots
    names: list[Tensor]  # per table: the row in each line; empty for tables without a cache
    ids: Tensor
    offsets: Tensor | None  # as many bags per feature as in the original batch
    sample_weights: Tensor | None
    segments: list[tuple[int, int]]  # per feature, range of its ids in the original batch

    @property
    def weights(self) -> list[Tensor]:
        """Per table, the tensor that holds its rows."""
        return [own[0] for own in self.tensors]

    @property
    def starts(self) -> list[int]:
        """Per feature, the position of its first id in `ids`."""
        return list(itertools.accumulate([end - begin for begin, end in self.segments], initial=0))[:-1]

    def _ranges(self) -> list[tuple[int, int]]:
        """Return per feature the range of its ids in `ids`."""
        ends = itertools.accumulate([end - begin for begin, end in self.segments], initial=0)
        return list(itertools.pairwise(ends))

    def copies(self, tables: Sequence[int], features: Sequence[int]) -> list[Tensor]:
        """Return copies of the rows of some features. `tables`: the table of each feature."""
        own = self._ranges()
        return [copy_rows(self.weights[tables[f]], self.ids[slice(*own[f])]) for f in features]

    def of_copies(self, rows: Sequence[Tensor]) -> LineBatch:
        """Return the same batch with ids that read such copies: one table per feature."""
        ids = positions_in_copies(self.ids, self._ranges())
        return LineBatch([[own] for own in rows], [], ids, self.offsets, None, self.segments)

    def back(self, values_n: Tensor, count: int) -> Tensor:
        """Return values of `ids` summed per id of the original batch, `[count]`."""
        out = values_n.new_zeros(count)
        sizes = [end - begin for begin, end in self.segments]
        for (begin, end), own in zip(self.segments, values_n.split(sizes), strict=True):
            out[begin:end] += own
        return out


def segments_of(
    holders: Sequence[RowSource], tables: Sequence[int], ids: Tensor, offsets: Tensor | None, starts: Sequence[int],
    bags: Sequence[int],
) -> list[tuple[int, int]]:  # fmt: skip
    """Return the range of ids of each feature.

    On a GPU this waits for the offsets, unless a cache has recorded the ranges for a batch in flight.
    """
    if offsets is None:
        return [(start, start + count) for start, count in zip(starts, bags, strict=True)]
    if offsets.device.type != "cpu":
        known = _in_flight(holders, tables, ids, offsets, starts, bags)
        if known is not None:
            return known
    return id_segments(offsets, starts, bags)


def _in_flight(
    holders: Sequence[RowSource], tables: Sequence[int], ids: Tensor, offsets: Tensor, starts: Sequence[int],
    bags: Sequence[int],
) -> list[tuple[int, int]] | None:  # fmt: skip
    found: list[tuple[int, int]] = []
    for table, start, count in zip(tables, starts, bags, strict=True):
        cache = holders[table].cache
        known = (0, 0) if not count else None
        if count and cache is not None:
            known = cache.known_segment(ids, offsets, start, count)
        if known is None:
            return None
        found.append(known)
    return found


def per_table(
    holders: Sequence[RowSource], tables: Sequence[int], segments: Sequence[tuple[int, int]]
) -> list[tuple[int, list[int], Segments]]:
    """Return for each cached table that a feature reads: its number, its features, and their segments."""
    out = []
    for t, holder in enumerate(holders):
        features = [f for f, table in enumerate(tables) if table == t]
        if holder.cache is not None and features:
            out.append((t, features, tuple([segments[f] for f in features])))
    return out


def wanted(
    holders: Sequence[RowSource],
    tables: Sequence[int],
    segments: Sequence[tuple[int, int]],
    refuse: Refuse,
    names: str = "",
) -> list[tuple[int, list[int], RowRequest]]:
    """Return for each cached table that a feature reads: its number, its features, and the request to its cache.

    Args:
        names: "feature@table" per feature, joined by ",", for messages; or empty.
    """
    named = names.split(",") if names else []
    found = []
    for t, features, own in per_table(holders, tables, segments):
        cache = holders[t].cache
        assert cache is not None

        def of_feature(segment: int, position: int, id_: int, features: list[int] = features) -> None:
            refuse(features[segment], position, id_)

        feature_names = ",".join([named[f] for f in features]) if named else ""
        found.append((t, features, RowRequest(cache, holders[t].host(), own, of_feature, feature_names)))
    return found


def _line_up(
    segments: Sequence[tuple[int, int]], starts: Sequence[int], bags: Sequence[int], total: int
) -> bool:
    """Return True if the features' ids and bags are consecutive and cover all ids of the batch."""
    at = bag = 0
    for (begin, end), start, count in zip(segments, starts, bags, strict=True):
        if (begin, start) != (at, bag):
            return False
        at, bag = end, bag + count
    return at == total


def place(
    holders: Sequence[RowSource], tables: Sequence[int], ids: Tensor, offsets: Tensor | None,
    sample_weights: Tensor | None, starts: Sequence[int], bags: Sequence[int], refuse: Refuse,
    segments: list[tuple[int, int]] | None = None, names: str = "", writes: bool = False,
) -> LineBatch:  # fmt: skip
    """Load the rows that a batch reads of cached tables, and return the batch with line numbers as ids.

    The result is valid until the next batch of any of these tables.

    Args:
        tables: per feature, the index of its table in `holders`.
        ids, offsets, starts, bags: as in `update_rows_`.
        segments: the range of each feature's ids, if known.
        names: as in `wanted`.
        writes: the caller will change the lines of these rows.
    """
    if segments is None:
        segments = segments_of(holders, tables, ids, offsets, starts, bags)
    wants = wanted(holders, tables, segments, refuse, names)
    of_table = {t: k for k, (t, _, _) in enumerate(wants)}
    if served_by_kernels([want for _, _, want in wants]):
        which = [of_table.get(t, -1) for t in tables]
        placed_ids = lines_of_all([want for _, _, want in wants], ids, segments, which, writes)
        for _, features, want in wants:
            if offsets is not None:
                ranges = [(starts[f], bags[f], *segments[f]) for f in features]
                want.cache.knows(ids, want.segments, bags_of(offsets, ranges))
    else:
        pieces = [ids[begin:end] for begin, end in segments]
        for _, features, want in wants:
            ranges = [(starts[f], bags[f], *segments[f]) for f in features]
            known = None if offsets is None else bags_of(offsets, ranges)
            lines = want.cache.lines_of(want.host, ids, want.segments, want.refuse, known)
            for f, lines_n in zip(features, lines, strict=True):
                pieces[f] = lines_n
            if writes:
                want.cache.updates(ids, want.segments)
        placed_ids = torch.cat(pieces) if pieces else ids[:0]
    placed_offsets, weights = offsets, sample_weights
    if offsets is not None and not (
        _line_up(segments, starts, bags, ids.shape[0]) and offsets.shape[0] == sum(bags) + 1
    ):
        base, parts = 0, [offsets.new_zeros(1)]
        for start, count, (begin, end) in zip(starts, bags, segments, strict=True):
            parts.append(offsets[start + 1 : start + count + 1] + (base - begin))
            base += end - begin
        placed_offsets = torch.cat(parts)
        if weights is not None:
            weights = torch.cat([weights[begin:end] for begin, end in segments]) if segments else weights[:0]
    elif offsets is None and weights is not None:
        weights = torch.cat([weights[begin:end] for begin, end in segments]) if segments else weights[:0]
    used = set(tables)
    no_names = ids.new_empty(0, dtype=torch.int64)
    live = [holder.cache is not None and t in used for t, holder in enumerate(holders)]
    return LineBatch(
        [h.cache.lines if on and h.cache is not None else h.host() for h, on in zip(holders, live, strict=True)],
        [h.cache.names if on and h.cache is not None else no_names for h, on in zip(holders, live, strict=True)],
        placed_ids,
        placed_offsets,
        weights,
        segments,
    )  # fmt: skip
