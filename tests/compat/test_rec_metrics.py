"""`tilerec.compat.rec_metrics`: TorchRec's classes of single metrics give the values of `RecMetricModule`."""

from __future__ import annotations

import pytest
import torch

from tilerec.compat import rec_metrics
from tilerec.compat.rec_metrics import AUCMetric, MetricPrefix, MSEMetric, NEMetric, NEMetricComputation
from tilerec.errors import ConfigError, InputError
from tilerec.metrics import RecComputeMode, RecMetricEnum, RecTaskInfo
from tilerec.metrics.functional import auc, normalized_entropy

TASKS = [RecTaskInfo("a"), RecTaskInfo("b")]


def samples(seed: int, count: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    predictions, labels, weights = torch.rand(3, 2, count, generator=draw)
    return predictions, (labels > 0.5).float(), weights


def add(to: rec_metrics.RecMetric, seed: int, *, by_name: bool = False) -> None:
    predictions, labels, weights = samples(seed)
    if by_name:
        to.update(predictions=by_task(predictions), labels=by_task(labels), weights=by_task(weights))
    else:
        to.update(predictions=predictions, labels=labels, weights=weights)


def by_task(tensor_TN: torch.Tensor) -> dict[str, torch.Tensor]:
    return {task.name: row for task, row in zip(TASKS, tensor_TN, strict=True)}


def metric(kind: type[rec_metrics.RecMetric] = NEMetric, **more: object) -> rec_metrics.RecMetric:
    return kind(1, 0, 50, TASKS, window_size=50, **more)  # type: ignore[arg-type]


def test_updates_by_task_and_as_one_tensor_give_equal_values() -> None:
    one, other = metric(), metric(compute_mode=RecComputeMode.FUSED_TASKS_COMPUTATION)
    for seed in range(3):
        add(one, seed, by_name=True)
        add(other, seed)
    assert one.compute() == other.compute()
    predictions, labels, weights = samples(2)
    assert float(one.compute()["ne-b|window_ne"]) == pytest.approx(
        float(normalized_entropy(predictions[1], labels[1], weights[1])), rel=1e-6
    )


def test_without_weights_samples_count_alike() -> None:
    predictions, labels, _ = samples(0)
    found = metric(AUCMetric)
    found.update(predictions=predictions, labels=labels, weights=None)
    assert float(found.compute()["auc-a|window_auc"]) == pytest.approx(float(auc(predictions[0], labels[0])), abs=1e-4)


def test_a_computation_reports_all_tasks_by_prefix() -> None:
    predictions, labels, weights = samples(0)
    computation, named = NEMetricComputation(0, 50, 2, 50), metric()
    computation.update(predictions=predictions, labels=labels, weights=weights)
    add(named, 0)
    reports = {report.metric_prefix: report for report in computation.compute()}
    assert set(reports) == {MetricPrefix.LIFETIME, MetricPrefix.WINDOW}
    assert reports[MetricPrefix.WINDOW].name == RecMetricEnum.NE
    assert reports[MetricPrefix.WINDOW].value.tolist() == [float(named.compute()[f"ne-{t}|window_ne"]) for t in "ab"]


def test_state_and_reset_are_those_of_the_samples() -> None:
    one, other = metric(MSEMetric), metric(MSEMetric)
    add(one, 0)
    other.load_state_dict(one.state_dict())
    assert other.compute() == one.compute()
    assert "mse-a|window_rmse" in one.compute()
    one.reset()
    assert float(one.compute()["mse-a|lifetime_mse"]) == 0.0


@pytest.mark.parametrize("kind", [k for k in vars(rec_metrics).values() if hasattr(k, "metric")], ids=str)
def test_every_class_has_a_computation_of_its_name(kind: type[rec_metrics.RecMetric]) -> None:
    computation = vars(rec_metrics)[f"{kind.__name__}Computation"]
    assert computation.metric_class is kind


def test_bad_tasks_and_tensors_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="distinct names"):
        NEMetric(1, 0, 50, [TASKS[0], TASKS[0]])
    with pytest.raises(ConfigError, match="world_size=2"):
        NEMetric(2, 0, 50, TASKS)
    predictions, labels, weights = samples(0)
    with pytest.raises(InputError, match=r"NEMetric: got labels of \['a'\]; expected one for each task, such as 'b'"):
        metric().update(predictions=predictions, labels={"a": labels[0]}, weights=weights)
    with pytest.raises(InputError, match=r"got predictions of shape \[50\]; expected \[2, N\]"):
        metric().update(predictions=predictions[0], labels=labels)
