"""Retrieval: a model with a query tower and an item tower, trained with in-batch softmax.

    s_bc   = <query_b, item_c> / temperature - log q_c         for all items c of the global batch
    loss   = sum over b of weight_b * label_b * -log softmax(s_b)[b] / B

q_c is the probability of item c as a positive (`item_frequency.py`). Items of the batch with the id of item b are left
out as its negatives. On several ranks, negatives are the items of all ranks.

Source: Yi et al., Sampling-bias-corrected neural modeling for large corpus item recommendations, RecSys 2019.

Legend: B samples of the global batch, b of this rank, D dim, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset
from tilerec.data.share import Share
from tilerec.errors import ConfigError, InputError
from tilerec.retrieval.all_gather import gather_rows, gather_sizes
from tilerec.retrieval.item_frequency import CountedFrequency, ItemFrequency, StreamingFrequency
from tilerec.retrieval.ranking_task import RankingConfig, RankingTask, sample_weights
from tilerec.retrieval.softmax import softmax_losses
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.train.config import TrainConfig
from tilerec.train.task import check_state
from tilerec.train.world import World


@dataclass(frozen=True)
class RetrievalConfig(RankingConfig):
    """Retrieval with two towers: in-batch softmax over the items of the global batch.

    Attributes:
        item_features: further features of an item, such as genres; the model's `candidate_features` without `item`.
        temperature: divides the scores; smaller values for normalised vectors, such as 0.05.
        log_q: correction for the popularity of in-batch negatives: "counted" frequencies of the training part, a
            "streaming" estimate, or "none".
        log_q_rate: of the streaming estimate.
    """

    item_features: tuple[str, ...] = ()
    temperature: float = 1.0
    log_q: Literal["counted", "streaming", "none"] = "counted"
    log_q_rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"task.temperature: got {self.temperature}; expected a number above 0. Correct it.")
        if not 0 < self.log_q_rate <= 1:
            raise ConfigError(f"task.log_q_rate: got {self.log_q_rate}; expected above 0 and at most 1. Correct it.")
        if self.log_q not in ("counted", "streaming", "none"):
            raise ConfigError(f"task.log_q: got {self.log_q!r}; expected 'counted', 'streaming' or 'none'. Correct it.")

    def build(self, dataset: Dataset, options: TrainConfig, device: torch.device, world: World) -> RetrievalTask:
        return RetrievalTask(self, dataset, options, device, world)


@final
class RetrievalTask(RankingTask):
    """Retrieval with a model that returns (query vectors, item vectors) [B, D].

    Args: see `RankingConfig.build`.
    """

    _name = "retrieval"

    def __init__(
        self, config: RetrievalConfig, dataset: Dataset, options: TrainConfig, device: torch.device, world: World
    ) -> None:
        super().__init__(config, dataset, config.item_features, options.eval_batch_size, device, world)
        self._config = config
        self._frequency: ItemFrequency | None = None
        if config.log_q == "counted":
            self._frequency = CountedFrequency(self.catalog.ids, self.catalog.counts, self.item_rows, device)
        elif config.log_q == "streaming":
            self._frequency = StreamingFrequency(self.item_rows, config.log_q_rate, device)
        # A channel of its own, because the backward of the gathered vectors runs among other collectives.
        self._group = None if world.group is None or world.size == 1 else world.group.split("retrieval")

    def check(self, batch: Batch) -> None:
        lengths = batch.sparse_features[self._config.item].lengths()
        if lengths.device.type == "cpu" and not bool((lengths == 1).all()):
            raise InputError(
                f"feature {self._config.item!r}: got {int(lengths.min())} to {int(lengths.max())} ids per sample; "
                "expected one item per training sample. Use a column with one id, and missing = 'error'."
            )

    def loss(self, model: nn.Module, share: Share) -> Tensor:
        batch = share.batch
        query_bD, item_bD = _towers(model, batch.dense_features, batch.sparse_features)
        own_b = batch.sparse_features[self._config.item].values().long()
        weight_b = sample_weights(batch)
        # Lanes of the data may give the ranks shares of other sizes than `bounds`.
        sizes = gather_sizes(own_b.numel(), self._group)
        item_BD = gather_rows(item_bD, sizes, self._group, "item vectors")
        item_B = gather_rows(own_b, sizes, self._group, "item ids")
        weight_B = gather_rows(weight_b.detach(), sizes, self._group, "sample weights")
        first = sum(sizes[: self._world.rank])
        scaled_bD = query_bD.float() / self._config.temperature
        positive_b = (scaled_bD * item_bD.float()).sum(1)
        bias_B = torch.zeros(item_B.shape[0], device=item_BD.device)
        if self._frequency is not None:
            bias_B = -self._frequency.log_q(item_B)
            positive_b = positive_b + bias_B[first : first + own_b.numel()]
        # Items of samples without weight are no positives, so they are no negatives either.
        bias_B = bias_B.masked_fill(weight_B <= 0, -torch.inf)
        loss_b = softmax_losses(scaled_bD, positive_b, item_BD, bias_B, target_P=own_b, candidate_C=item_B)
        # Zero times the vectors: a rank without samples has gradients for the same parameters as the others.
        return (loss_b * weight_b).sum() * (self._world.size / max(share.total, 1)) + 0.0 * (
            query_bD.sum() + item_bD.sum()
        )

    def state_dict(self) -> dict[str, Any]:
        return {} if self._frequency is None else dict(self._frequency.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(self, state, list(self.state_dict()))
        if self._frequency is not None:
            self._frequency.load_state_dict(state)

    def query_vectors(self, model: nn.Module, batch: Batch) -> Tensor:
        return _towers(model, batch.dense_features, batch.sparse_features)[0] / self._config.temperature

    def item_vectors(self, model: nn.Module, features: KeyedJaggedTensor) -> Tensor:
        dense = torch.zeros(features.stride(), 0, device=self._device)
        return _towers(model, dense, features)[1]


def _towers(model: nn.Module, dense: Tensor, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
    """Return a model's query vectors and item vectors [B, D].

    Raises:
        ConfigError: the model returns something else.
    """
    found = model(dense, features)
    if not isinstance(found, tuple) or len(found) != 2:
        raise ConfigError(
            f"model: got an output of type {type(found).__name__}; expected (query vectors, item vectors) with "
            "task.kind = 'retrieval'. Use model.kind = 'two_tower', or another task."
        )
    return found
