"""TorchRec's partitioners and ratings: ranks for the shards of a proposal, and the cost of the result."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

from tilerec.compat.planner.types import (
    DeviceHardware,
    PartitionByType,
    Partitioner,
    Perf,
    PerfModel,
    Shard,
    ShardingOption,
    Storage,
)
from tilerec.planner.planner_error import PlannerError, PlannerErrorType


class SortBy(Enum):
    """The order in which options are placed: by memory, or by milliseconds."""

    STORAGE = "storage"
    PERF = "perf"


class GreedyPerfPartitioner(Partitioner):
    """Places the largest options first, each shard on the rank with the fewest milliseconds that has room.

    Args:
        sort_by: what is large.
        balance_modules: place the tables of one module after those of another.
    """

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._sort_by, self._balance = sort_by, balance_modules

    def partition(self, proposal: list[ShardingOption], storage_constraint: Any) -> list[ShardingOption]:
        plan = [copy.deepcopy(option) for option in proposal]
        devices = copy.deepcopy(storage_constraint.devices)
        local = storage_constraint.local_world_size or storage_constraint.world_size
        uniform = PartitionByType.UNIFORM.value
        for option in sorted(plan, key=lambda option: (option.partition_by != uniform, *self._order(option))):
            if option.partition_by == uniform:
                for rank, shard in enumerate(option.shards):
                    self._place(option, shard, devices[rank % len(devices)])
            elif option.partition_by == PartitionByType.DEVICE.value:
                for shard in option.shards:
                    self._place(option, shard, self._best(option, shard, devices))
            else:
                self._place_on_hosts(option, devices, local)
        return plan

    def _order(self, option: ShardingOption) -> tuple[Any, ...]:
        storage = option.total_storage
        size = storage.hbm + storage.ddr if self._sort_by is SortBy.STORAGE else option.total_perf
        return (option.path if self._balance else "", -size)

    def _best(self, option: ShardingOption, shard: Shard, devices: list[DeviceHardware]) -> DeviceHardware:
        room = [device for device in devices if (shard.storage or Storage(0, 0)).fits_in(device.storage)]
        if not room:
            raise self._error(option)
        return min(room, key=lambda device: (device.perf.total, device.rank))

    def _place_on_hosts(self, option: ShardingOption, devices: list[DeviceHardware], local: int) -> None:
        """Place consecutive groups of `local` shards on hosts, the least loaded host first."""
        hosts = [devices[i : i + local] for i in range(0, len(devices), local)]
        hosts.sort(key=lambda host: sum(device.perf.total for device in host))
        for i, shard in enumerate(option.shards):
            self._place(option, shard, hosts[i // local % len(hosts)][i % local])

    def _place(self, option: ShardingOption, shard: Shard, device: DeviceHardware) -> None:
        storage = shard.storage or Storage(0, 0)
        if not storage.fits_in(device.storage):
            raise self._error(option)
        shard.rank = device.rank
        device.storage = device.storage - storage
        device.perf = device.perf + (shard.perf or Perf(0, 0, 0, 0))

    def _error(self, option: ShardingOption) -> PlannerError:
        return PlannerError(
            f"{type(self).__name__}: table '{option.name}', {option.sharding_type}: a shard needs "
            f"{option.shards[0].storage}; no rank has room for it. Use more ranks, or another sharding type.",
            error_type=PlannerErrorType.PARTITION,
        )


class MemoryBalancedPartitioner(GreedyPerfPartitioner):
    """TorchRec's partitioner that balances memory, by name; it places as `GreedyPerfPartitioner` does."""

    def __init__(self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False) -> None:
        super().__init__(SortBy.STORAGE, balance_modules)


class NoopPerfModel(PerfModel):
    """The milliseconds of the slowest rank."""

    def __init__(self, topology: Any) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        sums = [0.0] * self._topology.world_size
        for option in plan:
            for shard in option.shards:
                sums[shard.rank or 0] += shard.perf.total if shard.perf is not None else 0.0
        return max(sums)


class NoopStorageModel(PerfModel):
    """The bytes of the fullest rank."""

    def __init__(self, topology: Any) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        sums = [0] * self._topology.world_size
        for option in plan:
            for shard in option.shards:
                storage = shard.storage or Storage(0, 0)
                sums[shard.rank or 0] += storage.hbm + storage.ddr
        return float(max(sums))
