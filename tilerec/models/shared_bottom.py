"""Shared bottom (Caruana, Multitask Learning, 1997): one MLP for all tasks, and a tower per task.

    h = MLP([pooled vectors of all features, dense features])
    logit_t = tower_t(h)

Legend of the shapes in names: B samples, I elements of the input, H elements of the bottom's output, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilerec.models.tables import Bags, input_width, model_input, prefetched
from tilerec.models.task_towers import TaskTowers
from tilerec.modules.mlp import MLP
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class SharedBottom(nn.Module):
    """Multi-task model whose tasks share all layers but their towers.

    Args:
        embedding_bag_collection: tables of any dims; None without sparse features.
        dense_in_features: number of dense features; 0 for none.
        bottom_layer_sizes: of the shared MLP; () to share the tables only.
        tower_layer_sizes: of each task's MLP, without the last layer, which has one output.
        num_tasks: T.
        dense_device: of all weights but the tables'.

    Shape: dense `[B, dense_in_features]` and a `KeyedJaggedTensor` of B samples to logits `[B, T]`.

    State: `embedding_bag_collection.*`, `bottom._mlp.*`, `task_towers.towers.<task>.*`.

    Raises:
        ConfigError: no features, or a size below 1.
    """

    def __init__(
        self,
        embedding_bag_collection: Bags | None,
        dense_in_features: int,
        bottom_layer_sizes: Sequence[int],
        tower_layer_sizes: Sequence[int],
        num_tasks: int,
        *,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        width = input_width("SharedBottom", embedding_bag_collection, dense_in_features)
        self._dense_in_features, self._num_tasks = dense_in_features, num_tasks
        self.embedding_bag_collection = embedding_bag_collection
        self.bottom = MLP(width, bottom_layer_sizes, device=dense_device)
        hidden = bottom_layer_sizes[-1] if bottom_layer_sizes else width
        self.task_towers = TaskTowers(hidden, tower_layer_sizes, num_tasks, device=dense_device)

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        return prefetched(self.embedding_bag_collection, sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B, T].

        Args:
            dense_features: [B, dense_in_features].
            sparse_features: B samples of every feature that the tables read.
        """
        x_BI = model_input(
            "SharedBottom", self.embedding_bag_collection, dense_features, sparse_features, self._dense_in_features
        )
        logits: Tensor = self.task_towers([self.bottom(x_BI)] * self._num_tasks)
        return logits
