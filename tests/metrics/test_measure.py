"""Sums add up, and the binned AUC keeps its promise."""

from __future__ import annotations

import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.metrics.functional import auc
from tilerec.metrics.measure import AUC, NE, Calibration, LogLoss, Measure

MEASURES = [NE(), LogLoss(), Calibration(), AUC(bins=64)]


def _samples(tasks: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = torch.rand(tasks, count)
    return p, (torch.rand(tasks, count) < p).float(), torch.rand(tasks, count)


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_sums_of_two_batches_add_up_to_those_of_both(measure: Measure) -> None:
    samples = _samples(2, 31)
    first, second = (measure.sums(*(part[:, cut] for part in samples)) for cut in (slice(12), slice(12, 31)))
    torch.testing.assert_close(first + second, measure.sums(*samples))


@pytest.mark.parametrize("measure", MEASURES[:3], ids=lambda measure: measure.name)
def test_value_from_sums_equals_the_value_from_samples(measure: Measure) -> None:
    samples = _samples(3, 40)
    from_sums = measure.from_sums(measure.sums(*samples))
    exact = torch.stack([measure.exact(*(part[task] for part in samples)) for task in range(3)])
    torch.testing.assert_close(from_sums, exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bins", [2, 8, 64, 1 << 14])
def test_binned_auc_is_within_its_error_bound_of_the_exact_one(bins: int) -> None:
    measure = AUC(bins=bins)
    p, y, w = _samples(2, 500)
    sums = measure.sums(p, y, w)
    exact = torch.stack([auc(p[task], y[task], w[task]) for task in range(2)])
    bound = measure.error_bound(sums)
    assert ((measure.from_sums(sums) - exact).abs() <= bound + 1e-12).all()
    assert (bound < 1e-3).all() or bins < 1 << 14


def test_predictions_beyond_the_reach_still_count() -> None:
    measure = AUC(bins=16, reach=2.0)
    p, y = torch.tensor([[0.0, 1e-9, 0.5, 1.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert measure.from_sums(measure.sums(p, y, torch.ones_like(p))).item() == 1.0


def test_a_prediction_that_is_not_a_number_makes_the_lifetime_auc_not_a_number() -> None:
    measure = AUC(bins=16)
    p, y = torch.tensor([[0.2, float("nan"), 0.5]]), torch.tensor([[0.0, 1.0, 1.0]])
    assert measure.from_sums(measure.sums(p, y, torch.ones_like(p))).isnan().all()


@pytest.mark.parametrize(("bins", "reach"), [(1, 16.0), (8, 0.0), (8, -1.0), (8, float("inf"))])
def test_bins_that_cannot_rank_are_refused(bins: int, reach: float) -> None:
    with pytest.raises(ConfigError, match=r"at least 2 bins"):
        AUC(bins=bins, reach=reach)
