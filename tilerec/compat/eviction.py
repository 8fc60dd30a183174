"""TorchRec's eviction policies of managed collision with filters of new ids, and its filters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilerec.modules import evict

Filter = Callable[[Tensor], tuple[Tensor, Any]]


def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return which ids occur more often than the average, and the average. [1, 2, 3, 10] -> [F, F, F, T], 4."""
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


def dynamic_threshold_filter(id_counts: Tensor, threshold_skew_multiplier: float = 10.0) -> tuple[Tensor, Tensor]:
    """Return which ids occur more often than a multiple of the average, and that number."""
    threshold = id_counts.float().mean() * threshold_skew_multiplier
    return id_counts > threshold, threshold


def probabilistic_threshold_filter(id_counts: Tensor, per_id_probability: float = 0.01) -> tuple[Tensor, Tensor]:
    """Return a draw of which ids are kept, each occurrence with a probability, and the drawn numbers."""
    draw = torch.rand(id_counts.shape, device=id_counts.device)
    return draw < 1 - (1 - per_id_probability) ** id_counts, draw


class _Filtered:
    """Takes the filter, which has no effect."""

    def _take(self, function: Filter | None) -> None:
        self._threshold_filtering_func = function
        if function is not None:
            warnings.warn(
                f"{type(self).__name__}: threshold_filtering_func has no effect: it needs the counts of all new ids, "
                "which lie on many ranks. For fewer new ids set admission_threshold=k on the module.",
                stacklevel=3,
            )


class LFU_EvictionPolicy(_Filtered, evict.LFU_EvictionPolicy):  # type: ignore[misc]
    """`tilerec.modules.LFU_EvictionPolicy`; a filter is ignored with a warning."""

    def __init__(self, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__()
        self._take(threshold_filtering_func)


class LRU_EvictionPolicy(_Filtered, evict.LRU_EvictionPolicy):  # type: ignore[misc]
    """`tilerec.modules.LRU_EvictionPolicy`; a filter is ignored with a warning."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__(decay_exponent)
        self._take(threshold_filtering_func)


class DistanceLFU_EvictionPolicy(_Filtered, evict.DistanceLFU_EvictionPolicy):  # type: ignore[misc]
    """`tilerec.modules.DistanceLFU_EvictionPolicy`; a filter is ignored with a warning."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__(decay_exponent)
        self._take(threshold_filtering_func)
