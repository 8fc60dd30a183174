"""`Samples`: predictions, labels and weights of a batch, with the quantities that several measures share.

Legend: T tasks, N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from tilerec.metrics.functional import SMALLEST


@final
class Samples:
    """One batch of all tasks. Shared quantities are computed once, at their first use.

    Args:
        predictions_TN, labels_TN: float64.
        weights_TN: float64; None if all are 1.
        groups_TN: int64; None if the batch has no groups.
    """

    def __init__(
        self,
        predictions_TN: Tensor,
        labels_TN: Tensor,
        weights_TN: Tensor | None,
        groups_TN: Tensor | None = None,
    ) -> None:
        self.predictions_TN = predictions_TN
        self.labels_TN = labels_TN
        self.given_weights_TN = weights_TN
        self.groups_TN = groups_TN
        self._kept: dict[object, Tensor] = {}

    @cached_property
    def weights_TN(self) -> Tensor:
        """Weights, with ones where none were given."""
        return torch.ones_like(self.labels_TN) if self.given_weights_TN is None else self.given_weights_TN

    @cached_property
    def logs_TN(self) -> tuple[Tensor, Tensor]:
        """log(1 - p) and log(p / (1 - p)), p clamped to [1e-12, 1 - 1e-12]."""
        clamped_TN = self.predictions_TN.clamp(SMALLEST, 1 - SMALLEST)
        log_others_TN = clamped_TN.neg().log1p_()
        return log_others_TN, clamped_TN.log_().sub_(log_others_TN)

    def cross_entropy(self) -> Tensor:
        """Return sum w c, float64 [T], with c = -(y log p + (1 - y) log(1 - p)) = -(log(1 - p) + y logit(p))."""
        log_others_TN, logits_TN = self.logs_TN
        return (self.weighted_sum(log_others_TN) + torch.linalg.vecdot(self.weighted_labels_TN, logits_TN)).neg_()

    @cached_property
    def errors_TN(self) -> Tensor:
        """p - y."""
        return self.predictions_TN - self.labels_TN

    @cached_property
    def weighted_labels_TN(self) -> Tensor:
        """w y."""
        return self.labels_TN if self.given_weights_TN is None else self.labels_TN * self.given_weights_TN

    def weighted_sum(self, values_TN: Tensor) -> Tensor:
        """Return sum w x, float64 [T]."""
        if self.given_weights_TN is None:
            return values_TN.sum(1)
        return torch.linalg.vecdot(self.given_weights_TN, values_TN)

    def total_weight(self) -> Tensor:
        """Return sum w, float64 [T]."""
        if self.given_weights_TN is None:
            tasks, count = self.labels_TN.shape
            return self.labels_TN.new_full((tasks,), count)
        return self.given_weights_TN.sum(1)

    def finite(self) -> Tensor:
        """Return whether all numbers of each task are finite, bool [T]."""
        columns = torch.stack([self.predictions_TN, self.labels_TN, self.weights_TN])
        return columns.isfinite().all(2).all(0)

    def above(self, threshold: float) -> Tensor:
        """Return 1 where p >= threshold, 0 below and NaN where p is not finite; float64 [T, N]."""
        # 0 * p is NaN for a bad prediction, which must not count as a negative one.
        return self.once(
            threshold, lambda: (self.predictions_TN >= threshold).double().add_(self.predictions_TN, alpha=0)
        )

    def once(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """Return `make()` of the first call with this key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]
