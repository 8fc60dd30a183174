"""Config of DCN-V2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tilerec.data.dataset import Dataset
from tilerec.models.dcn import DCNv2
from tilerec.recipes.model.tables import TablesConfig


@dataclass(frozen=True)
class DCNConfig(TablesConfig):
    """A `DCNv2`: crosses and an MLP over any features, with several tasks, with or without dense features.

    Attributes:
        cross_layers: layers of the cross network.
        low_rank: rank of its matrices; 0 for full ones.
        experts: low-rank crosses per layer, weighed by a gate; 1 for no gate.
        layers: layer sizes of the MLP; [] for crosses alone.
        structure: "stacked" puts the MLP on top of the crosses, "parallel" beside them.
    """

    mean_pooling: bool = True
    cross_layers: int = 2
    low_rank: int = 0
    experts: int = 1
    layers: tuple[int, ...] = (64, 32)
    structure: Literal["stacked", "parallel"] = "stacked"

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        return DCNv2(
            self.bags(dataset, table_device or device),
            len(dataset.dense_features),
            self.cross_layers,
            self.layers,
            cross_low_rank_dim=self.low_rank,
            cross_num_experts=self.experts,
            structure=self.structure,
            num_tasks=len(dataset.tasks),
            dense_device=device,
        )
