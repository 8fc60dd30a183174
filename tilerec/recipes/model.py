"""Model configs of the recipes.

Legend: B samples, D embedding dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilerec.data.dataset import Dataset, SparseFeature
from tilerec.errors import ConfigError
from tilerec.models.dlrm import DLRM
from tilerec.models.tables import prefetched
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.mlp import MLP
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.train.config import ModelConfig


@dataclass(frozen=True)
class DLRMConfig(ModelConfig):
    """A DLRM with one table per sparse feature, or per table that features share.

    Attributes:
        embedding_dim: D of every table.
        dense_arch: layer sizes of the MLP over dense features, without the last layer, which has D outputs.
        over_arch: layer sizes of the MLP over the interactions, without the last layer, which has one output
            per task.
        mean_pooling: average bags instead of summing them; bags with weights are always summed.
        init_bound: initial rows are uniform in ±init_bound; 0 means ±sqrt(1 / rows of the table).
    """

    embedding_dim: int = 16
    dense_arch: tuple[int, ...] = (64,)
    over_arch: tuple[int, ...] = (64, 32)
    mean_pooling: bool = False
    init_bound: float = 0.0

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        if not dataset.dense_features:
            raise ConfigError("DLRM: got a dataset without dense features; expected at least one. Use another model.")
        return DLRM(
            _bags(dataset, self, table_device or device, mean=self.mean_pooling),
            dense_in_features=len(dataset.dense_features),
            dense_arch_layer_sizes=[*self.dense_arch, self.embedding_dim],
            over_arch_layer_sizes=[*self.over_arch, len(dataset.tasks)],
            dense_device=device,
        )


@dataclass(frozen=True)
class DotConfig(ModelConfig):
    """`DotModel` for datasets with two sparse features.

    Attributes:
        embedding_dim: D.
        layers: layer sizes of the MLP, without the last layer, which has one output.
        init_bound: initial rows are uniform in ±init_bound; 0 means ±sqrt(1 / rows of the table).
    """

    embedding_dim: int = 16
    layers: tuple[int, ...] = (32,)
    init_bound: float = 0.0

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        if len(dataset.sparse_features) != 2:
            names = [feature.name for feature in dataset.sparse_features]
            raise ConfigError(f"DotModel: got a dataset with sparse features {names}; expected two.")
        if len(dataset.tasks) != 1:
            raise ConfigError(
                f"DotModel: got a dataset with tasks {list(dataset.tasks)}; expected one. Use another model."
            )
        return DotModel(_bags(dataset, self, table_device or device, mean=False), self.layers, device)


@dataclass(frozen=True)
class MLPConfig(ModelConfig):
    """`ConcatModel`: for any features, with several tasks, with or without dense features.

    Attributes:
        embedding_dim: D of every table.
        layers: layer sizes of the MLP, without the last layer, which has one output per task.
        mean_pooling: average bags instead of summing them; bags with weights are always summed.
        init_bound: initial rows are uniform in ±init_bound; 0 means ±sqrt(1 / rows of the table).
    """

    embedding_dim: int = 16
    layers: tuple[int, ...] = (64, 32)
    mean_pooling: bool = True
    init_bound: float = 0.0

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        bags = None
        if dataset.sparse_features:
            bags = _bags(dataset, self, table_device or device, mean=self.mean_pooling)
        return ConcatModel(bags, len(dataset.dense_features), self.layers, len(dataset.tasks), device)


class ConcatModel(nn.Module):
    """logits = MLP([pooled vectors of all features, dense features]).

    Args:
        embedding_bag_collection: the tables; None without sparse features.
        dense_features: number of dense features, I.
        layers: sizes of the MLP's hidden layers.
        tasks: number of outputs, T.
        device: of the MLP.

    Shape: dense features [B, I] and a `KeyedJaggedTensor` of B samples to logits [B, T].
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection | None,
        dense_features: int,
        layers: tuple[int, ...],
        tasks: int,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        width = dense_features
        if embedding_bag_collection is not None:
            tables = embedding_bag_collection.embedding_bag_configs()
            width += sum(table.embedding_dim * len(table.feature_names) for table in tables)
        if not width:
            raise ConfigError("ConcatModel: got no features; expected at least one. Name columns of features.")
        hidden: list[nn.Module] = [MLP(width, list(layers), device=device)] if layers else []
        self.over_arch = nn.Sequential(*hidden, nn.Linear(layers[-1] if layers else width, tasks, device=device))

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        if self.embedding_bag_collection is None:
            return sparse_features
        return prefetched(self.embedding_bag_collection, sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        parts = [dense_features]
        if self.embedding_bag_collection is not None:
            parts.insert(0, self.embedding_bag_collection(sparse_features).values())
        logits: Tensor = self.over_arch(torch.cat(parts, dim=1))
        return logits


class DotModel(nn.Module):
    """logit = <a, b> / sqrt(D) + MLP([a, b]) for the vectors a, b of two features, such as user and item.

    Args:
        embedding_bag_collection: two tables of one dim D, one feature each.
        layers: sizes of the MLP's hidden layers.
        device: of the MLP.

    Shape: dense features are ignored; `KeyedJaggedTensor` of B samples to logits [B].
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        layers: tuple[int, ...],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self._dim = embedding_bag_collection.embedding_bag_configs()[0].embedding_dim
        hidden: list[nn.Module] = [MLP(2 * self._dim, list(layers), device=device)] if layers else []
        width = layers[-1] if layers else 2 * self._dim
        self.over_arch = nn.Sequential(*hidden, nn.Linear(width, 1, device=device))

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        return prefetched(self.embedding_bag_collection, sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        both = self.embedding_bag_collection(sparse_features).values()
        return dot_logits(both, self.over_arch)


def dot_logits(both: Tensor, over_arch: nn.Module) -> Tensor:
    """Return the logits [B] of `DotModel`'s head, from concatenated vectors a and b [B, 2 D]."""
    a_BD, b_BD = both.chunk(2, dim=1)
    logits: Tensor = (a_BD * b_BD).sum(1) / a_BD.shape[1] ** 0.5 + over_arch(both).squeeze(1)
    return logits


def _bags(
    dataset: Dataset, config: DLRMConfig | DotConfig | MLPConfig, device: torch.device, *, mean: bool
) -> EmbeddingBagCollection:
    """Return the tables of a dataset's features."""
    tables = _tables(dataset, config.embedding_dim, mean=mean, bound=config.init_bound)
    return EmbeddingBagCollection(tables, is_weighted=_is_weighted(dataset), device=device)


def _tables(dataset: Dataset, dim: int, *, mean: bool, bound: float) -> list[EmbeddingBagConfig]:
    """Return one table per name in `SparseFeature.table`, which features may share.

    Raises:
        ConfigError: features of one table differ in rows, or need modules that the recipes' models do not have.
    """
    shared: dict[str, list[SparseFeature]] = {}
    for feature in dataset.sparse_features:
        shared.setdefault(feature.table or f"{feature.name}_table", []).append(feature)
        if feature.managed:
            raise ConfigError(
                f"feature {feature.name!r}: got a managed table; expected ids='hash' or 'rows' with this model. Change "
                "the table, or use a model with ManagedCollisionEmbeddingBagCollection."
            )
    for name, features in shared.items():
        if len({feature.num_rows for feature in features}) > 1:
            rows = {feature.name: feature.num_rows for feature in features}
            raise ConfigError(
                f"table {name!r}: got features with {rows} rows; expected one number. Give both one size."
            )
    return [
        EmbeddingBagConfig(
            num_embeddings=features[0].num_rows,
            embedding_dim=dim,
            name=name,
            feature_names=[feature.name for feature in features],
            pooling="MEAN" if mean and not _is_weighted(dataset) else "SUM",
            weight_init_min=-bound if bound else None,
            weight_init_max=bound if bound else None,
        )
        for name, features in shared.items()
    ]


def _is_weighted(dataset: Dataset) -> bool:
    """Return True if a feature has weights. Then all ids have some (1 by default), and bags are weighted sums."""
    return any(feature.weighted for feature in dataset.sparse_features)
