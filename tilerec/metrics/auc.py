"""Measures of the order of predictions: AUC by histogram or exact, and AUC within groups.

Legend: T tasks, N samples, B bins, K sums of one measure: positive weights by bin, then negative ones.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.metrics.functional import auc, auc_of_groups, group_aucs, ratio
from tilerec.metrics.histogram import Histogram
from tilerec.metrics.measure import Measure
from tilerec.metrics.samples import Samples


class AUC(Histogram):
    """Area under the ROC curve, from bins of the logit (`histogram.py`).

    Samples of one bin count as tied. `error_bound` is the maximum difference between the binned and the exact value:
    half the fraction of (positive, negative) pairs that fall into one bin.

    Args:
        bins: B. A lifetime takes 16 B bytes per task (3.1 MB), a window at most 6.6 MB.
        reach: largest absolute logit with a bin of its own; 16 is p = 1e-7.
        exact: compute a window's value from its samples, which the module then stores, however many: 12 bytes per
            sample and task, 24 for float64 predictions.
        lifetime: False with `exact=True` computes a window's value only, and makes updates cheaper.
    """

    name = "auc"
    undefined = 0.5

    def __init__(self, bins: int = 3 << 16, reach: float = 16.0, *, exact: bool = False, lifetime: bool = True) -> None:
        super().__init__(bins, reach)
        if not exact and not lifetime:
            raise ConfigError("AUC: got lifetime=False without exact=True; expected at least one of both values.")
        self.keeps_samples = exact
        self.has_lifetime = lifetime

    def width(self) -> int:
        return super().width() if self.has_lifetime else 0

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        return auc_of_groups(*_by_class(sums_KT))

    def exact(self, predictions_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
        return auc(predictions_N, labels_N, weights_N)

    def error_bound(self, sums_KT: Tensor) -> Tensor:
        """Return the maximum difference between the binned and the exact AUC, float64 [T]."""
        positive_TB, negative_TB = _by_class(sums_KT)
        return ratio(torch.linalg.vecdot(positive_TB, negative_TB) / 2, positive_TB.sum(1) * negative_TB.sum(1))


def _by_class(sums_KT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positive and the negative weights, [T, B] each."""
    positive_BT, negative_BT = sums_KT.chunk(2)
    return positive_BT.T, negative_BT.T


class GroupedAUC(Measure):
    """Mean of the AUC within each group, such as a user or a session. Groups of one class have no AUC.

    The sums treat equal groups of two batches as two groups. With `exact=True` a window's value joins them.

    Source: Zhu et al., Optimized Cost per Click in Taobao Display Advertising, KDD 2017 (weights "samples").

    Args:
        weights: of a group in the mean: the weight of its samples, or 1.
        exact: compute a window's value from its samples, which the module then stores (see `AUC`; 8 bytes more per
            sample).
        one_class: AUC of groups of one class; None leaves them out. TorchRec takes 0.5.
    """

    name = "grouped_auc"
    needs_groups = True
    undefined = 0.5

    def __init__(
        self,
        weights: Literal["samples", "groups"] = "samples",
        *,
        exact: bool = False,
        one_class: float | None = None,
    ) -> None:
        if weights not in ("samples", "groups"):
            raise ConfigError(f"GroupedAUC: got weights={weights!r}; expected 'samples' or 'groups'.")
        self._by_samples = weights == "samples"
        self._one_class = one_class
        self.keeps_samples = exact

    def width(self) -> int:
        return 2

    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        one_group_TN = torch.zeros_like(predictions_TN, dtype=torch.int64)
        return self._sums(Samples(predictions_TN.double(), labels_TN.double(), weights_TN.double(), one_group_TN))

    def accumulate(self, samples: Samples, sums_TK: Tensor) -> None:
        sums_TK += self._sums(samples).T

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        areas_T, weights_T = sums_KT
        return ratio(areas_T, weights_T)

    def exact_of(self, samples: Samples) -> Tensor:
        return self.from_sums(self._sums(samples))

    def _sums(self, samples: Samples) -> Tensor:
        if samples.groups_TN is None:
            raise InputError("GroupedAUC: got no groups; expected one group per sample. Pass update(groups=...).")
        auc_TN, weight_TN = group_aucs(samples.predictions_TN, samples.labels_TN, samples.weights_TN, samples.groups_TN)
        if self._one_class is not None:
            auc_TN = torch.where(auc_TN.isinf() & (weight_TN > 0), self._one_class, auc_TN)
        counts_TN = ~auc_TN.isinf()
        if not self._by_samples:
            weight_TN = torch.ones_like(weight_TN)
        weight_TN = weight_TN * counts_TN
        areas_TN = torch.where(counts_TN, auc_TN, 0.0) * weight_TN
        return torch.stack([areas_TN.sum(1), weight_TN.sum(1)])
