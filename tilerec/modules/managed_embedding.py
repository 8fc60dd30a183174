"""Embedding collections for arbitrary int64 ids: managed collision first, and a reset of rows that change their id.

features ──► ManagedCollisionCollection ──► rows ──► EmbeddingBagCollection / EmbeddingCollection
                    │ evicted rows
                    └──► initial values and fresh optimizer state, before they are read
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.batch_checks import check_batch
from tilerec.modules.collection import TableCollection
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.id_counts import IdPlace, IdStats
from tilerec.modules.id_resize import Resized
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.row_reset import reset_rows
from tilerec.modules.table_resize import check_resizable, resize_table
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.ignored_settings import warn_ignored_settings


class ManagedCollisionEmbeddings(nn.Module):
    """Base class of the two modules below (abstract)."""

    _kind: type[TableCollection]

    def __init__(
        self,
        embedding_module: TableCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool,
        allow_in_place_embed_weight_update: bool,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        if not isinstance(embedding_module, self._kind):
            raise ConfigError(f"{who}: got a {type(embedding_module).__name__}; expected a {self._kind.__name__}.")
        if not isinstance(managed_collision_collection, ManagedCollisionCollection):
            raise ConfigError(
                f"{who}: got a {type(managed_collision_collection).__name__}; expected a ManagedCollisionCollection."
            )
        _check_same_tables(who, embedding_module, managed_collision_collection)
        reason = "rows are reset between two steps, when no autograd graph references them"
        name = "allow_in_place_embed_weight_update"
        warn_ignored_settings(who, {name: allow_in_place_embed_weight_update}, {name: reason}, 3)
        self._managed_collision_collection = managed_collision_collection
        vars(embedding_module)["_managed_by"] = type(self)  # for a sharder's error messages
        self._embedding_module = embedding_module
        self._return_remapped_features = return_remapped_features
        self.register_load_state_dict_pre_hook(_check_complete)

    @property
    def managed_collision_collection(self) -> ManagedCollisionCollection:
        """The id maps."""
        return self._managed_collision_collection

    @property
    def embedding_module(self) -> TableCollection:
        """The tables."""
        return self._embedding_module

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._embedding_module.device

    def stats(self) -> dict[str, IdStats]:
        """Return statistics of ids by table; see `IdStats`. If sharded, of all ranks; collective."""
        return self._managed_collision_collection.stats()

    def inspect(self, feature: str, id_: int) -> IdPlace:
        """Return the place of a feature's id; see `IdPlace`. Collective if sharded."""
        return self._managed_collision_collection.inspect(feature, id_)

    def _remap(self, features: KeyedJaggedTensor, mutate: bool) -> KeyedJaggedTensor:
        """Return the rows of the batch's ids, and reset evicted rows."""
        self._check(features)
        remapped = self._managed_collision_collection(features, mutate)
        self._reset(self._managed_collision_collection.lost_rows())
        return remapped

    def _check(self, features: KeyedJaggedTensor) -> None:
        """Raise the error that the tables would raise, before any id gets a row."""
        if not torch.compiler.is_exporting():
            check_batch(self._embedding_module, self._managed_collision_collection.modules_by_table, features)

    def _reset(self, lost: dict[str, Tensor | None]) -> None:
        for table, rows_M in lost.items():
            if rows_M is not None:
                reset_rows(self._embedding_module._tables[table], rows_M)

    def resize(self, table: str, zch_size: int | None = None, total_num_buckets: int | None = None) -> Resized:
        """Change the capacity of a table, and keep its ids with their rows and optimizer state.

        Args:
            zch_size: the new number of rows. None keeps the rows per bucket.
            total_num_buckets: the new number of buckets, a multiple or a divisor of the current number. None keeps it.

        Returns:
            The rows that moved, the number of ids kept, and the ids dropped.

        Raises:
            ConfigError: the table is unknown, tied or sharded, or the sizes do not fit. Nothing has changed then.
        """
        collection = self._managed_collision_collection
        if table not in collection.modules_by_table:
            raise ConfigError(
                f"{type(self).__name__}: got table '{table}'; expected a managed table: "
                f"{list(collection.modules_by_table)[:20]}."
            )
        module = collection.modules_by_table[table]
        module.id_map.resized(zch_size, total_num_buckets)
        check_resizable(self._embedding_module._tables[table])
        moved = module.resize(zch_size, total_num_buckets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the check above has warned already
            resize_table(self._embedding_module, table, module.output_size(), moved.old_rows, moved.new_rows)
        collection._embedding_configs = tuple(
            replace(config, num_embeddings=module.output_size()) if config.name == table else config
            for config in collection._embedding_configs
        )
        return moved


class ManagedCollisionEmbeddingBagCollection(ManagedCollisionEmbeddings):
    """An `EmbeddingBagCollection` for arbitrary int64 ids.

    Args:
        embedding_bag_collection: the tables.
        managed_collision_collection: built from the same table configs.
        return_remapped_features: whether `forward` also returns the batch of row numbers.
        allow_in_place_embed_weight_update: TorchRec's; no effect.

    Raises:
        ConfigError: the two have different tables.
    """

    _kind = EmbeddingBagCollection

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection, return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            embedding_bag_collection, managed_collision_collection, return_remapped_features,
            allow_in_place_embed_weight_update,
        )  # fmt: skip

    @graph_break
    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[KeyedTensor, KeyedJaggedTensor | None]:
        """Map ids to rows, then look up and pool.

        Args:
            features, mutate_miss_lengths: see `ManagedCollisionCollection.forward`.

        Returns:
            The pooled rows, and the batch of row numbers (None unless `return_remapped_features`).
        """
        remapped = self._remap(features, mutate_miss_lengths)
        pooled = self._embedding_module(remapped)
        return pooled, remapped if self._return_remapped_features else None


