"""Terms: weighted sums over samples that several measures share. A module computes each term once per batch.

Legend: T tasks, N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tilerec.metrics.samples import Samples


@dataclass(frozen=True)
class Term:
    """An additive sum over the samples of a batch.

    Attributes:
        name: unique; terms of one name are the same column of the sums.
        of: returns the sum of each task, float64 [T], without waiting for the device.
    """

    name: str
    of: Callable[[Samples], Tensor]


def _labels(samples: Samples) -> Tensor:
    return samples.weighted_labels_TN.sum(1)


def _predictions(samples: Samples) -> Tensor:
    return samples.weighted_sum(samples.predictions_TN)


def _squared_errors(samples: Samples) -> Tensor:
    return samples.weighted_sum(samples.errors_TN.square())


def _absolute_errors(samples: Samples) -> Tensor:
    return samples.weighted_sum(samples.errors_TN.abs())


def _predicted_positive(threshold: float, samples: Samples) -> Tensor:
    return samples.weighted_sum(samples.above(threshold))


def _true_positive(threshold: float, samples: Samples) -> Tensor:
    return (samples.weighted_labels_TN * samples.above(threshold)).sum(1)


# Functions and not lambdas, so that modules can be pickled.
WEIGHT = Term("sum w", Samples.total_weight)
LABEL = Term("sum w y", _labels)
PREDICTION = Term("sum w p", _predictions)
CROSS_ENTROPY = Term("sum w c", Samples.cross_entropy)
SQUARED_ERROR = Term("sum w (p - y)^2", _squared_errors)
ABSOLUTE_ERROR = Term("sum w |p - y|", _absolute_errors)


def predicted_positive(threshold: float) -> Term:
    """Return the weight of samples with p >= threshold."""
    return Term(f"sum w [p >= {threshold}]", partial(_predicted_positive, threshold))


def true_positive(threshold: float) -> Term:
    """Return the weight of positive samples with p >= threshold."""
    return Term(f"sum w y [p >= {threshold}]", partial(_true_positive, threshold))
