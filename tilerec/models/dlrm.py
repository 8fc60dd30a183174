"""DLRM (Naumov et al., 1906.00091) and two variants with other feature interactions.

Stages
  sparse_arch  ids -> pooled embeddings [B, F, D]
  dense_arch   dense features -> one vector of the embeddings' dim D
  inter_arch   both -> one vector per sample
  over_arch    that vector -> logit [B, 1]

Legend of the shapes in names: B samples, I dense features, F pooled embeddings per sample, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.models.tables import Bags, common_dim, output_names, pooled, prefetched, table_configs
from tilerec.modules.crossnet import LowRankCrossNet
from tilerec.modules.interaction import (
    InteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    pair_count,
)
from tilerec.modules.mlp import MLP
from tilerec.modules.recorded_call import is_proxy
from tilerec.modules.utils import check_size
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keys import Keys

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "DLRM_Projection",
    "DLRMTrain",
    "DenseArch",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "OverArch",
    "SparseArch",
]


class SparseArch(nn.Module):
    """Pooled embeddings as one tensor.

    Args:
        embedding_bag_collection: tables of one embedding dim.

    Shape: a `KeyedJaggedTensor` of B samples to `[B, F, D]`, in the order of `sparse_feature_names`.

    State: `embedding_bag_collection.*`.

    Raises:
        ConfigError: tables differ in dim.
    """

    def __init__(self, embedding_bag_collection: Bags) -> None:
        super().__init__()
        tables = table_configs(embedding_bag_collection)
        self.D = common_dim("SparseArch", tables)
        self._sparse_feature_names = output_names(tables)
        self._text = Keys.of(self._sparse_feature_names).text
        self.F = len(self._sparse_feature_names)
        self.embedding_bag_collection = embedding_bag_collection

    @property
    def sparse_feature_names(self) -> list[str]:
        """Names along the F dimension; `feature@table` if several tables read the feature."""
        return list(self._sparse_feature_names)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        vectors = pooled(self.embedding_bag_collection, features)
        if not is_proxy(vectors) and vectors.columns().text == self._text:
            return vectors.values().reshape(-1, self.F, self.D)
        return torch.stack([vectors[name] for name in self._sparse_feature_names], dim=1)


class DenseArch(nn.Module):
    """An MLP over the dense features.

    Args:
        in_features: I.
        layer_sizes: of the MLP; the last one is the embedding dim D in a DLRM.
        device: of the weights.

    Shape: `[B, in_features]` to `[B, layer_sizes[-1]]`.

    State: `model._mlp.<layer>._linear.weight`, `….bias`.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        self.model = MLP(in_features, layer_sizes, bias=True, activation="relu", device=device)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(features)
        return output


class OverArch(nn.Module):
    """An MLP whose last layer is linear and returns the logits.

    Args:
        in_features: features of the input.
        layer_sizes: at least two; the last one is the number of logits.
        device: of the weights.

    Shape: `[B, in_features]` to `[B, layer_sizes[-1]]`.

    State: `model.0._mlp.<layer>._linear.*`, `model.1.weight`, `model.1.bias`.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ConfigError(f"OverArch: got layer_sizes={list(layer_sizes)}; expected at least two layers.")
        check_size("OverArch: each of layer_sizes", layer_sizes[-1])
        self.model = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], bias=True, activation="relu", device=device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], bias=True, device=device),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(features)
        return output


class _DLRM(nn.Module):
    """The four stages. A concrete model defines the interaction and the width of its output."""

    def __init__(
        self,
        embedding_bag_collection: Bags,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None,
    ) -> None:
        super().__init__()
        model = type(self).__name__
        tables = table_configs(embedding_bag_collection)
        dim = common_dim(model, tables)
        if not dense_arch_layer_sizes or dense_arch_layer_sizes[-1] != dim:
            raise ConfigError(
                f"{model}: got dense_arch_layer_sizes={list(dense_arch_layer_sizes)}; expected the tables' "
                f"embedding_dim {dim} as the last entry, so that dense and sparse features can interact."
            )
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, device=dense_device)
        interaction, width = self._interaction(self.sparse_arch.F, dim, dense_device)
        self.inter_arch = interaction
        self.over_arch = OverArch(width, over_arch_layer_sizes, device=dense_device)

    def _interaction(self, features: int, dim: int, device: torch.device | None) -> tuple[nn.Module, int]:
        raise AssertionError("a concrete DLRM defines its interaction")

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Return logits [B, 1].

        Args:
            dense_features: [B, I].
            sparse_features: B samples of every feature that the tables read.
        """
        # The lookup comes first: on a GPU, or sharded, it runs while the host launches the dense stage.
        sparse_BFD = self.sparse_arch(sparse_features)
        dense_BD = self.dense_arch(dense_features)
        interacted = self.inter_arch(dense_BD, sparse_BFD)
        logits: torch.Tensor = self.over_arch(interacted)
        return logits

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        return prefetched(self.sparse_arch.embedding_bag_collection, sparse_features)

    def compile_dense_path(self, compile_mode: str = "reduce-overhead") -> None:
        """Compile all stages except the lookup, in place; names in the state dict do not change.

        Args:
            compile_mode: of `torch.compile`.
        """
        for stage in (self.dense_arch, self.inter_arch, self.over_arch):
            stage.compile(mode=compile_mode)


