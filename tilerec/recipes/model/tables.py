"""Tables of the recipes' models: one per sparse feature, or per table that features share.

A table with `ids = "managed"` in a run file maps 64-bit ids to rows by a `HashZchManagedCollisionModule`:
docs/managed-collision.md has its rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from tilerec.data.dataset import Dataset, SparseFeature
from tilerec.errors import ConfigError
from tilerec.models.tables import Bags
from tilerec.modules.buckets import DEFAULT_BUCKETS
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.train.config import ModelConfig

_ROWS_PER_BUCKET = 64  # smaller buckets overflow long before the table is full
_LEAST_BUCKETS = 16  # not fewer, so that up to 16 ranks share any table; the map must not depend on their number
_POLICIES = {"none": None, "lru": "LRU_EVICTION", "lfu": "LFU_EVICTION"}


@dataclass(frozen=True)
class ManagedIds:
    """Managed collision of the tables with `ids = "managed"`; no effect on others.

    Attributes:
        eviction: the id that loses its row when a bucket of the table is full: "lru" the longest unused, "lfu" the
            least used; "none": the new id shares a row with others.
        admission_threshold: an id gets a row at its k-th occurrence, and shares one until then.
        buckets: buckets of each table; a table is enlarged to whole ones. Ranks hold whole buckets, so it is the
            largest number of ranks. 0: one per 64 rows, from 16 to 768, of at least 64 rows each.
    """

    eviction: Literal["lru", "lfu", "none"] = "lru"
    admission_threshold: int = 1
    buckets: int = 0

    def __post_init__(self) -> None:
        if self.eviction not in _POLICIES:
            raise ConfigError(f"managed.eviction: got {self.eviction!r}; expected one of {', '.join(_POLICIES)}.")
        if self.admission_threshold < 1:
            raise ConfigError(f"managed.admission_threshold: got {self.admission_threshold}; expected at least 1.")
        if self.buckets < 0:
            raise ConfigError(f"managed.buckets: got {self.buckets}; expected at least 0.")

    def buckets_of(self, rows: int) -> int:
        """Return the number of buckets of a table that needs this number of rows."""
        return self.buckets or max(_LEAST_BUCKETS, min(DEFAULT_BUCKETS, rows // _ROWS_PER_BUCKET))

    def rows_of(self, rows: int) -> int:
        """Return the number of rows of a table that needs at least this number: whole buckets."""
        buckets = self.buckets_of(rows)
        return buckets * max(-(-rows // buckets), 1 if self.buckets else _ROWS_PER_BUCKET)

    def module(self, rows: int, device: torch.device) -> HashZchManagedCollisionModule:
        """Return the id map of a table that needs this number of rows; it has `rows_of` of them."""
        return HashZchManagedCollisionModule(
            self.rows_of(rows),
            device,
            total_num_buckets=self.buckets_of(rows),
            eviction_policy_name=_POLICIES[self.eviction],
            admission_threshold=self.admission_threshold,
        )


@dataclass(frozen=True)
class TablesConfig(ModelConfig):
    """Base class of the configs of models with tables of one embedding dim (abstract).

    Attributes:
        embedding_dim: D of every table.
        mean_pooling: average bags instead of summing them; bags with weights are always summed.
        init_bound: initial rows are uniform in ±init_bound; 0 means ±sqrt(1 / rows of the table).
        managed: of tables with ids = "managed".
    """

    embedding_dim: int = 16
    mean_pooling: bool = False
    init_bound: float = 0.0
    managed: ManagedIds = field(default_factory=ManagedIds)

    def bags(self, dataset: Dataset, device: torch.device) -> Bags | None:
        """Return the tables of a dataset's features; None if it has no sparse features."""
        bound = self.init_bound or None
        return bags_of(dataset, self.embedding_dim, device, mean=self.mean_pooling, bound=bound, managed=self.managed)

    def needed_bags(self, model: str, dataset: Dataset, device: torch.device) -> Bags:
        """Return the tables of a dataset's features; raise for a dataset without sparse features."""
        bags = self.bags(dataset, device)
        if bags is None:
            raise ConfigError(f"{model}: got a dataset without ids; expected at least one column. Use kind = 'mlp'.")
        return bags


def bags_of(
    dataset: Dataset, dim: int, device: torch.device, *, mean: bool, bound: float | None, managed: ManagedIds
) -> Bags | None:
    """Return the tables of a dataset's features; None if it has no sparse features.

    Args:
        dim: of every table.
        device: of the tables and their ids.
        mean: average bags; bags with weights are always summed.
        bound: initial rows are uniform in ±bound; None means ±sqrt(1 / rows).
        managed: of tables with managed ids.

    Raises:
        ConfigError: features of one table differ in rows, or some of them only have managed ids.
    """
    features_of = _features_by_table(dataset)
    if not features_of:
        return None
    weighted = any(feature.weighted for feature in dataset.sparse_features)  # then all ids have a weight, 1 by default
    tables = [
        EmbeddingBagConfig(
            num_embeddings=managed.rows_of(features[0].num_rows) if features[0].managed else features[0].num_rows,
            embedding_dim=dim,
            name=name,
            feature_names=[feature.name for feature in features],
            pooling="MEAN" if mean and not weighted else "SUM",
            weight_init_min=None if bound is None else -bound,
            weight_init_max=bound,
        )
        for name, features in features_of.items()
    ]
    bags = EmbeddingBagCollection(tables, is_weighted=weighted, device=device)
    modules = {
        name: managed.module(features[0].num_rows, device)
        for name, features in features_of.items()
        if features[0].managed
    }
    if not modules:
        return bags
    return ManagedCollisionEmbeddingBagCollection(bags, ManagedCollisionCollection(modules, tables))


def _features_by_table(dataset: Dataset) -> dict[str, list[SparseFeature]]:
    """Return the features of each table, by the names in `SparseFeature.table`, which features may share."""
    shared: dict[str, list[SparseFeature]] = {}
    for feature in dataset.sparse_features:
        shared.setdefault(feature.table or f"{feature.name}_table", []).append(feature)
    for name, features in shared.items():
        if len({feature.num_rows for feature in features}) > 1:
            rows = {feature.name: feature.num_rows for feature in features}
            raise ConfigError(
                f"table {name!r}: got features with {rows} rows; expected one number. Give both one size."
            )
        if len({feature.managed for feature in features}) > 1:
            kinds = {feature.name: "managed" if feature.managed else "rows" for feature in features}
            raise ConfigError(
                f"table {name!r}: got features with ids {kinds}; expected one kind. Give each kind its own table."
            )
    return shared
