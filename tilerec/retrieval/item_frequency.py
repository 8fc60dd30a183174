"""Logarithms of the probabilities that items are the positives of a batch, for the log-Q correction.

In-batch negatives are drawn in proportion to the items' popularity q, so popular items are negatives too often. The
score minus log q corrects for it (Yi et al., Sampling-bias-corrected neural modeling for large corpus item
recommendations, RecSys 2019).

    counted      q of the occurrences in the training part
    streaming    q = 1 / (mean number of steps between two batches with the item), estimated on the way (algorithm 2 of
                 the paper, one hash function)

Legend: N rows of the item table, B items of a global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from tilerec.errors import ConfigError


class ItemFrequency(ABC):
    """Estimate of log q."""

    @abstractmethod
    def log_q(self, item_B: Tensor) -> Tensor:
        """Return log q of the items of a training batch, float32 [B]. Each batch is passed once, on every rank."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the tensors that later estimates depend on; none if the estimate is constant."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - a constant estimate has no state
        """Continue from a state of `state_dict`."""


class CountedFrequency(ItemFrequency):
    """Frequencies in the training part.

    Args:
        item_M: rows of items, distinct or not [M].
        count_M: occurrences of each; those of one row are added.
        rows: N.
        device: of the batches.
    """

    def __init__(self, item_M: Tensor, count_M: Tensor, rows: int, device: torch.device) -> None:
        count_N = torch.zeros(rows, dtype=torch.float64).index_add_(0, item_M, count_M.double())
        # An item without occurrences can still be in a batch, if the data change after they were counted.
        count_N.clamp_(min=1.0)
        self._log_q_N = (count_N / count_N.sum()).log().float().to(device)

    def log_q(self, item_B: Tensor) -> Tensor:
        return self._log_q_N[item_B]


class StreamingFrequency(ItemFrequency):
    """Frequencies by the steps between two occurrences of an item, as a moving average.

    Args:
        rows: N.
        rate: weight of the latest gap in the average.
        device: of the batches.
    """

    def __init__(self, rows: int, rate: float, device: torch.device) -> None:
        self._last_N = torch.zeros(rows, device=device)
        # Before its second occurrence the gap of an item is unknown; one in 100 steps is the paper's initial value.
        self._gap_N = torch.full((rows,), 100.0, device=device)
        self._rate, self._step = rate, 0

    def log_q(self, item_B: Tensor) -> Tensor:
        self._step += 1
        distinct = item_B.unique()
        gap = self._step - self._last_N[distinct]
        self._gap_N[distinct] = (1 - self._rate) * self._gap_N[distinct] + self._rate * gap
        self._last_N[distinct] = float(self._step)
        # The probability that a batch has the item is at most 1.
        return -self._gap_N[item_B].clamp(min=1.0).log()

    def state_dict(self) -> dict[str, Tensor]:
        step = torch.tensor(self._step)
        return {"last": self._last_N.clone(), "gap": self._gap_N.clone(), "step": step}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, own in (("last", self._last_N), ("gap", self._gap_N)):
            if state[name].shape != own.shape:
                raise ConfigError(
                    f"task.log_q: got a state of {state[name].numel():,} items; expected {own.numel():,}, the rows of "
                    "the item table. Load the state of a run with the same data."
                )
        self._last_N.copy_(state["last"])
        self._gap_N.copy_(state["gap"])
        self._step = int(state["step"])
