"""`Batch`: the input of one training step.

Legend: B samples, I dense features, F sparse features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


@dataclass
class Batch:
    """One batch of samples: dense numbers, sparse ids and labels.

    A plain mutable record, so that a pipeline may replace `sparse_features` by a routed object before the model reads
    the batch.

    Attributes:
        dense_features: float [B, I]; I may be 0.
        sparse_features: F keys with a stride of B.
        labels: float [B], or [B, tasks].
        weights: float [B], the weight of each sample in the loss; None if all weigh the same.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor
    weights: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`; fields already there are shared, not copied."""
        target = torch.device(device)
        return Batch(
            dense_features=self.dense_features.to(target, non_blocking=non_blocking),
            sparse_features=self.sparse_features.to(target, non_blocking=non_blocking),
            labels=self.labels.to(target, non_blocking=non_blocking),
            weights=None if self.weights is None else self.weights.to(target, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """Return the batch in pinned host memory, from which a copy to a GPU can overlap with other work."""
        return Batch(
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=None if self.weights is None else self.weights.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Mark the tensors as read by `stream`, so the allocator does not reuse their memory before it is done."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)

    @property
    def batch_size(self) -> int:
        """B, the length of the labels."""
        return int(self.labels.shape[0])
