"""Placing tables greedily by bytes: the largest first, each onto the emptiest ranks.

Nouns
  load    bytes that a rank has been given so far: `everywhere` (what all ranks got alike) + its own
  share   total bytes / ranks: what each rank would hold of a perfectly even plan
  choice  a table's sharding type and ranks

A table without constraints lies on one rank; one larger than a share (and than `SPLIT_ABOVE`) would unbalance the
plan, so it is cut by rows over the ranks of one host, or of all hosts if such a cut is still larger than a share.
Where that leaves a rank with more than `EVEN` shares, tables larger than half a share are cut as well, if that helps.
A type that does not fit anywhere gives way to the next that is allowed. Equal candidates are told apart by number and
name: the same input gives the same plan on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.tables import PlannedTable
from tilerec.sharding.strategies import column_pieces
from tilerec.spec.plan import ShardingType
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.topology import Topology

# Cutting a table that any rank holds easily costs messages and balances nothing.
SPLIT_ABOVE = 16 * 2**20
EVEN = 1.25

# What this search reads of `ParameterConstraints`; `pooling_factors` and the kernels go into the plan as they are.
USED = ("sharding_types", "compute_kernels", "min_partition", "pooling_factors")


class Choice(NamedTuple):
    """Where a table goes."""

    kind: ShardingType
    ranks: tuple[int, ...]


class PlannerError(ConfigError):
    """No plan was found; says for which table, and what each type that is allowed failed at."""


def place(
    tables: Sequence[PlannedTable],
    constraints: Mapping[tuple[str, str], ParameterConstraints],
    topology: Topology,
) -> list[Choice]:
    """A choice for every table, in their order.

    Args:
        constraints: by a table's first name; a table that is not there has none.

    Raises:
        PlannerError: a table fits nowhere in the way its constraints allow.
    """
    share = sum(table.bytes for table in tables) / topology.world_size
    even = max(EVEN * share, SPLIT_ABOVE)
    choices, fullest = _place(tables, constraints, topology, max(share, SPLIT_ABOVE))
    if isinstance(choices, list) and fullest <= even:
        return choices
    finer, lower = _place(tables, constraints, topology, max(share / 2, SPLIT_ABOVE))
    if isinstance(finer, list) and (isinstance(choices, PlannerError) or lower < fullest):
        return finer
    if isinstance(choices, PlannerError):
        raise choices
    return choices


def _place(
    tables: Sequence[PlannedTable],
    constraints: Mapping[tuple[str, str], ParameterConstraints],
    topology: Topology,
    whole_below: float,
) -> tuple[list[Choice] | PlannerError, int]:
    """Choices (or why there are none) and the fullest rank's load; tables of up to `whole_below` bytes stay whole."""
    loads = _Loads(topology)
    order = sorted(
        range(len(tables)),
        key=lambda t: (
            # What every rank must hold a part of comes first: the rest is placed around it.
            not _uniform(constraints.get(tables[t].names[0])),
            -tables[t].bytes,
            tables[t].names[0],
        ),
    )
    choices: dict[int, Choice] = {}
    for t in order:
        table, limits = tables[t], constraints.get(tables[t].names[0])
        least = None if limits is None else limits.min_partition
        kinds = (() if limits is None else limits.types_allowed()) or _preferred(table, whole_below, topology)
        found = None
        for kind in kinds:
            found = _PLACERS[kind](loads, table, least)
            if found is not None:
                break
        if found is None:
            return PlannerError(_does_not_fit(table, kinds, tables, loads)), 0
        choices[t] = Choice(kind, found)
    return [choices[t] for t in range(len(tables))], loads.everywhere + max(loads.own)


def _uniform(limits: ParameterConstraints | None) -> bool:
    kinds = () if limits is None else limits.types_allowed()
    return bool(kinds) and kinds[0] in (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE)


def _preferred(table: PlannedTable, whole_below: float, topology: Topology) -> tuple[ShardingType, ...]:
    one, host, world = ShardingType.TABLE_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.ROW_WISE
    if topology.world_size == 1:
        return (one,)
    hosts = () if topology.host_count == 1 else (host,)
    if table.bytes <= whole_below:
        return (one, *hosts, world)
    largest = max(len(ranks) for ranks in topology.host_ranks)
    if hosts and table.bytes / largest <= whole_below:
        return (host, world)
    return (world,)


