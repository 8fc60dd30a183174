"""`DotModel`: the scaled dot product of two features' vectors, and an MLP of both.

Legend: B samples, D embedding dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError
from tilerec.models.tables import Bags, pooled, prefetched, table_configs
from tilerec.modules.mlp import MLP
from tilerec.recipes.model.tables import TablesConfig
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class DotConfig(TablesConfig):
    """`DotModel` for datasets with two sparse features.

    Attributes:
        layers: layer sizes of the MLP, without the last layer, which has one output.
    """

    layers: tuple[int, ...] = (32,)

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        if len(dataset.sparse_features) != 2:
            names = [feature.name for feature in dataset.sparse_features]
            raise ConfigError(
                f"DotModel: got a dataset with sparse features {names}; expected two. Leave others out, or use another "
                "model, such as dcn."
            )
        if len(dataset.tasks) != 1:
            raise ConfigError(
                f"DotModel: got a dataset with tasks {list(dataset.tasks)}; expected one. Use another model."
            )
        return DotModel(self.needed_bags("DotModel", dataset, table_device or device), self.layers, device)


class DotModel(nn.Module):
    """logit = <a, b> / sqrt(D) + MLP([a, b]) for the vectors a, b of two features, such as user and item.

    Args:
        embedding_bag_collection: tables of one dim D with two features in all.
        layers: sizes of the MLP's hidden layers.
        device: of the MLP.

    Shape: dense features are ignored; `KeyedJaggedTensor` of B samples to logits [B].
    """

    def __init__(
        self,
        embedding_bag_collection: Bags,
        layers: tuple[int, ...],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self._dim = table_configs(embedding_bag_collection)[0].embedding_dim
        hidden: list[nn.Module] = [MLP(2 * self._dim, list(layers), device=device)] if layers else []
        width = layers[-1] if layers else 2 * self._dim
        self.over_arch = nn.Sequential(*hidden, nn.Linear(width, 1, device=device))

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        return prefetched(self.embedding_bag_collection, sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        both = pooled(self.embedding_bag_collection, sparse_features).values()
        return dot_logits(both, self.over_arch)


def dot_logits(both: Tensor, over_arch: nn.Module) -> Tensor:
    """Return the logits [B] of `DotModel`'s head, from concatenated vectors a and b [B, 2 D]."""
    a_BD, b_BD = both.chunk(2, dim=1)
    logits: Tensor = (a_BD * b_BD).sum(1) / a_BD.shape[1] ** 0.5 + over_arch(both).squeeze(1)
    return logits
