"""TorchRec's sharders: the optimizer and wire formats of all collections of one kind.

The plan alone places tables, so every kind of collection is sharded with or without a sharder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, cast, final

from torch import nn
from typing_extensions import TypeVar

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.table import Table
from tilerec.sharders.fused_params import read_cache_params, read_fused_params
from tilerec.sharders.qcomms import CommOp
from tilerec.sharding.embedding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from tilerec.spec.cache import CacheParams
from tilerec.spec.ignored_settings import warn_ignored_settings
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.plan import HOST_KERNELS, KERNELS_IN_USE, EmbeddingComputeKernel, ShardingType, Wire

Registry = Wire | Mapping[str, Any]


M = TypeVar("M", bound=nn.Module, covariant=True, default=nn.Module)


class ModuleSharder(Generic[M]):
    """Base of the sharders; `M` is the kind of collection.

    Args:
        fused_params: the optimizer of all tables of this kind without an attached one; see `read_fused_params`.
        qcomm_codecs_registry: a `Wire`, or the result of `get_qcomm_codecs_registry`: the formats of all tables of this
            kind whose plan names none.

    Raises:
        ConfigError: one of them is invalid.
    """

    _op: CommOp
    _kinds: tuple[type[nn.Module], type[nn.Module]]  # before and after `shard`

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
    ) -> None:
        self._cache, fused = read_cache_params(fused_params, type(self).__name__)
        self._spec = read_fused_params(fused, type(self).__name__)
        self._wire = _read_registry(qcomm_codecs_registry, type(self)._op, type(self).__name__)
        self._fused_params = dict(fused_params or {})
        self._registry = qcomm_codecs_registry

    @property
    def module_type(self) -> type[M]:
        """The kind of collection to which the sharder applies."""
        return cast("type[M]", self._kinds[0])

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        """The class of such a collection after `shard`."""
        return self._kinds[1]

    @property
    def fused_params(self) -> dict[str, Any]:
        """The argument of the constructor."""
        return self._fused_params

    @property
    def qcomm_codecs_registry(self) -> Registry | None:
        """The argument of the constructor."""
        return self._registry

    @property
    def optimizer(self) -> OptimizerSpec | None:
        """The optimizer that `fused_params` describe."""
        return self._spec

    @property
    def cache(self) -> CacheParams | None:
        """The cache that `fused_params` describe, for `fused_uvm_caching` tables without `cache_params` in the plan."""
        return self._cache

    @property
    def wire(self) -> Wire | None:
        """The formats that the registry names."""
        return self._wire

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the weights of a collection's tables, by name."""
        if not isinstance(module, self.module_type):
            raise ConfigError(
                f"{type(self).__name__}: got a {type(module).__name__}; expected a {self.module_type.__name__}."
            )
        return {name: table.weight for name, table in self._tables_of(module).items()}

    def _tables_of(self, module: nn.Module) -> dict[str, Table]:
        return cast(TableCollection, module)._tables

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return all sharding types; every device supports them."""
        return [kind.value for kind in ShardingType if kind is not ShardingType.EXPLICIT]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the kernels that need no further settings; on CPU, without those in host memory.

        A cache of host memory saves nothing on a CPU. "key_value" needs a folder.
        """
        idle = set(HOST_KERNELS) if compute_device_type == "cpu" else {EmbeddingComputeKernel.KEY_VALUE}
        return [kernel.value for kernel in KERNELS_IN_USE if kernel not in idle]


@final
class EmbeddingBagCollectionSharder(ModuleSharder[EmbeddingBagCollection]):
    """Sharder of `EmbeddingBagCollection`s.

    Args:
        fused_params, qcomm_codecs_registry: see `ModuleSharder`.
        sharded_module_order_overwrite: accepted with a warning; no effect.
    """

    _op = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
    _kinds = EmbeddingBagCollection, ShardedEmbeddingBagCollection

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
        sharded_module_order_overwrite: Sequence[str] | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        name = "sharded_module_order_overwrite"
        reason = "tables and outputs keep the collection's order under every plan"
        warn_ignored_settings(type(self).__name__, {name: sharded_module_order_overwrite}, {name: reason}, 2)


@final
class EmbeddingCollectionSharder(ModuleSharder[EmbeddingCollection]):
    """Sharder of `EmbeddingCollection`s.

    Args:
        fused_params, qcomm_codecs_registry: see `ModuleSharder`.
        use_index_dedup: send each distinct id of a batch once. False: where the counts of a batch show that it pays.
    """

    _op = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    _kinds = EmbeddingCollection, ShardedEmbeddingCollection

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        if use_index_dedup:
            self._wire = replace(self._wire or Wire(), distinct=True)


def get_default_sharders() -> list[ModuleSharder]:
    """Return one sharder of each kind, without an optimizer."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def _read_registry(registry: Registry | None, op: CommOp, who: str) -> Wire | None:
    if registry is None or isinstance(registry, Wire):
        return registry
    wire = registry.get(op.name) if isinstance(registry, Mapping) else None
    if not isinstance(registry, Mapping) or not (wire is None or isinstance(wire, Wire)):
        raise ConfigError(
            f"{who}: qcomm_codecs_registry: got {registry!r:.200}; expected a Wire such as Wire('bf16', 'bf16'), or "
            "get_qcomm_codecs_registry(QCommsConfig(...))."
        )
    return wire
