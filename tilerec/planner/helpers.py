"""Plans by hand: one helper per sharding type, and `construct_module_sharding_plan` to put them together.

    construct_module_sharding_plan(ebc, {"user": row_wise(), "item": table_wise(rank=1)}, local_size=2, world_size=4)

`shard` takes them without it: `shard(ebc, {"user": row_wise(), "item": table_wise(rank=1)})`, `shard(ebc, row_wise())`.

Nouns
  cut  what a helper returns: how a table is to be cut, once its size and the world are known
"""

from __future__ import annotations

import os
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
from tilerec.spec.topology import Topology

Kernel = EmbeddingComputeKernel | str | None
"""None: "fused" for a table whose optimizer is attached or given by the sharder, else "dense".

`construct_module_sharding_plan` decides it; a plan of bare helpers leaves it to `shard`.
"""


@final
@dataclass(frozen=True)
class Cut:
    """How a table is to be cut. Made by the helpers below.

    Args:
        ranks: those that take part; None: all, or those of `hosts`.
        hosts: those whose ranks take part.
        sizes: rows of each piece. widths: columns of each block. buckets: see `row_wise`.
        devices: kinds of device that the caller asked for.
        tiles: of an explicit cut.
    """

    kind: ShardingType
    compute_kernel: Kernel = None
    ranks: Sequence[int] | None = None
    hosts: Sequence[int] | None = None
    sizes: Sequence[int] | None = None
    widths: Sequence[int] | None = None
    buckets: int | None = None
    devices: Sequence[str] = ()
    tiles: Iterable[Sequence[Any]] | Tiling = ()

    def __post_init__(self) -> None:
        if self.compute_kernel is not None:
            kernel = to_enum(
                EmbeddingComputeKernel, self.compute_kernel, f"{self.kind.value}: compute_kernel"
            )
            object.__setattr__(self, "compute_kernel", kernel)
        for name in ("ranks", "hosts"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, text_to_ranks(list(given), f"{self.kind.value}: {name}"))
        for name in ("sizes", "widths"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, tuple(given))
        if not isinstance(self.tiles, Tiling):
            object.__setattr__(self, "tiles", tuple(self.tiles))

    def sharding(self, name: str, rows: int, dim: int, topology: Topology) -> ParameterSharding:
        """Of one table in one world. Pieces of given sizes name the ranks that have some.

        Raises:
            ConfigError: it does not fit the table or the world.
        """
        self._check_devices(name, topology)
        ranks = self._ranks(name, dim, topology)
        tiling: Tiling | None = None
        if self.kind is ShardingType.EXPLICIT:
            tiles = self.tiles
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
            ranks = None  # read off the tiling: pieces may be empty, or one with their neighbours
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
                f"Table '{name}': {self.kind.value} names host {missing[0] if missing else 'nobody'}; "
                f"{topology.world_size} ranks are on hosts 0 to {topology.host_count - 1}."
            )
        ranks = tuple(rank for host in self.hosts for rank in topology.ranks_of(host))
        if self.kind is ShardingType.TABLE_COLUMN_WISE:
            # As many of the host's ranks as there are widths, or as divide the columns.
            count = strategies.column_pieces(dim, len(ranks)) if self.widths is None else len(self.widths)
            return ranks[:count]
        return ranks

    def _check_devices(self, name: str, topology: Topology) -> None:
        other = [d for d in self.devices if d.split(":")[0] != topology.compute_device]
        if other:
            raise ConfigError(
                f"Table '{name}': {self.kind.value} asks for device {other[0]!r}, but the world's is "
                f"{topology.compute_device!r}; all tables of a world are on one kind of device, so leave it out or "
                "pass device_type=."
            )


_BY_WIDTHS = {
    ShardingType.COLUMN_WISE: strategies.column_wise,
    ShardingType.TABLE_COLUMN_WISE: strategies.table_column_wise,
    ShardingType.GRID_SHARD: strategies.grid,
}


