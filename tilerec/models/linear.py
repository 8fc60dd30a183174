"""Logistic regression over sparse and dense features: the baseline of every other click model.

    logit_t = sum over features of the pooled weights of its ids  +  w_t . dense  +  b_t

An id's row of a table holds its T weights, one per task. Legend of the shapes in names: B samples, T tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.models.tables import Bags, common_dim, output_names, pooled, prefetched, table_configs
from tilerec.modules.utils import check_last_dim, check_size
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class LogisticRegression(nn.Module):
    """One weight per id and task, one per dense feature and task, and a bias per task.

    Args:
        embedding_bag_collection: tables of dim T; None without sparse features.
        dense_in_features: number of dense features; 0 for none.
        num_tasks: T.
        dense_device: of all weights but the tables'.

    Shape: dense `[B, dense_in_features]` and a `KeyedJaggedTensor` of B samples to logits `[B, T]`.

    State: `embedding_bag_collection.*`, `dense_weights` [T, dense_in_features], `bias` [T]. The last two begin at 0.

    Raises:
        ConfigError: no features, or tables whose dim is not T.
    """

    def __init__(
        self,
        embedding_bag_collection: Bags | None,
        dense_in_features: int,
        *,
        num_tasks: int = 1,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_size("LogisticRegression: dense_in_features", dense_in_features, least=0)
        check_size("LogisticRegression: num_tasks", num_tasks)
        self._dense_in_features, self._num_tasks = dense_in_features, num_tasks
        self._names: list[str] = []
        if embedding_bag_collection is not None:
            tables = table_configs(embedding_bag_collection)
            dim = common_dim("LogisticRegression", tables)
            if dim != num_tasks:
                raise ConfigError(
                    f"LogisticRegression: got tables of embedding_dim {dim} for {num_tasks} tasks; expected "
                    f"{num_tasks}, one weight per id and task. Change the tables."
                )
            self._names = output_names(tables)
        if not self._names and not dense_in_features:
            raise ConfigError("LogisticRegression: got no features; expected at least one. Name columns of features.")
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_weights = nn.Parameter(torch.zeros(num_tasks, dense_in_features, device=dense_device))
        self.bias = nn.Parameter(torch.zeros(num_tasks, device=dense_device))

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        return prefetched(self.embedding_bag_collection, sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B, T].

        Args:
            dense_features: [B, dense_in_features].
            sparse_features: B samples of every feature that the tables read.
        """
        check_last_dim("LogisticRegression", dense_features, self._dense_in_features, dims=2)
        logits_BT = nn.functional.linear(dense_features, self.dense_weights, self.bias)
        if self.embedding_bag_collection is None:
            return logits_BT
        weights = pooled(self.embedding_bag_collection, sparse_features).values()
        return logits_BT + weights.reshape(-1, len(self._names), self._num_tasks).sum(1)
