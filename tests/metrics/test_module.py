"""Windows, lifetimes, tasks, and what an update may not do."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilerec.errors import ConfigError, InputError
from tilerec.metrics.functional import auc, calibration, log_loss, normalized_entropy
from tilerec.metrics.measure import AUC
from tilerec.metrics.module import MetricModule
from tilerec.testing.ranks import run_ranks

EXACT = {"ne": normalized_entropy, "log_loss": log_loss, "auc": auc, "calibration": calibration}


def _samples(tasks: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = torch.rand(tasks, count)
    return p, (torch.rand(tasks, count) < p).float(), torch.rand(tasks, count)


@pytest.mark.parametrize("cuts", [(0, 70), (0, 1, 2, 70), (0, 30, 30, 47, 70), (0, 13, 26, 39, 52, 70)])
@pytest.mark.parametrize("window", [1, 20, 69, 70, 100])
def test_window_holds_exactly_the_latest_samples_however_they_are_batched(
    cuts: tuple[int, ...], window: int
) -> None:
    p, y, w = _samples(2, 70)
    metrics = MetricModule(("click", "like"), window=window)
    for start, stop in itertools.pairwise(cuts):
        metrics.update(p[:, start:stop], y[:, start:stop], w[:, start:stop])
    values = metrics.compute()
    assert len(values) == 2 * 4 * 2
    for task, name in enumerate(("click", "like")):
        for measure, exact in EXACT.items():
            latest = [part[task, -window:] for part in (p, y, w)]
            torch.testing.assert_close(
                values[f"{name}/{measure}/window"], exact(*latest), rtol=1e-12, atol=0, equal_nan=True
            )
            whole = exact(p[task], y[task], w[task])
            atol = 2e-3 if measure == "auc" else 0
            torch.testing.assert_close(values[f"{name}/{measure}/lifetime"], whole, rtol=1e-12, atol=atol)


def test_lifetime_auc_is_exact_up_to_ties_within_a_bin() -> None:
    p, y, w = _samples(1, 3000)
    metrics = MetricModule(measures=["auc"], window=0)
    metrics.update(p[0], y[0], w[0])
    bound = AUC().error_bound(metrics.sums_auc)[0]
    assert (metrics.compute()["click/auc/lifetime"] - auc(p[0], y[0], w[0])).abs() <= bound + 1e-12
    assert bound < 1e-3


def test_update_reads_no_value_from_the_device() -> None:
    """On the meta device a tensor has no values: any read would fail here."""
    metrics = MetricModule(("click", "like"), window=10).to("meta")
    for count in (0, 4, 7, 23):
        metrics.update(*(torch.empty(2, count, device="meta") for _ in range(3)))
    assert metrics.window_samples.is_meta
    assert metrics.sums_auc.is_meta


def test_labels_of_any_type_are_taken() -> None:
    p, y, _ = _samples(1, 50)
    as_float, as_int, as_half = MetricModule(), MetricModule(), MetricModule()
    as_float.update(p[0], y[0])
    as_int.update(p[0], y[0].long())
    as_half.update(p[0], y[0].bfloat16())
    assert as_float.compute() == as_int.compute() == as_half.compute()


def test_predictions_with_a_graph_leave_no_graph_behind() -> None:
    p = torch.rand(8, requires_grad=True)
    metrics = MetricModule()
    metrics.update(p.sigmoid(), torch.ones(8))
    assert not metrics.window_samples.requires_grad
    assert not metrics.sums_ne.requires_grad


def test_reset_forgets_everything() -> None:
    p, y, w = _samples(1, 50)
    metrics, fresh = MetricModule(window=8), MetricModule(window=8)
    metrics.update(p[0], y[0], w[0])
    metrics.reset()
    for module in (metrics, fresh):
        module.update(p[0, :5], y[0, :5], w[0, :5])
    a, b = metrics.compute(), fresh.compute()
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_state_dict_carries_lifetime_and_window_over() -> None:
    p, y, w = _samples(1, 50)
    metrics, other = MetricModule(window=8), MetricModule(window=8)
    metrics.persistent(True)
    other.persistent(True)
    metrics.update(p[0, :30], y[0, :30], w[0, :30])
    other.load_state_dict(metrics.state_dict())
    for module in (metrics, other):
        module.update(p[0, 30:], y[0, 30:], w[0, 30:])
    a, b = metrics.compute(), other.compute()
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("tasks", "shapes", "message"),
    [
        (
            ("a",),
            ((5,), (4,), (5,)),
            r"labels of shape \[4\] with predictions of shape \[5\]; expected all of shape \[N\]",
        ),
        (("a", "b"), ((5,), (5,), (5,)), r"expected all of shape \[2, N\]"),
        (("a", "b"), ((3, 5), (3, 5), (3, 5)), r"predictions of shape \[3, 5\] with"),
        (("a",), ((1, 5), (1, 5), (5,)), r"weights of shape \[5\]"),
    ],
)
def test_shapes_that_disagree_are_named(
    tasks: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    metrics = MetricModule(tasks)
    with pytest.raises(InputError, match=message):
        metrics.update(*(torch.zeros(shape) for shape in shapes))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="got measure 'ndgc'"):
        MetricModule(measures=["ndgc"])
    with pytest.raises(ConfigError, match="each once"):
        MetricModule(tasks=["a", "a"])
    with pytest.raises(ConfigError, match="each once"):
        MetricModule(tasks="click")
    with pytest.raises(ConfigError, match="window=-1"):
        MetricModule(window=-1)
    with pytest.raises(ConfigError, match="got measures"):
        MetricModule(measures=["ne", "ne"])


def _on_two_ranks() -> tuple[dict[str, float], int]:
    torch.manual_seed(3)
    samples = _samples(2, 40)
    rank = torch.distributed.get_rank()
    metrics = MetricModule(["a", "b"], window=30)
    metrics.update(*(part[:, rank::2] for part in samples))
    return {name: float(value) for name, value in metrics.compute().items()}, metrics.window_samples.dim()


def test_ranks_compute_the_values_of_all_their_samples() -> None:
    torch.manual_seed(3)
    p, labels, weights = _samples(2, 40)
    first, second = run_ranks(2, _on_two_ranks)
    assert first == second
    values, dims = first
    assert dims == 3  # each rank's own window is back after the sum
    for index, task in enumerate(["a", "b"]):
        for name, exact in EXACT.items():
            want = float(exact(p[index], labels[index], weights[index]))
            assert values[f"{task}/{name}/window"] == pytest.approx(want, rel=1e-9)
            assert values[f"{task}/{name}/lifetime"] == pytest.approx(want, rel=1e-3)
