"""Terms: weighted sums over samples that several measures share. A module computes each term once per batch.

Legend: T tasks, N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


WEIGHT = Term("sum w", Samples.total_weight)
LABEL = Term("sum w y", lambda s: s.weighted_labels_TN.sum(1))
PREDICTION = Term("sum w p", lambda s: s.weighted_sum(s.predictions_TN))
CROSS_ENTROPY = Term("sum w c", lambda s: s.weighted_sum(s.cross_entropies_TN))
SQUARED_ERROR = Term("sum w (p - y)^2", lambda s: s.weighted_sum(s.errors_TN.square()))
ABSOLUTE_ERROR = Term("sum w |p - y|", lambda s: s.weighted_sum(s.errors_TN.abs()))


def predicted_positive(threshold: float) -> Term:
    """Return the weight of samples with p >= threshold."""
    return Term(f"sum w [p >= {threshold}]", lambda s: s.weighted_sum(s.above(threshold)))


def true_positive(threshold: float) -> Term:
    """Return the weight of positive samples with p >= threshold."""
    return Term(f"sum w y [p >= {threshold}]", lambda s: (s.weighted_labels_TN * s.above(threshold)).sum(1))
