"""`Measure`: one number per task, computed from sums that add up over batches and ranks.

A measure states its sums in one of three ways:

    terms         weighted sums over samples, shared with other measures (`terms.py`); all measures of this file
    sums          a method that returns its own sums; the way for measures from outside of the package
    accumulate    a method that adds to its sums in place, for many sums (`auc.py`)

Legend: T tasks, N samples, K sums of one measure.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.metrics.functional import entropy, ratio
from tilerec.metrics.samples import Samples
from tilerec.metrics.terms import (
    ABSOLUTE_ERROR,
    CROSS_ENTROPY,
    LABEL,
    PREDICTION,
    SQUARED_ERROR,
    WEIGHT,
    Term,
    predicted_positive,
    true_positive,
)


class Measure(ABC):
    """One number per task, computed from predictions and labels. Samples are [T, N], sums are float64 [K, T].

    Attributes:
        name: part of the keys of values; unique within a module.
        terms: the sums, if they are all terms; `sums` is then not called.
        entries: size of the ring of sums that a window needs, for measures with many sums; 0 for the module's size.
        keeps_samples: whether a window's value is computed by `exact` from the samples, which the module stores.
        needs_groups: whether updates must pass groups.
        has_lifetime: whether there are sums, and so a lifetime's value.
        undefined: TorchRec's value where the samples do not define the measure (`RecMetricModule` returns it).
    """

    name: str
    terms: tuple[Term, ...] = ()
    entries: int = 0
    keeps_samples: bool = False
    needs_groups: bool = False
    has_lifetime: bool = True
    undefined: float = math.nan

    @abstractmethod
    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        """Return additive sums of a batch, float64 [K, T], without waiting for the device."""

    @abstractmethod
    def from_sums(self, sums_KT: Tensor) -> Tensor:
        """Return the values, float64 [T]; NaN if the samples do not define the measure."""

    def width(self) -> int:
        """Return K."""
        nothing = torch.zeros(1, 0)
        return self.sums(nothing, nothing, nothing).shape[0]

    def accumulate(self, samples: Samples, sums_TK: Tensor) -> None:
        """Add the sums of a batch to `sums_TK`, float64 [T, K], in place."""
        sums_TK += self.sums(samples.predictions_TN, samples.labels_TN, samples.weights_TN).T

    def exact(self, predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
        """Return the measure of these samples of one task, a float64 scalar; by default from their sums."""
        return self.from_sums(self.sums(predictions_N[None], labels_N[None], weights_N[None]))[0]

    def exact_of(self, samples: Samples) -> Tensor:
        """Return the measure of these samples, float64 [T]; by default `exact` of each task."""
        columns = (samples.predictions_TN, samples.labels_TN, samples.weights_TN)
        return torch.stack([self.exact(*task) for task in zip(*columns, strict=True)])

    def error_bound(self, sums_KT: Tensor) -> Tensor | None:
        """Return the maximum error of `from_sums`, float64 [T]; None if it is exact."""
        return None


class TermMeasure(Measure):
    """A measure whose sums are terms (abstract)."""

    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        samples = Samples(predictions_TN.double(), labels_TN.double(), weights_TN.double())
        return torch.stack([term.of(samples) for term in self.terms])


class NE(TermMeasure):
    """Normalized entropy: log loss divided by the entropy of the mean label."""

    name = "ne"
    terms = (CROSS_ENTROPY, LABEL, WEIGHT)

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        loss, positive, total = sums_KT
        return ratio(loss, total * entropy(ratio(positive, total)))


class LogLoss(TermMeasure):
    """Weighted mean cross entropy.

    Args:
        base: of the logarithm; e for nats, 2 for bits.
    """

    terms = (CROSS_ENTROPY, WEIGHT)
    undefined = 0.0

    def __init__(self, base: float = math.e, *, name: str = "log_loss") -> None:
        if not 1 < base < math.inf:
            raise ConfigError(f"LogLoss: got base={base}; expected a number above 1, such as 2.")
        self.name = name
        self._nats = math.log(base)

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        loss, total = sums_KT
        return ratio(loss, total * self._nats)


class Calibration(TermMeasure):
    """Predicted divided by observed positives."""

    name = "calibration"
    terms = (PREDICTION, LABEL)
    undefined = 0.0

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        predicted, observed = sums_KT
        return ratio(predicted, observed)


class CTR(TermMeasure):
    """Click-through rate: the weighted mean label."""

    name = "ctr"
    terms = (LABEL, WEIGHT)
    undefined = 0.0

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        observed, total = sums_KT
        return ratio(observed, total)


class MSE(TermMeasure):
    """Mean squared error."""

    name = "mse"
    terms = (SQUARED_ERROR, WEIGHT)
    undefined = 0.0

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        error, total = sums_KT
        return ratio(error, total)


class RMSE(MSE):
    """Square root of the mean squared error."""

    name = "rmse"

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        return super().from_sums(sums_KT).sqrt()


class MAE(TermMeasure):
    """Mean absolute error."""

    name = "mae"
    terms = (ABSOLUTE_ERROR, WEIGHT)
    undefined = 0.0

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        error, total = sums_KT
        return ratio(error, total)


class _AtThreshold(TermMeasure):
    """A measure of the decision p >= threshold (abstract)."""

    undefined = 0.0

    def __init__(self, threshold: float = 0.5, *, name: str = "") -> None:
        if not math.isfinite(threshold):
            raise ConfigError(
                f"{type(self).__name__}: got threshold={threshold}; expected a finite number, such as 0.5."
            )
        self.name = name or type(self).__name__.lower()
        self.terms = (true_positive(threshold), predicted_positive(threshold), LABEL, WEIGHT)


class Accuracy(_AtThreshold):
    """Fraction of samples whose decision p >= threshold equals the label."""

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        true_positive, predicted, observed, total = sums_KT
        true_negative = total - predicted - observed + true_positive
        return ratio(true_positive + true_negative, total)


class Precision(_AtThreshold):
    """Fraction of the samples with p >= threshold that are positive."""

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        true_positive, predicted, _, _ = sums_KT
        return ratio(true_positive, predicted)


class Recall(_AtThreshold):
    """Fraction of the positive samples with p >= threshold."""

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        true_positive, _, observed, _ = sums_KT
        return ratio(true_positive, observed)


class TermMean(TermMeasure):
    """A term divided by the weight of the samples: the mean of any quantity.

    Args:
        name: of the measure.
        term: its sum.
    """

    def __init__(self, name: str, term: Term) -> None:
        self.name = name
        self.terms = (term, WEIGHT)

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        above, total = sums_KT
        return ratio(above, total)


class TermTotal(TermMeasure):
    """A term as it is: the sum of any quantity.

    Args:
        name: of the measure.
        term: its sum.
    """

    def __init__(self, name: str, term: Term) -> None:
        self.name = name
        self.terms = (term,)

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        return sums_KT[0]
