"""How often each id of a table is read, and how many distinct ids are among so many draws.

Nouns
  law     shares of all reads by id, the most frequent id first: Zipf's, or measured ones for the first ids
  curve   measured points (k, share of the reads of the k most frequent ids), k ascending
  bucket  neighbouring ids of a law, which count with one mean frequency: one id at first, then a quarter more each
  seen    expected number of distinct ids among independent draws

Sums run over buckets one after the other, so their bits are equal on every machine (portable.py).

Legend: T tables, L tables with a law, B buckets, n lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilerec.planner.cost.portable import LN2, Floats, distinct_uniform, exponential, missed

if TYPE_CHECKING:
    from tilerec.planner.cost.hot_reads import HotReads

_ROUNDING = 1e-5  # of shares with six digits

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


Curve = Sequence[tuple[int, float]]


def curve_problem(curve: Curve, distinct: int) -> str | None:
    """Return what is wrong with a curve of so many distinct ids; None if nothing is."""
    before, share_before, slope_before = 0, 0.0, math.inf
    for k, share in curve:
        if not before < k <= distinct:
            return f"numbers of ids that rise, up to {distinct}, the number of different ids"
        if not share_before <= share <= 1.0 + _ROUNDING:
            return "shares that rise, up to 1"
        if share - share_before > slope_before * (k - before) + _ROUNDING:
            return "shares of the most frequent ids, each of which adds no more than the one before"
        before, share_before, slope_before = k, share, (share - share_before) / (k - before)
    if before == distinct and abs(share_before - 1.0) > _ROUNDING:
        return f"shares that reach 1 at {distinct}, the number of different ids"
    return None


def bucket_edges(most: float) -> list[float]:
    """Return the numbers of the first ids of buckets, from 1, and one above `most`."""
    edges = [1.0]
    while edges[-1] <= most:
        edges.append(max(edges[-1] + 1.0, math.floor(edges[-1] * 1.25)))
    return edges


class FrequencyLaws:
    """Laws of some tables.

    edges: [B + 1] number of the first id of each bucket, from 1. counts: [B, L] ids. weights: [B, L] share of the reads
    of one id. position: [T] column of a table; -1 without a law. tables, distinct: [L] its table and its ids.

    Args:
        tables: T. which: [L] tables. distinct, exponent, curves: [L] of `Skew`.
    """

    def __init__(self, tables: int, which: Ints, distinct: Floats, exponent: Floats, curves: Sequence[Curve]) -> None:
        self.tables, self.distinct = which, distinct
        self.position = np.full(tables, -1, np.int64)
        self.position[which] = np.arange(len(which))
        most = float(distinct.max()) if len(which) else 1.0
        self.edges = np.array(bucket_edges(most))
        low, high = self.edges[:-1, None], self.edges[1:, None]
        self.counts = np.clip(distinct + 1.0 - low, 0.0, high - low)
        # The logarithm of the middle of each bucket: most are full or empty, and laws differ in the last one.
        full, part = self.counts == high - low, (self.counts > 0.0) & (self.counts < high - low)
        middle = np.where(full, _log(low + (high - low - 1.0) / 2.0), _log(low))
        middle[part] = _log((low + (self.counts - 1.0) / 2.0)[part])
        # Bucket by bucket, as arrays of that size stay in the processor's cache, in the same order on every machine.
        self.weights, total = np.zeros_like(self.counts), np.zeros(len(which))
        for weights, ids, each in zip(self.weights, self.counts, middle, strict=True):
            some = np.flatnonzero(ids)
            weights[some] = exponential(-exponent[some] * each[some])
            total += ids * weights
        self.weights /= total
        measured = [(i, curve) for i, curve in enumerate(curves) if curve]
        if measured:
            zipf = RangeSums(self.edges, self.counts, self.weights)
            for i, curve in measured:
                self.weights[:, i] = self._measured(zipf, i, curve)

    def _measured(self, zipf: RangeSums, i: int, curve: Curve) -> Floats:
        """Return [B] shares of one id: those of a curve, and by Zipf's law beyond its last point."""
        points = np.array([(0, 0.0), *curve], np.float64)
        ends = np.minimum(self.edges - 1.0, float(sum(self.counts[:, i].tolist())))
        known = np.minimum(ends, points[-1, 0])
        at = np.clip(np.searchsorted(points[:, 0], known, side="right") - 1, 0, len(points) - 2)
        (k0, share0), (k1, share1) = points[at].T, points[at + 1].T
        below = share0 + (known - k0) / (k1 - k0) * (share1 - share0)
        column = np.full(len(ends), i)
        rest = zipf.below(column, ends) - zipf.below(column, known)
        whole = float(rest[-1])
        if whole > 0.0:
            below = below + rest / whole * max(0.0, 1.0 - float(points[-1, 1]))
        counts = self.counts[:, i]
        return np.where(counts > 0.0, np.diff(below) / np.maximum(counts, 1.0), 0.0)

    @cached_property
    def _reads(self) -> RangeSums:
        return RangeSums(self.edges, self.counts, self.weights)

    def reads(self, table: Ints, row: Any) -> Floats:
        """Return the share of ids below `row`, for ids numbered by frequency. Arguments broadcast."""
        return self._reads.below(self.position[table], row)

    def places(self, table: Ints, row: Any) -> Places:
        """Return the places of rows of tables with ids numbered by frequency. Arguments broadcast."""
        return self._reads.places(self.position[table], row)

    def reads_at_edges(self, table: Ints, first: Ints) -> Floats:
        """Return [n, B + 2] the share of ids below the rows of `RangeSums.at_edges`."""
        return self._reads.at_edges(self.position[table], first)

    def reads_below(self, table: Ints, places: Places) -> Floats:
        """Return the share of ids below places, for ids numbered by frequency. Arguments broadcast."""
        return self._reads.at(self.position[table], places)


