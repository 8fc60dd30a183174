"""Row ranges of a split: their number, their cuts if traffic is uneven, and shares in whole rows.

Legend: T tables, n some tables, k pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tilerec.planner.cost.model import Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.workload import Bools, Ints, Workload
from tilerec.planner.search.instance import SHARE
from tilerec.spec.hot_rows import MOST_HOT_ROWS


def even_pieces(rows: Any, parts: int) -> Ints:
    """Return the number of ranges that `ceil_chunks` makes: of 5 rows in 4 parts, three (2, 2 and 1 rows)."""
    rows = np.asarray(rows, np.int64)
    return -(-rows // -(-rows // parts))


def head_rows(rows: Any, head: float) -> Ints:
    """Return the rows of a head that has a part of the rows."""
    return np.floor(np.asarray(rows, np.float64) * head).astype(np.int64)


def heads_of(work: Workload, head: float, *, cached: bool = False) -> Ints:
    """Return [T] the rows of heads: that part of the rows, at most as many as a table has hot ids, if not ordered.

    Args:
        cached: the table's rows are behind a cache, so its first rows are hot ids, too; 0 for more than a plan holds.
    """
    rows = head_rows(work.rows, head)
    first = np.where(rows <= MOST_HOT_ROWS, rows, 0) if cached else rows
    return np.where(work.ordered, first, np.minimum(rows, work.named))


BLOCK = 512
"""Tables whose levels are computed at a time: arrays of 10,000 tables are larger than the processor's caches."""


class Levels(NamedTuple):
    """Where equal pieces of some tables in frequency order end, whatever their number.

    The level of a row is the part of all pieces below it. It is linear between knots.

    Args:
        first, ends: [n, 1] rows that are split: from the end of a head to the last row. knots: [n, m] rows.
        density: [n, m - 1] level of each row behind a knot. level: [n, m] at the knots, from 0 to 1.
    """

    first: Ints
    ends: Ints
    knots: Floats
    density: Floats
    level: Floats

    def cuts(self, line: Ints, pieces: int, which: Ints) -> Ints:
        """Return [n, m] the first rows of some of so many pieces, as `RangesByFrequency.cuts`, for lines [n]."""
        wanted = which / pieces
        at = self._knots_below(line, wanted)
        # Positions in the flat arrays: `take` needs a third of the time of two indices.
        knot = line[:, None] * self.knots.shape[1] + at
        rest = wanted - self.level.take(knot)
        rest /= np.maximum(self.density.take(knot - line[:, None]), 1e-300)
        low = self.knots.take(knot)
        cut = low + np.clip(rest, 0.0, 1.0) * (self.knots.take(knot + 1) - low)
        inner = np.floor(cut + 0.5).astype(np.int64)
        first, ends = self.first[line], self.ends[line]
        least = np.minimum(first + which, ends)
        inner = np.minimum(np.maximum(inner, least), np.maximum(ends - pieces + which, least))
        found: Ints = np.where(which == 0, first, np.where(which == pieces, ends, inner))
        return found

    def _knots_below(self, line: Ints, wanted: Floats) -> Ints:
        """Return [n, m] the last knots below levels `wanted` [m], or the first one."""
        level = self.level if len(line) == len(self.level) else self.level[line]
        if len(line) < len(wanted):
            found = np.stack([np.searchsorted(own[:-1], wanted) for own in level])
        else:  # levels rise, so the first one that is not below it has its position
            found = np.stack([(level < each).argmin(1) for each in wanted.tolist()], axis=1)
        return np.maximum(found - 1, 0)


class RangesByFrequency:
    """Ranges of rows of all tables in frequency order, each with an equal number of the ids that travel.

    tables: [n] these tables, ascending.
    """

    def __init__(self, model: Model, tables: Ints) -> None:
        self.model, self.tables = model, tables
        self._levels: dict[tuple[float, bytes, bytes], Levels] = {}
        self._once: dict[tuple[int, float], bytes] = {}
        self._cuts: dict[tuple[int, bytes], tuple[Ints, Ints]] = {}  # tables and cuts

    def levels(self, tables: Ints, pieces: int, head: float) -> Iterator[tuple[Levels, Ints]]:
        """Yield levels for so many pieces behind a head, and the lines in them of some of the tables, block by block.

        Numbers of pieces with the same repeated ids have the same levels. Only large tables have heads.
        """
        every = tables if head else self.tables
        once = self._sent_once(pieces, head)
        for begin in range(0, len(every), BLOCK):
            block = every[begin : begin + BLOCK]
            some = tables[slice(*np.searchsorted(tables, (block[0], block[-1] + 1)))]
            key = head, once, block.tobytes()
            if key not in self._levels and len(some):
                self._levels[key] = _levels(self.model, block, np.frombuffer(once, np.bool_), head)
            if len(some):
                yield self._levels[key], np.searchsorted(block, some)

    def _sent_once(self, pieces: int, head: float) -> bytes:
        """Return [F] features whose ids the owners of so many pieces behind a head send once each."""
        if (pieces, head) not in self._once:
            features = np.arange(len(self.model.workload.bags))
            once = self.model.sent_once(features, (1.0 - head) * (1.0 - 1.0 / pieces))
            self._once[pieces, head] = once.tobytes()
        return self._once[pieces, head]

    def cuts(self, tables: Ints, pieces: int, head: float, which: Ints) -> Ints:
        """Return [n, m] the first rows of the pieces `which` [m], up to `pieces` for the end of the last one.

        Pieces need a row each. So the cuts at the most frequent rows move up, and then others may.

        Args:
            tables: [n] some of these tables, ascending.
        """
        if head or len(tables) == 1:
            return self._computed_cuts(tables, pieces, head, which)
        # Other options have the same ranges, of some of the tables: those of a host, and each grid.
        known, found = self._cuts.get((pieces, which.tobytes()), (tables[:0], which))
        at = np.searchsorted(known, tables)
        if len(known) < len(tables) or not np.array_equal(known[np.minimum(at, len(known) - 1)], tables):
            found = self._computed_cuts(tables, pieces, head, which)
            self._cuts[pieces, which.tobytes()] = tables, found
            return found
        return found[at]

    def _computed_cuts(self, tables: Ints, pieces: int, head: float, which: Ints) -> Ints:
        levels = self.levels(tables, pieces, head)
        return np.concatenate([own.cuts(lines, pieces, which) for own, lines in levels])


