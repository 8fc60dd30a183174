"""TorchRec's sharders of managed-collision modules: optimizers and wire formats of the tables in such modules.

For tables in such a module, a sharder of `ManagedCollisionEmbeddingBagCollection` takes precedence over one of
`EmbeddingBagCollection`; without it, the latter applies to these tables, too. Ids have no settings: their rank depends
only on their bucket, and row numbers are sent as integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, final

from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddings,
)
from tilerec.modules.table import Table
from tilerec.sharders.qcomms import CommOp
from tilerec.sharders.table_sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharder,
    Registry,
)
from tilerec.sharding.managed_collision import (
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
)
from tilerec.spec.ignored_settings import warn_ignored_settings


@final
class ManagedCollisionCollectionSharder(ModuleSharder[ManagedCollisionCollection]):
    """Sharder of `ManagedCollisionCollection`s, without optimizer and wire formats; an argument of the two below.

    Args:
        qcomm_codecs_registry: accepted with a warning; no effect.
    """

    _op = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    _kinds = ManagedCollisionCollection, ShardedManagedCollisionCollection

    def __init__(self, qcomm_codecs_registry: Registry | None = None) -> None:
        name, reason = "qcomm_codecs_registry", "ids and row numbers are integers, which are sent unchanged"
        warn_ignored_settings(type(self).__name__, {name: qcomm_codecs_registry}, {name: reason}, 2)
        super().__init__()
        self._registry = qcomm_codecs_registry

    def _tables_of(self, module: nn.Module) -> dict[str, Table]:
        return {}  # ids are buffers, placed with the rows of their table


@final
class ManagedCollisionEmbeddingBagCollectionSharder(ModuleSharder[ManagedCollisionEmbeddingBagCollection]):
    """Sharder of `ManagedCollisionEmbeddingBagCollection`s.

    Args:
        ebc_sharder: sharder with the settings of the tables.
        mc_sharder: accepted without effect.
        fused_params, qcomm_codecs_registry: see `ModuleSharder`; alternatives to `ebc_sharder`.

    Raises:
        ConfigError: both `ebc_sharder` and one of the alternatives are given, or a sharder is of another class.
    """

    _op = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
    _kinds = ManagedCollisionEmbeddingBagCollection, ShardedManagedCollisionEmbeddingBagCollection

    def __init__(
        self, ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None, fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
    ) -> None:  # fmt: skip
        who, kind = type(self).__name__, EmbeddingBagCollectionSharder
        _check(who, "ebc_sharder", ebc_sharder, kind, mc_sharder, fused_params, qcomm_codecs_registry)
        tables_sharder = ebc_sharder or kind(fused_params, qcomm_codecs_registry)
        super().__init__(tables_sharder.fused_params, tables_sharder.qcomm_codecs_registry)

    def _tables_of(self, module: nn.Module) -> dict[str, Table]:
        return cast(ManagedCollisionEmbeddings, module).embedding_module._tables


@final
class ManagedCollisionEmbeddingCollectionSharder(ModuleSharder[ManagedCollisionEmbeddingCollection]):
    """Sharder of `ManagedCollisionEmbeddingCollection`s.

    Args:
        ec_sharder: sharder with the settings of the tables.
        mc_sharder, fused_params, qcomm_codecs_registry: see `ManagedCollisionEmbeddingBagCollectionSharder`.
    """

    _op = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    _kinds = ManagedCollisionEmbeddingCollection, ShardedManagedCollisionEmbeddingCollection

    def __init__(
        self, ec_sharder: EmbeddingCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None, fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
    ) -> None:  # fmt: skip
        who, kind = type(self).__name__, EmbeddingCollectionSharder
        _check(who, "ec_sharder", ec_sharder, kind, mc_sharder, fused_params, qcomm_codecs_registry)
        tables_sharder = ec_sharder or kind(fused_params, qcomm_codecs_registry)
        super().__init__(tables_sharder.fused_params, tables_sharder.qcomm_codecs_registry)

    def _tables_of(self, module: nn.Module) -> dict[str, Table]:
        return cast(ManagedCollisionEmbeddings, module).embedding_module._tables


def _check(
    who: str, name: str, inner: Any, kind: type[ModuleSharder], ids: Any, fused_params: Any, registry: Any
) -> None:
    for parameter, given, wanted in (
        (name, inner, kind),
        ("mc_sharder", ids, ManagedCollisionCollectionSharder),
    ):
        if given is not None and not isinstance(given, wanted):
            words = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
            raise ConfigError(f"{who}: {parameter}: got {words}; expected {wanted.__name__}(...), or None.")
    if inner is not None and (fused_params is not None or registry is not None):
        raise ConfigError(
            f"{who}: got fused_params or qcomm_codecs_registry beside {name}; give them to the {kind.__name__} only."
        )
