"""Plans written by hand: one helper per sharding type, and `construct_module_sharding_plan` to combine them.

    construct_module_sharding_plan(ebc, {"user": row_wise(), "item": table_wise(rank=1)}, local_size=2, world_size=4)

`shard` also accepts helpers: `shard(ebc, {"user": row_wise(), "item": table_wise(rank=1)})`, `shard(ebc, row_wise())`.

Terms
  cut  a split of a table into pieces, independent of the table's size and of the world. Each helper returns one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch.distributed as dist
from torch import nn

from tilerec.errors import ConfigError
from tilerec.planner.sharder import Sharder, check_sharder
from tilerec.planner.tables import PlannedTable, device_type_of, tables_of
from tilerec.sharding import strategies
from tilerec.spec.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
    to_enum,
)
from tilerec.spec.ranks import placement_to_rank, ranks_to_text, text_to_ranks
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology, launcher_local_size

Kernel = EmbeddingComputeKernel | str | None
"""None: "fused" for a table whose optimizer is attached or comes from the sharder, else "dense".

`construct_module_sharding_plan` makes this choice; for helpers passed to `shard` directly, `shard` makes it.
"""


@final
@dataclass(frozen=True)
class Cut:
    """A split of a table into pieces, with their ranks. The helpers below return it.

    Args:
        ranks: ranks that hold pieces. None: all ranks, or those of `hosts`.
        hosts: hosts whose ranks hold pieces.
        sizes: rows of each piece. widths: columns of each block. buckets: `num_buckets` of `row_wise`.
        devices: device types given by the caller; they must match the topology's.
        tiles: the tiles of an explicit cut, or a strategy that makes them (`sharding/strategies.py`).
    """

    kind: ShardingType
    compute_kernel: Kernel = None
    ranks: Sequence[int] | None = None
    hosts: Sequence[int] | None = None
    sizes: Sequence[int] | None = None
    widths: Sequence[int] | None = None
    buckets: int | None = None
    devices: Sequence[str] = ()
    tiles: Iterable[Sequence[Any]] | Tiling | strategies.Strategy = ()

    def __post_init__(self) -> None:
        if self.compute_kernel is not None:
            kernel = to_enum(EmbeddingComputeKernel, self.compute_kernel, f"{self.kind.value}: compute_kernel")
            object.__setattr__(self, "compute_kernel", kernel)
        for name in ("ranks", "hosts"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, text_to_ranks(list(given), f"{self.kind.value}: {name}"))
        for name in ("sizes", "widths"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, tuple(given))
        if not isinstance(self.tiles, Tiling) and not callable(self.tiles):
            object.__setattr__(self, "tiles", tuple(self.tiles))

    def sharding(self, name: str, rows: int, dim: int, topology: Topology) -> ParameterSharding:
        """Return the sharding of one table in one world.

        With given `sizes`, `widths` or `buckets`, its ranks are those that hold a nonempty piece.

        Raises:
            ConfigError: the cut does not fit the table or the world.
        """
        self._check_devices(name, topology)
        ranks = self._ranks(name, dim, topology)
        tiling: Tiling | None = None
        if self.kind is ShardingType.EXPLICIT:
            tiles = self.tiles
            if callable(tiles):
                tiles = tiles(name, rows, dim, ranks, topology)
            tiling = tiles if isinstance(tiles, Tiling) else Tiling.of(name, rows, dim, tiles)
        elif self.buckets is not None:
            sizes = _bucket_rows(name, rows, self.buckets, topology.world_size)
            tiling = strategies.row_wise(name, rows, dim, ranks, topology, sizes=sizes)
        elif self.sizes is not None:
            tiling = strategies.row_wise(name, rows, dim, ranks, topology, sizes=self.sizes)
        elif self.widths is not None:
            strategy = _BY_WIDTHS[self.kind]
            tiling = strategy(name, rows, dim, ranks, topology, widths=self.widths)
        if tiling is not None:
            ranks = None  # derived from the tiling: pieces may be empty, or merged with their neighbours
        return strategies.complete(
            ParameterSharding(self.kind, self.compute_kernel, ranks, tiling=tiling),
            name,
            rows,
            dim,
            topology,
        )

    def _ranks(self, name: str, dim: int, topology: Topology) -> tuple[int, ...] | None:
        if self.hosts is None:
            stray = [rank for rank in self.ranks or () if rank >= topology.world_size]
            if stray:
                raise ConfigError(
                    f"Table '{name}': {self.kind.value} names rank {ranks_to_text(stray)}; the world has ranks 0 to "
                    f"{topology.world_size - 1}."
                )
            return None if self.ranks is None else tuple(self.ranks)
        missing = [host for host in self.hosts if host >= topology.host_count]
        if missing or not self.hosts:
            raise ConfigError(
                f"Table '{name}': {self.kind.value} names {f'host {missing[0]}' if missing else 'no host'}; "
                f"{topology.world_size} ranks are on hosts 0 to {topology.host_count - 1}."
            )
        ranks = tuple(rank for host in self.hosts for rank in topology.ranks_of(host))
        if self.kind is ShardingType.TABLE_COLUMN_WISE:
            # One rank per width; without widths, the largest number of ranks that divides the columns.
            count = strategies.column_pieces(dim, len(ranks)) if self.widths is None else len(self.widths)
            return ranks[:count]
        return ranks

    def _check_devices(self, name: str, topology: Topology) -> None:
        other = [d for d in self.devices if d.split(":")[0] != topology.compute_device]
        if other:
            raise ConfigError(
                f"Table '{name}': {self.kind.value} got device {other[0]!r}; expected the world's "
                f"{topology.compute_device!r}, as all tables are on one kind of device. Leave the device out, or pass "
                "device_type=."
            )


_BY_WIDTHS = {
    ShardingType.COLUMN_WISE: strategies.column_wise,
    ShardingType.TABLE_COLUMN_WISE: strategies.table_column_wise,
    ShardingType.GRID_SHARD: strategies.grid,
}


def data_parallel() -> Cut:
    """Replicate the table on every rank. For replicas on some ranks use an `explicit` tiling."""
    return Cut(ShardingType.DATA_PARALLEL)


def table_wise(rank: int, device: str | None = None, compute_kernel: Kernel = None) -> Cut:
    """Place the whole table on one rank. `device` must be the world's device type."""
    return Cut(ShardingType.TABLE_WISE, compute_kernel, [rank], devices=[device] if device else ())


