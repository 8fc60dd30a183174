"""Strategies: functions from a sharding type and ranks to a tiling. Later code uses the tiling only, not the type.

Nouns
  ranks    ranks that take part, in the order of their pieces; None: the default of the strategy
  sizes    rows of each rank's piece; None: ceil(rows / ranks) each and the rest on the last, as `torch.chunk`
  widths   columns of each block; None: equal blocks

    strategy(name, rows, dim, ranks, topology) -> Tiling

  data_parallel       one tile, a copy on every rank
  table_wise          one tile on one rank
  column_wise         block i of the columns on ranks[i]; a rank may occur more than once
  table_column_wise   the same, on ranks of one host
  row_wise            rows in ranges, range i on ranks[i]
  table_row_wise      the same, on ranks of one host
  grid                a block of columns for each run of ranks of one host, with its rows in ranges over that run

Example of grid: hosts with ranks (0, 1) and (2, 3), a table of 10 x 8, ranks (0, 1, 2, 3). Columns [0, 4) are on ranks
0 and 1, columns [4, 8) on ranks 2 and 3; the first rank of each host has rows [0, 5), the second rows [5, 10).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from types import MappingProxyType

from tilerec.errors import ConfigError
from tilerec.spec.plan import ParameterSharding, ShardingType
from tilerec.spec.ranks import ranks_to_text
from tilerec.spec.tile import ColumnBlock, Tiling, ceil_chunks
from tilerec.spec.topology import Topology

Strategy = Callable[[str, int, int, "Sequence[int] | None", Topology], Tiling]

# Narrower column blocks cost more in ids and messages than they gain in balance.
MIN_WIDTH = 4


def data_parallel(name: str, rows: int, dim: int, ranks: Sequence[int] | None, topology: Topology) -> Tiling:
    """Place the whole table on each of `ranks` (None: all)."""
    owners = _distinct(name, "data_parallel", _all_if_none(ranks, topology))
    return _stacked(rows, dim, (0, rows), (tuple(sorted(owners)),))


def table_wise(name: str, rows: int, dim: int, ranks: Sequence[int] | None, topology: Topology) -> Tiling:
    """Place the whole table on one rank (None: rank 0 if the world has one rank)."""
    if ranks is None and topology.world_size == 1:
        ranks = (0,)
    if ranks is None or len(ranks) != 1 or ranks[0] < 0:
        raise ConfigError(
            f"Table '{name}': table_wise got ranks {None if ranks is None else list(ranks)}; expected one rank. Name "
            "the rank of the table."
        )
    return _stacked(rows, dim, (0, rows), ((ranks[0],),))


def column_wise(
    name: str, rows: int, dim: int, ranks: Sequence[int] | None, topology: Topology, *,
    widths: Sequence[int] | None = None,
) -> Tiling:  # fmt: skip
    """Place column block i on `ranks[i]` (None: the first ranks, as many as cut the columns evenly)."""
    own = _all_if_none(ranks, topology)
    return _in_columns(name, "column_wise", rows, dim, own, widths, given=ranks is not None)


def table_column_wise(
    name: str, rows: int, dim: int, ranks: Sequence[int] | None, topology: Topology, *,
    widths: Sequence[int] | None = None,
) -> Tiling:  # fmt: skip
    """Place column blocks as `column_wise` does, on ranks of one host (None: allowed if there is one host)."""
    own = _on_one_host(name, "table_column_wise", ranks, topology)
    return _in_columns(name, "table_column_wise", rows, dim, own, widths, given=ranks is not None)


def row_wise(
    name: str, rows: int, dim: int, ranks: Sequence[int] | None, topology: Topology, *,
    sizes: Sequence[int] | None = None,
) -> Tiling:  # fmt: skip
    """Place row range i on `ranks[i]` (None: all). Ranks for which no row remains hold nothing."""
    own = tuple(_all_if_none(ranks, topology))
    if sizes is None:
        cuts = ceil_chunks(rows, len(_distinct(name, "row_wise", own)))
        return _stacked(rows, dim, cuts, tuple([(rank,) for rank in own[: len(cuts) - 1]]))
    return Tiling.of(name, rows, dim, _rows(name, "row_wise", rows, (0, dim), own, sizes))


def table_row_wise(
    name: str, rows: int, dim: int, ranks: Sequence[int] | None, topology: Topology, *,
    sizes: Sequence[int] | None = None,
) -> Tiling:  # fmt: skip
    """Place row ranges as `row_wise` does, on ranks of one host (None: allowed if there is one host)."""
    own = _on_one_host(name, "table_row_wise", ranks, topology)
    if sizes is None:
        return row_wise(name, rows, dim, own, topology)
    return Tiling.of(name, rows, dim, _rows(name, "table_row_wise", rows, (0, dim), own, sizes))


def grid(
    name: str, rows: int, dim: int, ranks: Sequence[int] | None, topology: Topology, *,
    widths: Sequence[int] | None = None, sizes: Sequence[int] | None = None,
) -> Tiling:  # fmt: skip
    """Place a column block on each run of ranks of one host, with its rows in ranges over that run.

    `ranks` (None: all, host after host) may return to a host: the host then holds another block. `sizes` are those of
    each run, which must be of one length.
    """
    own = [r for host in topology.host_ranks for r in host] if ranks is None else list(ranks)
    if not own:
        raise ConfigError(f"Table '{name}': grid_shard got no ranks; name those of one or more hosts.")
    runs = _host_runs(own, topology)
    if ranks is None and widths is None:
        runs = runs[: column_pieces(dim, len(runs))]
    cuts = _column_cuts(name, "grid_shard", dim, len(runs), widths, "hosts")
    tiles: list[tuple[int, int, int, int, int]] = []
    for run, c0, c1 in zip(runs, cuts, cuts[1:], strict=False):
        tiles += _rows(name, "grid_shard", rows, (c0, c1), run, sizes)
    return Tiling.of(name, rows, dim, tiles)


STRATEGIES: Mapping[ShardingType, Strategy] = MappingProxyType(
    {
        ShardingType.DATA_PARALLEL: data_parallel,
        ShardingType.TABLE_WISE: table_wise,
        ShardingType.COLUMN_WISE: column_wise,
        ShardingType.ROW_WISE: row_wise,
        ShardingType.TABLE_ROW_WISE: table_row_wise,
        ShardingType.TABLE_COLUMN_WISE: table_column_wise,
        ShardingType.GRID_SHARD: grid,
    }
)


def complete(
    sharding: ParameterSharding | Tiling, name: str, rows: int, dim: int, topology: Topology
) -> ParameterSharding:
    """Return one table's sharding with its tiling filled in from sharding type and ranks, and its hot rows in it.

    Args:
        sharding: its tiling is kept if it has one; a bare `Tiling` is an explicit sharding.
        name, rows, dim: name and shape of the table.
        topology: the world, and the hosts of its ranks.

    Raises:
        ConfigError: ranks are missing, are too many or do not fit the sharding type, columns do not divide, a rank is
            outside the world, or a tiling or a hot id is for a table of another size.
    """
    if isinstance(sharding, Tiling):
        sharding = ParameterSharding(ShardingType.EXPLICIT, tiling=sharding)
    if sharding.tiling is None:
        if sharding.kind is ShardingType.EXPLICIT:
            raise ConfigError(
                f"Table '{name}': sharding_type is explicit and no tiling is given; give one with tiling=, or use "
                "another sharding type."
            )
        _check_ranks(name, sharding.ranks, topology)
        made = STRATEGIES[sharding.kind](name, rows, dim, sharding.ranks, topology)
        # Given ranks are kept, in the order of their pieces; otherwise the tiling defines them.
        sharding = replace(sharding, tiling=made)
    tiling = sharding.tiling
    assert tiling is not None
    if (tiling.rows, tiling.dim) != (rows, dim):
        raise ConfigError(
            f"Table '{name}': its tiling is of {tiling.rows} x {tiling.dim} cells and the table has {rows} x {dim}; "
            "plan again, or leave the tiling out: it is then built from sharding_type and ranks."
        )
    tiling.check(name, topology.world_size)
    with_head = tiling if sharding.hot is None else tiling.with_hot(name, sharding.hot, topology.world_size)
    return sharding if with_head is tiling else replace(sharding, tiling=with_head)


def column_pieces(dim: int, most: int, min_width: int = MIN_WIDTH) -> int:
    """Return the largest number of equal column blocks, up to `most`, that are at least `min_width` wide; else 1.

    `column_pieces(64, 6) == 4`: 5 and 6 do not divide 64.
    """
    return next(k for k in range(max(1, most), 0, -1) if k == 1 or (dim % k == 0 and dim // k >= min_width))


# ---------------------------------------------------------------------------------------------------------- placement


def _everyone(topology: Topology) -> tuple[int, ...]:
    return tuple(range(topology.world_size))


def _all_if_none(ranks: Sequence[int] | None, topology: Topology) -> Sequence[int]:
    return _everyone(topology) if ranks is None else ranks


def _check_ranks(name: str, ranks: Sequence[int] | None, topology: Topology) -> None:
    if ranks is None:
        return
    stray = [rank for rank in ranks if rank >= topology.world_size]
    if stray or not ranks:
        raise ConfigError(
            f"Table '{name}': ranks "
            + (f"contain {ranks_to_text(stray)}" if stray else "are empty")
            + f"; the world has ranks 0 to {topology.world_size - 1}."
        )


def _distinct(name: str, kind: str, ranks: Sequence[int]) -> tuple[int, ...]:
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise ConfigError(
            f"Table '{name}': {kind} got ranks {list(ranks)}; name one or more from 0 up, each of them once."
        )
    return tuple(ranks)


def _on_one_host(name: str, kind: str, ranks: Sequence[int] | None, topology: Topology) -> tuple[int, ...]:
    if ranks is None:
        if topology.host_count == 1:
            return topology.ranks_of(0)
        raise ConfigError(
            f"Table '{name}': {kind} got no ranks and there are {topology.host_count} hosts; name the ranks of one of "
            "them."
        )
    hosts = sorted({topology.host_of(rank) for rank in ranks})
    if len(hosts) != 1:
        other = kind.removeprefix("table_")
        raise ConfigError(
            f"Table '{name}': {kind} got ranks {ranks_to_text(ranks)} of hosts {hosts}; expected ranks of one host "
            f"(host 0 has {ranks_to_text(topology.ranks_of(0))}). Name ranks of one host, or use {other}."
        )
    return tuple(ranks)


def _host_runs(ranks: Sequence[int], topology: Topology) -> list[tuple[int, ...]]:
    """Return runs of ranks of one host; a repeated rank begins a new run: (0, 1, 0, 1) gives two."""
    runs: list[tuple[int, ...]] = []
    for _, same in groupby(ranks, topology.host_of):
        run: list[int] = []
        for rank in same:
            if rank in run:
                runs.append(tuple(run))
                run = []
            run.append(rank)
        runs.append(tuple(run))
    return runs


# ---------------------------------------------------------------------------------------------------------- cuts


def _stacked(rows: int, dim: int, cuts: tuple[int, ...], owners: tuple[tuple[int, ...], ...]) -> Tiling:
    """Return a tiling of one column block, which covers the table by construction and needs no check."""
    return Tiling(rows, dim, (ColumnBlock(0, dim, cuts, owners),))


def _rows(
    name: str, kind: str, rows: int, columns: tuple[int, int], ranks: Sequence[int], sizes: Sequence[int] | None
) -> list[tuple[int, int, int, int, int]]:  # fmt: skip
    own = _distinct(name, kind, ranks) if sizes is None else tuple(ranks)
    if sizes is None:
        cuts = ceil_chunks(rows, len(own))
    else:
        cuts = _given_cuts(name, kind, "sizes", "rows", rows, len(own), sizes)
    return [(r0, r1, *columns, rank) for r0, r1, rank in zip(cuts, cuts[1:], own, strict=False)]


def _in_columns(
    name: str, kind: str, rows: int, dim: int, ranks: Sequence[int], widths: Sequence[int] | None, *, given: bool
) -> Tiling:  # fmt: skip
    """Return column blocks on `ranks`; if the user has not given these, on as many as cut the columns evenly."""
    if not given:
        ranks = ranks[: column_pieces(dim, len(ranks)) if widths is None else len(widths)]
    cuts = _column_cuts(name, kind, dim, len(ranks), widths)
    tiles = [(0, rows, c0, c1, rank) for c0, c1, rank in zip(cuts, cuts[1:], ranks, strict=False)]
    return Tiling.of(name, rows, dim, tiles)


def _column_cuts(
    name: str, kind: str, dim: int, pieces: int, widths: Sequence[int] | None, unit: str = "ranks"
) -> tuple[int, ...]:
    if widths is not None:
        return _given_cuts(name, kind, "widths", "columns", dim, pieces, widths)
    if pieces < 1 or dim % pieces:
        fitting = [k for k in range(1, dim + 1) if dim % k == 0][:6]
        raise ConfigError(
            f"Table '{name}': {kind} got {pieces} {unit}, and {pieces} column tiles do not divide embedding_dim {dim}; "
            f"use {', '.join(map(str, fitting))} {unit}, or give the width of each tile (widths=, size_per_rank=)."
        )
    return tuple(range(0, dim + 1, dim // pieces))


def _given_cuts(
    name: str, kind: str, field: str, what: str, total: int, pieces: int, sizes: Sequence[int]
) -> tuple[int, ...]:
    if len(sizes) != pieces or sum(sizes) != total or min(sizes, default=0) < (what == "columns"):
        raise ConfigError(
            f"Table '{name}': {kind} got {field} {list(sizes)} for {pieces} pieces of {total} {what}; give one for "
            f"each piece, {'above 0' if what == 'columns' else 'from 0'}, that sum to {total}."
        )
    return tuple(accumulate(sizes, initial=0))