class DLRM(_DLRM):
    """Deep learning recommendation model: features interact by dot products of all pairs (1906.00091).

    Args:
        embedding_bag_collection: tables of one embedding dim D.
        dense_in_features: I.
        dense_arch_layer_sizes: of the MLP over dense features; the last is D.
        over_arch_layer_sizes: of the MLP over the interaction, at least two; the last is the number of
            logits.
        dense_device: of all weights but the tables'.

    Shape: dense `[B, I]` and a `KeyedJaggedTensor` of B samples to logits `[B, over_arch_layer_sizes[-1]]`.

    State: `sparse_arch.embedding_bag_collection.*`, `dense_arch.model.*`, `over_arch.model.*`.

    Raises:
        ConfigError: tables of several dims, layer sizes that do not fit.
    """

    def __init__(
        self,
        embedding_bag_collection: Bags,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )

    def _interaction(self, features: int, dim: int, device: torch.device | None) -> tuple[nn.Module, int]:
        return InteractionArch(features), dim + pair_count(features + 1)


class DLRM_Projection(_DLRM):
    """DLRM that projects its features to two smaller sets of vectors, which interact by dot products.

    Args:
        embedding_bag_collection: tables of one embedding dim D.
        dense_in_features: I.
        dense_arch_layer_sizes: of the MLP over dense features; the last is D.
        over_arch_layer_sizes: of the MLP over the interaction, at least two; the last is the number of
            logits.
        interaction_branch1_layer_sizes: of the first projection's MLP; the last is a multiple of D.
        interaction_branch2_layer_sizes: of the second.
        dense_device: of all weights but the tables'.

    Shape: as `DLRM`.

    State: as `DLRM`, and `inter_arch.interaction_branch1.model.*`, `inter_arch.interaction_branch2.model.*`.

    Raises:
        ConfigError: tables of several dims, layer sizes that do not fit.
    """

    def __init__(
        self,
        embedding_bag_collection: Bags,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        interaction_branch1_layer_sizes: Sequence[int],
        interaction_branch2_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        self._branches = (tuple(interaction_branch1_layer_sizes), tuple(interaction_branch2_layer_sizes))
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )

    def _interaction(self, features: int, dim: int, device: torch.device | None) -> tuple[nn.Module, int]:
        for number, sizes in enumerate(self._branches, start=1):
            if not sizes or sizes[-1] % dim:
                raise ConfigError(
                    f"DLRM_Projection: got interaction_branch{number}_layer_sizes={list(sizes)}; expected a multiple "
                    f"of the tables' embedding_dim {dim} as the last entry."
                )
        width = (features + 1) * dim
        first, second = (DenseArch(width, sizes, device=device) for sizes in self._branches)
        left, right = (sizes[-1] // dim for sizes in self._branches)
        return InteractionProjectionArch(features, first, second), dim + left * right


class DLRM_DCN(_DLRM):
    """DLRM whose features interact in a low-rank cross network (DCN-V2, 2008.13535).

    Args:
        embedding_bag_collection: tables of one embedding dim D.
        dense_in_features: I.
        dense_arch_layer_sizes: of the MLP over dense features; the last is D.
        over_arch_layer_sizes: of the MLP over the interaction, at least two; the last is the number of
            logits.
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: its rank.
        dense_device: of all weights but the tables'.

    Shape: as `DLRM`.

    State: as `DLRM`, and `inter_arch.crossnet.{W_kernels,V_kernels,bias}.<layer>`.

    Raises:
        ConfigError: tables of several dims, layer sizes that do not fit.
    """

    def __init__(
        self,
        embedding_bag_collection: Bags,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        self._cross = (dcn_num_layers, dcn_low_rank_dim)
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )

    def _interaction(self, features: int, dim: int, device: torch.device | None) -> tuple[nn.Module, int]:
        width = (features + 1) * dim
        num_layers, low_rank = self._cross
        return InteractionDCNArch(features, LowRankCrossNet(width, num_layers, low_rank, device=device)), width


class _Batch(Protocol):
    """Batch attributes that `DLRMTrain` reads, as in `tilerec.data.batch.Batch`."""

    @property
    def dense_features(self) -> torch.Tensor: ...
    @property
    def sparse_features(self) -> KeyedJaggedTensor: ...
    @property
    def labels(self) -> torch.Tensor: ...


class DLRMTrain(nn.Module):
    """A model with its training loss: binary cross-entropy on the logits, averaged over the batch.

    Args:
        dlrm_module: maps (dense features, sparse features) to logits [B, 1]: `DLRM`, `DLRM_DCN`,
            `DLRM_Projection`.

    Shape: a batch with `dense_features` [B, I], `sparse_features` and `labels` [B] (0 or 1, any dtype) to
    `(loss, (loss, logits, labels))`. The first loss is a scalar with gradient; the inner loss, logits [B] and labels
    [B] are detached.

    State: `model.*`.

    Raises:
        InputError: the labels and the logits differ in shape.
    """

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module

    def forward(self, batch: _Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        labels = batch.labels
        if labels.shape != logits.shape:
            raise InputError(
                f"DLRMTrain: got labels of shape {list(labels.shape)} for logits of shape {list(logits.shape)}; "
                "expected one label per sample, [B]."
            )
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return loss, (loss.detach(), logits.detach(), labels.detach())
