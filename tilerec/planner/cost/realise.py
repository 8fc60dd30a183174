"""From an option and the places of its pieces to a sharding: type, ranks and tiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from tilerec.planner.cost.cuts import RangesByFrequency, heads_of, row_cuts, sizes_of_shares
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.ways import Option, Way
from tilerec.planner.cost.workload import Ints, TableWork
from tilerec.sharding.strategies import column_wise, grid, row_wise
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.spec.tile import ColumnBlock, Tiling

_PLAIN = Wire()


def sharding_of(
    model: Model,
    table: int,
    option: Option,
    places: Sequence[int],
    shares: Ints | None,
    ranges: RangesByFrequency | None = None,
) -> ParameterSharding:
    """Return the sharding of a table with an option and places.

    Args:
        table: its index in the model's workload.
        places: ranks, or hosts, of the pieces; () for all ranks.
        shares: of an uneven split by rows, in units of 1 / SHARE.
        ranges: of the model's tables; None: new ones.
    """
    work, topology = model.workload.tables[table], model.topology
    name, rows, dim = work.name, work.rows, work.dim
    kind, sizes = ShardingType, None
    ranks: tuple[int, ...]
    if option.way is Way.COPIES:
        ranks = _everyone(topology.world_size)
        return _made(kind.DATA_PARALLEL, _one_tile(rows, dim, ranks), ranks, work)
    ordered = model.workload.ordered[table]
    hot = _hot_rows(model, table, option) if option.head and (option.cached or not ordered) else None
    if option.way is Way.WHOLE:
        ranks = tuple(places)
        return _beside(hot, topology.world_size, _made(kind.TABLE_WISE, _one_tile(rows, dim, ranks), ranks, work), work)
    if option.width == 1:
        ranks = tuple(places)
    elif len(places):
        ranks = tuple(r for host in places for r in sorted(topology.ranks_of(host)))
    else:
        ranks = _everyone(topology.world_size)
    one_host = topology.host_count > 1 and len({topology.host_of(r) for r in ranks}) == 1
    if option.way is Way.COLUMNS:
        # Blocks on one rank become neighbours, and `column_wise` merges them into one tile.
        ranks = tuple(sorted(ranks))
        found = kind.TABLE_COLUMN_WISE if one_host and len(set(ranks)) > 1 else kind.COLUMN_WISE
        blocks = column_wise(name, rows, dim, ranks, topology)
        return _beside(hot, topology.world_size, _made(found, blocks, ranks, work), work)
    if option.way is Way.GRID:
        if ordered:
            sizes = np.diff(row_cuts(model, np.array([table]), option.width, ranges=ranges)[0]).tolist()
        made = _made(kind.GRID_SHARD, grid(name, rows, dim, ranks, topology, sizes=sizes), ranks, work)
        return _beside(hot, topology.world_size, made, work)
    if option.head and hot is None:
        edges = row_cuts(model, np.array([table]), len(ranks), option.head, ranges)[0].tolist()
        owners = (ranks, *((rank,) for rank in ranks))
        tiling = Tiling(rows, dim, (ColumnBlock(0, dim, (0, *edges), owners),))
        return _made(kind.EXPLICIT, tiling, ranks, work)
    if shares is not None:
        sizes = sizes_of_shares(rows, np.asarray(shares))
    elif ordered:
        edges = row_cuts(model, np.array([table]), len(ranks), option.head, ranges)[0]
        sizes = np.diff(edges).tolist()
        sizes[0] += int(edges[0])  # hot ids are also in the first range
    elif len(set(ranks)) < len(ranks):
        sizes = np.diff(np.arange(len(ranks) + 1) * rows // len(ranks)).tolist()
    if sizes is not None and 0 in sizes:
        # Ranks without rows are left out.
        kept = [(rank, size) for rank, size in zip(ranks, sizes, strict=True) if size]
        ranks, sizes = tuple(rank for rank, _ in kept), [size for _, size in kept]
        one_host = topology.host_count > 1 and len({topology.host_of(r) for r in ranks}) == 1
    found = kind.TABLE_ROW_WISE if one_host and len(set(ranks)) > 1 else kind.ROW_WISE
    # Single ranges are priced as if no two of them shared a host, so hosts do not add their rows.
    apart = 1.0 if option.width == 1 and topology.host_count > 1 else None
    made = _made(found, row_wise(name, rows, dim, ranks, topology, sizes=sizes), ranks, work, apart)
    return _beside(hot, topology.world_size, made, work)


def _hot_rows(model: Model, table: int, option: Option) -> HotRows:
    """Return the head of a table as hot ids."""
    work = model.workload.tables[table]
    assert work.skew is not None
    rows = int(heads_of(model.workload, option.head, cached=option.cached)[table])
    return HotRows(np.arange(rows) if work.skew.ordered else np.asarray(work.skew.hot)[:rows])


def _beside(hot: HotRows | None, ranks: int, made: ParameterSharding, work: TableWork) -> ParameterSharding:
    """Return a sharding with copies of hot rows on every rank; None: no copies."""
    if hot is None:
        return made
    assert made.tiling is not None
    return replace(made, tiling=made.tiling.with_hot(work.name, hot, ranks), hot=hot)


@lru_cache(maxsize=8)
def _everyone(world_size: int) -> tuple[int, ...]:
    """Return all ranks, as one tuple that all tables share."""
    return tuple(range(world_size))


def _one_tile(rows: int, dim: int, ranks: tuple[int, ...]) -> Tiling:
    """Return a tiling of one tile with these owners, as `table_wise` and `data_parallel` do."""
    return Tiling(rows, dim, (ColumnBlock(0, dim, (0, rows), (ranks,)),))


def _made(
    kind: ShardingType,
    tiling: Tiling,
    ranks: tuple[int, ...],
    work: TableWork,
    ids_per_bag: float | None = None,
) -> ParameterSharding:
    # The kernel, and default wire formats, are left to the sharder.
    wire = None if work.wire == _PLAIN else work.wire
    return ParameterSharding.of_strategy(kind, ranks, tiling, wire, work.data_type, ids_per_bag)
