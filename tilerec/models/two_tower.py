"""`TwoTower`: a query vector and an item vector per sample, for retrieval.

    query = MLP([pooled vectors of the query features])          score = <query, item>
    item  = MLP([pooled vectors of the item features])

Source of the names: TorchRec's retrieval example. Legend: B samples, D outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from tilerec.errors import ConfigError
from tilerec.models.tables import prefetched
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.mlp import MLP
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class TwoTower(nn.Module):
    """Two towers over one collection of tables.

    Args:
        embedding_bag_collection: tables of all features; several features may share a table.
        layer_sizes: of the MLP of each tower; () for none, and the vectors are the pooled ones. All layers but the last
            have a ReLU.
        device: of the MLPs.
        query_features, candidate_features: names; by default the first table's feature and the second's.
        normalize: divide vectors by their L2 norm, so scores are cosines.

    Shape: dense features are ignored; a `KeyedJaggedTensor` of B samples to (query [B, D], item [B, D]).

    State: `embedding_bag_collection.*`, `query_proj.*`, `candidate_proj.*`.

    Raises:
        ConfigError: unknown features, or towers of different widths without an MLP.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        layer_sizes: Sequence[int],
        device: torch.device | None = None,
        *,
        query_features: Sequence[str] = (),
        candidate_features: Sequence[str] = (),
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        dims = {
            name: table.embedding_dim
            for table in embedding_bag_collection.embedding_bag_configs()
            for name in table.feature_names
        }
        names = list(dims)
        self.query_features = list(query_features) or names[:1]
        self.candidate_features = list(candidate_features) or names[1:2]
        for side, features in (("query", self.query_features), ("candidate", self.candidate_features)):
            unknown = [name for name in features if name not in dims]
            if unknown or not features:
                raise ConfigError(
                    f"TwoTower: got {side}_features={features}; expected at least one of {names}. Correct the names."
                )
        widths = [sum(dims[name] for name in side) for side in (self.query_features, self.candidate_features)]
        if not layer_sizes and widths[0] != widths[1]:
            raise ConfigError(
                f"TwoTower: got towers of {widths[0]} and {widths[1]} columns without layers; expected one width. Set "
                "layers, or use equally many features."
            )
        self.query_proj = _projection(widths[0], layer_sizes, device)
        self.candidate_proj = _projection(widths[1], layer_sizes, device)
        self._normalize = normalize

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        return prefetched(self.embedding_bag_collection, sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return query vectors and item vectors [B, D]. Empty bags give the vectors of zeros."""
        pooled = self.embedding_bag_collection(sparse_features).to_dict()
        query_BD = self.query_proj(torch.cat([pooled[name] for name in self.query_features], dim=1))
        item_BD = self.candidate_proj(torch.cat([pooled[name] for name in self.candidate_features], dim=1))
        if self._normalize:
            return normalize(query_BD, dim=1), normalize(item_BD, dim=1)
        return query_BD, item_BD


class Tower(nn.Module):
    """One tower of a `TwoTower`, for servers that compute queries and items apart; it shares all weights.

    Args:
        two_tower: unsharded.
        side: "query" or "candidate".

    Attributes:
        features: names of the features that this tower reads.

    Shape: a `KeyedJaggedTensor` of B samples, with at least the tower's features, to [B, D].

    State: as in `TwoTower`, without tables that only the other tower reads.

    Raises:
        ConfigError: another side, or tables that are sharded or have managed ids.
    """

    def __init__(self, two_tower: TwoTower, side: str) -> None:
        super().__init__()
        bags = two_tower.embedding_bag_collection
        if side not in ("query", "candidate"):
            raise ConfigError(f"Tower: got side='{side}'; expected 'query' or 'candidate'.")
        if type(bags) is not EmbeddingBagCollection:
            raise ConfigError(
                f"Tower: got tables in a {type(bags).__name__}; expected an unsharded EmbeddingBagCollection. "
                "Export both towers together."
            )
        query = side == "query"
        self.features = list(two_tower.query_features if query else two_tower.candidate_features)
        own = [
            replace(table, feature_names=[name for name in table.feature_names if name in self.features])
            for table in bags.embedding_bag_configs()
            if any(name in self.features for name in table.feature_names)
        ]
        self.embedding_bag_collection = EmbeddingBagCollection(
            own, bags.is_weighted(), torch.device("meta"), output_dtype=bags._output_dtype, on_bad_id=bags._on_bad_id
        )
        for table in own:
            self.embedding_bag_collection.embedding_bags[table.name] = bags.embedding_bags[table.name]
        self.query_proj = two_tower.query_proj if query else None
        self.candidate_proj = None if query else two_tower.candidate_proj
        self._normalize = two_tower._normalize

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the vectors of this tower [B, D]."""
        pooled = self.embedding_bag_collection(sparse_features).to_dict()
        projection = self.candidate_proj if self.query_proj is None else self.query_proj
        assert projection is not None
        vector_BD: Tensor = projection(torch.cat([pooled[name] for name in self.features], dim=1))
        return normalize(vector_BD, dim=1) if self._normalize else vector_BD


class _Batch(Protocol):
    """Batch attributes that `TwoTowerTrainTask` reads, as in `tilerec.data.batch.Batch`."""

    @property
    def dense_features(self) -> Tensor: ...
    @property
    def sparse_features(self) -> KeyedJaggedTensor: ...
    @property
    def labels(self) -> Tensor: ...


class TwoTowerTrainTask(nn.Module):
    """A `TwoTower` with binary cross-entropy on the inner product of each sample's vectors, for data with negatives.

    `tilerec train` uses in-batch softmax in its place (`task.kind = "retrieval"`).

    Args:
        two_tower: maps (dense features, sparse features) to (query [B, D], item [B, D]).

    Shape: a batch with `sparse_features` and `labels` [B] to `(loss, (loss, logits, labels))`. The first loss is a
        scalar with gradient; the inner loss, logits [B] and labels [B] are detached.

    State: `two_tower.*`.
    """

    def __init__(self, two_tower: nn.Module) -> None:
        super().__init__()
        self.two_tower = two_tower

    def forward(self, batch: _Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        query_BD, item_BD = self.two_tower(batch.dense_features, batch.sparse_features)
        logits = (query_BD * item_BD).sum(dim=1)
        loss = binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype))
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def _projection(width: int, layer_sizes: Sequence[int], device: torch.device | None) -> nn.Module:
    if not layer_sizes:
        return nn.Identity()
    hidden = [MLP(width, list(layer_sizes[:-1]), device=device)] if len(layer_sizes) > 1 else []
    return nn.Sequential(*hidden, nn.Linear(layer_sizes[-2] if hidden else width, layer_sizes[-1], device=device))
