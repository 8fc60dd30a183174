"""Scores of predictions, and of a model on held-out batches.

Legend: B samples of a batch, N samples in total.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilerec.data.batch import Batch
from tilerec.metrics.functional import auc, calibration, log_loss, normalized_entropy
from tilerec.ops.runtime.readback import drain


@dataclass(frozen=True)
class Scores:
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

    @staticmethod
    def of(predictions_N: Tensor, labels_N: Tensor) -> Scores:
        """Return the scores of probabilities."""
        return Scores(
            samples=labels_N.numel(),
            auc=auc(predictions_N, labels_N).item(),
            log_loss=log_loss(predictions_N, labels_N).item(),
            ne=normalized_entropy(predictions_N, labels_N).item(),
            calibration=calibration(predictions_N, labels_N).item(),
        )


def predict(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return probabilities float64 [N] and labels float32 [N] on the CPU, with the model in eval mode."""
    training = model.training
    model.eval()
    predictions, labels = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0)]
    try:
        with torch.no_grad():
            for batch in batches:
                moved = batch.to(device)
                logits_B = model(moved.dense_features, moved.sparse_features).reshape(-1)
                predictions.append(logits_B.double().sigmoid().cpu())
                labels.append(batch.labels.float())
        drain(device)
    finally:
        model.train(training)
    return torch.cat(predictions), torch.cat(labels)


def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Scores:
    """Return the scores of the model on these batches; takes 12 bytes per sample."""
    return Scores.of(*predict(model, batches, device))
