"""Statistics of managed collision: counters per bucket and feature, and the records that users read.

Every id of a training batch is counted once for its feature:

    hit            it had a row
    insert         it got a row; `evictions` counts inserts that took another id's row
    collision      it has no row and shares one
    rejection      it has no row and is dropped
    not_admitted   collisions and rejections of ids below the admission threshold; for the others, the bucket was full

Counters are stored per bucket and move with it, so their sums do not depend on the ranks.

Legend: N ids, F features, M counters per feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.ops.hash.definition import IdOutcome
from tilerec.ops.runtime.fetch import host_readable

KINDS = ("hits", "inserts", "evictions", "collisions", "rejections", "not_admitted", "probes")
"""Names of a feature's counters, in order."""

_HITS, _INSERTS, _EVICTIONS, _COLLISIONS, _REJECTIONS, _NOT_ADMITTED, _PROBES = range(len(KINDS))


@dataclass(frozen=True)
class FeatureCounts:
    """Counts of one feature's ids in training since the table was created.

    Args:
        probes: total number of slots read.
        reads, misses: ids of evaluation batches, and those of them without a row, since this process started.
    """

    hits: int
    inserts: int
    evictions: int
    collisions: int
    rejections: int
    not_admitted: int
    probes: int
    reads: int = 0
    misses: int = 0

    @property
    def lookups(self) -> int:
        """Number of ids looked up."""
        return self.hits + self.inserts + self.collisions + self.rejections

    @property
    def probes_per_lookup(self) -> float:
        """Slots read per id; 0 if there were no ids."""
        return self.probes / self.lookups if self.lookups else 0.0

    def __add__(self, other: FeatureCounts) -> FeatureCounts:
        return FeatureCounts(*(a + b for a, b in zip(_astuple(self), _astuple(other), strict=True)))


def _astuple(counts: FeatureCounts) -> tuple[int, ...]:
    return (*(getattr(counts, kind) for kind in KINDS), counts.reads, counts.misses)


@dataclass(frozen=True)
class IdStats:
    """Current state and training counts of a table's ids.

    Args:
        features: counts by feature name.
        rows: number of rows that can belong to one id.
        shared_rows: number of rows that ids without their own row share.
        live: number of ids that have a row.
        probe_lengths: entry p - 1 is the number of live ids that a lookup finds at the p-th slot it reads.
        fullest_bucket: largest fraction of occupied rows in a bucket.
    """

    features: dict[str, FeatureCounts]
    rows: int
    shared_rows: int
    live: int
    probe_lengths: tuple[int, ...]
    fullest_bucket: float

    @property
    def occupancy(self) -> float:
        """Fraction of the rows that have an id."""
        return self.live / self.rows

    @property
    def total(self) -> FeatureCounts:
        """Sum of the counts of all features."""
        return sum(self.features.values(), FeatureCounts(0, 0, 0, 0, 0, 0, 0))

    def __str__(self) -> str:
        head = ("feature", *KINDS)
        lines = [(name, *(str(getattr(counts, kind)) for kind in KINDS)) for name, counts in self.features.items()]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        text = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in (head, *lines)]
        longest = len(self.probe_lengths)
        taken = f"{self.live:,} of {self.rows:,} rows taken ({self.occupancy:.1%}"
        return f"{taken}; fullest bucket {self.fullest_bucket:.1%}), longest probe {longest}\n" + "\n".join(text)


@dataclass(frozen=True)
class IdPlace:
    """Place of an id in a table; `row` is None if the id has none.

    Args:
        row: of the table. An id without a row reads `shared_row`; if that is None too, the id is dropped.
        since, last: training steps of the id's insertion and of its last use.
        hits: uses since the insertion.
        expires: by the table's clock; None if nothing expires.
        probes: slots read to find the id, or to find that it is absent.
        sooner: number of ids of the bucket that the policy would evict before this one; None without a policy.
        how: the eviction rule and `sooner` in words.
        rank: the rank that holds the bucket.
    """

    table: str
    feature: str
    id: int
    bucket: int
    row: int | None
    shared_row: int | None
    since: int | None
    last: int | None
    hits: int | None
    expires: int | None
    probes: int
    sooner: int | None
    how: str
    rank: int = 0


class Summary(NamedTuple):
    """One rank's part of a table's statistics; `stats_of` combines the ranks'."""

    counts_FM: Tensor
    reads_F2: Tensor
    live: int
    probe_lengths: Tensor
    fullest: int


def add_counts(
    counts_BC: Tensor, features: int, bucket_N: Tensor, feature_N: Tensor | None, outcomes_N: Tensor,
    probes_N: Tensor, *, shares: bool,
) -> None:  # fmt: skip
    """Add the outcomes of ids to `counts_BC[bucket, feature * M + kind]`; bucket 0 is the first one held here.

    Args:
        feature_N: None if there is one feature.
    """
    if not outcomes_N.numel():
        return
    held = counts_BC.shape[0]
    place_N = bucket_N if feature_N is None else bucket_N * features + feature_N
    became_BFO = sums_at(place_N * len(IdOutcome) + outcomes_N, None, held * features * len(IdOutcome))
    became_BFO = became_BFO.view(held, features, len(IdOutcome))
    counts_BFM = counts_BC.view(held, features, len(KINDS))
    counts_BFM[..., _HITS] += became_BFO[..., IdOutcome.HIT]
    counts_BFM[..., _INSERTS] += became_BFO[..., IdOutcome.INSERTED] + became_BFO[..., IdOutcome.EVICTED]
    counts_BFM[..., _EVICTIONS] += became_BFO[..., IdOutcome.EVICTED]
    counts_BFM[..., _COLLISIONS if shares else _REJECTIONS] += became_BFO[..., IdOutcome.REJECTED :].sum(-1)
    counts_BFM[..., _NOT_ADMITTED] += became_BFO[..., IdOutcome.NOT_ADMITTED]
    counts_BFM[..., _PROBES] += sums_at(place_N, probes_N, held * features).view(held, features)


def sums_at(place_N: Tensor, value_N: Tensor | None, places: int) -> Tensor:
    """Return the sum of the values at each place, int64 `[places]`; the count if `value_N` is None."""
    if host_readable(place_N):  # on a device, bincount would synchronise
        if value_N is None:
            return torch.bincount(place_N, minlength=places)
        return torch.bincount(place_N, value_N, minlength=places).to(torch.int64)  # exact below 2^53
    value_N = torch.ones_like(place_N) if value_N is None else value_N.to(torch.int64)
    return place_N.new_zeros(places).index_add_(0, place_N, value_N)


def stats_of(features: Sequence[str], parts: Sequence[Summary], rows: int, shared: int, slots: int) -> IdStats:
    """Return the statistics combined from the ranks' summaries."""
    counts = torch.stack([part.counts_FM.cpu() for part in parts]).sum(0).tolist()
    reads = torch.stack([part.reads_F2.cpu() for part in parts]).sum(0).tolist()
    longest = max(part.probe_lengths.numel() for part in parts)
    lengths = torch.zeros(longest, dtype=torch.int64, device="cpu")
    for part in parts:
        lengths[: part.probe_lengths.numel()] += part.probe_lengths.cpu()
    return IdStats(
        {
            name: FeatureCounts(*own, *read)
            for name, own, read in zip(features, counts, reads, strict=True)
        },
        rows, shared, sum(part.live for part in parts), tuple(lengths.tolist()),
        max(part.fullest for part in parts) / slots,
    )  # fmt: skip
