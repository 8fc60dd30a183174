"""The ways to cut a table that a planner considers, and what a user allows of them.

Nouns
  option  a way to cut: COPIES on every rank, WHOLE on one, blocks of COLUMNS, ranges of ROWS, or a GRID (blocks of
          columns on hosts, each one's rows over the host's ranks)
  pieces  column blocks, ranges of rows over single ranks, or hosts of a grid
  width   ranks that hold each piece: 1, a host's, or all
  cached  rows and their state lie in host memory, behind a cache on the device
  limits  what a user allows for one table
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tilerec.spec.plan import ShardingType
from tilerec.spec.topology import Topology

COLUMN_SPLITS = (2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
FEW_RANKS = 16
"""Ranks up to which every number of ranges of rows is tried; on more of them 2, 3, 4, 6, 8 and powers of two."""
GRIDS = (2, 3, 4, 6, 8, 16)
MIN_PARTITION = 32
"""Columns of the narrowest column tile, unless limits say else."""


class Way(Enum):
    """How an option cuts."""

    COPIES = "copies"
    WHOLE = "whole"
    COLUMNS = "columns"
    ROWS = "rows"
    GRID = "grid"


class Option(NamedTuple):
    """pieces: column tiles, ranges of rows over single ranks, or hosts of a grid."""

    way: Way
    pieces: int
    width: int
    cached: bool = False

    def __str__(self) -> str:
        over = {1: ""}.get(self.width, f" over {self.width} ranks")
        behind = ", cached" if self.cached else ""
        return self.way.value + (f" x {self.pieces}" if self.pieces > 1 else "") + over + behind


@dataclass(frozen=True)
class Limits:
    """What is allowed for a table.

    types: sharding types; () for all. min_partition: least columns of a column tile. ranks: where its pieces may lie.
    on_device, cached: where its rows may lie: in device memory, or in host memory behind a cache.
    """

    types: Sequence[ShardingType] = ()
    min_partition: int | None = None
    ranks: Sequence[int] | None = None
    on_device: bool = True
    cached: bool = False


def enumerate_options(
    topology: Topology, dims: Sequence[int], cached: bool = False, row_splits: Sequence[int] = ()
) -> tuple[Option, ...]:
    """The columns of an instance on a topology, for tables of these dims.

    Args:
        cached: with each but copies in both storages.
        row_splits: further numbers of ranges of rows: of ranks that tables are limited to.
    """
    plain = _ways_to_cut(topology, dims, row_splits)
    behind = [option._replace(cached=True) for option in plain if option.way is not Way.COPIES]
    return plain + tuple(behind) if cached else plain


def row_splits_below(ranks: int) -> list[int]:
    """Numbers of ranges of rows that are tried on so many ranks, besides all of them."""
    if ranks <= FEW_RANKS:
        return list(range(2, ranks))
    return [2, 3, 4, 6, *(1 << k for k in range(3, (ranks - 1).bit_length()))]


def _ways_to_cut(topology: Topology, dims: Sequence[int], row_splits: Sequence[int]) -> tuple[Option, ...]:
    ranks, sizes = topology.world_size, sorted({len(host) for host in topology.host_ranks})
    options = [Option(Way.WHOLE, 1, 1)]
    if ranks == 1:
        return tuple(options)
    options.append(Option(Way.COPIES, 1, ranks))
    distinct = sorted(set(dims))
    options += [
        Option(Way.COLUMNS, k, 1)
        for k in COLUMN_SPLITS
        if k <= ranks and any(d % k == 0 < d // k for d in distinct)
    ]
    counts = {*row_splits_below(ranks), *(k for k in row_splits if 1 < k < ranks)}
    options += [Option(Way.ROWS, k, 1) for k in sorted(counts)]
    options.append(Option(Way.ROWS, 1, ranks))
    if topology.host_count > 1:
        for n in sizes:
            if n == 1:
                continue
            options.append(Option(Way.ROWS, 1, n))
            hosts = sum(len(host) == n for host in topology.host_ranks)
            options += [
                Option(Way.GRID, k, n) for k in GRIDS if k <= hosts and any(d % k == 0 for d in distinct)
            ]
    return tuple(options)


def is_of(option: Option, types: Sequence[ShardingType], ranks: int, hosts: int) -> bool:
    """Whether an option is one of these sharding types."""
    kind = ShardingType
    if option.way is Way.ROWS and option.width == ranks and hosts == 1:
        # On one host, rows over all its ranks go by three names.
        own = {kind.ROW_WISE, kind.TABLE_ROW_WISE, kind.GRID_SHARD}
    elif option.way is Way.ROWS:
        own = {kind.TABLE_ROW_WISE} if 1 < option.width < ranks else {kind.ROW_WISE}
    else:
        own = {
            Way.COPIES: {kind.DATA_PARALLEL},
            Way.WHOLE: {kind.TABLE_WISE},
            Way.COLUMNS: {kind.COLUMN_WISE, kind.TABLE_COLUMN_WISE},
            Way.GRID: {kind.GRID_SHARD},
        }[option.way]
    return not own.isdisjoint(types)
