"""TorchRec's sharders, with the methods that programs and planners call on them.

`DistributedModelParallel` reads a sharder's optimizer and wire formats and shards all collections itself. Their methods
`shard` and `reshard` do the same for one collection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.shard import shard
from tilerec.sharders import managed_sharders, table_sharders
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

M = TypeVar("M", bound=nn.Module)


class _Methods:
    """Methods of a sharder of embedding collections."""

    def shard(
        self, module: nn.Module, params: Mapping[str, ParameterSharding], env: ShardingEnv,
        device: torch.device | None = None, module_fqn: str | None = None,
    ) -> nn.Module:  # fmt: skip
        """Shard a collection in place, and return it. Collective.

        Args:
            params: shardings by table.
            module_fqn: the collection's path in the model; no effect.
        """
        plan = ShardingPlan({"": EmbeddingModuleShardingPlan(params)})
        return shard(module, plan, env, device, self)  # type: ignore[arg-type]

    def reshard(
        self, sharded_module: nn.Module, changed_shard_to_params: Mapping[str, ParameterSharding],
        env: ShardingEnv | None = None, device: torch.device | None = None,
    ) -> nn.Module:  # fmt: skip
        """Move tables of a sharded collection to new places, with their state. Collective."""
        before = plan_of(sharded_module).plan[""]
        tables = EmbeddingModuleShardingPlan({**before, **changed_shard_to_params})
        reshard(sharded_module, ShardingPlan({"": tables}))
        return sharded_module

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Return the bytes of a table by memory: "hbm" (device) and "ddr" (host)."""
        size = tensor.numel() * tensor.element_size()
        on_host = compute_device_type == "cpu" or "uvm" in compute_kernel
        return {"ddr" if on_host else "hbm": size}


class ModuleSharder(ABC, Generic[M]):
    """Base of sharders of a program's own modules: subclasses define `module_type` and `shard`.

    `tilerec.compat.model_parallel.DistributedModelParallel` replaces modules of this type by the result of `shard`.
    """

    optimizer = cache = wire = None

    def __init__(self, qcomm_codecs_registry: Any = None) -> None:
        self._registry = qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> Any:
        """The argument of the constructor."""
        return self._registry

    @property
    @abstractmethod
    def module_type(self) -> type[M]:
        """The type of the modules that the sharder shards."""

    @abstractmethod
    def shard(
        self, module: M, params: Mapping[str, ParameterSharding], env: ShardingEnv,
        device: torch.device | None = None, module_fqn: str | None = None,
    ) -> nn.Module:  # fmt: skip
        """Return the sharded module."""

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Return the parameters that can be sharded, by name."""
        return dict(module.named_parameters())

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that the sharder supports."""
        return ["data_parallel"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the compute kernels that the sharder supports."""
        return ["default"]

    storage_usage = _Methods.storage_usage


class BaseEmbeddingSharder(ModuleSharder[M]):
    """Base of sharders of a program's own embedding modules.

    Args:
        fused_params: kept as an attribute, for the subclass.
    """

    def __init__(self, fused_params: dict[str, Any] | None = None, qcomm_codecs_registry: Any = None) -> None:
        super().__init__(qcomm_codecs_registry)
        self.fused_params = fused_params


class EmbeddingBagCollectionSharder(_Methods, table_sharders.EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """`tilerec.parallel.EmbeddingBagCollectionSharder` with `shard`, `reshard` and `storage_usage`."""


class EmbeddingCollectionSharder(_Methods, table_sharders.EmbeddingCollectionSharder):  # type: ignore[misc]
    """`tilerec.parallel.EmbeddingCollectionSharder` with `shard`, `reshard` and `storage_usage`."""


class ManagedCollisionCollectionSharder(_Methods, managed_sharders.ManagedCollisionCollectionSharder):  # type: ignore[misc]
    """`tilerec.parallel.ManagedCollisionCollectionSharder` with `shard`, `reshard` and `storage_usage`."""


class ManagedCollisionEmbeddingBagCollectionSharder(  # type: ignore[misc]
    _Methods, managed_sharders.ManagedCollisionEmbeddingBagCollectionSharder
):
    """`tilerec.parallel.ManagedCollisionEmbeddingBagCollectionSharder` with TorchRec's methods."""


class ManagedCollisionEmbeddingCollectionSharder(  # type: ignore[misc]
    _Methods, managed_sharders.ManagedCollisionEmbeddingCollectionSharder
):
    """`tilerec.parallel.ManagedCollisionEmbeddingCollectionSharder` with TorchRec's methods."""


def get_default_sharders() -> list[Any]:
    """Return one sharder of each kind, without an optimizer."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def get_module_to_default_sharders() -> dict[type[nn.Module], Any]:
    """Return the default sharders by the type of their modules."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}
