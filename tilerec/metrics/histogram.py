"""`Histogram`: positive and negative weight by bins of the logit, for measures of the order of predictions.

    logit      -16               -8            0            8               16
    bins        |  12,288 bins   |  172,032 bins, 7 of 8    |  12,288 bins   |          the lifetime
                |  256 bins      |  3,584 bins              |  256 bins      |          an entry of a long window

A window has one of two forms, both of bounded memory:

    at most 2^19 samples     its samples (`SampleWindow`), 12 bytes each; a report counts them in the lifetime's bins
    more samples             200 entries of 4,096 bins: its start is exact to 1 % of its length

States of one form fit the other. Histograms of older states had bins of equal width, and become these bins.

Legend: T tasks, N samples, B bins, V bins of an entry, K sums: B positive ones, then B negative ones; X entries.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.metrics.measure import Measure
from tilerec.metrics.samples import Samples

STORED = 1 << 19
"""Longest window whose samples are stored: 6.3 MB per task, as much as the entries of a longer one."""
ENTRY_BINS = 4096
"""V, the most bins of an entry: 200 entries take 6.6 MB per task. AUC differs by less than 1e-4 (docs/metrics.md)."""
DENSE = 7 / 8
"""Fraction of the bins in the inner half of the range, where nearly all predictions are."""


class Histogram(Measure):
    """A measure whose sums are the positive and the negative weight in B bins of log(p / (1 - p)) (abstract).

    Args:
        bins: B.
        reach: largest absolute logit with a bin of its own. 7/8 of the bins divide the inner half of [-reach, reach]
            equally, and 1/8 the rest.
    """

    entries = 200

    def __init__(self, bins: int, reach: float) -> None:
        if bins < 2 or not reach > 0 or not math.isfinite(reach):
            raise ConfigError(
                f"{type(self).__name__}: got bins={bins}, reach={reach}; expected at least 2 bins and a positive, "
                "finite reach."
            )
        self._bins = bins
        self._reach = reach
        self._fold = -(-bins // ENTRY_BINS)  # bins of the lifetime in one of an entry

    # -- sums -------------------------------------------------------------------------------------------------

    def width(self) -> int:
        return 2 * self._bins

    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        samples = Samples(predictions_TN.double(), labels_TN.double(), weights_TN.double())
        sums_TK = samples.labels_TN.new_zeros(len(predictions_TN), 2 * self._bins)
        self.accumulate(samples, sums_TK)
        return sums_TK.T

    def accumulate(self, samples: Samples, sums_TK: Tensor) -> None:
        _add(sums_TK, self._bin_TN(samples), self._positive_TN(samples), samples.weights_TN)

    def _bin_TN(self, samples: Samples) -> Tensor:
        """Return the bin of each sample; 0 for a NaN prediction, which must not become an index."""
        return samples.once((self._bins, self._reach), lambda: self._bin_of(samples.logs_TN[1]))

    def _positive_TN(self, samples: Samples) -> Tensor:
        """Return the positive weight of each sample; NaN for a NaN prediction."""
        predictions_TN = samples.predictions_TN
        return samples.once(
            "positive", lambda: torch.where(predictions_TN.isnan(), predictions_TN, samples.weighted_labels_TN)
        )

    def _bin_of(self, logits: Tensor) -> Tensor:
        dense, sparse = (self._bins * fraction / self._reach for fraction in (DENSE, 1 - DENSE))  # bins per logit
        place = torch.add(logits * sparse, logits.clamp(-self._reach / 2, self._reach / 2), alpha=dense - sparse)
        return place.add_(self._bins / 2).nan_to_num_(0.0).clamp_(0, self._bins - 1).long()

    # -- sums of a window -------------------------------------------------------------------------------------

    def stores_samples(self, window: int) -> bool:
        """Return whether a window of this length is stored as samples."""
        return self.keeps_samples or window <= STORED

    def window_width(self) -> int:
        """Return the number of sums of an entry, 2 V."""
        return 2 * -(-self._bins // self._fold)

    def accumulate_window(self, samples: Samples, sums_TK: Tensor) -> None:
        """Add the sums of a batch to those of an entry, float32 [T, 2 V], in place."""
        bin_TN = samples.once(
            (self._bins, self._reach, "entry"), lambda: self._bin_TN(samples).div(self._fold, rounding_mode="floor")
        )
        _add(sums_TK, bin_TN, self._positive_TN(samples).float(), samples.weights_TN.float())

    # -- sums of saved states ---------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """Text that differs for other bins of the same number; "" is that of older states."""
        return f"{DENSE:g} of the bins in |logit| < {self._reach / 2:g}"

    def from_equal_bins(self, sums_XK: Tensor, *, window: bool) -> Tensor:
        """Return sums of an older state, by bins of equal width in the same range, in these bins.

        Args:
            sums_XK: of any number of bins, with any leading dimensions.
            window: return sums of an entry.
        """
        count = sums_XK.shape[-1] // 2
        logits = (torch.arange(count, dtype=torch.float64, device=sums_XK.device) + 0.5) / count * 2 - 1
        bin_K = self._bin_of(logits * self._reach)
        bins = self._bins
        if window:
            bin_K, bins = bin_K // self._fold, self.window_width() // 2
        found = sums_XK.new_zeros(*sums_XK.shape[:-1], 2 * bins)
        return found.index_add_(-1, torch.cat([bin_K, bin_K + bins]), sums_XK)

    def as_samples(self, sums_TK: Tensor) -> Tensor:
        """Return samples with the sums of an entry: predictions, labels and weights, float64 [3, T, n].

        A bin becomes one sample of its weight, whose label is the positive part of it. Waits for the device.
        """
        positive_TV, negative_TV = sums_TK.double().chunk(2, dim=1)
        weight_TV = positive_TV + negative_TV
        used_n = (weight_TV != 0).any(0).nonzero()[:, 0]
        # The center of an entry's bin: the middle of its first and its last bin.
        first_n = used_n * self._fold
        last_n = (first_n + self._fold).clamp(max=self._bins)
        center_n = (self._logit_of(first_n) + self._logit_of(last_n)) / 2
        weight_Tn = weight_TV[:, used_n]
        labels_Tn = torch.where(weight_Tn == 0, 0.0, positive_TV[:, used_n] / weight_Tn)
        return torch.stack([center_n.sigmoid().expand_as(weight_Tn), labels_Tn, weight_Tn])

    def _logit_of(self, edge: Tensor) -> Tensor:
        """Return the logit at the lower edge of a bin, 0 to B; the inverse of `_bin_of`."""
        place = edge.double() - self._bins / 2
        dense, sparse = (self._bins * fraction / self._reach for fraction in (DENSE, 1 - DENSE))
        inner = self._bins * DENSE / 2
        return place.clamp(-inner, inner) / dense + (place - place.clamp(-inner, inner)) / sparse

    # -- values -----------------------------------------------------------------------------------------------

    @abstractmethod
    def from_sums(self, sums_KT: Tensor) -> Tensor:
        """Return the values of sums of any number of bins, float64 [T]."""


def _add(sums_TK: Tensor, bin_TN: Tensor, positive_TN: Tensor, weights_TN: Tensor) -> None:
    positive_TB, negative_TB = sums_TK.chunk(2, dim=1)
    positive_TB.scatter_add_(1, bin_TN, positive_TN)
    negative_TB.scatter_add_(1, bin_TN, weights_TN - positive_TN)
