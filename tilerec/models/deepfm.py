"""A small DeepFM (Guo et al., 1703.04247) over dense and sparse features.

Stages
  sparse_arch  ids -> pooled embeddings, one key each
  dense_arch   dense features -> one vector of the embeddings' dim
  inter_arch   both -> dense vector, deep half and factorization machine, concatenated
  over_arch    that -> probability [B, 1]

Legend of the shapes in names: B samples, I dense features, F pooled embeddings per sample, D embedding dim.
"""

from __future__ import annotations

import torch
from torch import nn

from tilerec.errors import InputError
from tilerec.models.tables import Bags, common_dim, output_names, pooled, prefetched, table_configs
from tilerec.modules.deepfm import DeepFM, FactorizationMachine
from tilerec.modules.utils import check_last_dim, check_size
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor


class SparseArch(nn.Module):
    """Pooled embeddings as a `KeyedTensor`.

    Args:
        embedding_bag_collection: the tables.

    Shape: a `KeyedJaggedTensor` of B samples to a `KeyedTensor`.

    State: `embedding_bag_collection.*`.
    """

    def __init__(self, embedding_bag_collection: Bags) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return pooled(self.embedding_bag_collection, features)


class DenseArch(nn.Module):
    """Two layers with ReLU over the dense features.

    Args:
        in_features: I.
        hidden_layer_size: features of the first layer's output.
        embedding_dim: features of the output.
        device: of the weights.

    Shape: `[B, in_features]` to `[B, embedding_dim]`.

    State: `model.0.*`, `model.2.*`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_layer_size: int,
        embedding_dim: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._in_features = check_size("DenseArch: in_features", in_features)
        check_size("DenseArch: hidden_layer_size", hidden_layer_size)
        check_size("DenseArch: embedding_dim", embedding_dim)
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size, device=device),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim, device=device),
            nn.ReLU(),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        check_last_dim("DenseArch", features, self._in_features)
        output: torch.Tensor = self.model(features)
        return output


class FMInteractionArch(nn.Module):
    """The concatenated dense vector, deep half and factorization machine.

    Args:
        fm_in_features: number of elements in a sample's dense vector and embeddings, (F + 1) D.
        sparse_feature_names: keys of the `KeyedTensor` to use.
        deep_fm_dimension: features of the deep half's output.
        per_embedding: see `FactorizationMachine`.
        device: of the weights.

    Shape: dense `[B, D]` and a `KeyedTensor` to `[B, D + deep_fm_dimension + 1]`.

    State: `deep_fm.dense_module.0.*`.
    """

    def __init__(
        self,
        fm_in_features: int,
        sparse_feature_names: list[str],
        deep_fm_dimension: int,
        *,
        per_embedding: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._in_features = check_size("FMInteractionArch: fm_in_features", fm_in_features)
        check_size("FMInteractionArch: deep_fm_dimension", deep_fm_dimension)
        self._names = list(sparse_feature_names)
        self.deep_fm = DeepFM(nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension, device=device), nn.ReLU()))
        self.fm = FactorizationMachine(per_embedding=per_embedding)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedTensor) -> torch.Tensor:
        if not self._names:
            return dense_features
        embeddings = [dense_features, *(sparse_features[name] for name in self._names)]
        elements = sum(e.shape[-1] for e in embeddings)
        if elements != self._in_features:
            raise InputError(
                f"FMInteractionArch: got {elements} elements in the dense vector and {len(self._names)} embeddings; "
                f"expected fm_in_features={self._in_features}. Make them equal."
            )
        return torch.cat([dense_features, self.deep_fm(embeddings), self.fm(embeddings)], dim=1)


class OverArch(nn.Module):
    """A linear layer and a sigmoid.

    Args:
        in_features: features of the input.
        device: of the weights.

    Shape: `[B, in_features]` to probabilities `[B, 1]`.

    State: `model.0.weight`, `model.0.bias`.
    """

    def __init__(self, in_features: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        self._in_features = check_size("OverArch: in_features", in_features)
        self.model = nn.Sequential(nn.Linear(in_features, 1, device=device), nn.Sigmoid())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        check_last_dim("OverArch", features, self._in_features)
        output: torch.Tensor = self.model(features)
        return output


class SimpleDeepFMNN(nn.Module):
    """DeepFM for a click probability.

    Args:
        num_dense_features: I.
        embedding_bag_collection: tables of one embedding dim D.
        hidden_layer_size: of the dense stage.
        deep_fm_dimension: features of the deep half's output.
        per_embedding: pair embeddings (the paper's form) instead of their elements; see
            `FactorizationMachine`.
        dense_device: of all weights but the tables'.

    Shape: dense `[B, I]` and a `KeyedJaggedTensor` of B samples to probabilities `[B, 1]` (not logits).

    State: `sparse_arch.embedding_bag_collection.*`, `dense_arch.model.*`, `inter_arch.deep_fm.*`,
    `over_arch.model.*`.

    Raises:
        ConfigError: tables differ in dim, or a size is below 1.
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: Bags,
        hidden_layer_size: int,
        deep_fm_dimension: int,
        *,
        per_embedding: bool = False,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        tables = table_configs(embedding_bag_collection)
        dim = common_dim("SimpleDeepFMNN", tables)
        names = output_names(tables)
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, dim, device=dense_device)
        self.inter_arch = FMInteractionArch(
            (len(names) + 1) * dim,
            names,
            deep_fm_dimension,
            per_embedding=per_embedding,
            device=dense_device,
        )
        self.over_arch = OverArch(dim + deep_fm_dimension + 1, device=dense_device)

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        return prefetched(self.sparse_arch.embedding_bag_collection, sparse_features)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Return probabilities [B, 1].

        Args:
            dense_features: [B, I].
            sparse_features: B samples of every feature that the tables read.
        """
        vectors = self.sparse_arch(sparse_features)
        dense_BD = self.dense_arch(dense_features)
        probabilities: torch.Tensor = self.over_arch(self.inter_arch(dense_BD, vectors))
        return probabilities
