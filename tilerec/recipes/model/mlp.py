"""`ConcatModel`: an MLP over all features, for any columns.

Legend: B samples, I elements of the input, T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilerec.data.dataset import Dataset
from tilerec.models.tables import Bags, input_width, model_input, prefetched
from tilerec.modules.mlp import MLP
from tilerec.recipes.model.tables import TablesConfig
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class MLPConfig(TablesConfig):
    """`ConcatModel`: for any features, with several tasks, with or without dense features.

    Attributes:
        layers: layer sizes of the MLP, without the last layer, which has one output per task.
    """

    mean_pooling: bool = True
    layers: tuple[int, ...] = (64, 32)

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        bags = self.bags(dataset, table_device or device)
        return ConcatModel(bags, len(dataset.dense_features), self.layers, len(dataset.tasks), device)


class ConcatModel(nn.Module):
    """logits = MLP([pooled vectors of all features, dense features]).

    Args:
        embedding_bag_collection: the tables; None without sparse features.
        dense_features: number of dense features.
        layers: sizes of the MLP's hidden layers.
        tasks: number of outputs, T.
        device: of the MLP.

    Shape: dense features [B, dense_features] and a `KeyedJaggedTensor` of B samples to logits [B, T].
    """

    def __init__(
        self,
        embedding_bag_collection: Bags | None,
        dense_features: int,
        layers: tuple[int, ...],
        tasks: int,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        width = input_width("ConcatModel", embedding_bag_collection, dense_features)
        self._dense_features = dense_features
        self.embedding_bag_collection = embedding_bag_collection
        hidden: list[nn.Module] = [MLP(width, list(layers), device=device)] if layers else []
        self.over_arch = nn.Sequential(*hidden, nn.Linear(layers[-1] if layers else width, tasks, device=device))

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        return prefetched(self.embedding_bag_collection, sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        x_BI = model_input(
            "ConcatModel", self.embedding_bag_collection, dense_features, sparse_features, self._dense_features
        )
        logits: Tensor = self.over_arch(x_BI)
        return logits
