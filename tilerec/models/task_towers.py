"""Towers of multi-task models: an MLP and a logit per task.

Legend of the shapes in names: B samples, H elements of a task's input, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilerec.modules.mlp import MLP
from tilerec.modules.utils import check_size


class TaskTowers(nn.Module):
    """One tower per task: an MLP of its own and a linear layer with one output.

    Args:
        in_features: H.
        layer_sizes: of each tower's MLP; () for a linear layer alone.
        num_tasks: T.
        device: of the weights.

    Shape: T tensors `[B, H]`, one per task, to logits `[B, T]`.

    State: `towers.<task>.0._mlp.*`, `towers.<task>.1.weight`, `towers.<task>.1.bias`.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], num_tasks: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        check_size("TaskTowers: num_tasks", num_tasks)
        last = layer_sizes[-1] if layer_sizes else in_features
        self.towers = nn.ModuleList(
            nn.Sequential(MLP(in_features, layer_sizes, device=device), nn.Linear(last, 1, device=device))
            for _ in range(num_tasks)
        )

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        return torch.cat([tower(input_BH) for tower, input_BH in zip(self.towers, inputs, strict=True)], dim=1)
