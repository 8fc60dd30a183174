"""TorchRec's records of planning, and the bases of the parts of its planner.

    enumerator   model -> sharding options (one per table, sharding type and kernel)
    estimator    options -> memory and milliseconds of each shard
    proposer     options -> one option per table, again and again
    partitioner  proposal -> ranks of its shards
    perf model   plan -> a number; the least is the best

tilerec's own search has no such parts. `EmbeddingShardingPlanner` of this package uses parts that a program defines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import torch
from torch import nn


class _Sums:
    """Records of numbers that add up field by field."""

    def __add__(self, other: Any) -> Any:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))  # type: ignore[arg-type]

    def __sub__(self, other: Any) -> Any:
        return type(self)(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))  # type: ignore[arg-type]


@dataclass(unsafe_hash=True)
class Storage(_Sums):
    """Bytes of device memory, host memory and disk."""

    hbm: int
    ddr: int
    ssd: int = 0

    def fits_in(self, other: Storage) -> bool:
        """Return whether the bytes are at most the other's, memory by memory."""
        return self.hbm <= other.hbm and self.ddr <= other.ddr and self.ssd <= other.ssd


@dataclass(unsafe_hash=True)
class Perf(_Sums):
    """Predicted milliseconds of a step, by part."""

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """The sum."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass
class DeviceHardware:
    """A rank: its free memory, and the milliseconds that it has been given."""

    rank: int
    storage: Storage
    perf: Perf


@dataclass
class Shard:
    """A piece of a table: rows and columns, where it begins, its cost, its rank once it is placed."""

    size: list[int]
    offset: list[int]
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    def __hash__(self) -> int:
        return hash((*self.size, *self.offset, self.rank))


class PartitionByType(Enum):
    """How a partitioner places shards: one by one, a shard per rank of a host, on all ranks."""

    DEVICE = "device"
    HOST = "host"
    UNIFORM = "uniform"
    MULTI_HOST = "multi_host"


@dataclass(eq=False)
class ShardingOption:
    """One way to shard one table.

    Args:
        name: of the table.
        tensor: its weight, or one on meta of the same shape.
        module: path and module.
        input_lengths: ids per bag of each feature.
        batch_size: samples of a rank.
        sharding_type, partition_by, compute_kernel: the values of the enums.
        shards: the pieces.
        dependency, is_pooled, feature_names, …: as in TorchRec; kept.
    """

    name: str
    tensor: torch.Tensor
    module: tuple[str, nn.Module]
    input_lengths: list[float]
    batch_size: int
    sharding_type: str
    partition_by: str
    compute_kernel: str
    shards: list[Shard]
    cache_params: Any = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    dependency: str | None = None
    is_pooled: bool | None = None
    feature_names: list[str] | None = None
    output_dtype: Any = None
    key_value_params: Any = None
    num_poolings: list[float] | None = None

    @property
    def path(self) -> str:
        """Path of the module."""
        return self.module[0]

    @property
    def fqn(self) -> str:
        """Path and table."""
        return f"{self.module[0]}.{self.name}"

    @property
    def num_shards(self) -> int:
        """Number of pieces."""
        return len(self.shards)

    @property
    def num_inputs(self) -> int:
        """Number of features."""
        return len(self.input_lengths)

    @property
    def cache_load_factor(self) -> float | None:
        """Cache lines per row."""
        return None if self.cache_params is None else self.cache_params.load_factor

    @property
    def total_storage(self) -> Storage:
        """Bytes of all pieces."""
        return sum((shard.storage for shard in self.shards if shard.storage is not None), Storage(0, 0))

    @property
    def total_perf(self) -> float:
        """Milliseconds of all pieces."""
        return sum(shard.perf.total for shard in self.shards if shard.perf is not None)

    def get_shards_assignment(self) -> list[int | None]:
        """Return the rank of each piece."""
        return [shard.rank for shard in self.shards]

    def __deepcopy__(self, memo: Any) -> ShardingOption:
        copied = type(self)(**{f.name: getattr(self, f.name) for f in fields(self)})
        copied.shards = [Shard(list(s.size), list(s.offset), s.storage, s.perf, s.rank) for s in self.shards]
        return copied


@dataclass
class SharderData:
    """A sharder's settings, for estimators."""

    fused_params: dict[str, Any] = field(default_factory=dict)


class ShardEstimator(ABC):
    """Base of estimators: `estimate` sets the storage or the perf of every shard."""

    def __init__(self, topology: Any, constraints: Mapping[str, Any] | None = None) -> None:
        self._topology, self._constraints = topology, constraints

    @abstractmethod
    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: dict[str, SharderData] | None = None
    ) -> None:
        """Set the estimates."""


class Enumerator(ABC):
    """Base of enumerators."""

    @abstractmethod
    def enumerate(self, module: nn.Module, sharders: Sequence[Any]) -> list[ShardingOption]:
        """Return the options of a model's tables."""

    @abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set memory and milliseconds of the options' shards."""


class Proposer(ABC):
    """Base of proposers."""

    @abstractmethod
    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Take the options; the next proposal is the first one."""

    @abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """Return one option per table; None: there are no more."""

    @abstractmethod
    def feedback(
        self, partitionable: bool, plan: list[ShardingOption] | None = None, perf_rating: float | None = None,
        storage_constraint: Any = None,
    ) -> None:  # fmt: skip
        """Take the result of the last proposal, and move to the next one."""


class Partitioner(ABC):
    """Base of partitioners."""

    @abstractmethod
    def partition(self, proposal: list[ShardingOption], storage_constraint: Any) -> list[ShardingOption]:
        """Return the proposal with a rank for every shard; raise a `PlannerError` if it does not fit."""


class PerfModel(ABC):
    """Base of ratings."""

    @abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the cost of a plan; less is better."""


class Stats(ABC):
    """Base of printers of plans."""

    @abstractmethod
    def log(self, sharding_plan: Any, topology: Any, batch_size: int, storage_reservation: Any, *rest: Any,
            **more: Any) -> None:  # fmt: skip
        """Print a plan."""
