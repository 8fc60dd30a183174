"""What a model reads off the tables it is given (output names, their common dim), and what it asks of them ahead."""

from __future__ import annotations

from collections.abc import Sequence

from tilerec.errors import ConfigError
from tilerec.modules.collection import feature_slots
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig

Bags = EmbeddingBagCollection | FeatureProcessedEmbeddingBagCollection
"""Pooled tables of a model: `KeyedJaggedTensor` in, `KeyedTensor` out."""


def output_names(tables: Sequence[EmbeddingBagConfig]) -> list[str]:
    """Keys of the pooled output, table by table: the feature, or `feature@table` where several tables read it."""
    return [slot.name for slot in feature_slots(tables, "EmbeddingBagCollection")]


def prefetched(tables: Bags, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """What the tables are called with, made ready ahead (`prefetch` of the tables), where they read the batch's own
    ids and weights."""
    return tables.prefetch(features) if isinstance(tables, EmbeddingBagCollection) else features


def common_dim(model: str, tables: Sequence[EmbeddingBagConfig]) -> int:
    """The embedding dim of all `tables`.

    Raises:
        ConfigError: tables of several dims.
    """
    dim = tables[0].embedding_dim
    for table in tables:
        if table.embedding_dim != dim:
            raise ConfigError(
                f"{model}: table '{table.name}' has embedding_dim {table.embedding_dim} and table '{tables[0].name}' "
                f"{dim}; the interaction needs one dim for all tables."
            )
    return dim