class ManagedCollisionEmbeddingCollection(ManagedCollisionEmbeddings):
    """An `EmbeddingCollection` for arbitrary int64 ids.

    Args:
        embedding_collection: the tables.
        managed_collision_collection, return_remapped_features, allow_in_place_embed_weight_update: see
            `ManagedCollisionEmbeddingBagCollection`.
    """

    _kind = EmbeddingCollection

    def __init__(
        self, embedding_collection: EmbeddingCollection, managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False, allow_in_place_embed_weight_update: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            embedding_collection, managed_collision_collection, return_remapped_features,
            allow_in_place_embed_weight_update,
        )  # fmt: skip

    @graph_break
    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Map ids to rows, then look up one row per id; see `ManagedCollisionEmbeddingBagCollection.forward`."""
        remapped = self._remap(features, mutate_miss_lengths)
        rows = self._embedding_module(remapped)
        return rows, remapped if self._return_remapped_features else None


def _check_complete(module: nn.Module, state: dict[str, Any], prefix: str, _: Any, strict: bool, *__: Any) -> None:
    """Raise before loading ids without their rows, or rows without their ids."""
    assert isinstance(module, ManagedCollisionEmbeddings)
    tables = module._embedding_module
    names = [f"{prefix}_embedding_module.{tables._holder}.{table}.weight" for table in tables._tables]
    missing = [name for name in names if name not in state]
    if strict and missing:
        raise ConfigError(
            f"{type(module).__name__}: the state lacks {missing[:8]}; it is truncated, or from another model. Nothing "
            "of this module is loaded."
        )


def _check_same_tables(who: str, tables: TableCollection, collection: ManagedCollisionCollection) -> None:
    own = {config.name: config for config in tables._configs}
    for table in collection.modules_by_table:
        config = next(c for c in collection.embedding_configs() if c.name == table)
        if table not in own:
            raise ConfigError(
                f"{who}: got managed collision for table '{table}'; expected a table of the embedding module: "
                f"{list(own)[:20]}."
            )
        for fact in ("num_embeddings", "feature_names"):
            if getattr(own[table], fact) != getattr(config, fact):
                raise ConfigError(
                    f"{who}: table '{table}' has {fact}={getattr(own[table], fact)} in the embedding module, but "
                    f"{getattr(config, fact)} in the managed collision collection. Give both the same configs."
                )