class Places(NamedTuple):
    """Rows of laws in frequency order: the bucket of each, and the number of the bucket's ids below it."""

    bucket: Ints
    inside: Floats


class RangeSums:
    """Sums over the ids below a row, for ids numbered by frequency.

    Args:
        edges: of the laws. counts: [B, n] ids. each: [B, n] value of each id of a bucket.
    """

    def __init__(self, edges: Floats, counts: Floats, each: Floats) -> None:
        self.edges = edges
        self.ids = np.asarray(sum(counts), np.float64)
        # The buckets of a line are adjacent in memory, as several rows of a line are looked up at once.
        self.each = np.ascontiguousarray(each.T)
        self.sums = np.zeros((counts.shape[1], len(edges)))
        np.add.accumulate((counts * each).T, axis=1, out=self.sums[:, 1:])

    def places(self, line: Ints, row: Any) -> Places:
        """Return the places of rows, for all sums over the same laws. Arguments broadcast."""
        above = np.minimum(row, self.ids[line]) + 1.0
        bucket = np.minimum(np.searchsorted(self.edges, above, side="right"), len(self.edges) - 1) - 1
        return Places(bucket, above - self.edges[bucket])

    def at(self, line: Ints, places: Places) -> Floats:
        """Return the sums over the rows below places. Arguments broadcast."""
        bucket, inside = places
        own, last = np.asarray(line) * len(self.edges), len(self.edges) - 1
        found: Floats = self.sums.take(own + bucket) + inside * self.each.take(np.asarray(line) * last + bucket)
        return found

    def at_edges(self, line: Ints, first: Ints) -> Floats:
        """Return [n, B + 2] the sums over the ids below the first one of each bucket, and over all ids.

        Args:
            line, first: [n] lines, and numbers of ids that all sums contain.
        """
        found = np.concatenate([self.sums[line], self.sums[line, -1:]], axis=1)
        return np.maximum(found, self.below(line, first)[:, None], out=found) if first.any() else found

    def below(self, line: Ints, row: Any) -> Floats:
        """Return the sums over rows [0, row). Arguments broadcast."""
        return self.at(line, self.places(line, row))


