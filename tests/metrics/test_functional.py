"""The measures against oracles written from their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilerec.metrics.functional import auc, calibration, log_loss, normalized_entropy


def _auc_by_pairs(predictions: list[float], labels: list[float], weights: list[float]) -> float:
    """Every (positive, negative) pair, one at a time."""
    won = total = 0.0
    for p, y, w in zip(predictions, labels, weights, strict=True):
        for q, z, v in zip(predictions, labels, weights, strict=True):
            pair = w * y * v * (1 - z)
            total += pair
            won += pair * (1.0 if p > q else 0.5 if p == q else 0.0)
    return won / total if total else math.nan


_samples = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.50001, 0.9, 1.0]),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    ),
    min_size=1,
    max_size=25,
)


@given(_samples)
def test_auc_equals_counting_pairs_with_ties_and_weights(samples: list[tuple[float, float, float]]) -> None:
    p, y, w = (list(part) for part in zip(*samples, strict=True))
    got = auc(torch.tensor(p), torch.tensor(y), torch.tensor(w)).item()
    assert got == pytest.approx(_auc_by_pairs(p, y, w), abs=1e-12, nan_ok=True)


@given(_samples, st.sampled_from([None, 1.0, 0.25]), st.sampled_from([torch.float32, torch.float64]))
def test_auc_of_two_classes_with_equal_weights_equals_counting_pairs(
    samples: list[tuple[float, float, float]], weight: float | None, dtype: torch.dtype
) -> None:
    p, y, _ = (list(part) for part in zip(*samples, strict=True))
    weights = None if weight is None else torch.full((len(p),), weight)
    got = auc(torch.tensor(p, dtype=dtype), torch.tensor(y), weights).item()
    assert got == pytest.approx(_auc_by_pairs(p, y, [1.0] * len(p)), abs=1e-12, nan_ok=True)


def test_auc_of_two_classes_is_that_of_the_general_way() -> None:
    """Its sorts and searches against cumulative sums over the order, on many samples with ties."""
    draw = torch.Generator().manual_seed(0)
    p = torch.randn(5000, generator=draw).mul(100).round().div(100).sigmoid()
    y = (torch.rand(5000, generator=draw) < p).float()
    w = torch.ones(5000, dtype=torch.float64)
    general = auc(torch.cat([p, p[:1]]), torch.cat([y, y[:1]]), torch.cat([w, 0 * w[:1]]))
    for labels in (y, y.bool(), y.long()):
        assert auc(p, labels).item() == pytest.approx(general.item(), abs=1e-14)


@given(_samples)
def test_losses_equal_the_formulas_sample_by_sample(samples: list[tuple[float, float, float]]) -> None:
    samples = [(min(max(p, 0.01), 0.99), y, w) for p, y, w in samples]
    p, y, w = (list(part) for part in zip(*samples, strict=True))
    loss = sum(wi * -math.log(pi if yi else 1 - pi) for pi, yi, wi in samples)
    weight, positive = sum(w), sum(wi * yi for _, yi, wi in samples)
    tensors = [torch.tensor(part, dtype=torch.float64) for part in (p, y, w)]
    mean_loss = loss / weight if weight else math.nan
    assert log_loss(*tensors).item() == pytest.approx(mean_loss, abs=1e-12, nan_ok=True)
    mean = positive / weight if weight else math.nan
    base = -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean)) if 0 < mean < 1 else 0.0
    ne = mean_loss / base if base else math.nan
    assert normalized_entropy(*tensors).item() == pytest.approx(ne, abs=1e-12, nan_ok=True)
    ratio = sum(pi * wi for pi, _, wi in samples) / positive if positive else math.nan
    assert calibration(*tensors).item() == pytest.approx(ratio, abs=1e-12, nan_ok=True)


def test_worked_examples_of_the_docstrings() -> None:
    p, y = torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert auc(p, y).item() == 0.875
    assert log_loss(torch.tensor([0.8]), torch.tensor([1.0])).item() == pytest.approx(0.2231435, abs=1e-6)
    assert normalized_entropy(torch.full((4,), 0.5), y).item() == pytest.approx(1.0, abs=1e-12)
    assert calibration(torch.tensor([0.2, 0.4]), torch.tensor([0.0, 1.0])).item() == pytest.approx(0.6)


def test_what_one_class_or_no_sample_cannot_define_is_nan() -> None:
    p, ones, none = torch.tensor([0.3, 0.6]), torch.ones(2), torch.zeros(0)
    assert auc(p, ones).isnan()
    assert auc(p, 1 - ones).isnan()
    assert normalized_entropy(p, ones).isnan()
    assert calibration(p, 1 - ones).isnan()
    for measure in (auc, log_loss, normalized_entropy, calibration):
        assert measure(none, none).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_auc_of_every_dtype_and_of_nan(dtype: torch.dtype) -> None:
    p, y = torch.rand(50).to(dtype), (torch.rand(50) < 0.5).to(dtype)
    assert auc(p, y).item() == pytest.approx(_auc_by_pairs(p.tolist(), y.tolist(), [1.0] * 50))
    p[7] = float("nan")
    assert auc(p, y).isnan()
    assert calibration(p, y).isnan()
    assert normalized_entropy(p, y).isnan()


def test_certain_and_wrong_predictions_cost_a_finite_loss() -> None:
    loss = log_loss(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]))
    assert loss.item() == pytest.approx(-math.log(1e-12), rel=1e-3)


def test_auc_of_probabilities_as_labels_is_the_expectation_over_drawn_labels() -> None:
    p = torch.rand(2000, dtype=torch.float64)
    expected = auc(p, p).item()
    drawn = [auc(p, (torch.rand(2000) < p).double()).item() for _ in range(50)]
    mean = sum(drawn) / len(drawn)
    spread = (sum((x - mean) ** 2 for x in drawn) / (len(drawn) - 1)) ** 0.5
    assert abs(mean - expected) < 4 * spread / len(drawn) ** 0.5
