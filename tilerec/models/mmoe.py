"""Multi-gate mixture of experts (Ma et al., KDD 2018): shared experts, and a gate and a tower per task.

    x = [pooled vectors of all features, dense features]
    g_t = softmax(W_t x)                                  weights of the E experts, for task t
    h_t = sum over experts e of g_te MLP_e(x)
    logit_t = tower_t(h_t)

Legend of the shapes in names: B samples, I elements of the input, E experts, H elements of an expert's output, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.models.tables import Bags, input_width, model_input, prefetched
from tilerec.models.task_towers import TaskTowers
from tilerec.modules.mlp import MLP
from tilerec.modules.utils import check_size
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class MMoE(nn.Module):
    """Multi-task model whose tasks weigh shared experts by a softmax gate each.

    With one expert every gate is 1, so it equals `SharedBottom`.

    Args:
        embedding_bag_collection: tables of any dims; None without sparse features.
        dense_in_features: number of dense features; 0 for none.
        num_experts: E.
        expert_layer_sizes: of each expert's MLP, at least one.
        tower_layer_sizes: of each task's MLP, without the last layer, which has one output.
        num_tasks: T.
        dense_device: of all weights but the tables'.

    Shape: dense `[B, dense_in_features]` and a `KeyedJaggedTensor` of B samples to logits `[B, T]`.

    State: `embedding_bag_collection.*`, `experts.<expert>._mlp.*`, `gates.<task>.weight` [E, I],
    `task_towers.towers.<task>.*`.

    Raises:
        ConfigError: no features, a size below 1, or experts without layers.
    """

    def __init__(
        self,
        embedding_bag_collection: Bags | None,
        dense_in_features: int,
        num_experts: int,
        expert_layer_sizes: Sequence[int],
        tower_layer_sizes: Sequence[int],
        num_tasks: int,
        *,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        width = input_width("MMoE", embedding_bag_collection, dense_in_features)
        check_size("MMoE: num_experts", num_experts)
        check_size("MMoE: num_tasks", num_tasks)
        if not expert_layer_sizes:
            raise ConfigError(
                "MMoE: got expert_layer_sizes=[]; expected at least one layer, because experts without layers are "
                "equal. Name the size of a layer."
            )
        self._dense_in_features = dense_in_features
        self.embedding_bag_collection = embedding_bag_collection
        self.experts = nn.ModuleList(MLP(width, expert_layer_sizes, device=dense_device) for _ in range(num_experts))
        self.gates = nn.ModuleList(
            nn.Linear(width, num_experts, bias=False, device=dense_device) for _ in range(num_tasks)
        )
        self.task_towers = TaskTowers(expert_layer_sizes[-1], tower_layer_sizes, num_tasks, device=dense_device)

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
            "MMoE", self.embedding_bag_collection, dense_features, sparse_features, self._dense_in_features
        )
        experts_BEH = torch.stack([expert(x_BI) for expert in self.experts], dim=1)
        mixed = [torch.einsum("be,beh->bh", gate(x_BI).softmax(dim=1), experts_BEH) for gate in self.gates]
        logits: Tensor = self.task_towers(mixed)
        return logits
