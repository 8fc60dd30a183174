"""Configs of the multi-task models: shared bottom, MMoE and PLE."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tilerec.data.dataset import Dataset
from tilerec.models.mmoe import MMoE
from tilerec.models.ple import PLE
from tilerec.models.shared_bottom import SharedBottom
from tilerec.recipes.model.tables import TablesConfig


@dataclass(frozen=True)
class SharedBottomConfig(TablesConfig):
    """A `SharedBottom`: one MLP for all tasks, and a tower per task.

    Attributes:
        bottom: layer sizes of the shared MLP.
        tower: layer sizes of each task's MLP, without the last layer, which has one output.
    """

    mean_pooling: bool = True
    bottom: tuple[int, ...] = (64,)
    tower: tuple[int, ...] = (32,)

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        return SharedBottom(
            self.bags(dataset, table_device or device),
            len(dataset.dense_features),
            self.bottom,
            self.tower,
            len(dataset.tasks),
            dense_device=device,
        )


@dataclass(frozen=True)
class MMoEConfig(TablesConfig):
    """An `MMoE`: experts that all tasks share, and a gate and a tower per task.

    Attributes:
        experts: number of experts.
        expert: layer sizes of each expert's MLP.
        tower: layer sizes of each task's MLP, without the last layer, which has one output.
    """

    mean_pooling: bool = True
    experts: int = 4
    expert: tuple[int, ...] = (64,)
    tower: tuple[int, ...] = (32,)

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        return MMoE(
            self.bags(dataset, table_device or device),
            len(dataset.dense_features),
            self.experts,
            self.expert,
            self.tower,
            len(dataset.tasks),
            dense_device=device,
        )


@dataclass(frozen=True)
class PLEConfig(TablesConfig):
    """A `PLE`: experts of each task beside shared ones, in levels, and a tower per task.

    Attributes:
        levels: number of levels.
        task_experts: experts of each task and level.
        shared_experts: shared experts of each level.
        expert: layer sizes of each expert's MLP.
        tower: layer sizes of each task's MLP, without the last layer, which has one output.
    """

    mean_pooling: bool = True
    levels: int = 1
    task_experts: int = 2
    shared_experts: int = 2
    expert: tuple[int, ...] = (64,)
    tower: tuple[int, ...] = (32,)

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        return PLE(
            self.bags(dataset, table_device or device),
            len(dataset.dense_features),
            self.levels,
            self.task_experts,
            self.shared_experts,
            self.expert,
            self.tower,
            len(dataset.tasks),
            dense_device=device,
        )