class _Loads:
    """Bytes per rank, and the emptiest ranks."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.cap = topology, topology.memory_cap
        self.everywhere = 0
        self.own = [0] * topology.world_size
        self._heap = [(0, rank) for rank in range(topology.world_size)]

    def load(self, rank: int) -> int:
        return self.everywhere + self.own[rank]

    def emptiest(self) -> int:
        """The least loaded rank."""
        while self._heap[0][0] != self.own[self._heap[0][1]]:
            heapq.heappop(self._heap)  # was added to since
        return self._heap[0][1]

    def add(self, rank: int, size: int) -> None:
        self.own[rank] += size
        heapq.heappush(self._heap, (self.own[rank], rank))

    def add_everywhere(self, size: int) -> bool:
        """Whether it fits; then every rank has it."""
        if self.everywhere + max(self.own) + size > self.cap:
            return False
        self.everywhere += size
        return True

    def add_one_by_one(self, sizes: Sequence[int], among: Sequence[int] | None) -> tuple[int, ...] | None:
        """Each piece onto the emptiest rank (of `among`); all or none. The ranks in ascending order."""
        if among is not None:
            heap = [(self.own[rank], rank) for rank in among]
            heapq.heapify(heap)
        taken: list[int] = []
        for size in sizes:
            rank = self.emptiest() if among is None else heap[0][1]
            if self.load(rank) + size > self.cap:
                for given, back in zip(taken, sizes, strict=False):
                    self.add(given, -back)
                return None
            self.add(rank, size)
            if among is not None:
                heapq.heapreplace(heap, (self.own[rank], rank))
            taken.append(rank)
        return tuple(sorted(taken))  # pieces that share a rank side by side: they merge

    def hosts_by_load(self) -> list[int]:
        """Hosts, the one whose fullest rank is emptiest first."""
        ranks = self.topology.host_ranks
        return sorted(range(len(ranks)), key=lambda h: (max(self.own[r] for r in ranks[h]), h))


def _place_everywhere(loads: _Loads, table: PlannedTable, least: int | None) -> tuple[int, ...] | None:
    return _everyone(loads) if loads.add_everywhere(table.bytes) else None


def _place_rows(loads: _Loads, table: PlannedTable, least: int | None) -> tuple[int, ...] | None:
    size = table.bytes_of(-(-table.rows // len(loads.own)), table.dim)
    return _everyone(loads) if loads.add_everywhere(size) else None


def _everyone(loads: _Loads) -> tuple[int, ...]:
    return tuple(range(len(loads.own)))


def _place_whole(loads: _Loads, table: PlannedTable, least: int | None) -> tuple[int, ...] | None:
    return loads.add_one_by_one([table.bytes], None)


def _place_columns(loads: _Loads, table: PlannedTable, least: int | None) -> tuple[int, ...] | None:
    pieces = _pieces(table.dim, len(loads.own), least)
    return loads.add_one_by_one([table.bytes_of(table.rows, table.dim // pieces)] * pieces, None)


def _place_rows_on_a_host(loads: _Loads, table: PlannedTable, least: int | None) -> tuple[int, ...] | None:
    for host in loads.hosts_by_load():
        ranks = loads.topology.ranks_of(host)
        size = table.bytes_of(-(-table.rows // len(ranks)), table.dim)
        if all(loads.load(rank) + size <= loads.cap for rank in ranks):
            for rank in ranks:
                loads.add(rank, size)
            return ranks
    return None


def _place_columns_on_a_host(loads: _Loads, table: PlannedTable, least: int | None) -> tuple[int, ...] | None:
    for host in loads.hosts_by_load():
        ranks = loads.topology.ranks_of(host)
        pieces = _pieces(table.dim, len(ranks), least)
        found = loads.add_one_by_one(
            [table.bytes_of(table.rows, table.dim // pieces)] * pieces, sorted(ranks)
        )
        if found is not None:
            return found
    return None


def _place_grid(loads: _Loads, table: PlannedTable, least: int | None) -> tuple[int, ...] | None:
    hosts = loads.topology.host_count
    pieces = _pieces(table.dim, hosts, least)
    added: list[tuple[int, int]] = []
    blocks: list[int] = []
    for _ in range(pieces):
        for host in loads.hosts_by_load():
            ranks = loads.topology.ranks_of(host)
            size = table.bytes_of(-(-table.rows // len(ranks)), table.dim // pieces)
            if all(loads.load(rank) + size <= loads.cap for rank in ranks):
                for rank in ranks:
                    loads.add(rank, size)
                    added.append((rank, size))
                blocks.append(host)
                break
        else:
            for rank, size in added:
                loads.add(rank, -size)
            return None
    return tuple(rank for host in sorted(blocks) for rank in loads.topology.ranks_of(host))


def _pieces(dim: int, ranks: int, least: int | None) -> int:
    """Column tiles: with a least width as many as it allows, else at most one per rank (or host)."""
    return column_pieces(dim, ranks) if least is None else column_pieces(dim, dim // least, least)


_PLACERS = {
    ShardingType.DATA_PARALLEL: _place_everywhere,
    ShardingType.TABLE_WISE: _place_whole,
    ShardingType.COLUMN_WISE: _place_columns,
    ShardingType.ROW_WISE: _place_rows,
    ShardingType.TABLE_ROW_WISE: _place_rows_on_a_host,
    ShardingType.TABLE_COLUMN_WISE: _place_columns_on_a_host,
    ShardingType.GRID_SHARD: _place_grid,
}


def _does_not_fit(
    table: PlannedTable, kinds: Sequence[ShardingType], tables: Sequence[PlannedTable], loads: _Loads
) -> str:
    world, total = len(loads.own), sum(each.bytes for each in tables)
    left = loads.cap - loads.load(loads.emptiest())
    words = [kind.value for kind in kinds]
    text = (
        f"{table}: no place found for its {table.rows:,} x {table.dim:,} cells ({bytes_text(table.bytes)} with "
        f"gradients or optimizer state) as {' or '.join(words)}; the emptiest of {world} ranks has "
        f"{bytes_text(left)} left of {bytes_text(loads.cap)}"
    )
    if total > world * loads.cap:
        return (
            f"{text}, and all {len(tables)} tables are {bytes_text(total)} for {bytes_text(world * loads.cap)} in all. "
            "Use more ranks, a smaller data_type, or a Topology with larger caps if the devices have more memory."
        )
    return (
        f"{text}. Allow it other sharding_types (row_wise needs the least per rank), or use more ranks or a Topology "
        "with larger caps."
    )
