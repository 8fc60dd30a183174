"""Arrangements to compare with a plan, by the independent price: all of a small case, or a downhill walk."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from planner_check_planned import Planned, placement_of
from planner_check_price import Placement, Sums, Table

from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.ways import Limits, Option, Way, enumerate_options, is_of
from tilerec.planner.pins import pins_of
from tilerec.planner.table_limits import limits_of_tables
from tilerec.sharding.strategies import column_wise, grid, row_wise
from tilerec.spec.plan import ShardingType
from tilerec.spec.tile import ColumnBlock, Tiling

FEW = 2  # combinations of ranks of each option, where not all are tried


class Arrangements:
    """The allowed placements of each table: the options that limits allow, on all combinations of ranks.

    Args:
        offload: host memory may hold the rows of tables without constraints on the memory.
        some: random generator that draws a few combinations of ranks per option; None: all combinations.
    """

    def __init__(self, planned: Planned, offload: bool = False, some: random.Random | None = None) -> None:
        self.planned, self.topology, self.some = planned, planned.topology, some
        request = planned.request
        pins = pins_of(request)
        limits = limits_of_tables(request, pins, offload)
        cached = any(limit.cached for limit in limits.values())
        counts = sorted({len(set(limit.ranks)) for limit in limits.values() if limit.ranks is not None})
        options = enumerate_options(self.topology, [t.dim for t in request.tables], cached, counts)
        self.found: list[list[Placement]] = []
        for table in planned.tables:
            if table.key in pins:
                self.found.append([placement_of(pins[table.key])])
                continue
            limit = limits.get(table.key, Limits())
            given = request.constraints.get(table.key, ParameterConstraints())
            most, length = given.max_ranks or planned.world.ranks, given.ids_per_bag()
            several = [
                # Ranges of rows on single ranks are not summed inside a host, even on ranks that share one.
                Placement(
                    tiling,
                    o.cached,
                    (length is None or length > 1) and not (o.way is Way.ROWS and o.width == 1),
                )
                for o in options
                for tiling in self._tilings(table, o, limit)
            ]
            self.found.append([each for each in dict.fromkeys(several) if len(each.tiling.ranks()) <= most])

    @property
    def count(self) -> int:
        return int(np.prod([len(each) for each in self.found]))

    def _tilings(self, table: Table, option: Option, limit: Limits) -> Iterator[Tiling]:
        topology, ranks = self.topology, self.topology.world_size
        way, pieces, width, cached, head = option
        if head:  # heads are compared with all arrangements without one
            return
        if limit.types and not is_of(option, limit.types, ranks, topology.host_count, ordered=table.ordered):
            return
        if (cached and not (limit.cached and table.attached)) or (not cached and not limit.on_device):
            return
        allowed = range(ranks) if limit.ranks is None else sorted(set(limit.ranks))
        if width == ranks > 1 and len(allowed) < ranks:
            return
        least = 32 if limit.min_partition is None else limit.min_partition
        if way in (Way.COLUMNS, Way.GRID) and (table.dim % pieces or table.dim // pieces < least):
            return
        parts = width if way is Way.GRID else pieces * width
        # Ranges of ceil(rows / parts) rows, none of them empty.
        even = -(-table.rows // -(-table.rows // parts)) == parts
        if way in (Way.ROWS, Way.GRID) and not even and not (limit.types and width > 1):
            return
        if way is Way.COPIES:
            yield Tiling(table.rows, table.dim, (ColumnBlock(0, table.dim, (0, table.rows), (tuple(range(ranks)),)),))
        elif way is Way.WHOLE:
            for rank in allowed:
                yield Tiling(table.rows, table.dim, (ColumnBlock(0, table.dim, (0, table.rows), ((rank,),)),))
        elif way is Way.COLUMNS:
            one_host = bool(limit.types) and ShardingType.COLUMN_WISE not in limit.types
            for own in self._combinations(allowed, pieces):
                if one_host and len({topology.host_of(rank) for rank in own}) > 1:
                    continue
                yield column_wise(table.key, table.rows, table.dim, own, topology)
        elif way is Way.GRID:
            hosts = [h for h in topology.host_ranks if len(h) == width and set(h) <= set(allowed)]
            for several in self._combinations(range(len(hosts)), pieces) if len(hosts) >= pieces else ():
                own = tuple(rank for host in several for rank in sorted(hosts[host]))
                sizes = self._sizes(table, width) if table.ordered else None
                yield grid(table.key, table.rows, table.dim, own, topology, sizes=sizes)
        elif width == 1:
            for own in self._combinations(allowed, pieces):
                # Ranges differ where ids are ordered by frequency.
                for order in itertools.permutations(own) if table.ordered and self.some is None else (own,):
                    yield self._rows(table, order)
        elif width == ranks:
            yield self._rows(table, range(ranks))
        else:
            for host in topology.host_ranks:
                if len(host) == width and set(host) <= set(allowed):
                    yield self._rows(table, sorted(host))

    def _combinations(self, ranks: Sequence[int], pieces: int) -> Iterator[tuple[int, ...]]:
        """Yield ranks for the pieces: distinct if possible, else with numbers of pieces that differ by at most 1."""
        times, rest = divmod(pieces, len(ranks))
        if self.some is None:
            chosen: Iterable[Sequence[int]] = itertools.combinations(ranks, rest)
        else:
            chosen = [self.some.sample(ranks, rest) for _ in range(FEW)]
        for own in chosen:
            yield tuple(sorted([*ranks] * times + list(own)))

    def _sizes(self, table: Table, parts: int) -> list[int]:
        """Return other ranges than the planner makes: split where the share of ids + the share of rows is 2 / parts."""
        cuts = [0]
        for i in range(1, parts):
            low, high = 0, table.rows
            while low < high:
                middle = (low + high) // 2
                enough = table.share(0, middle) + middle / table.rows >= i * 2.0 / parts
                low, high = (low, middle) if enough else (middle + 1, high)
            cuts.append(low)
        return np.diff([*cuts, table.rows]).tolist()

    def _rows(self, table: Table, ranks: Sequence[int]) -> Tiling:
        sizes = None
        if table.ordered:
            sizes = self._sizes(table, len(ranks))
        elif len(set(ranks)) < len(ranks):
            sizes = np.diff(np.arange(len(ranks) + 1) * table.rows // len(ranks)).tolist()
        if sizes is not None:
            ranks = [rank for rank, size in zip(ranks, sizes, strict=True) if size]
            sizes = [size for size in sizes if size]
        return row_wise(table.key, table.rows, table.dim, ranks, self.topology, sizes=sizes)

    def _fits(self, total: Sums) -> bool:
        memory, tier = total.memory.copy(), self.planned.world.tier
        memory[:, tier] += 2.0 * total.output + np.array(self.planned.reserved)
        return bool((memory <= np.array(self.topology.caps)).all())

    def best(self) -> tuple[float, tuple[Placement, ...]] | None:
        """Return the least independent price within memory, and its arrangement; None if no arrangement fits."""
        pricing = self.planned.pricing
        each = [
            [(pricing.of_table(table, placed), placed) for placed in several]
            for table, several in zip(pricing.tables, self.found, strict=True)
        ]
        found: tuple[float, tuple[Placement, ...]] | None = None

        def go(t: int, so_far: Sums, chosen: tuple[Placement, ...]) -> None:
            nonlocal found
            if not self._fits(so_far):
                return
            if t == len(each):
                seconds = pricing.finished(so_far).seconds
                if found is None or seconds < found[0]:
                    found = (seconds, chosen)
                return
            for sums, placed in each[t]:
                go(t + 1, so_far + sums, (*chosen, placed))

        go(0, pricing.nothing(), ())
        return found

    def downhill(self) -> float:
        """Return the least independent price on a walk from the plan that improves one table after the other."""
        pricing, planned = self.planned.pricing, self.planned
        parts = [pricing.of_table(t, placement_of(planned.placed[t.key])) for t in pricing.tables]
        least = planned.price.seconds
        for t, (table, several) in enumerate(zip(pricing.tables, self.found, strict=True)):
            for placed in several:
                before, parts[t] = parts[t], pricing.of_table(table, placed)
                total = sum(parts, pricing.nothing())
                seconds = pricing.finished(total).seconds if self._fits(total) else least
                if seconds < least:
                    least = seconds
                else:
                    parts[t] = before
        return least
