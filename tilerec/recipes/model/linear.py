"""Config of logistic regression."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from tilerec.data.dataset import Dataset
from tilerec.models.linear import LogisticRegression
from tilerec.recipes.model.tables import ManagedIds, bags_of
from tilerec.train.config import ModelConfig


@dataclass(frozen=True)
class LinearConfig(ModelConfig):
    """A `LogisticRegression`: the baseline for any features and tasks. All weights begin at 0.

    Attributes:
        mean_pooling: average the weights of a bag's ids instead of summing them; bags with weights are always summed.
        managed: of tables with ids = "managed".
    """

    mean_pooling: bool = False
    managed: ManagedIds = field(default_factory=ManagedIds)

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        tasks = len(dataset.tasks)
        bags = bags_of(dataset, tasks, table_device or device, mean=self.mean_pooling, bound=0.0, managed=self.managed)
        return LogisticRegression(bags, len(dataset.dense_features), num_tasks=tasks, dense_device=device)
