"""The options of the planner: the ways to cut a table, and the restrictions of the user on them.

Nouns
  option  a way to cut: COPIES on every rank, WHOLE on one rank, blocks of COLUMNS, ranges of ROWS, or a GRID (blocks of
          columns on hosts, with the rows of each block over the ranks of its host)
  pieces  column blocks, ranges of rows on single ranks, or hosts of a grid
  width   number of ranks that hold each piece: 1, those of a host, or all
  cached  rows and their state are in host memory, behind a cache on the device
  head    copies of the rows that are read most, on every rank, beside other cuts than copies. Of a table in frequency
          order these are its first rows, and the other rows are in ranges over all ranks. Of other tables, and behind
          a cache, they are hot ids, beside all rows
  limits  the restrictions for one table
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tilerec.spec.plan import ShardingType
from tilerec.spec.topology import Topology

COLUMN_SPLITS = (2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
"""Numbers of column blocks that are tried."""
ALL_ROW_SPLITS_RANKS = 16
"""Largest number of ranks for which every number of row ranges is tried; above it 2, 3, 4, 6, and powers of two."""
GRIDS = (2, 3, 4, 6, 8, 16)
"""Numbers of hosts of a grid that are tried."""
HEADS = (0.0005, 0.002, 0.01, 0.05)
"""Sizes of heads that are tried, as a part of the rows of a table; of hot ids, at most as many as are known."""
MIN_PARTITION = 32
"""Default of the fewest columns of a column tile."""


class Way(Enum):
    """The kinds of cuts."""

    COPIES = "copies"
    WHOLE = "whole"
    COLUMNS = "columns"
    ROWS = "rows"
    GRID = "grid"


class Option(NamedTuple):
    """A way to cut a table. way: its kind. pieces, width, cached: as above. head: part of the rows; 0: none."""

    way: Way
    pieces: int
    width: int
    cached: bool = False
    head: float = 0.0

    @property
    def holders(self) -> int:
        """Number of ranks that hold a part of the table, if pieces are on distinct ranks."""
        return self.pieces * self.width

    @property
    def ranges(self) -> int:
        """Number of ranges of rows of each column block; 1 for copies."""
        if self.way is Way.ROWS:
            return self.holders
        return self.width if self.way is Way.GRID else 1

    def __str__(self) -> str:
        over = {1: ""}.get(self.width, f" over {self.width} ranks")
        behind = ", cached" if self.cached else ""
        behind += f", {self.head:.2%} of rows on each" if self.head else ""
        return self.way.value + (f" x {self.pieces}" if self.pieces > 1 else "") + over + behind


PIECES_WITH_HEAD = {Way.WHOLE: (1,), Way.COLUMNS: (2, 4), Way.ROWS: (1, 2, 4), Way.GRID: (2,)}
"""Numbers of pieces that are tried beside a head; of ranges of rows, 1 is those over all ranks, or over a host's."""
MANY_TABLES = 1_000
"""More tables than this have fewer options with heads, since every option takes a part of the planner's time.

Theirs are ranges of rows over all ranks, whole tables, and column blocks of rules without sums over rows.
"""


@dataclass(frozen=True)
class Limits:
    """The restrictions on the options of one table.

    Args:
        types: allowed sharding types; () for all.
        min_partition: fewest columns of a column tile; None: the default.
        ranks: ranks that may hold pieces; None for all.
        on_device: device memory may hold the rows.
        cached: host memory behind a cache may hold the rows.
        heads: every rank may hold copies of a head; False also if `ranks` are not all ranks.
    """

    types: Sequence[ShardingType] = ()
    min_partition: int | None = None
    ranks: Sequence[int] | None = None
    on_device: bool = True
    cached: bool = False
    heads: bool = True


def enumerate_options(
    topology: Topology, dims: Sequence[int], cached: bool = False, row_splits: Sequence[int] = (),
    heads: bool = False,
) -> tuple[Option, ...]:  # fmt: skip
    """Return the options on a topology for tables of these dims; an instance has one column for each.

    Args:
        dims: of each table.
        cached: add each option, except copies, a second time with rows behind a cache. A head is on the device.
        row_splits: further numbers of row ranges, for tables that are limited to so many ranks.
        heads: add options with heads.
    """
    plain = _ways_to_cut(topology, dims, row_splits)
    behind = [option._replace(cached=True) for option in plain if option.way is not Way.COPIES]
    ranks = topology.world_size
    sizes = HEADS if heads and ranks > 1 else ()
    cuts = [cut for cut in plain if cut.pieces in PIECES_WITH_HEAD.get(cut.way, ())]
    if len(dims) > MANY_TABLES:
        cuts = [cut for cut in cuts if cut.width == ranks or cut.way in (Way.WHOLE, Way.COLUMNS)]
    with_head = [
        cut._replace(cached=slow, head=size)
        for cut in sorted(cuts, key=lambda cut: cut.width < ranks)
        for slow in (False, True)[: 1 + cached]
        for size in sizes
    ]
    return (*plain, *(behind if cached else ()), *with_head)


def row_splits_below(ranks: int) -> list[int]:
    """Return the numbers of row ranges that are tried on so many ranks, besides one range for each rank."""
    if ranks <= ALL_ROW_SPLITS_RANKS:
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
        Option(Way.COLUMNS, k, 1) for k in COLUMN_SPLITS if k <= ranks and any(d % k == 0 < d // k for d in distinct)
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
            options += [Option(Way.GRID, k, n) for k in GRIDS if k <= hosts and any(d % k == 0 for d in distinct)]
    return tuple(options)


def is_of(option: Option, types: Sequence[ShardingType], ranks: int, hosts: int, *, ordered: bool) -> bool:
    """Return True if an option has one of these sharding types.

    Args:
        ranks, hosts: their numbers in the topology. ordered: the table is in frequency order.
    """
    kind = ShardingType
    if option.head and ordered and not option.cached:
        own = {kind.EXPLICIT}
    elif option.way is Way.ROWS and option.width == ranks and hosts == 1:
        # With one host, rows over all ranks have three sharding types.
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
