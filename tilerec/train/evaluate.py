"""Scores of predictions, and of a model on held-out batches.

Legend: B samples of a batch, N samples in total, T tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilerec.data.batch import Batch
from tilerec.metrics.functional import auc, calibration, log_loss, normalized_entropy
from tilerec.ops.runtime.readback import drain
from tilerec.train.scores import HeldOutScores, mean_scores


class Predictions(NamedTuple):
    """Predictions of N samples on the CPU.

    Attributes:
        probabilities: float64 [N], or [N, T] for several tasks.
        labels: float32, the same shape.
        weights: float32 [N]; None if all samples weigh the same.
    """

    probabilities: Tensor
    labels: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class Scores(HeldOutScores):
    """Exact scores of N predictions; NaN if the labels do not define a score.

    Attributes:
        samples: N.
        auc, log_loss, ne, calibration: see `tilerec.metrics.functional`. Log loss is in nats.
    """

    samples: int
    auc: float
    log_loss: float
    ne: float
    calibration: float

    @property
    def numbers(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "samples"}

    def with_numbers(self, numbers: dict[str, float]) -> Scores:
        return Scores(self.samples, **numbers)

    @staticmethod
    def of(predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None) -> Scores:
        """Return the scores of probabilities of one task."""
        return Scores(
            samples=labels_N.numel(),
            auc=auc(predictions_N, labels_N, weights_N).item(),
            log_loss=log_loss(predictions_N, labels_N, weights_N).item(),
            ne=normalized_entropy(predictions_N, labels_N, weights_N).item(),
            calibration=calibration(predictions_N, labels_N, weights_N).item(),
        )

    @staticmethod
    def by_task(found: Predictions, tasks: Sequence[str]) -> dict[str, Scores]:
        """Return the scores of each task."""
        if found.labels.dim() == 1:
            # One task; or several without samples, whose predictions have no columns.
            return {task: Scores.of(*found) for task in tasks}
        columns = zip(tasks, found.probabilities.unbind(1), found.labels.unbind(1), strict=True)
        return {task: Scores.of(ours, theirs, found.weights) for task, ours, theirs in columns}

    @staticmethod
    def mean(several: Iterable[Scores]) -> Scores:
        """Return the mean of the scores of tasks on the same samples."""
        found = mean_scores(several)
        assert isinstance(found, Scores)
        return found


def predict(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Predictions:
    """Return the predictions of a model on batches, with the model in eval mode."""
    training = model.training
    model.eval()
    probabilities, labels, weights = [], [], []
    try:
        for batch in batches:
            probabilities.append(predict_batch(model, batch, device))
            labels.append(batch.labels.float().cpu())
            weights += [] if batch.weights is None else [batch.weights.float().cpu()]
        drain(device)
    finally:
        model.train(training)
    if not labels:
        return Predictions(torch.zeros(0, dtype=torch.float64), torch.zeros(0))
    return Predictions(torch.cat(probabilities), torch.cat(labels), torch.cat(weights) if weights else None)


@torch.no_grad()
def predict_batch(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Return the probabilities of a batch, float64 with the shape of its labels, on the CPU."""
    moved = batch.to(device)
    logits = model(moved.dense_features, moved.sparse_features)
    probabilities: Tensor = logits.reshape(batch.labels.shape).double().sigmoid().cpu()
    return probabilities


def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> HeldOutScores:
    """Return the scores of the model on these batches, the mean over tasks; takes 12 bytes per sample and task."""
    found = predict(model, batches, device)
    tasks = [str(t) for t in range(found.labels.shape[1])] if found.labels.dim() == 2 else ["0"]
    return mean_scores(Scores.by_task(found, tasks).values())
