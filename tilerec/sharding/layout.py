"""Static layout of a module's exchange: the data sent between each pair of ranks, compiled once from the tilings.

Nouns
  slot       a (table, feature) pair of a module; reads one table with the ids of one key
  rectangle  rows x columns that one set of ranks holds; one leaf on each of these ranks
  part       (slot, rows, owners): a destination of ids. All rectangles of a table with equal rows and owners read
             the same ids
  unit       one rectangle of a part: a source of rows
  route      row cuts that send each id of a slot to one part; column blocks with other cuts need their own route,
             and skip parts that already receive ids by an earlier route
  home       the rank that a batch belongs to;  reader: the owner that looks up for a home
  team       ranks that together hold every table (`replica_groups.py`); by default, all ranks form one
  group      parts of one route on one host other than the home's: one of their owners, the proxy, adds up their rows,
             and only the sums are sent to the home

    reader(owners, home) = home itself, else an owner in its team and, among those, on its host, else one by turns, so
                           that reads are spread over replicas

A home's parts in wire order: by reader, then in canonical order (slot, route, rows). The layout depends only on tiles,
their owners and the hosts; it does not use the names of strategies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tilerec.spec.plan import Wire
from tilerec.spec.tile import Tile, Tiling
from tilerec.spec.tile import rectangles as rectangles
from tilerec.spec.topology import Topology


@dataclass(frozen=True)
class TableLayout:
    """Input of the layout for one table.

    Attributes:
        fan_in: expected ids per bag; at 1 or less, sums inside a host save no bytes.
    """

    name: str
    tiling: Tiling
    fan_in: float = 2.0
    wire: Wire = field(default_factory=Wire)


class SlotRead(NamedTuple):
    """A slot: the position of the table that it reads, and the feature whose ids it reads it with."""

    table: int
    feature: str


class Unit(NamedTuple):
    """One rectangle of a part, with its columns."""

    rectangle: int  # among all rectangles of all tables
    c0: int
    width: int


class SlotPart(NamedTuple):
    """A destination of a slot's ids: rows [r0, r1) on some owners."""

    slot: int
    route: int
    r0: int
    r1: int
    owners: tuple[int, ...]
    units: tuple[Unit, ...]


class SlotRoute(NamedTuple):
    """Row cuts that distribute one slot's ids over parts.

    `parts[i]` holds rows [cuts[i], cuts[i+1]); -1: an earlier route already sends these ids.
    """

    slot: int
    cuts: tuple[int, ...]
    parts: tuple[int, ...]


class HostGroup(NamedTuple):
    """Parts on one host, each with its owner on that host."""

    host: int
    parts: tuple[int, ...]  # in canonical order
    owners: tuple[int, ...]  # parallel to them


class Merge(NamedTuple):
    """Parts whose rows are added on `proxy` before they are sent to the home."""

    proxy: int
    parts: tuple[int, ...]  # in canonical order, which is the order of the sum


def reader(owners: tuple[int, ...], home: int, topology: Topology, team_of: Sequence[int] | None = None) -> int:
    """Return the owner that looks up for `home`.

    Args:
        team_of: team of each rank; None: all ranks form one team.
    """
    if len(owners) == 1:
        return owners[0]
    if home in owners:
        return home
    if team_of is not None:
        owners = tuple(o for o in owners if team_of[o] == team_of[home]) or owners
        if len(owners) == 1:
            return owners[0]
    host = topology.host_of(home)
    near = [o for o in owners if topology.host_of(o) == host] or list(owners)
    return near[topology.local_rank(home) % len(near)]


