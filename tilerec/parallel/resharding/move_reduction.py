"""Reduce the bytes that a move to a new plan sends, at nearly the same step time.

    renamed           permute ranks of a host, and hosts of equal size, so that more cells are already in place
    keep_tables_in_place   return tables to their present tiling, the largest moves first, if the step time allows it

A permutation of equal ranks does not change the step time, but it can change the bytes of the move a lot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tilerec.errors import ConfigError
from tilerec.parallel.model_tables import Name
from tilerec.parallel.resharding.transfers import transfers
from tilerec.sharding.layout import rectangles
from tilerec.sharding.strategies import complete
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

MAX_TABLES_TRIED = 64
"""Largest number of tables that `keep_tables_in_place` tries to keep in place. Each try prices one plan."""

Tilings = dict[Name, Tiling]


def tilings_of(plan: ShardingPlan) -> Tilings:
    """Return the tilings of a complete plan."""
    found: Tilings = {}
    for path, table, sharding in plan.tables():
        found[(path, table)] = _tiling(sharding)
    return found


def moved_bytes(old: Tiling, new: Tiling, cell: int, topology: Topology) -> int:
    """Return the bytes sent between ranks, at `cell` bytes per cell."""
    if old == new:
        return 0
    cells = sum(t.rectangle.cells for t in transfers(old.bare, new.bare, topology) if not t.stays)
    return cell * (cells + new_hot_rows(old, new) * new.dim * (topology.world_size - 1))


def new_hot_rows(old: Tiling, new: Tiling) -> int:
    """Return the number of rows that become hot."""
    if new.head is None:
        return 0
    return len(new.head.hot) if old.head is None else len(np.setdiff1d(new.head.hot.ids, old.head.hot.ids))


def permute_ranks(
    plan: ShardingPlan, present: ShardingPlan, cells: Mapping[Name, int], topology: Topology
) -> ShardingPlan:
    """Return the plan with its ranks permuted so that more cells are already in place.

    Ranks of one host count as interchangeable, and so do hosts with the same number of ranks.

    Args:
        cells: bytes of a cell of each table, with its state.

    Example: two tables of one size on two ranks. Now a is on rank 0 and b on rank 1; the plan has b on 0 and a on 1.
    With ranks 0 and 1 exchanged nothing moves.
    """
    size = topology.world_size
    # overlap[r][q]: bytes of the new tiles of rank r that rank q holds now
    overlap = [[0] * size for _ in range(size)]
    before, after = tilings_of(present), tilings_of(plan)
    for name, tiling in after.items():
        for tile in rectangles(tiling.bare):
            for other in rectangles(before[name].bare):
                rows = min(tile.r1, other.r1) - max(tile.r0, other.r0)
                width = min(tile.c1, other.c1) - max(tile.c0, other.c0)
                if rows > 0 and width > 0:
                    for r in tile.owners:
                        for q in other.owners:
                            overlap[r][q] += rows * width * cells[name]
    names = _rank_permutation(overlap, topology)
    if names == list(range(size)):
        return plan
    try:
        return _permuted(plan, names, topology)
    except ConfigError:  # a sharding type that fixes the order of ranks
        return plan


def _rank_permutation(overlap: Sequence[Sequence[int]], topology: Topology) -> list[int]:
    """Return for each rank of a plan the rank that replaces it."""
    hosts = [list(host) for host in topology.host_ranks]
    gains: list[list[int]] = []
    inside: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for a, new in enumerate(hosts):
        gains.append([])
        for b, old in enumerate(hosts):
            if len(new) != len(old):
                gains[a].append(-1)
                continue
            pairs = _greedy_matching([[overlap[r][q] for q in old] for r in new])
            inside[(a, b)] = [(new[i], old[j]) for i, j in enumerate(pairs)]
            gains[a].append(sum(overlap[r][q] for r, q in inside[(a, b)]))
    names = list(range(topology.world_size))
    for a, b in enumerate(_greedy_matching(gains)):
        for r, q in inside[(a, b)]:
            names[r] = q
    return names


def _greedy_matching(gains: Sequence[Sequence[int]]) -> list[int]:
    """Return a different column for each row, greedily by the largest gain; among equal gains, the diagonal first.

    Negative gains are never chosen.
    """
    count = len(gains)
    order = sorted(
        ((i, j) for i in range(count) for j in range(count) if gains[i][j] >= 0),
        key=lambda pair: (-gains[pair[0]][pair[1]], pair[0] != pair[1], pair),
    )
    found = [-1] * count
    taken: set[int] = set()
    for i, j in order:
        if found[i] < 0 and j not in taken:
            found[i] = j
            taken.add(j)
    # If a host has no partner of its size left, all ranks keep their numbers.
    return found if -1 not in found else list(range(count))


def _permuted(plan: ShardingPlan, names: Sequence[int], topology: Topology) -> ShardingPlan:
    parts = {}
    for path, part in plan.plan.items():
        done: dict[str, ParameterSharding] = {}
        for name, sharding in part.items():
            tiling = sharding.tiling
            assert tiling is not None
            tiles = [(*tile[:4], tuple(names[rank] for rank in tile.owners)) for tile in tiling.tiles()]
            new = Tiling.of(name, tiling.rows, tiling.dim, tiles).with_hot(name, sharding.hot, topology.world_size)
            ranks = None if sharding.ranks is None else tuple(names[rank] for rank in sharding.ranks)
            if sharding.kind in (ShardingType.DATA_PARALLEL, ShardingType.EXPLICIT):
                ranks = None
            made = replace(sharding, ranks=ranks, tiling=new)
            # Raises if the sharding type does not allow these ranks in this order.
            complete(replace(made, tiling=None, hot=None) if ranks else made, name, tiling.rows, tiling.dim, topology)
            done[name] = made
        parts[path] = EmbeddingModuleShardingPlan(done)
    return replace(plan, plan=parts, report=None)


def keep_tables_in_place(
    plan: ShardingPlan,
    present: ShardingPlan,
    ties: Sequence[Sequence[Name]],
    cells: Mapping[Name, int],
    topology: Topology,
    seconds: Callable[[Tilings], float],
    most: float,
) -> ShardingPlan:
    """Return the plan with tables back in their present tiling as long as a step takes at most `most` seconds.

    A table that needs its new hot rows for that keeps its tiles, and only hot rows move.

    Args:
        ties: all names of each table; tied tables move together.
        seconds: returns the predicted seconds of a step under given tilings.
    """
    before, after = tilings_of(present), tilings_of(plan)
    moves = [
        (moved_bytes(before[names[0]], after[names[0]], cells[names[0]], topology), k)
        for k, names in enumerate(ties)
        if before[names[0]] != after[names[0]]
    ]
    for _, k in sorted(moves, key=lambda move: (-move[0], move[1]))[:MAX_TABLES_TRIED]:
        names = ties[k]
        for kept in zip(*(_in_place(present, plan, name) for name in names), strict=True):
            tried = {**after, **{name: _tiling(sharding) for name, sharding in zip(names, kept, strict=True)}}
            if seconds(tried) <= most:
                after = tried
                for (path, table), sharding in zip(names, kept, strict=True):
                    plan = plan.replaced(path, table, sharding)
                break
    return plan


def _in_place(present: ShardingPlan, plan: ShardingPlan, name: Name) -> list[ParameterSharding]:
    """Return a table's present sharding, and the same tiles beside the hot rows of the plan, if it has others."""
    path, table = name
    sharding, hot = present.plan[path][table], plan.plan[path][table].hot
    tiling = _tiling(sharding)
    if hot is None or hot == (sharding.hot or HotRows()) or tiling.bare.replicated:
        return [sharding]
    return [sharding, replace(sharding, hot=hot, tiling=tiling.bare.with_hot(table, hot, plan.world_size or 1))]


def _tiling(sharding: ParameterSharding) -> Tiling:
    assert sharding.tiling is not None
    return sharding.tiling
