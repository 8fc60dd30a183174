"""TorchRec's types of distributed modules, for annotations, `isinstance` and a program's own subclasses."""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tilerec.compat.awaitable import Awaitable, LazyAwaitable
from tilerec.errors import ConfigError
from tilerec.sharding.embedding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from tilerec.sharding.managed_collision import (
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
)
from tilerec.spec.plan import EmbeddingModuleShardingPlan

CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")
ShrdCtx = TypeVar("ShrdCtx")

ModuleShardingPlan = EmbeddingModuleShardingPlan


@unique
class BoundsCheckMode(Enum):
    """FBGEMM's checks of ids. In tilerec, a collection has `on_bad_id=`."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6


@unique
class PipelineType(Enum):
    """Kinds of training pipelines, for estimates of memory."""

    NONE = "none"
    TRAIN_BASE = "train_base"
    TRAIN_SPARSE_DIST = "train_sparse_dist"
    TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"


@unique
class ParameterStorage(Enum):
    """Memories of a table."""

    HBM = "hbm"
    DDR = "ddr"


@unique
class ComputeKernel(Enum):
    """Kernels of modules without tables."""

    DEFAULT = "default"


@dataclass(eq=False)
class KeyValueParams:
    """Settings of tables in key-value stores. tilerec keeps rows in memory: `ParameterSharding` warns of them."""

    ssd_storage_directory: str | None = None
    ssd_rocksdb_write_buffer_size: int | None = None
    ssd_rocksdb_shards: int | None = None
    gather_ssd_cache_stats: bool | None = None
    stats_reporter_config: Any = None
    use_passed_in_path: bool = True
    l2_cache_size: int | None = None
    max_l1_cache_size: int | None = None
    enable_async_update: bool | None = None
    bulk_init_chunk_size: int | None = None
    lazy_bulk_init_enabled: bool | None = None
    enable_raw_embedding_streaming: bool | None = None
    res_store_shards: int | None = None
    kvzch_tbe_config: Any = None
    load_ckpt_without_opt: bool = False
    ps_hosts: tuple[tuple[str, int], ...] | None = None
    ps_client_thread_num: int | None = None
    ps_max_key_per_request: int | None = None
    ps_max_local_index_length: int | None = None


class CacheStatistics(ABC):
    """Statistics of a cached table's accesses; tilerec's planner takes `ParameterConstraints(skew=)`."""

    @property
    @abstractmethod
    def expected_lookups(self) -> float:
        """Number of distinct ids of a batch."""

    @abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Return the share of ids that a cache of a relative size lacks."""

    @property
    @abstractmethod
    def cacheability(self) -> float:
        """How well a cache works, from 0 (best) to 1."""


class ShardedModule(nn.Module, Generic[CompIn, DistOut, Out, ShrdCtx], metaclass=ABCMeta):
    """Base of a program's own sharded modules; tilerec's sharded collections count as instances.

    forward = create_context, input_dist, compute, output_dist.
    """

    def __init__(self, qcomm_codecs_registry: Any = None) -> None:
        super().__init__()
        self._registry = qcomm_codecs_registry or {}

    @property
    def qcomm_codecs_registry(self) -> Any:
        """The argument of the constructor."""
        return self._registry

    @abstractmethod
    def create_context(self) -> ShrdCtx:
        """Return an object that the steps of one forward share."""

    @abstractmethod
    def input_dist(self, ctx: ShrdCtx, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:
        """Send the input to the ranks that need it."""

    @abstractmethod
    def compute(self, ctx: ShrdCtx, dist_input: CompIn) -> DistOut:
        """Return this rank's results."""

    @abstractmethod
    def output_dist(self, ctx: ShrdCtx, output: DistOut) -> LazyAwaitable[Out]:
        """Send the results to the ranks of the samples."""

    def compute_and_output_dist(self, ctx: ShrdCtx, input: CompIn) -> LazyAwaitable[Out]:
        """Compute, and send the results."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[Out]:
        """Return the results of this rank's samples."""
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, *input, **kwargs).wait().wait())


class ShardedEmbeddingModule(ShardedModule[CompIn, DistOut, Out, ShrdCtx]):
    """A `ShardedModule` with tables."""


for _kind in (
    ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection, ShardedManagedCollisionEmbeddingCollection,
):  # fmt: skip
    ShardedEmbeddingModule.register(_kind)


class _SeesTables(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, DTensor)


class ShardedTensor(metaclass=_SeesTables):
    """Tables in state dicts: tilerec has them as DTensors, which count as instances.

    `tilerec.compat.torchrec` gives them `local_shards()` and `metadata()`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> ShardedTensor:
        """Raise a ConfigError: tables are DTensors."""
        raise ConfigError(
            "ShardedTensor: got a call; expected none, as tables are DTensors. Use torch.distributed.tensor."
        )


class ShardingPlanner(ABC):
    """Base of planners: `plan` and `collective_plan` return a `ShardingPlan`."""

    @abstractmethod
    def plan(self, module: nn.Module, sharders: Any) -> Any:
        """Return the plan of a model."""

    @abstractmethod
    def collective_plan(self, module: nn.Module, sharders: Any) -> Any:
        """Return the same plan on all ranks."""


class QuantizedCommCodec(ABC):
    """Base of wire formats of TorchRec. tilerec registers formats with `tilerec.comms` (docs/extending.md)."""

    @abstractmethod
    def encode(self, input_tensor: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Return the numbers as they are sent."""

    @abstractmethod
    def decode(self, input_grad: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Return the numbers as they are used."""


class NoOpQuantizedCommCodec(QuantizedCommCodec):
    """Numbers are sent as they are."""

    def encode(self, input_tensor: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        return input_tensor

    def decode(self, input_grad: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        return input_grad

    def quantized_dtype(self) -> torch.dtype:
        """Return float32."""
        return torch.float32


@dataclass
class QuantizedCommCodecs:
    """Formats of rows and of gradients."""

    forward: QuantizedCommCodec = field(default_factory=NoOpQuantizedCommCodec)
    backward: QuantizedCommCodec = field(default_factory=NoOpQuantizedCommCodec)


class NullShardingContext(nn.Module):
    """Context of a module that needs none."""


class NullShardedModuleContext:
    """Context of a module that needs none; setting an attribute raises an error."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Do nothing: there is no memory."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"NullShardedModuleContext: got {name}=; expected no attributes.")


def rank_device(device_type: str, rank: int) -> torch.device:
    """Return a rank's device: the CPU, or the device with the rank's number."""
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)


def get_tensor_size_bytes(t: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return t.numel() * t.element_size()