class SharedLayout:
    """Parts, routes and groups of a module's exchange: the part of the layout that is equal on every rank."""

    def __init__(
        self,
        tables: Sequence[TableLayout],
        slots: Sequence[SlotRead],
        topology: Topology,
        team_of: Sequence[int] | None = None,
    ) -> None:
        self.tables, self.slots = tuple(tables), tuple(slots)
        self._team_of = None if team_of is None else tuple(team_of)
        self.topology, self.size = topology, topology.world_size
        self.rectangles: list[tuple[int, Tile]] = []  # (table, tile)
        self.parts: list[SlotPart] = []
        self.routes: list[SlotRoute] = []
        self._first_rectangle: list[int] = []
        for t, table in enumerate(self.tables):
            self._first_rectangle.append(len(self.rectangles))
            self.rectangles.extend((t, tile) for tile in rectangles(table.tiling))
        for s, slot in enumerate(self.slots):
            self._add_slot(s, slot.table)
        teams = {0} if self._team_of is None else set(self._team_of)
        self._groups = {team: self._find_groups(team) for team in teams}
        self.hierarchical = any(self._groups.values())
        # Every rank holds all rows that it looks up: no ids and no rows are sent.
        self.alone = all(len(part.owners) == self.size for part in self.parts)

    def _add_slot(self, s: int, t: int) -> None:
        first = self._first_rectangle[t]
        last = self._first_rectangle[t + 1] if t + 1 < len(self._first_rectangle) else len(self.rectangles)
        blocks, route, begin = self.tables[t].tiling.held.blocks, len(self.routes), len(self.parts)
        if len(blocks) == 1:  # each rectangle is a part, with rows of its own
            for r in range(first, last):
                r0, r1, c0, c1, owners = self.rectangles[r][1]
                self.parts.append(SlotPart(s, route, r0, r1, owners, (Unit(r, c0, c1 - c0),)))
            self.routes.append(SlotRoute(s, blocks[0].cuts, tuple(range(begin, len(self.parts)))))
            return
        units: defaultdict[tuple[int, int, tuple[int, ...]], list[Unit]] = defaultdict(list)
        for r in range(first, last):
            tile = self.rectangles[r][1]
            units[(tile.r0, tile.r1, tile.owners)].append(Unit(r, tile.c0, tile.c1 - tile.c0))
        numbers: dict[tuple[int, int, tuple[int, ...]], int] = {}
        seen: set[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = set()
        for block in blocks:
            if (block.cuts, block.owners) in seen:
                continue
            seen.add((block.cuts, block.owners))
            own: list[int] = []
            for (r0, r1), owners in zip(pairwise(block.cuts), block.owners, strict=True):
                key = (r0, r1, owners)
                if key in numbers:
                    own.append(-1)
                    continue
                numbers[key] = len(self.parts)
                own.append(len(self.parts))
                self.parts.append(SlotPart(s, len(self.routes), r0, r1, owners, tuple(units[key])))
            if any(p >= 0 for p in own):
                self.routes.append(SlotRoute(s, block.cuts, tuple(own)))

    def _only_owner(self, p: int, team: int) -> int | None:
        """Return the owner of a part in a team; None if several ranks of the team hold copies."""
        owners = self.parts[p].owners
        if self._team_of is not None:
            owners = tuple(o for o in owners if self._team_of[o] == team)
        return owners[0] if len(owners) == 1 else None

    def _find_groups(self, team: int) -> list[HostGroup]:
        """Return groups of parts of one route: equal columns, one owner each in the team, several ranks of a host."""
        if self.topology.host_count == 1:
            return []
        groups: list[HostGroup] = []
        for route in self.routes:
            if len(route.parts) == 1 or self.tables[self.slots[route.slot].table].fan_in <= 1:
                continue
            by_host: defaultdict[tuple[int, tuple[tuple[int, int], ...]], dict[int, int]] = defaultdict(dict)
            for p in route.parts:
                owner = self._only_owner(p, team) if p >= 0 else None
                if owner is not None:
                    columns = tuple((unit.c0, unit.width) for unit in self.parts[p].units)
                    by_host[(self.topology.host_of(owner), columns)][p] = owner
            for (host, _), owners in by_host.items():
                if len(set(owners.values())) > 1:
                    groups.append(HostGroup(host, tuple(owners), tuple(owners.values())))
        return groups

    def _team(self, rank: int) -> int:
        return 0 if self._team_of is None else self._team_of[rank]

    def groups(self, team: int = 0) -> list[HostGroup]:
        """Return the groups of a team, each of which a proxy adds up for homes on other hosts."""
        return self._groups[team]

    def merges(self, home: int) -> list[Merge]:
        """Return the groups whose rows a proxy adds up before it sends the sums to `home`."""
        own_host = self.topology.host_of(home)
        found = []
        for group in self._groups[self._team(home)]:
            if group.host != own_host:
                owners = sorted(set(group.owners))
                found.append(Merge(owners[self.topology.turn(home, group.host) % len(owners)], group.parts))
        return found


class ExchangeLayout(SharedLayout):
    """Static records of a module's exchange on one rank: the segments that it sends and receives."""

    def __init__(
        self,
        tables: Sequence[TableLayout],
        slots: Sequence[SlotRead],
        topology: Topology,
        rank: int,
        team_of: Sequence[int] | None = None,
    ) -> None:
        super().__init__(tables, slots, topology, team_of)
        self.rank = rank
        # Rectangles that this rank holds, and their positions among its leaves.
        self.held = [r for r, (_, tile) in enumerate(self.rectangles) if rank in tile.owners]
        self.leaf_of = {r: i for i, r in enumerate(self.held)}
        self._lay_out()

    def _lay_out(self) -> None:
        rank, size = self.rank, self.size
        by_reader: list[list[int]] = [[] for _ in range(size)]
        for p, part in enumerate(self.parts):
            by_reader[reader(part.owners, rank, self.topology, self._team_of)].append(p)
        self.sent: list[list[int]] = by_reader  # per owner, parts in canonical order
        self.wire = [0] * len(self.parts)
        for place, p in enumerate(p for parts in by_reader for p in parts):
            self.wire[p] = place
        mine = [p for p, part in enumerate(self.parts) if rank in part.owners]
        self.received: list[list[int]] = [
            [p for p in mine if reader(self.parts[p].owners, home, self.topology, self._team_of) == rank]
            for home in range(size)
        ]
        self.own_merges = self.merges(rank)  # as home
        self.merges_of: list[list[Merge]] = (
            [self.merges(home) for home in range(size)] if self.hierarchical else [[] for _ in range(size)]
        )
        self._lay_out_home()
        self._lay_out_owner()
        self._lay_out_proxy()

    def _lay_out_home(self) -> None:
        """Compute the segments of received rows: per owner, units of direct parts, then units of merged groups.

        `HomeSegment.count` indexes the concatenation (P of each part in wire order, U of each merge).
        """
        merged = {p for merge in self.own_merges for p in merge.parts}
        # Columns of a slot with rows from more than one part (or merge) are summed on the home rank.
        feeders: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.home: list[list[HomeSegment]] = []
        drafts: list[list[tuple[int, int, Unit]]] = []
        for owner, parts in enumerate(self.sent):
            own = [(self.wire[p], self.parts[p].slot, u) for p in parts if p not in merged for u in self.parts[p].units]
            for m, merge in enumerate(self.own_merges):
                if merge.proxy == owner:
                    first = self.parts[merge.parts[0]]
                    own.extend((len(self.parts) + m, first.slot, u) for u in first.units)
            drafts.append(own)
            for _, slot, unit in own:
                for c in self._edges(slot, unit):
                    feeders[(slot, c)] += 1
        for own in drafts:
            self.home.append(
                [
                    HomeSegment(
                        count,
                        slot,
                        unit.c0,
                        unit.width,
                        any(feeders[(slot, c)] > 1 for c in self._edges(slot, unit)),
                    )
                    for count, slot, unit in own
                ]
            )

    def _edges(self, slot: int, unit: Unit) -> list[int]:
        """Return the left edges of the column blocks that a unit spans."""
        blocks = self.tables[self.slots[slot].table].tiling.blocks
        return [block.c0 for block in blocks if unit.c0 <= block.c0 < unit.c0 + unit.width]

    def _lay_out_owner(self) -> None:
        """Compute the segments of the rows that this rank looks up: direct ones to homes, then those to proxies.

        `OwnerSegment.count` indexes the flattened [home][received part].
        """
        direct: list[list[OwnerSegment]] = [[] for _ in range(self.size)]
        inner: list[list[OwnerSegment]] = [[] for _ in range(self.size)]
        at = 0
        for home, parts in enumerate(self.received):
            via = {p: merge.proxy for merge in self.merges_of[home] for p in merge.parts}
            for p in parts:
                to = inner[via[p]] if p in via else direct[home]
                to.extend(
                    OwnerSegment(at, self.leaf_of[unit.rectangle], unit.width, self.parts[p].slot, home)
                    for unit in self.parts[p].units
                )
                at += 1
        self.direct, self.inner = direct, inner
        self.received_count = at

    def _lay_out_proxy(self) -> None:
        """Compute the merges that this rank makes, `merging[home]`, and the siblings' segments, in arrival order."""
        self.merging: list[list[Merge]] = [
            [merge for merge in merges if merge.proxy == self.rank] for merges in self.merges_of
        ]
        first = 0  # merges are numbered home after home; so are their parts, by `member`
        numbered: list[tuple[int, int, int, int]] = []  # (home, part, merge, member)
        member = 0
        for home, merges in enumerate(self.merging):
            for m, merge in enumerate(merges):
                for p in merge.parts:
                    numbered.append((home, p, first + m, member))
                    member += 1
            first += len(merges)
        numbered.sort()
        self.siblings: list[list[ProxySegment]] = [[] for _ in range(self.size)]
        for home, p, m, number in numbered:
            part = self.parts[p]
            owner = self._only_owner(p, self._team(home))
            assert owner is not None, "copies within a team are not merged"
            self.siblings[owner].extend(ProxySegment(m, number, u, unit.width) for u, unit in enumerate(part.units))


@dataclass(frozen=True, slots=True)
class HomeSegment:
    """Rows of some columns of a slot, as received by their home."""

    count: int  # index of its number of rows: parts in wire order, then merges
    slot: int
    c0: int
    width: int
    adds: bool  # True if other segments contribute to the same columns


@dataclass(frozen=True, slots=True)
class OwnerSegment:
    """Rows of one leaf for one part of one home."""

    count: int  # index of its number of bags in the flattened [home][part]
    leaf: int
    width: int
    slot: int
    home: int


@dataclass(frozen=True, slots=True)
class ProxySegment:
    """Rows of one unit of a sibling, which the proxy adds to a merge."""

    merge: int
    member: int
    unit: int
    width: int
