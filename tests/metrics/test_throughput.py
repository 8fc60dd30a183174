"""Rates count samples after warm-up; a lifetime continues after a restart; ranks add their samples."""

from __future__ import annotations

import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.metrics.throughput import ThroughputMetric


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _values(metric: ThroughputMetric) -> dict[str, float]:
    return {name: value.item() for name, value in metric.values(metric.numbers(), 1).items()}


def _run(metric: ThroughputMetric, clock: _Clock, sizes: list[int], seconds: float) -> None:
    for size in sizes:
        clock.now += seconds
        metric.update(size)


def test_rates_leave_out_warm_up_and_count_the_samples_of_ragged_batches() -> None:
    clock = _Clock()
    metric = ThroughputMetric(window_seconds=5, warmup_steps=2, clock=clock)
    _run(metric, clock, [100, 100], 50.0)
    assert _values(metric) == {"total_examples": 200, "attempt_examples": 200}
    _run(metric, clock, [10, 20, 30], 2.0)
    assert _values(metric) == {
        "total_examples": 260,
        "attempt_examples": 260,
        "lifetime_throughput": 10.0,
        "attempt_throughput": 10.0,
        "window_throughput": pytest.approx(60 / 6),
    }
    _run(metric, clock, [40], 2.0)
    assert _values(metric)["window_throughput"] == pytest.approx((20 + 30 + 40) / 6)  # of the last 5 seconds


def test_a_lifetime_continues_after_a_restart_with_a_warm_up_of_its_own() -> None:
    clock = _Clock()
    first = ThroughputMetric(warmup_steps=1, clock=clock)
    _run(first, clock, [5, 10, 10], 1.0)
    state = first.state(first.numbers(), 1)
    second = ThroughputMetric(warmup_steps=1, clock=clock)
    second.load(state, empty=False)
    _run(second, clock, [7, 40], 2.0)
    values = _values(second)
    assert values["total_examples"] == 25 + 47
    assert values["attempt_examples"] == 47
    assert values["lifetime_throughput"] == pytest.approx((10 + 10 + 40) / (1 + 1 + 2))
    assert values["attempt_throughput"] == pytest.approx(40 / 2)


def test_ranks_add_samples_and_average_seconds() -> None:
    clocks = [_Clock(), _Clock()]
    ranks = [ThroughputMetric(warmup_steps=1, clock=clock) for clock in clocks]
    for metric, clock, size in zip(ranks, clocks, (10, 30), strict=True):
        _run(metric, clock, [size] * 3, 1.0)
    sums = ranks[0].numbers() + ranks[1].numbers()
    values = ranks[0].values(sums, 2)
    assert values["total_examples"] == 120
    assert values["lifetime_throughput"] == pytest.approx(80 / 2)
    state = ranks[0].state(sums, 2)
    resumed = [ThroughputMetric(warmup_steps=1), ThroughputMetric(warmup_steps=1), ThroughputMetric()]
    for rank, metric in enumerate(resumed):
        metric.load(state, empty=rank != 0)
    total = torch.stack([metric.numbers() for metric in resumed]).sum(0)
    again = resumed[0].values(total, 3)
    assert again["total_examples"] == 120
    assert again["lifetime_throughput"] == pytest.approx(80 / 2)


@pytest.mark.parametrize(("seconds", "steps"), [(0, 1), (-1, 1), (5, 0)])
def test_wrong_settings_are_refused(seconds: float, steps: int) -> None:
    with pytest.raises(ConfigError, match="expected a positive number of seconds"):
        ThroughputMetric(window_seconds=seconds, warmup_steps=steps)
