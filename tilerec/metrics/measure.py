"""Measures that can be computed from running sums.

A measure maps samples to sums, which add up over batches and ranks, and maps sums to its value. On a window of stored
samples, it is computed exactly from the samples.

Legend: T tasks, N samples, K sums of one measure.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.metrics.functional import (
    auc,
    auc_of_groups,
    calibration,
    cross_entropy,
    entropy,
    log_loss,
    normalized_entropy,
    ratio,
)


class Measure(ABC):
    """One number per task, computed from predictions and labels. Samples are [T, N], sums are float64 [K, T]."""

    name: str

    @abstractmethod
    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        """Return additive sums of a batch, float64 [K, T], without waiting for the device."""

    @abstractmethod
    def from_sums(self, sums_KT: Tensor) -> Tensor:
        """Return the values, float64 [T]; NaN if the samples do not define the measure."""

    def exact(self, predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
        """Return the measure of these samples of one task, a float64 scalar; by default from their sums."""
        return self.from_sums(self.sums(predictions_N[None], labels_N[None], weights_N[None]))[0]


class NE(Measure):
    """Normalized entropy: log loss divided by the entropy of the mean label."""

    name = "ne"

    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        w = weights_TN.double()
        loss = w * cross_entropy(predictions_TN, labels_TN)
        return torch.stack([loss.sum(1), (w * labels_TN).sum(1), w.sum(1)])

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        loss, positive, total = sums_KT
        return ratio(loss, total * entropy(ratio(positive, total)))

    def exact(self, predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
        return normalized_entropy(predictions_N, labels_N, weights_N)


class LogLoss(Measure):
    """Weighted mean cross entropy in nats."""

    name = "log_loss"

    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        w = weights_TN.double()
        return torch.stack([(w * cross_entropy(predictions_TN, labels_TN)).sum(1), w.sum(1)])

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        loss, total = sums_KT
        return ratio(loss, total)

    def exact(self, predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
        return log_loss(predictions_N, labels_N, weights_N)


class Calibration(Measure):
    """Predicted divided by observed positives."""

    name = "calibration"

    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        w = weights_TN.double()
        return torch.stack([(w * predictions_TN).sum(1), (w * labels_TN).sum(1)])

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        predicted, observed = sums_KT
        return ratio(predicted, observed)

    def exact(self, predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
        return calibration(predictions_N, labels_N, weights_N)


class AUC(Measure):
    """Area under the ROC curve: exact on a window, from bins of the logit over a lifetime.

    The lifetime's sums are the positive and the negative weight in each of `bins` equal steps of
    log(p / (1 - p)) in [-reach, reach]. Samples of one bin count as tied. `error_bound` is the maximum difference
    between the binned and the exact value: half the fraction of (positive, negative) pairs that fall into one bin.
    """

    name = "auc"

    def __init__(self, bins: int = 1 << 14, reach: float = 16.0) -> None:
        if bins < 2 or not reach > 0 or not math.isfinite(reach):
            raise ConfigError(
                f"AUC: got bins={bins}, reach={reach}; expected at least 2 bins and a positive, finite reach."
            )
        self._bins = bins
        self._reach = reach

    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        logit_TN = torch.logit(predictions_TN.double(), eps=1e-15)
        place_TN = (logit_TN / (2 * self._reach) + 0.5) * self._bins
        # A NaN prediction has no bin. It takes the middle bin with NaN weight, as NaN must not become an index.
        bin_TN = place_TN.nan_to_num(0.0).clamp(0, self._bins - 1).long()
        w_TN = weights_TN.double() * torch.where(place_TN.isnan(), float("nan"), 1.0)
        sums = w_TN.new_zeros(2, w_TN.shape[0], self._bins)
        sums[0].scatter_add_(1, bin_TN, w_TN * labels_TN)
        sums[1].scatter_add_(1, bin_TN, w_TN * (1 - labels_TN.double()))
        return sums.permute(0, 2, 1).reshape(2 * self._bins, -1)

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        positive_TK, negative_TK = self._groups(sums_KT)
        return auc_of_groups(positive_TK, negative_TK)

    def exact(self, predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
        return auc(predictions_N, labels_N, weights_N)

    def error_bound(self, sums_KT: Tensor) -> Tensor:
        """Return the maximum difference between the binned and the exact AUC, float64 [T]."""
        positive_TK, negative_TK = self._groups(sums_KT)
        return ratio((positive_TK * negative_TK).sum(1) / 2, positive_TK.sum(1) * negative_TK.sum(1))

    def _groups(self, sums_KT: Tensor) -> tuple[Tensor, Tensor]:
        positive_KT, negative_KT = sums_KT.split(self._bins)
        return positive_KT.T, negative_KT.T
