"""The measures as functions of whole tensors: exact, float64.

For predictions p in [0, 1], labels y in [0, 1] and weights w (1 unless given):

    cross entropy   c = -(y log p + (1 - y) log(1 - p))
    log loss        sum w c / sum w
    NE              log loss / entropy of the mean label  m = sum w y / sum w:
                    sum w c / -(sum w y log m + sum w (1 - y) log(1 - m))
                    1 is as good as the constant prediction m; below 1 is better (He et al., Practical Lessons from
                    Predicting Clicks on Ads at Facebook, ADKDD 2014)
    calibration     sum w p / sum w y
    AUC             the probability that a random positive is ranked above a random negative, ties counting half:
                    with y as the weight of the positive part and 1 - y of the negative part

A measure is NaN if the data do not define it (no weight, no positives, or one class only).

Legend: N samples. Every function takes predictions_N, labels_N, weights_N and returns a float64 scalar tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1e-12
"""Minimum distance of predictions from 0 and 1, by clamping before a logarithm."""


def cross_entropy(predictions_N: Tensor, labels_N: Tensor) -> Tensor:
    """Return the cross entropy of each sample in float64, any shape."""
    p = predictions_N.double().clamp(SMALLEST, 1 - SMALLEST)
    y = labels_N.double()
    return -(y * p.log() + (1 - y) * (-p).log1p())


def entropy(mean: Tensor) -> Tensor:
    """Return the entropy in nats of a Bernoulli variable with this mean; 0 at 0 and 1."""
    return torch.special.entr(mean) + torch.special.entr(1 - mean)


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return above / below, NaN where below is 0."""
    return torch.where(below == 0, torch.full_like(above, float("nan")), above / below)


def log_loss(predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """Return the weighted mean cross entropy in nats. One sample, p = 0.8, y = 1: -log 0.8 = 0.223."""
    w = _weights(labels_N, weights_N)
    return ratio((w * cross_entropy(predictions_N, labels_N)).sum(), w.sum())


def normalized_entropy(predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """Return log loss divided by the entropy of the mean label. p = 0.5 everywhere on balanced labels: 1."""
    w = _weights(labels_N, weights_N)
    mean = ratio((w * labels_N.double()).sum(), w.sum())
    return ratio((w * cross_entropy(predictions_N, labels_N)).sum(), w.sum() * entropy(mean))


def calibration(predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """Return predicted divided by observed positives. Predictions 0.2 and 0.4 on labels 0 and 1: 0.6."""
    w = _weights(labels_N, weights_N)
    return ratio((w * predictions_N.double()).sum(), (w * labels_N.double()).sum())


def auc(predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """Return the area under the ROC curve, exact with ties.

    Worked example: predictions 0.1, 0.4, 0.4, 0.8 on labels 0, 0, 1, 1. Of the four (positive, negative) pairs, three
    are in order and one is tied, so the AUC is 3.5 / 4 = 0.875.

    Labels may be probabilities. The result is then the AUC expected over labels drawn from them, as a ratio of
    expectations.
    """
    w = _weights(labels_N, weights_N)
    y = labels_N.double()
    order_N = predictions_N.argsort()
    distinct, group_N = torch.unique_consecutive(predictions_N[order_N], return_inverse=True)
    positive = w.new_zeros(distinct.numel()).index_add_(0, group_N, (w * y)[order_N])
    negative = w.new_zeros(distinct.numel()).index_add_(0, group_N, (w * (1 - y))[order_N])
    return auc_of_groups(positive, negative)


def auc_of_groups(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the AUC of groups of tied samples, in ascending order along the last dimension."""
    below = negative.cumsum(-1) - negative
    pairs = (positive * (below + negative / 2)).sum(-1)
    return ratio(pairs, positive.sum(-1) * negative.sum(-1))


def _weights(labels_N: Tensor, weights_N: Tensor | None) -> Tensor:
    return torch.ones_like(labels_N, dtype=torch.float64) if weights_N is None else weights_N.double()
