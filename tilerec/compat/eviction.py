"""TorchRec's eviction policies of managed collision with filters of new ids, and its filters."""

from __future__ import annotations

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


class WindowFilter:
    """Admits the ids that pass a filter of the counts since the last eviction, at their next use.

    A call is a training step. Every `interval`-th call counts the ids of the steps since the last such call, and the
    filter chooses among them. Until the next one, only ids that passed may get a row; before the first one, none.

    Args:
        function: takes the counts of distinct ids, int64 [U]; returns (ids that pass bool [U], the threshold).
        interval: steps between two decisions.
    """

    def __init__(self, function: Filter, interval: int) -> None:
        self._function, self._interval = function, interval
        self._steps = 0
        self._window: list[Tensor] = []
        self._passed_P: Tensor | None = None

    def __call__(self, ids_N: Tensor) -> Tensor:
        """Return the ids that may get a row, bool [N]."""
        self._steps += 1
        self._window.append(ids_N)
        if self._steps % self._interval == 0:
            ids_U, counts_U = torch.unique(torch.cat(self._window), return_counts=True)
            self._passed_P = ids_U[self._function(counts_U)[0]] if ids_U.numel() else ids_U
            self._window.clear()
        if self._passed_P is None:
            return torch.zeros_like(ids_N, dtype=torch.bool)
        return torch.isin(ids_N, self._passed_P)


class _Filtered:
    """A policy with a filter of new ids."""

    _threshold_filtering_func: Filter | None

    def admission(self, interval: int) -> evict.Admission | None:
        """Return the filter of a module; None without `threshold_filtering_func`."""
        function = self._threshold_filtering_func
        return None if function is None else WindowFilter(function, interval)


class LFU_EvictionPolicy(_Filtered, evict.LFU_EvictionPolicy):  # type: ignore[misc]
    """`tilerec.modules.LFU_EvictionPolicy` with a filter of new ids; see `WindowFilter`."""

    def __init__(self, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__()
        self._threshold_filtering_func = threshold_filtering_func


class LRU_EvictionPolicy(_Filtered, evict.LRU_EvictionPolicy):  # type: ignore[misc]
    """`tilerec.modules.LRU_EvictionPolicy` with a filter of new ids; see `WindowFilter`."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__(decay_exponent)
        self._threshold_filtering_func = threshold_filtering_func


class DistanceLFU_EvictionPolicy(_Filtered, evict.DistanceLFU_EvictionPolicy):  # type: ignore[misc]
    """`tilerec.modules.DistanceLFU_EvictionPolicy` with a filter of new ids; see `WindowFilter`."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__(decay_exponent)
        self._threshold_filtering_func = threshold_filtering_func