def row_wise(
    sizes_placement: tuple[Sequence[int], str | Sequence[str]] | None = None,
    compute_kernel: Kernel = None,
    num_buckets: int | None = None,
) -> Cut:
    """Split the rows into ranges over all ranks.

    Args:
        sizes_placement: (rows of each piece, placement). The placement "cuda" (a device type) puts piece i on rank i. A
            list contains the rank ("rank:3/cuda:1") or the device type of each piece; each rank occurs once.
        num_buckets: number of equal buckets of rows that must not be split; it must divide the rows.
    """
    if sizes_placement is None:
        return Cut(ShardingType.ROW_WISE, compute_kernel, buckets=num_buckets)
    if num_buckets is not None:
        raise ConfigError(
            "row_wise: got both sizes_placement and num_buckets; expected one of them, as each determines the row "
            "ranges. Leave one out."
        )
    sizes, where = sizes_placement
    places = [where] * len(sizes) if isinstance(where, str) else list(where)
    if len(places) != len(sizes):
        raise ConfigError(
            f"row_wise: sizes_placement has {len(sizes)} sizes and {len(places)} placements; give one for each piece."
        )
    ranks = [placement_to_rank(p) if p.startswith("rank:") else i for i, p in enumerate(places)]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigError(
            f"row_wise: sizes_placement names rank{'s' * (len(twice) > 1)} {ranks_to_text(twice)} more than once; "
            "expected each rank once. Give each rank the sum of its sizes."
        )
    devices = [place.split("/")[-1].split(":")[0] for place in places]
    return Cut(ShardingType.ROW_WISE, compute_kernel, ranks, sizes=sizes, devices=devices)


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: Kernel = None,
    device_types: Sequence[str] | None = None,
) -> Cut:
    """Split the columns into blocks, block i on `ranks[i]` (None: on rank i).

    Args:
        size_per_rank: columns of each block. None: equal blocks, one per rank in `ranks`; without `ranks`, over the
            largest number of ranks that divides the columns.
        device_types: device type of each block; all must be the world's.
    """
    if ranks is None and size_per_rank is not None:
        ranks = range(len(size_per_rank))
    return Cut(ShardingType.COLUMN_WISE, compute_kernel, ranks, widths=size_per_rank, devices=device_types or ())


def table_row_wise(host_index: int, compute_kernel: Kernel = None) -> Cut:
    """Split the rows into ranges over the ranks of one host."""
    return Cut(ShardingType.TABLE_ROW_WISE, compute_kernel, hosts=[host_index])


def table_column_wise(
    host_index: int, size_per_rank: Sequence[int] | None = None, compute_kernel: Kernel = None
) -> Cut:
    """Split the columns into blocks over ranks of one host.

    `size_per_rank` gives the columns of each block. None: equal blocks on as many
    ranks as divide the columns.
    """
    return Cut(ShardingType.TABLE_COLUMN_WISE, compute_kernel, hosts=[host_index], widths=size_per_rank)


def grid_shard(
    host_indexes: Sequence[int], size_per_host: Sequence[int] | None = None, compute_kernel: Kernel = None
) -> Cut:
    """Split the columns into one block per host, and each block's rows into ranges over that host's ranks.

    A host may occur several times. Blocks are equal, or have `size_per_host` columns, which must cover the table.
    """
    return Cut(ShardingType.GRID_SHARD, compute_kernel, hosts=host_indexes, widths=size_per_host)


