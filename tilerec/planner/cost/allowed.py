"""`Allowed`: the options and the ranks of each table, under its limits and for its numbers of rows and columns.

Legend: T tables, O options, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.cost.cuts import even_pieces, heads_of
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.ways import MANY_TABLES, Limits, Way, enumerate_options, is_of
from tilerec.planner.search.instance import Bools, Ints
from tilerec.spec.plan import ShardingType


class Allowed:
    """The options and ranks that tables may use.

    options: those that some table can use. there: [T, O] options of each table. on: [T, R] ranks that may hold its
    pieces; None for all. one_host: tables whose pieces must share a host.

    Args:
        least: fewest columns of a piece, for tables without limits of their own.
        lower: for a bound: tables whose pieces must share a host may be on any ranks.
        together: groups of names of tables that are placed on the same ranks.

    Raises:
        ConfigError: limits leave a table no option.
    """

    def __init__(
        self, model: Model, limits: Mapping[str, Limits], least: int, *, lower: bool,
        together: Sequence[Sequence[str]],
    ) -> None:  # fmt: skip
        self.model, self.work, self.topology = model, model.workload, model.topology
        self.ranks, self.hosts = model.ranks, self.topology.host_count
        self.limits, self.least, self.lower = limits, least, lower
        self.leader = {name: min(group) for group in together for name in group}
        cached = any(limit.cached for _, limit in self._limited())
        limited = sorted({len(set(limit.ranks)) for _, limit in self._limited() if limit.ranks is not None})
        heads = bool((self.work.ordered | (self.work.named > 0)).any())
        self.options = enumerate_options(self.topology, self.work.dim.tolist(), cached, limited, heads)
        there = self._options()
        # Options that no table can use are dropped.
        kept = np.flatnonzero(there.any(0)).tolist()
        self.options = tuple(self.options[o] for o in kept)
        self.there = there[:, kept]
        # An instance cannot keep pieces on one host. For the search, each table that must be on one host gets a host
        # here; for a bound, its pieces may be on any ranks.
        self.one_host = [
            t for t, limit in self._limited() if limit.ranks is None and self.hosts > 1 and _on_one_host(limit)
        ]
        self.on = self._ranks_allowed()
        self._spread()

    def _options(self) -> Bools:
        """Return [T, O] the options that limits, sizes and storages allow."""
        work, options = self.work, self.options
        tables = len(work.names)
        least = np.full(tables, self.least, np.int64)
        typed = np.zeros(tables, np.bool_)
        stored = {True: np.zeros(tables, np.bool_), False: np.ones(tables, np.bool_)}
        for t, limit in self._limited():
            if limit.min_partition is not None:
                least[t] = limit.min_partition
            typed[t] = bool(limit.types)
            stored[True][t], stored[False][t] = limit.cached, limit.on_device
        there = np.zeros((tables, len(options)), np.bool_)
        # Where repeated ids travel once, the owner of a part of a table would decide otherwise than homes of its head.
        once = work.per_table(self.model.sent_once(np.arange(len(work.bags)), 1.0).astype(np.float64)) > 0.0
        before: dict[tuple[Way, int, int, bool], Ints] = {}  # hot ids of the smaller head
        for o, (way, k, width, cached, head) in enumerate(options):
            if way is Way.COLUMNS or way is Way.GRID:
                there[:, o] = (work.dim % k == 0) & (work.dim // k >= least)
            else:
                there[:, o] = True
            if way in (Way.ROWS, Way.GRID):
                parts = width if width > 1 else k
                enough = even_pieces(work.rows, parts) == parts
                # If a constraint names the type, rows over all ranks are allowed even for fewer rows than ranks.
                there[:, o] &= enough | (typed & (width > 1))
            there[:, o] &= stored[cached]
            if head:  # fewer rows than one are no head; a table without an optimizer does not train beside hot rows
                rows = heads_of(work, head, cached=cached)
                named = work.attached & (rows > before.get((way, k, width, cached), 0))
                first = work.rows - rows >= self.ranks
                there[:, o] = there[:, o] & (rows > 0) & np.where(work.ordered, first, named)
                if width < self.ranks:
                    there[:, o] &= ~work.ordered & ~once
                if way is Way.COLUMNS and tables > MANY_TABLES:
                    there[:, o] &= work.talks == 0
                before[way, k, width, cached] = rows
            if cached:  # without an attached optimizer, a gradient as large as the table would be on the device
                there[:, o] &= work.attached
        for t, limit in self._limited():
            if limit.types:
                there[t] &= np.array(
                    [
                        is_of(option, limit.types, self.ranks, self.hosts, ordered=bool(work.ordered[t]))
                        for option in options
                    ]
                )
            few = limit.ranks is not None and len(set(limit.ranks)) < self.ranks
            if few:
                there[t] &= np.array([option.width < self.ranks or self.ranks == 1 for option in options])
            if few or not limit.heads:
                there[t] &= np.array([not option.head for option in options])
        empty = np.flatnonzero(~there.any(1))
        if len(empty):
            limit = self.limits.get(work.names[empty[0]], Limits())
            kinds = [ShardingType(kind).value for kind in limit.types]
            raise ConfigError(
                f"Table '{work.names[empty[0]]}': nothing that its constraints allow (types {kinds or 'any'}, "
                f"{int(least[empty[0]])} columns or more, ranks {limit.ranks or 'any'}) can be made of "
                f"{work.rows[empty[0]]} x {work.dim[empty[0]]} on {self.ranks} ranks; allow more types, or narrower "
                "column tiles (min_partition)."
            )
        return there

    def _limited(self) -> list[tuple[int, Limits]]:
        """Return the tables with limits: index and limits."""
        if not self.limits:
            return []
        place = {name: t for t, name in enumerate(self.work.names)}
        return [(place[name], limit) for name, limit in self.limits.items() if name in place]

    def _ranks_allowed(self) -> Bools | None:
        """Return [T, R] the ranks that may hold pieces; None if no table is limited."""
        found: Bools | None = None
        limited = self._limited()
        host = {} if self.lower else self._hosts_for(self.one_host)
        for t, limit in limited:
            ranks = self.topology.ranks_of(host[t]) if t in host else limit.ranks
            if ranks is not None:
                if found is None:
                    found = np.ones((len(self.work.names), self.ranks), np.bool_)
                found[t] = False
                found[t, list(ranks)] = True
        return found

    def _spread(self) -> None:
        """Drop options with more pieces than allowed ranks, if the table has others: two pieces would share a rank."""
        if self.on is None:
            return
        pieces = np.array([option.pieces if option.width == 1 else 1 for option in self.options])
        apart = self.there & (pieces[None, :] <= self.on.sum(1)[:, None])
        self.there = np.where(apart.any(1)[:, None], apart, self.there)

    def _hosts_for(self, tables: Sequence[int]) -> dict[int, int]:
        """Return a host for each table: the largest table first, each on the host with the least load per rank.

        Co-located tables get one host. The size of a table is its traffic, plus its bytes as far as memory is full.
        """
        work = self.work
        each = np.arange(len(work.names))
        bags = work.present(np.ones(len(work.names)))[0]
        held = self.model.weights(each, work.rows.astype(np.float64), work.dim).astype(np.int64).tolist()
        read = {t: int((work.ids[t] + bags[t]) * work.dim[t]) for t in tables}
        # Whole numbers, so that every machine decides alike.
        all_held, all_read = max(sum(held[t] for t in tables), 1), max(sum(read.values()), 1)
        full = min(1024 * all_held // max(sum(self.topology.memory_caps), 1), 1024)
        size = {t: (held[t] * all_read * full >> 10) + read[t] * all_held for t in tables}
        borne = [0] * self.hosts
        ranks = [len(host) for host in self.topology.host_ranks]
        groups: dict[str, list[int]] = {}
        for t in tables:
            groups.setdefault(self.leader.get(work.names[t], work.names[t]), []).append(t)
        whole = {name: sum(size[t] for t in group) for name, group in groups.items()}
        found: dict[int, int] = {}
        for name in sorted(groups, key=lambda name: (-whole[name], name)):
            then = [borne[h] + whole[name] // ranks[h] for h in range(self.hosts)]
            least = then.index(min(then))
            found |= dict.fromkeys(groups[name], least)
            borne[least] = then[least]
        return found


def _on_one_host(limit: Limits) -> bool:
    """Return True if column blocks are allowed, but only on one host."""
    inside = {
        ShardingType.TABLE_COLUMN_WISE, ShardingType.TABLE_WISE, ShardingType.TABLE_ROW_WISE,
        ShardingType.DATA_PARALLEL,
    }  # fmt: skip
    return ShardingType.TABLE_COLUMN_WISE in limit.types and set(limit.types) <= inside
