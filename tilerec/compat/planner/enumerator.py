"""Enumerator and estimators: sharding options whose shards are tilerec's tiles, with tilerec's prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tilerec.compat.planner.types import (
    Enumerator,
    PartitionByType,
    Perf,
    Shard,
    SharderData,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.helpers import Cut
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.tables import PlannedTable, tables_of
from tilerec.spec.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tilerec.spec.table import data_type_to_dtype
from tilerec.spec.topology import Topology

MIN_COLUMNS = 128
"""Least number of columns of a column shard, unless the constraints set `min_partition`."""

_BY = {
    ShardingType.DATA_PARALLEL: PartitionByType.UNIFORM,
    ShardingType.TABLE_WISE: PartitionByType.DEVICE,
    ShardingType.COLUMN_WISE: PartitionByType.DEVICE,
    ShardingType.ROW_WISE: PartitionByType.UNIFORM,
    ShardingType.TABLE_ROW_WISE: PartitionByType.HOST,
    ShardingType.TABLE_COLUMN_WISE: PartitionByType.HOST,
    ShardingType.GRID_SHARD: PartitionByType.MULTI_HOST,
}


class _Priced:
    """Prices of single tables by tilerec's cost model."""

    def __init__(self, topology: Topology, batch_size: int, constraints: Mapping[str, ParameterConstraints]) -> None:
        facts = {
            name: ParameterConstraints(
                pooling_factors=limits.pooling_factors, num_poolings=limits.num_poolings,
                batch_sizes=limits.batch_sizes, is_weighted=limits.is_weighted,
            )
            for name, limits in constraints.items()
        }  # fmt: skip
        self._topology, self._batch_size, self._facts = topology, batch_size, facts

    def set(self, table: PlannedTable, option: ShardingOption, sharding: ParameterSharding) -> None:
        """Set memory and milliseconds of an option's shards, in proportion to their sizes."""
        name = option.name
        facts = {name: self._facts[name]} if name in self._facts else None
        planner = EmbeddingShardingPlanner(self._topology, self._batch_size, constraints=facts)
        path, _ = table.names[0]
        price = planner.price([table], ShardingPlan({path: EmbeddingModuleShardingPlan({name: sharding})}))
        memory = price.price.memory.sum(axis=0)
        elements = [shard.size[0] * shard.size[1] for shard in option.shards]
        whole = max(sum(elements), 1)
        for shard, size in zip(option.shards, elements, strict=True):
            hbm, ddr = (int(part * size // whole) for part in memory)
            shard.storage = Storage(hbm, ddr)
            shard.perf = Perf(price.seconds * 1e3 * size / whole, 0.0, 0.0, 0.0)


class EmbeddingEnumerator(Enumerator):
    """Options of all tables: each allowed sharding type with each allowed kernel.

    Args:
        topology, batch_size, constraints: as in `EmbeddingShardingPlanner`.
        estimator: a program's own estimators; None: memory and milliseconds are those of tilerec's cost model, which
            counts a whole step as `fwd_compute`.
        use_exact_enumerate_order: options are always in the order of the tables.
    """

    def __init__(
        self, topology: Topology, batch_size: int | None = 512,
        constraints: Mapping[str, ParameterConstraints] | None = None, estimator: Any = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:  # fmt: skip
        self._topology, self._batch_size = topology, batch_size or 512
        self._constraints = dict(constraints or {})
        given = [] if estimator is None else list(estimator) if isinstance(estimator, (list, tuple)) else [estimator]
        self._estimators = [own for own in given if not isinstance(own, _Stock)]
        self._last: dict[int, tuple[PlannedTable, ParameterSharding]] = {}

    def enumerate(self, module: nn.Module, sharders: Sequence[Any]) -> list[ShardingOption]:
        modules = dict(module.named_modules())
        found = []
        self._last.clear()
        for table in tables_of(module, sharders):
            path, name = table.names[0]
            limits = self._constraints.get(name, ParameterConstraints())
            kernels = limits.kernels_allowed() or (EmbeddingComputeKernel.FUSED,)
            for kind in limits.types_allowed() or _BY:
                for kernel in kernels:
                    option = self._option(table, limits, kind, kernel, (path, modules[path]))
                    if option is not None:
                        found.append(option)
        self.populate_estimates(found)
        return found

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        priced = _Priced(self._topology, self._batch_size, self._constraints)
        for option in sharding_options:
            if id(option) in self._last:
                priced.set(self._last[id(option)][0], option, self._last[id(option)][1])
        for estimator in self._estimators:
            estimator.estimate(sharding_options, {})

    def _option(
        self, table: PlannedTable, limits: ParameterConstraints, kind: ShardingType, kernel: EmbeddingComputeKernel,
        module: tuple[str, nn.Module],
    ) -> ShardingOption | None:  # fmt: skip
        _, name = table.names[0]
        sharding = _sharding(name, table.rows, table.dim, kind, kernel, limits.min_partition, self._topology)
        if sharding is None:
            return None
        assert sharding.tiling is not None
        shards = [
            Shard([tile.r1 - tile.r0, tile.c1 - tile.c0], [tile.r0, tile.c0])
            for tile in sharding.tiling.tiles()
            for _ in tile.owners
        ]
        lengths = [float(number) for number in limits.pooling_factors or [1.0] * max(len(table.features), 1)]
        dtype = data_type_to_dtype(table.data_type)
        tensor = torch.empty(table.rows, table.dim, dtype=dtype, device="meta")
        option = ShardingOption(
            name=name, tensor=tensor, module=module, input_lengths=lengths, batch_size=self._batch_size,
            sharding_type=kind.value,
            partition_by=_BY[kind].value, compute_kernel=kernel.value, shards=shards, is_pooled=table.pooled,
            feature_names=list(table.features), cache_params=limits.cache_params, enforce_hbm=limits.enforce_hbm,
        )  # fmt: skip
        self._last[id(option)] = table, sharding
        return option


def _sharding(
    name: str, rows: int, dim: int, kind: ShardingType, kernel: EmbeddingComputeKernel, least: int | None,
    topology: Topology,
) -> ParameterSharding | None:  # fmt: skip
    """Return a sharding of a table on the first ranks that it needs; None: the type does not fit the table."""
    blocks = max(1, dim // (least or MIN_COLUMNS))
    local = topology.local_world_size or topology.world_size
    hosts = topology.world_size // local
    if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE):
        most = topology.world_size if kind is ShardingType.COLUMN_WISE else local
        count = max(n for n in range(1, min(blocks, most) + 1) if dim % n == 0)
        cut = Cut(kind, kernel, widths=[dim // count] * count,
                  **({"ranks": range(count)} if kind is ShardingType.COLUMN_WISE else {"hosts": [0]}))  # fmt: skip
    elif kind is ShardingType.TABLE_WISE:
        cut = Cut(kind, kernel, ranks=[0])
    elif kind is ShardingType.TABLE_ROW_WISE:
        cut = Cut(kind, kernel, hosts=[0])
    elif kind is ShardingType.GRID_SHARD:
        cut = Cut(kind, kernel, hosts=list(range(min(hosts, blocks))))
    else:
        cut = Cut(kind, kernel)
    try:
        return cut.sharding(name, rows, dim, topology)
    except ConfigError:
        return None


class _Stock(ShardEstimator):
    """An estimator of TorchRec by name; the enumerator uses tilerec's cost model."""

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: dict[str, SharderData] | None = None
    ) -> None:
        """Set memory and milliseconds of every shard, by tilerec's cost model."""
        for option in sharding_options:
            limits = (self._constraints or {}).get(option.name, ParameterConstraints())
            rows, dim = option.tensor.shape
            table = next(own for own in tables_of(option.module[1]) if own.names[0][1] == option.name)
            kind, kernel = ShardingType(option.sharding_type), EmbeddingComputeKernel(option.compute_kernel)
            sharding = _sharding(option.name, rows, dim, kind, kernel, limits.min_partition, self._topology)
            if sharding is not None:
                _Priced(self._topology, option.batch_size, {option.name: limits}).set(table, option, sharding)


class EmbeddingPerfEstimator(_Stock):
    """TorchRec's estimator of milliseconds, by name; the numbers are tilerec's (docs/planner-cost.md)."""

    def __init__(self, topology: Topology, constraints: Any = None, is_inference: bool = False) -> None:
        super().__init__(topology, constraints)


class EmbeddingStorageEstimator(_Stock):
    """TorchRec's estimator of memory, by name; the numbers are tilerec's (docs/planner-cost.md)."""

    def __init__(
        self, topology: Topology, constraints: Any = None, pipeline_type: Any = None,
        run_embedding_at_peak_memory: bool = False, is_inference: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(topology, constraints)