def row_cuts(
    model: Model, tables: Ints, pieces: int, head: float = 0.0, ranges: RangesByFrequency | None = None
) -> Ints:
    """Return [n, k + 1] cuts such that each piece gets an equal number of the ids that travel, if memory allows.

    The first cut is the end of a head, of a part of the rows. Where repeated ids travel once, these are distinct ids.
    No piece has more than `Model.longest_range` times its part of the rows, so other pieces may get more ids: the least
    number c with

        integral of max(ids(x) / c, rows(x) / longest) = 1

    in shares of the table is the most that a piece gets, in means. For tables whose ids are numbered by frequency.
    """
    nth = np.arange(pieces + 1)
    ranges = RangesByFrequency(model, tables) if ranges is None else ranges
    cuts = ranges.cuts(tables, pieces, head, nth)
    # Measured frequencies may rise a little from one row to the next; cuts never come back.
    inner = np.maximum.accumulate(cuts[:, :-1] - nth[:-1], axis=1) + nth[:-1]
    return np.concatenate([np.minimum(inner, cuts[:, -1:]), cuts[:, -1:]], axis=1)


def _levels(model: Model, tables: Ints, once: Bools, head: float) -> Levels:
    work = model.workload
    first, ends = head_rows(work.rows[tables], head)[:, None], work.rows[tables][:, None]
    rows = (ends - first).astype(np.float64)
    # Between the first ids of buckets, up to the last id that is read, ids are spread evenly.
    law = work.laws.distinct[work.laws.position[tables]][:, None]
    edges = np.clip(work.laws.edges - 1.0, first, np.maximum(law, first))
    # The knots of a table are adjacent in memory (`RangesByFrequency.cuts`).
    knots = np.concatenate([edges, ends], axis=1)
    sent, held = _sent_below(model, tables, first[:, 0], knots, once), (knots - first) / rows
    sent = (sent - sent[:, :1]) / np.maximum(1.0 - sent[:, :1], 1e-300)
    most = np.max(sent[:, 1:] / (1.0 - (1.0 - held[:, 1:]) / model.longest_range), axis=1)[:, None]
    most = np.maximum(most, 1e-300)
    density = np.maximum(np.diff(sent, axis=1) / most, np.diff(held, axis=1) / model.longest_range)
    level = np.zeros_like(knots)
    np.add.accumulate(density, axis=1, out=level[:, 1:])
    # The sum is 1, or less if no id is read behind the head.
    return Levels(first, ends, knots, density / level[:, -1:], level / level[:, -1:])


def distinct_below(model: Model, tables: Ints, rows: Any, once: Bools) -> Floats:
    """Return [n, m] shares below rows [n, m] of the distinct ids of one home, over features that send these.

    Args:
        once: [F] these features. A table without them has shares of 0.
    """

    def distinct(feature: Ints) -> Floats:
        return model.seen_by_feature.between(feature[:, None], 0, rows)

    found, total = _below(model, tables, np.zeros(np.shape(rows)), once, np.zeros_like(once), distinct)
    return found / np.maximum(total, 1e-300)


def _sent_below(model: Model, tables: Ints, first: Ints, knots: Floats, once: Bools) -> Floats:
    """Return [n, m] shares below knots [n, m] of the ids that travel; of the rows in a table that is not read."""

    def distinct(feature: Ints) -> Floats:
        return model.seen_by_feature.at_edges(feature, first)

    share = np.zeros(knots.shape) if once.all() else model.workload.laws.reads_at_edges(tables, first)
    found, total = _below(model, tables, share, once, ~once, distinct)
    if (total > 0.0).all():
        return found / total
    even = knots / model.workload.rows[tables][:, None]
    return np.where(total > 0.0, found / np.maximum(total, 1e-300), even)


def _below(
    model: Model, tables: Ints, share: Floats, once: Bools, each: Bools, distinct: Callable[[Ints], Floats]
) -> tuple[Floats, Floats]:
    """Return [n, m] ids below some rows, and [n, 1] all ids: distinct ones of features `once`, all of `each`.

    Args:
        share: [n, m] of all ids. distinct: from features [n] to their distinct ids [n, m].
    """
    work = model.workload
    found, total = np.zeros(share.shape), np.zeros((len(tables), 1))
    for features in work.turns:
        of_table = np.full(len(work.names), -1, np.int64)
        of_table[work.table[features]] = features
        feature = of_table[tables]
        here = feature >= 0
        used = here & each[feature]
        if used.any():
            ids = np.where(used, (work.bags * work.ids_per_bag)[feature], 0.0)[:, None]
            found += ids * share
            total += ids
        used = here & once[feature]
        if used.any():
            found += np.where(used[:, None], distinct(feature), 0.0)
            total += np.where(used, model.seen_by_feature.whole[feature], 0.0)[:, None]
    return found, total


def sizes_of_shares(rows: int, shares: Ints) -> list[int]:
    """Return the whole rows of each piece, in proportion to `shares`, which add up to SHARE."""
    ends = [int(end) * rows // SHARE for end in np.cumsum(shares).tolist()]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