class Seen:
    """Expected distinct rows among draws of some tables.

    whole: [n] in the whole table.

    Args:
        laws: of all tables. rows, ordered: [T]. table: [n]. draws: [n] ids.
    """

    def __init__(self, laws: FrequencyLaws, rows: Ints, ordered: Bools, table: Ints, draws: Floats) -> None:
        self._rows, self._edges = rows[table].astype(np.float64), laws.edges
        self.whole = distinct_uniform(rows[table], draws)
        self._hot_rows: Ints | None = None
        # [n] distinct rows of the heads.
        self._head = np.zeros(len(table))
        self._laws, self._table = laws, table
        self._lawful = np.flatnonzero(laws.position[table] >= 0)
        own = laws.position[table[self._lawful]]
        # Bucket by bucket, as arrays of that size stay in the processor's cache, and one sum after the other.
        counts, drawn, found = _columns(laws.counts, own), draws[self._lawful], np.zeros(len(own))
        self._counts, self._seen = counts, np.zeros_like(counts)
        for bucket, weights, ids in zip(self._seen, laws.weights, counts, strict=True):
            some = np.flatnonzero(ids)
            bucket[some] = 1.0 - missed(weights[own[some]], drawn[some])
            found += ids * bucket
        self.whole[self._lawful] = np.minimum(found, drawn)
        self._within = self.whole[self._lawful] / np.maximum(found, 1e-300)
        self._by_row = np.flatnonzero(ordered[table[self._lawful]])
        self._ordered = self._lawful[self._by_row]
        self._cold: Floats | None = None

    def with_hot(self, hot: HotReads) -> Seen:
        """Return the same for tables with heads."""
        found, laws = copy(self), self._laws
        vars(found).pop("_sums", None)
        own = laws.position[self._table[self._lawful]]
        found._hot_rows = hot.rows[self._table]
        found._head = self.whole * (found._hot_rows / self._rows)
        found._head[self._lawful] = np.asarray(sum(hot.inside[:, own] * self._seen)) * self._within
        if len(self._by_row):
            found._cold = hot.cold(laws)[:, own[self._by_row]]
        return found

    @cached_property
    def _sums(self) -> RangeSums:
        seen = _columns(self._seen, self._by_row)
        seen = seen if self._cold is None else seen * self._cold
        return RangeSums(self._edges, _columns(self._counts, self._by_row), seen * self._within[self._by_row])

    @cached_property
    def _column(self) -> Ints:
        """[n] of a line with ordered ids, its column of `_sums`; else -1."""
        found = np.full(len(self.whole), -1, np.int64)
        found[self._ordered] = np.arange(len(self._ordered))
        return found

    def at_edges(self, line: Ints, first: Ints) -> Floats:
        """Return [n, B + 2] the expected distinct rows below those of `RangeSums.at_edges`, of lines as in `below`."""
        return self._sums.at_edges(self._column[line], first)

    def below(self, line: Ints, places: Places) -> Floats:
        """Return the expected distinct rows below places, of lines with ordered ids. Arguments broadcast."""
        return self._sums.at(self._column[line], places)

    def between(self, line: Any, r0: Any, r1: Any) -> Floats:
        """Return the expected distinct rows in [r0, r1), for some of the n lines. Arguments broadcast."""
        line = np.asarray(line, np.int64)
        if self._hot_rows is None:
            even = self.whole[line] * ((np.asarray(r1, np.float64) - r0) / self._rows[line])
            if not len(self._ordered):
                return even
            column = self._column[line]
            law = self._sums.below(column, r1) - self._sums.below(column, r0)
            return np.where(column >= 0, law, even)
        rows, hot_rows, head = self._rows[line], self._hot_rows[line], self._head[line]
        even = spread(rows, hot_rows, r0, r1, self.whole[line] - head, head)
        if not len(self._ordered):
            return even
        column, low, high = self._column[line], np.minimum(r0, rows), np.minimum(r1, rows)
        law = self._sums.below(column, high) - self._sums.below(column, low)
        return np.where(column >= 0, law + spread(rows, hot_rows, r0, r1, 0.0, head), even)


def _columns(values: Floats, which: Ints) -> Floats:
    """Return columns of [B, L], without a copy if these are all columns."""
    return values if np.array_equal(which, np.arange(values.shape[1])) else values[:, which]


def spread(rows: Any, hot_rows: Any, r0: Any, r1: Any, cold: Any, head: Any) -> Floats:
    """Return the part of an amount on rows [r0, r1): `cold` lies evenly on [0, rows), `head` on the rows behind.

    Arguments broadcast.
    """
    r0, r1 = np.asarray(r0, np.float64), np.asarray(r1, np.float64)
    below = np.minimum(r1, rows) - np.minimum(r0, rows)
    behind = np.maximum(r1, rows) - np.maximum(r0, rows)
    found: Floats = cold * (below / rows) + head * (behind / np.maximum(hot_rows, 1.0))
    return found


def _log(x: Floats) -> Floats:
    """Return the natural logarithm, computed with +, -, * and /: x = m 2^e, and ln m by the series of artanh."""
    mantissa, exponent = np.frexp(x)
    z = (mantissa - 0.75) / (mantissa + 0.75)
    square, term, total = z * z, z, np.zeros_like(z)
    for k in range(1, 24, 2):
        total = total + term / k
        term = term * square
    return 2.0 * total + exponent * LN2 - 0.2876820724517809  # ln 0.75