def explicit(tiles: Iterable[Sequence[Any]] | Tiling | strategies.Strategy, compute_kernel: Kernel = None) -> Cut:
    """Split the table into `Tile`s or tuples `(r0, r1, c0, c1, owners)`, as `Tiling.of`, or as a given tiling.

    A strategy of your own also serves: a function `(name, rows, dim, ranks, topology) -> Tiling`, here with ranks None.
    """
    return Cut(ShardingType.EXPLICIT, compute_kernel, tiles=tiles)


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, Cut],
    sharder: Sharder | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
    *,
    topology: Topology | None = None,
) -> EmbeddingModuleShardingPlan:
    """Return the plan of one embedding collection, given a cut for each table.

    The plan records its world size and hosts; sharding in another world raises an error.

    Args:
        module: an EmbeddingBagCollection or EmbeddingCollection, or a module that contains one of them.
        per_param_sharding: table -> helper's result, for every table.
        sharder: the sharder that the collection will be sharded with. Tables are "fused" if it has an optimizer for
            them. Tables without an optimizer are "dense"; a sharder that `shard` gets later does not change that.
        local_size, world_size: ranks per host, and in total. None: those of the process group and the launcher, or of
            a world of one rank. If the ranks per host remain unknown, the plan leaves the hosts to the launcher.
        device_type: "cpu" or "cuda"; None: the device of the tables.
        topology: replaces the three arguments above.

    Raises:
        ConfigError: a table is missing or unknown, `module` has several collections, a cut does not fit its table or
            the world, or `sharder` is for another kind of collection.
    """
    if sharder is not None:
        check_sharder(sharder, "construct_module_sharding_plan: sharder")
    found = tables_of(module, () if sharder is None else (sharder,))
    tables: dict[str, PlannedTable] = {name: table for table in found for _, name in table.names}
    paths = {path for table in found for path, _ in table.names}
    if len(paths) != 1:
        raise ConfigError(
            f"construct_module_sharding_plan: {type(module).__name__} has {len(paths)} embedding collections, "
            "wanted one; pass them one by one."
        )
    if sharder is not None and not any(isinstance(part, sharder.module_type) for part in module.modules()):
        raise ConfigError(
            f"construct_module_sharding_plan: got a sharder for {sharder.module_type.__name__}; expected one for "
            f"{type(module).__name__}. Pass that sharder, or none."
        )
    for mine, theirs, what in (
        (tables, per_param_sharding, "has no sharding"),
        (per_param_sharding, tables, "is no table of the module"),
    ):
        stray = [name for name in mine if name not in theirs]
        if stray:
            raise ConfigError(
                f"construct_module_sharding_plan: '{stray[0]}' {what} ({len(stray)} such names in total); "
                f"per_param_sharding names {list(per_param_sharding)[:8]}, the module has {list(tables)[:8]}. Name "
                "each table once."
            )
    world, hosts_known = topology, True
    if world is None:
        world, hosts_known = _world(local_size, world_size, device_type or device_type_of(module))
    plan = EmbeddingModuleShardingPlan(world_size=world.world_size, hosts=world.host_ranks if hosts_known else None)
    for name, table in tables.items():
        cut = per_param_sharding[name]
        if not isinstance(cut, Cut):
            raise ConfigError(
                f"construct_module_sharding_plan: per_param_sharding['{name}'] is a {type(cut).__name__}; wanted the "
                "return value of a helper such as row_wise() or table_wise(rank)."
            )
        if cut.compute_kernel is None:
            cut = replace(cut, compute_kernel=_kernel(table))
        sharding = cut.sharding(name, table.rows, table.dim, world)
        plan[name] = replace(sharding, data_type=table.data_type)
    return plan


def apply_to_all(
    module: nn.Module, parameter_sharding_generator: Cut, sharder: Sharder | None = None
) -> dict[str, Cut]:
    """Return `per_param_sharding` of `construct_module_sharding_plan`, with the same cut for every table."""
    return {name: parameter_sharding_generator for table in tables_of(module) for _, name in table.names}


def _kernel(table: PlannedTable) -> Kernel:
    """Return "fused" for a table with an optimizer, else "dense"; None for a frozen table with rows in host memory."""
    if table.kernel is None and table.cached is None:
        return EmbeddingComputeKernel.DENSE
    return table.kernel


def _bucket_rows(name: str, rows: int, buckets: int, world_size: int) -> tuple[int, ...]:
    """Return the rows of each rank, in whole buckets; the first ranks get one more bucket each if there is a rest."""
    if buckets < 1 or rows % buckets:
        raise ConfigError(
            f"Table '{name}': row_wise got num_buckets={buckets}, which does not divide its {rows} rows; use a divisor."
        )
    each, more = divmod(buckets, world_size)
    return tuple((each + (rank < more)) * (rows // buckets) for rank in range(world_size))


def _world(local_size: int | None, world_size: int | None, device_type: str) -> tuple[Topology, bool]:
    """Return the world, and True if it is known which ranks share a host."""
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if world_size is None:
        from_launcher = Topology.from_launcher(device_type)
        world_size = from_launcher.world_size
    if local_size is None:
        launched = launcher_local_size()
        local_size = launched if launched is not None and world_size % launched == 0 else None
    topology = Topology(world_size, device_type, local_world_size=local_size)
    return topology, local_size is not None or world_size == 1
