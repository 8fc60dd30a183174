"""Next item: a model with a state after every item of a sequence, trained to predict the item that follows.

    sequence  a b c     target d      positions: a -> b, b -> c, c -> d

    full      cross entropy over all items of the catalog
    sampled   cross entropy over the next item and K negatives, drawn uniformly and shared by the batch. With
              `correction`, log((N - 1) / K) is added to the negatives' scores, so that their sum estimates that of all
              other items
    bce       binary cross entropy of the next item and of one negative that the sequence does not have

The loss is the mean over the positions of the global batch. Sources: Kang and McAuley, ICDM 2018 (bce); Klenitskiy and
Vasilev, Turning Dross Into Gold Loss, RecSys 2023, 2309.07602 (full and sampled).

Negatives are a function of (seed, step), whatever the number of ranks. The step is in the task's state, so a run that
continues draws the negatives of a run without an interruption.

Legend: B samples, P positions of this rank, N items, K negatives, D dim, L maximum length, W ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset
from tilerec.data.share import Share
from tilerec.errors import ConfigError, InputError
from tilerec.models.sasrec import SASRecOutput
from tilerec.retrieval.all_gather import gather_sizes
from tilerec.retrieval.ranking_task import RankingConfig, RankingTask, sample_weights
from tilerec.retrieval.softmax import softmax_losses
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.train.config import TrainConfig
from tilerec.train.task import check_state
from tilerec.train.world import World


@dataclass(frozen=True)
class NextItemConfig(RankingConfig):
    """The next item of a sequence.

    Attributes:
        sequence: feature with the items so far, in order of time.
        loss: "full" cross entropy over all items, "sampled" cross entropy, or "bce" with one negative.
        negatives: K, for "sampled".
        correction: for "sampled": scale the negatives to the number of items.
    """

    sequence: str = "history"
    loss: Literal["full", "sampled", "bce"] = "full"
    negatives: int = 3000
    correction: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in ("full", "sampled", "bce"):
            raise ConfigError(f"task.loss: got {self.loss!r}; expected 'full', 'sampled' or 'bce'. Correct it.")
        if self.negatives < 1:
            raise ConfigError(f"task.negatives: got {self.negatives}; expected at least 1. Set it higher.")

    def build(self, dataset: Dataset, options: TrainConfig, device: torch.device, world: World) -> NextItemTask:
        return NextItemTask(self, dataset, options, device, world)


@final
class NextItemTask(RankingTask):
    """Next item with a model that returns a `SASRecOutput`.

    Args: see `TaskConfig.build`.
    """

    _name = "next item"

    def __init__(
        self, config: NextItemConfig, dataset: Dataset, options: TrainConfig, device: torch.device, world: World
    ) -> None:
        super().__init__(config, dataset, (), options.eval_batch_size, device, world)
        self._config = config
        tables = {feature.name: feature.table or feature.name for feature in dataset.sparse_features}
        if tables.get(config.sequence) != tables[config.item]:
            raise ConfigError(
                f"task.sequence: got {config.sequence!r}; expected a feature with the table of {config.item!r}. Give "
                "both columns one table."
            )
        self._lengths = {feature.name: feature.max_length for feature in dataset.sparse_features}
        self._all_items = self.item_ids.to(device)
        self._seed, self._steps = options.seed, 0
        self._group = None if world.group is None or world.size == 1 else world.group.split("next item")

    def check(self, batch: Batch) -> None:
        lengths = batch.sparse_features[self._config.item].lengths()
        if lengths.device.type == "cpu" and not bool((lengths == 1).all()):
            raise InputError(
                f"feature {self._config.item!r}: got {int(lengths.min())} to {int(lengths.max())} ids per sample; "
                "expected the next item of each sequence. Use a column with one id, and missing = 'error'."
            )

    def loss(self, model: nn.Module, share: Share) -> Tensor:
        batch, config = share.batch, self._config
        sequence = batch.sparse_features[config.sequence]
        item = batch.sparse_features[config.item]
        # `manual_seed` uses 32 bits of its argument, so both numbers are hashed into one.
        hashed = int(np.random.SeedSequence([self._seed, self._steps]).generate_state(1)[0])
        generator = torch.Generator().manual_seed(hashed)
        self._steps += 1
        candidates = self._candidates(share, sequence, generator)
        _check_model(model)
        out: SASRecOutput = model(batch.dense_features, batch.sparse_features, candidates)
        last, full = _last_positions(sequence)
        target_P = torch.roll(sequence.values().long(), -1).index_copy(0, last, item.values().long()[full])
        positive_PD = torch.roll(out.rows, -1, 0).index_copy(0, last, out.target_rows[full])
        positive_P = (out.states.float() * positive_PD.float()).sum(1)
        assert out.candidate_rows is not None
        if config.loss == "bce":
            loss_P = self._bce(out, positive_P, sequence, candidates)
        else:
            bias_C = None
            if config.loss == "sampled" and config.correction:
                shift = math.log(max(self.item_ids.numel() - 1, 1) / candidates.numel())
                bias_C = torch.full((candidates.numel(),), shift, device=candidates.device)
            loss_P = softmax_losses(
                out.states, positive_P, out.candidate_rows, bias_C, target_P=target_P, candidate_C=candidates
            )
        weight_B = sample_weights(batch)
        weight_P = weight_B.repeat_interleave(sequence.lengths().long())
        total = self._positions(target_P.numel())
        zero = 0.0 * (out.states.sum() + out.candidate_rows.sum() + out.target_rows.sum())
        return (loss_P * weight_P).sum() * (self._world.size / max(total, 1)) + zero

    def _candidates(self, share: Share, sequence: JaggedTensor, generator: torch.Generator) -> Tensor:
        """Return the ids of all items, of K negatives, or of one negative per position."""
        config, items, device = self._config, self.item_ids, self._device
        if config.loss == "full":
            return self._all_items
        if config.loss == "sampled":
            drawn = torch.randint(items.numel(), (config.negatives,), generator=generator)
            return items[drawn].to(device)
        # Drawn for the global batch, so that they do not depend on the number of ranks.
        length = self._lengths[config.sequence]
        if not length:
            own = int(sequence.lengths().max()) if share.batch.batch_size else 0
            length = max(gather_sizes(own, self._group))
        drawn_BL = torch.randint(items.numel(), (share.total, max(length, 1)), generator=generator)
        first = share.first - (share.end - share.total)
        own_BL = drawn_BL[first : first + share.batch.batch_size].to(device)
        has_BL = torch.arange(own_BL.shape[1], device=device) < sequence.lengths()[:, None]
        return self._all_items[own_BL[has_BL]]

    def _bce(self, out: SASRecOutput, positive_P: Tensor, sequence: JaggedTensor, negative_P: Tensor) -> Tensor:
        """Return softplus(-positive) + softplus(negative); a negative of the own sequence counts nothing."""
        assert out.candidate_rows is not None
        score_P = (out.states.float() * out.candidate_rows.float()).sum(1)
        count_B = sequence.lengths().long()
        sample_P = torch.repeat_interleave(torch.arange(count_B.numel(), device=count_B.device), count_B)
        own_P = torch.isin(sample_P * self.item_rows + negative_P, sample_P * self.item_rows + sequence.values().long())
        return softplus(-positive_P) + softplus(score_P) * ~own_P

    def _positions(self, own: int) -> int:
        """Return the number of positions of all ranks. Collective."""
        if self._group is None:
            return own
        total = torch.tensor([own], dtype=torch.int64, device=self._group.device)
        return int(self._group.all_reduce_("positions", total).wait())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(self, state, ["steps"])
        self._steps = int(state["steps"])

    def query_vectors(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the state after the last item of each sequence; zeros for an empty one."""
        out: SASRecOutput = model(batch.dense_features, batch.sparse_features)
        last, full = _last_positions(batch.sparse_features[self._config.sequence])
        query_BD = out.states.new_zeros(batch.batch_size, out.states.shape[1])
        query_BD[full] = out.states[last]
        return query_BD

    def item_vectors(self, model: nn.Module, features: KeyedJaggedTensor) -> Tensor:
        out: SASRecOutput = model(torch.zeros(features.stride(), 0, device=self._device), features)
        return out.target_rows


def _check_model(model: nn.Module) -> None:
    """Raise `ConfigError` for a model that takes no candidates."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if "candidates" not in inspect.signature(inner.forward).parameters:
        raise ConfigError(
            f"model: got {type(inner).__name__}; expected a model with `candidates`, as SASRec, with task.kind = "
            "'next_item'. Use model.kind = 'sasrec', or another task."
        )


def _last_positions(sequence: JaggedTensor) -> tuple[Tensor, Tensor]:
    """Return the place of the last item of each sequence that is not empty, and the number of its sample."""
    lengths_B = sequence.lengths()
    full = (lengths_B > 0).nonzero().squeeze(1)
    return sequence.offsets()[1:][full].long() - 1, full