def data_parallel() -> Cut:
    """A copy of the table on every rank. Copies on some of the ranks are an `explicit` tiling."""
    return Cut(ShardingType.DATA_PARALLEL)


def table_wise(rank: int, device: str | None = None, compute_kernel: Kernel = None) -> Cut:
    """The whole table on one rank. `device` is the world's kind of device; another one is refused."""
    return Cut(ShardingType.TABLE_WISE, compute_kernel, [rank], devices=[device] if device else ())


def row_wise(
    sizes_placement: tuple[Sequence[int], str | Sequence[str]] | None = None,
    compute_kernel: Kernel = None,
    num_buckets: int | None = None,
) -> Cut:
    """Ranges of rows on all ranks.

    Args:
        sizes_placement: (rows of each piece, where they go). A device type ("cuda") puts piece i on rank i; a list has
            for each piece its rank ("rank:3/cuda:1") or its device type.
        num_buckets: rows come in this many equal buckets, which are never cut; must divide the rows.
    """
    if sizes_placement is None:
        return Cut(ShardingType.ROW_WISE, compute_kernel, buckets=num_buckets)
    if num_buckets is not None:
        raise ConfigError(
            "row_wise: both sizes_placement and num_buckets say where to cut; keep one of them."
        )
    sizes, where = sizes_placement
    places = [where] * len(sizes) if isinstance(where, str) else list(where)
    if len(places) != len(sizes):
        raise ConfigError(
            f"row_wise: sizes_placement has {len(sizes)} sizes and {len(places)} placements; give one for each piece."
        )
    ranks = [placement_to_rank(p) if p.startswith("rank:") else i for i, p in enumerate(places)]
    devices = [place.split("/")[-1].split(":")[0] for place in places]
    return Cut(ShardingType.ROW_WISE, compute_kernel, ranks, sizes=sizes, devices=devices)


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: Kernel = None,
    device_types: Sequence[str] | None = None,
) -> Cut:
    """Blocks of columns, block i on `ranks[i]` (None: on rank i).

    Args:
        size_per_rank: columns of each block; None: equal ones, without `ranks` over as many as divide the columns.
        device_types: of the blocks; each is the world's kind of device.
    """
    if ranks is None and size_per_rank is not None:
        ranks = range(len(size_per_rank))
    return Cut(
        ShardingType.COLUMN_WISE, compute_kernel, ranks, widths=size_per_rank, devices=device_types or ()
    )


def table_row_wise(host_index: int, compute_kernel: Kernel = None) -> Cut:
    """Ranges of rows on the ranks of one host."""
    return Cut(ShardingType.TABLE_ROW_WISE, compute_kernel, hosts=[host_index])


def table_column_wise(
    host_index: int, size_per_rank: Sequence[int] | None = None, compute_kernel: Kernel = None
) -> Cut:
    """Blocks of columns on ranks of one host: `size_per_rank` columns each, or equal ones on as many as divide them."""
    return Cut(ShardingType.TABLE_COLUMN_WISE, compute_kernel, hosts=[host_index], widths=size_per_rank)


def grid_shard(
    host_indexes: Sequence[int], size_per_host: Sequence[int] | None = None, compute_kernel: Kernel = None
) -> Cut:
    """A block of columns for each of the hosts (they may repeat), its rows in ranges over that host's ranks.

    The blocks cover the table: equal ones, or `size_per_host` columns each.
    """
    return Cut(ShardingType.GRID_SHARD, compute_kernel, hosts=host_indexes, widths=size_per_host)


