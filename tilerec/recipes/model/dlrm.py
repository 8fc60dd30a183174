"""Configs of DLRM and its variants with other feature interactions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError
from tilerec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from tilerec.recipes.model.tables import TablesConfig


@dataclass(frozen=True)
class DLRMConfig(TablesConfig):
    """A DLRM with one table per sparse feature, or per table that features share.

    Attributes:
        dense_arch: layer sizes of the MLP over dense features, without the last layer, which has D outputs.
        over_arch: layer sizes of the MLP over the interactions, without the last layer, which has one output
            per task.
    """

    dense_arch: tuple[int, ...] = (64,)
    over_arch: tuple[int, ...] = (64, 32)

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        _check_features("DLRM", dataset)
        return DLRM(
            self.needed_bags("DLRM", dataset, table_device or device),
            dense_in_features=len(dataset.dense_features),
            dense_arch_layer_sizes=[*self.dense_arch, self.embedding_dim],
            over_arch_layer_sizes=[*self.over_arch, len(dataset.tasks)],
            dense_device=device,
        )


@dataclass(frozen=True)
class DLRMDCNConfig(TablesConfig):
    """A `DLRM_DCN`: the features of a DLRM interact in a low-rank cross network.

    Attributes:
        dense_arch, over_arch: as of kind "dlrm".
        cross_layers: layers of the cross network.
        low_rank: rank of its matrices.
    """

    dense_arch: tuple[int, ...] = (64,)
    over_arch: tuple[int, ...] = (64, 32)
    cross_layers: int = 3
    low_rank: int = 32

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        _check_features("DLRM_DCN", dataset)
        return DLRM_DCN(
            self.needed_bags("DLRM_DCN", dataset, table_device or device),
            dense_in_features=len(dataset.dense_features),
            dense_arch_layer_sizes=[*self.dense_arch, self.embedding_dim],
            over_arch_layer_sizes=[*self.over_arch, len(dataset.tasks)],
            dcn_num_layers=self.cross_layers,
            dcn_low_rank_dim=self.low_rank,
            dense_device=device,
        )


@dataclass(frozen=True)
class DLRMProjectionConfig(TablesConfig):
    """A `DLRM_Projection`: the features of a DLRM are projected to two sets of vectors, which interact.

    Attributes:
        dense_arch, over_arch: as of kind "dlrm".
        branch1: layer sizes of the first projection's MLP, without the last layer, which has vectors1 * D outputs.
        branch2: of the second.
        vectors1, vectors2: vectors of each set; the interaction has vectors1 * vectors2 dot products.
    """

    dense_arch: tuple[int, ...] = (64,)
    over_arch: tuple[int, ...] = (64, 32)
    branch1: tuple[int, ...] = ()
    branch2: tuple[int, ...] = ()
    vectors1: int = 8
    vectors2: int = 8

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        _check_features("DLRM_Projection", dataset)
        return DLRM_Projection(
            self.needed_bags("DLRM_Projection", dataset, table_device or device),
            dense_in_features=len(dataset.dense_features),
            dense_arch_layer_sizes=[*self.dense_arch, self.embedding_dim],
            over_arch_layer_sizes=[*self.over_arch, len(dataset.tasks)],
            interaction_branch1_layer_sizes=[*self.branch1, self.vectors1 * self.embedding_dim],
            interaction_branch2_layer_sizes=[*self.branch2, self.vectors2 * self.embedding_dim],
            dense_device=device,
        )


def _check_features(model: str, dataset: Dataset) -> None:
    if not dataset.dense_features:
        raise ConfigError(
            f"{model}: got a dataset without dense features; expected at least one. Use kind = 'dcn' or 'mlp'."
        )
