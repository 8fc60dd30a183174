"""Helpers of models for their tables: output names, common dim, prefetch."""

from __future__ import annotations

from collections.abc import Sequence

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_reads import feature_reads
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig

Bags = EmbeddingBagCollection | FeatureProcessedEmbeddingBagCollection
"""Pooled tables of a model: `KeyedJaggedTensor` in, `KeyedTensor` out."""


def output_names(tables: Sequence[EmbeddingBagConfig]) -> list[str]:
    """Return the pooled output's keys, table by table: the feature, or `feature@table` if several tables read it."""
    return [read.name for read in feature_reads(tables, "EmbeddingBagCollection")]


def prefetched(tables: Bags, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the features for the tables' forward, prefetched if the tables read the batch's own ids and weights.

    Tables behind feature processors read other weights, so their features are returned unchanged.
    """
    return tables.prefetch(features) if isinstance(tables, EmbeddingBagCollection) else features


def common_dim(model: str, tables: Sequence[EmbeddingBagConfig]) -> int:
    """Return the embedding dim of all `tables`.

    Raises:
        ConfigError: tables differ in dim.
    """
    dim = tables[0].embedding_dim
    for table in tables:
        if table.embedding_dim != dim:
            raise ConfigError(
                f"{model}: got embedding_dim {table.embedding_dim} of table '{table.name}' and {dim} of table "
                f"'{tables[0].name}'; expected one dim for all tables."
            )
    return dim