def explicit(tiles: Iterable[Sequence[Any]] | Tiling, compute_kernel: Kernel = None) -> Cut:
    """Any cover: `Tile`s or `(r0, r1, c0, c1, owners)`, as `Tiling.of` takes them, or a tiling."""
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
    """The plan of one embedding collection, table by table. It knows the world it is for, and is refused in another.

    Args:
        module: an EmbeddingBagCollection or EmbeddingCollection, or a module with one of them in it.
        per_param_sharding: table -> helper's result, for every table.
        sharder: the one that the collection will be sharded with: tables are "fused" where it gives an optimizer.
            Tables without one are "dense": a sharder that is given later, to `shard`, does not change that.
        local_size, world_size: ranks per host and in all; None: the process group's and the launcher's, or those of a
            world of one. Where neither is known, hosts are left to the launcher.
        device_type: "cpu" or "cuda"; None: where the tables are.
        topology: in place of these three.

    Raises:
        ConfigError: a table is missing or unknown, `module` has several collections, the cut does not fit its table or
            the world, `sharder` speaks of another kind of collection.
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
            f"construct_module_sharding_plan: the sharder speaks of {sharder.module_type.__name__}, which "
            f"{type(module).__name__} is not; pass the sharder of its kind, or none."
        )
    for mine, theirs, what in (
        (tables, per_param_sharding, "has no sharding"),
        (per_param_sharding, tables, "is no table of the module"),
    ):
        stray = [name for name in mine if name not in theirs]
        if stray:
            raise ConfigError(
                f"construct_module_sharding_plan: '{stray[0]}' {what} ({len(stray)} such in all); per_param_sharding "
                f"names {list(per_param_sharding)[:8]}, the module has {list(tables)[:8]}. Name each table once."
            )
    world, hosts_known = topology, True
    if world is None:
        world, hosts_known = _world(local_size, world_size, device_type or device_type_of(module))
    plan = EmbeddingModuleShardingPlan(
        world_size=world.world_size, hosts=world.host_ranks if hosts_known else None
    )
    for name, table in tables.items():
        cut = per_param_sharding[name]
        if not isinstance(cut, Cut):
            raise ConfigError(
                f"construct_module_sharding_plan: per_param_sharding['{name}'] is a {type(cut).__name__}; wanted what "
                "row_wise(), table_wise(rank) and their like return."
            )
        if cut.compute_kernel is None:
            cut = replace(cut, compute_kernel=_kernel(table))
        sharding = cut.sharding(name, table.rows, table.dim, world)
        plan[name] = replace(sharding, data_type=table.data_type)
    return plan


def apply_to_all(
    module: nn.Module, parameter_sharding_generator: Cut, sharder: Sharder | None = None
) -> dict[str, Cut]:
    """The same helper for every table of a collection: `per_param_sharding` of `construct_module_sharding_plan`."""
    return {name: parameter_sharding_generator for table in tables_of(module) for _, name in table.names}


def _kernel(table: PlannedTable) -> Kernel:
    """Return "fused" for a table with an optimizer, else "dense"; None for a frozen table, which stays where it is."""
    if table.kernel is None and table.cached is None:
        return EmbeddingComputeKernel.DENSE
    return table.kernel


def _bucket_rows(name: str, rows: int, buckets: int, world_size: int) -> tuple[int, ...]:
    """Rows of each rank: whole buckets, the first ranks have one more where they do not come out even."""
    if buckets < 1 or rows % buckets:
        raise ConfigError(
            f"Table '{name}': row_wise got num_buckets={buckets}, which does not divide its {rows} rows; use a divisor."
        )
    each, more = divmod(buckets, world_size)
    return tuple((each + (rank < more)) * (rows // buckets) for rank in range(world_size))


def _world(local_size: int | None, world_size: int | None, device_type: str) -> tuple[Topology, bool]:
    """The world, and whether somebody said which ranks share a host."""
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if world_size is None:
        from_launcher = Topology.from_launcher(device_type)
        world_size = from_launcher.world_size
    if local_size is None and text.isdecimal() and int(text) and world_size % int(text) == 0:
        local_size = int(text)
    topology = Topology(world_size, device_type, local_world_size=local_size)
    return topology, local_size is not None or world_size == 1
