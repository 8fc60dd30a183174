"""Helpers of models for their tables: output names, common dim, prefetch, inputs of an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_reads import feature_reads
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.modules.utils import check_size
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.table import EmbeddingBagConfig

Bags = EmbeddingBagCollection | FeatureProcessedEmbeddingBagCollection | ManagedCollisionEmbeddingBagCollection
"""Pooled tables of a model: a `KeyedJaggedTensor` in, a `KeyedTensor` out, which `pooled` returns for all of them."""


def table_configs(tables: Bags) -> Sequence[EmbeddingBagConfig]:
    """Return the configs of a model's tables."""
    if isinstance(tables, ManagedCollisionEmbeddingBagCollection):
        inner = tables.embedding_module
        assert isinstance(inner, EmbeddingBagCollection)
        return inner.embedding_bag_configs()
    return tables.embedding_bag_configs()


def output_names(tables: Sequence[EmbeddingBagConfig]) -> list[str]:
    """Return the pooled output's keys, table by table: the feature, or `feature@table` if several tables read it."""
    return [read.name for read in feature_reads(tables, "EmbeddingBagCollection")]


def pooled(tables: Bags, features: KeyedJaggedTensor) -> KeyedTensor:
    """Return the pooled vectors of a batch. In training mode, managed collision gives rows to new ids."""
    found = tables(features)
    out: KeyedTensor = found[0] if isinstance(found, tuple) else found  # managed collision, quantized or not
    return out


def prefetched(tables: Bags | None, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the features for the tables' forward, prefetched if the tables read the batch's own ids and weights.

    Tables behind feature processors read other weights, and tables with managed collision other ids, so their features
    are returned unchanged.
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


def input_width(model: str, tables: Bags | None, dense_in_features: int) -> int:
    """Return the width I of `model_input`: the dims of all pooled vectors and the number of dense features.

    Raises:
        ConfigError: there are neither tables nor dense features.
    """
    width = check_size(f"{model}: dense_in_features", dense_in_features, least=0)
    if tables is not None:
        width += sum(table.embedding_dim * len(table.feature_names) for table in table_configs(tables))
    if not width:
        raise ConfigError(f"{model}: got no features; expected at least one. Name columns of features.")
    return width


def model_input(
    model: str, tables: Bags | None, dense_BI: Tensor, features: KeyedJaggedTensor, dense_in_features: int
) -> Tensor:
    """Return the pooled vectors of all features, table by table, and the dense features: [B, `input_width`].

    Raises:
        InputError: the dense features have another shape than [B, dense_in_features].
    """
    if dense_BI.dim() != 2 or dense_BI.shape[1] != dense_in_features:
        raise InputError(
            f"{model}: got dense features of shape {list(dense_BI.shape)}; expected [batch, {dense_in_features}]. Pass "
            "the columns that the model was built with."
        )
    if tables is None:
        return dense_BI
    vectors = pooled(tables, features).values()
    return torch.cat([vectors, dense_BI.to(vectors.dtype)], dim=1) if dense_in_features else vectors
