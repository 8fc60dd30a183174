"""Sums add up; each measure equals its formula written as a loop; the binned AUC is within its error bound."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.metrics.auc import AUC, GroupedAUC
from tilerec.metrics.functional import auc, grouped_auc
from tilerec.metrics.measure import (
    CTR,
    MAE,
    MSE,
    NE,
    RMSE,
    Accuracy,
    Calibration,
    LogLoss,
    Measure,
    Precision,
    Recall,
)
from tilerec.metrics.samples import Samples

SCALARS = [
    NE(),
    LogLoss(),
    LogLoss(2.0, name="bits"),
    Calibration(),
    CTR(),
    MSE(),
    RMSE(),
    MAE(),
    Accuracy(),
    Precision(0.3),
    Recall(0.7),
]
MEASURES = [*SCALARS, AUC(bins=64)]


def _samples(tasks: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    p = torch.rand(tasks, count)
    return p, (torch.rand(tasks, count) < p).float(), torch.rand(tasks, count)


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_sums_of_two_batches_add_up_to_those_of_both(measure: Measure) -> None:
    samples = _samples(2, 31)
    first, second = (measure.sums(*(part[:, cut] for part in samples)) for cut in (slice(12), slice(12, 31)))
    torch.testing.assert_close(first + second, measure.sums(*samples))
    assert len(first) == measure.width()


def _by_loop(name: str, samples: list[tuple[float, float, float]]) -> float:
    """The formulas of docs/metrics.md, sample by sample."""
    total = sum(w for _, _, w in samples)
    positive = sum(w * y for _, y, w in samples)
    predicted = sum(w * p for p, _, w in samples)
    loss = sum(-w * (y * math.log(p) + (1 - y) * math.log(1 - p)) for p, y, w in samples)
    squared = sum(w * (p - y) ** 2 for p, y, w in samples)
    absolute = sum(w * abs(p - y) for p, y, w in samples)

    def over(threshold: float, positive_only: bool) -> float:
        return sum(w * (y if positive_only else 1) for p, y, w in samples if p >= threshold)

    correct = sum(w * (y if p >= 0.5 else 1 - y) for p, y, w in samples)
    mean = positive / total if total else math.nan
    base = -mean * math.log(mean) - (1 - mean) * math.log(1 - mean) if 0 < mean < 1 else 0.0
    above, below = {
        "ne": (loss, total * base),
        "log_loss": (loss, total),
        "bits": (loss, total * math.log(2)),
        "calibration": (predicted, positive),
        "ctr": (positive, total),
        "mse": (squared, total),
        "rmse": (squared, total),
        "mae": (absolute, total),
        "accuracy": (correct, total),
        "precision": (over(0.3, True), over(0.3, False)),
        "recall": (over(0.7, True), positive),
    }[name]
    value = above / below if below else math.nan
    return math.sqrt(value) if name == "rmse" else value


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.01, 0.25, 0.3, 0.5, 0.7, 0.99]),
            st.sampled_from([0.0, 0.25, 1.0]),
            st.sampled_from([0.0, 0.5, 3.0]),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_every_scalar_measure_equals_its_formula_sample_by_sample(
    samples: list[tuple[float, float, float]],
) -> None:
    columns = [torch.tensor(part, dtype=torch.float64)[None] for part in zip(*samples, strict=True)]
    for measure in SCALARS:
        got = measure.from_sums(measure.sums(*columns)).item()
        assert got == pytest.approx(_by_loop(measure.name, samples), abs=1e-12, nan_ok=True), measure.name


@pytest.mark.parametrize("measure", SCALARS, ids=lambda measure: measure.name)
def test_samples_without_weights_have_weight_1(measure: Measure) -> None:
    p, y, _ = (part.double() for part in _samples(3, 40))
    given, absent = (
        torch.stack([term.of(Samples(p, y, w)) for term in measure.terms]) for w in (None, y.new_ones(3, 40))
    )
    torch.testing.assert_close(given, absent, rtol=1e-14, atol=0)


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_a_nan_prediction_makes_its_task_nan_and_no_other(measure: Measure) -> None:
    p, y, w = _samples(2, 30)
    p[0, 3] = float("nan")
    y[:, :2] = torch.tensor([0.0, 1.0])
    found = measure.from_sums(measure.sums(p, y, w))
    assert found.isnan().tolist() == [measure.name != "ctr", False]


@pytest.mark.parametrize("bins", [2, 8, 64, 1 << 14])
def test_binned_auc_is_within_its_error_bound_of_the_exact_one(bins: int) -> None:
    measure = AUC(bins=bins)
    p, y, w = _samples(2, 500)
    sums = measure.sums(p, y, w)
    exact = torch.stack([auc(p[task], y[task], w[task]) for task in range(2)])
    bound = measure.error_bound(sums)
    assert ((measure.from_sums(sums) - exact).abs() <= bound + 1e-12).all()
    assert (bound < 1e-3).all() or bins < 1 << 14


@pytest.mark.parametrize("mean", [-6.0, -3.0, 0.0])
@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
def test_default_bins_are_within_1e_4_of_the_exact_auc(mean: float, spread: float) -> None:
    """Logits as click models have them: rates from 0.2 % to 50 %, sharp and flat. The reported bound shows it."""
    logits = torch.randn(20_000, dtype=torch.float64) * spread + mean
    p = logits.sigmoid()
    y = (torch.rand(20_000, dtype=torch.float64) < p).double()
    w = torch.rand(20_000, dtype=torch.float64)
    measure = AUC()
    sums = measure.sums(p[None], y[None], w[None])
    bound = measure.error_bound(sums).item()
    assert bound < 1e-4
    assert measure.from_sums(sums).item() == pytest.approx(auc(p, y, w).item(), abs=bound + 1e-12)


def test_predictions_beyond_the_reach_still_count() -> None:
    measure = AUC(bins=16, reach=2.0)
    p, y = torch.tensor([[0.0, 1e-9, 0.5, 1.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert measure.from_sums(measure.sums(p, y, torch.ones_like(p))).item() == 1.0


@pytest.mark.parametrize(("bins", "reach"), [(1, 16.0), (8, 0.0), (8, -1.0), (8, float("inf"))])
def test_bins_that_cannot_rank_are_refused(bins: int, reach: float) -> None:
    with pytest.raises(ConfigError, match=r"at least 2 bins"):
        AUC(bins=bins, reach=reach)


def _grouped_by_loop(p: Tensor, y: Tensor, w: Tensor, g: Tensor, by_samples: bool) -> float:
    areas = []
    for group in g.unique():
        mine = g == group
        area = auc(p[mine], y[mine], w[mine]).item()
        if not math.isnan(area):
            areas.append((area, w[mine].sum().item() if by_samples else 1.0))
    weight = sum(w for _, w in areas)
    return sum(a * w for a, w in areas) / weight if weight else math.nan


@pytest.mark.parametrize("groups", [1, 5, 40])
@pytest.mark.parametrize("count", [0, 1, 2, 60])
def test_grouped_auc_equals_the_mean_over_groups_in_a_loop(groups: int, count: int) -> None:
    p = torch.rand(2, count).mul(8).round().div(8).double()  # with ties
    y, w = (torch.rand(2, count) < 0.4).double(), torch.rand(2, count).double()
    g = torch.randint(0, groups, (2, count)) * 1_000_003
    for weights in ("samples", "groups"):
        measure = GroupedAUC(weights)
        sums_TK = torch.zeros(2, 2, dtype=torch.float64)
        measure.accumulate(Samples(p, y, w, g), sums_TK)
        for task in range(2):
            want = _grouped_by_loop(p[task], y[task], w[task], g[task], weights == "samples")
            found = measure.from_sums(sums_TK.T)[task].item()
            assert found == pytest.approx(want, abs=1e-12, nan_ok=True)
            if weights == "samples":
                assert grouped_auc(p[task], y[task], g[task], w[task]).item() == pytest.approx(
                    want, abs=1e-12, nan_ok=True
                )


def test_grouped_auc_of_the_docstring() -> None:
    p = torch.tensor([0.4, 0.2, 0.3, 0.9, 0.1, 0.6])
    y = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    g = torch.tensor([3, 7, 3, 5, 3, 7])
    assert grouped_auc(p, y, g).item() == pytest.approx(0.7)


def test_a_nan_prediction_makes_the_grouped_auc_nan() -> None:
    p, y, w = (part.double() for part in _samples(1, 30))
    p[0, 4] = float("nan")
    y[0, :15] = 0.0
    y[0, 15:] = 1.0
    sums_TK = torch.zeros(1, 2, dtype=torch.float64)
    GroupedAUC().accumulate(Samples(p, y, w, torch.arange(30)[None] % 3), sums_TK)
    assert GroupedAUC().from_sums(sums_TK.T).isnan().all()


def test_grouped_auc_without_groups_is_refused() -> None:
    p = torch.rand(1, 4).double()
    with pytest.raises(InputError, match=r"Pass update\(groups=\.\.\.\)"):
        GroupedAUC().accumulate(Samples(p, p, None), torch.zeros(1, 2, dtype=torch.float64))


def test_wrong_settings_of_measures_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights='users'"):
        GroupedAUC("users")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threshold=nan"):
        Accuracy(float("nan"))
    with pytest.raises(ConfigError, match=r"base=1"):
        LogLoss(1)
