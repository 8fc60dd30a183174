"""TorchRec's interface: keys, values from a fixed batch, windows over ranks, states, bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics.retrieval import RetrievalNormalizedDCG

from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError
from tilerec.metrics.measure import TermMean
from tilerec.metrics.metrics_config import (
    DefaultMetricsConfig,
    EmptyMetricsConfig,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    StateMetricEnum,
    ThroughputDef,
)
from tilerec.metrics.rec_metric_module import RecMetricModule, generate_metric_module
from tilerec.metrics.terms import PREDICTION
from tilerec.metrics.torch_metric import TorchMetric
from tilerec.testing.virtual import run_virtual_ranks

TASKS = [
    RecTaskInfo(name=name, label_name=f"{name}_y", prediction_name=f"{name}_p", weight_name=f"{name}_w")
    for name in ("click", "like")
]
FIVE = (RecMetricEnum.NE, RecMetricEnum.CALIBRATION, RecMetricEnum.CTR, RecMetricEnum.MSE, RecMetricEnum.MAE)


def _config(
    names: tuple[RecMetricEnum, ...] = FIVE,
    window: int = 8,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> MetricsConfig:
    metrics = {name: RecMetricDef(rec_tasks=TASKS, window_size=window, arguments=arguments) for name in names}
    return MetricsConfig(rec_tasks=TASKS, rec_metrics=metrics, **settings)


def _module(config: MetricsConfig, **mapping: Any) -> RecMetricModule:
    return generate_metric_module(RecMetricModule, config, 4, 1, 0, mapping, torch.device("cpu"))


def _output(p: list[float], y: list[float], w: list[float]) -> dict[str, Tensor]:
    """One output for both tasks; "like" has the labels reversed."""
    columns = {"p": p, "y": y, "w": w}
    out = {f"click_{name}": torch.tensor(column) for name, column in columns.items()}
    like = {f"like_{name}": torch.tensor(column)[:, None] for name, column in columns.items()}
    return {**out, **like, "like_y": torch.tensor(y).flip(0), "unrelated": torch.zeros(99)}


BATCH = _output([0.1, 0.4, 0.35, 0.8], [0.0, 0.0, 1.0, 1.0], [1.0, 2.0, 1.0, 0.5])


def test_keys_and_values_of_one_batch_are_those_of_the_formulas() -> None:
    """Computed by hand in float64 from the batch: sum w = 4.5, sum w y = 1.5, sum w p = 1.65."""
    module = _module(_config())
    module.update(BATCH)
    values = {key: float(value) for key, value in module.compute().items()}
    loss = -(math.log(0.9) + 2 * math.log(0.6) + math.log(0.35) + 0.5 * math.log(0.8))
    base = -(1.5 * math.log(1.5 / 4.5) + 3 * math.log(3 / 4.5))
    squared = (0.01 + 2 * 0.16 + 0.65**2 + 0.5 * 0.04) / 4.5
    want = {
        "ne-click|{}_ne": loss / base,
        "calibration-click|{}_calibration": 1.65 / 1.5,
        "ctr-click|{}_ctr": 1.5 / 4.5,
        "mse-click|{}_mse": squared,
        "mse-click|{}_rmse": math.sqrt(squared),
        "mae-click|{}_mae": (0.1 + 0.8 + 0.65 + 0.1) / 4.5,
    }
    for key, number in want.items():
        for scope in ("lifetime", "window"):
            assert values[key.format(scope)] == pytest.approx(number, abs=1e-7), key
    likes = {key.replace("click", "like").format(scope) for key in want for scope in ("lifetime", "window")}
    assert set(values) == {key.format(s) for key in want for s in ("lifetime", "window")} | likes
    assert values["ctr-like|window_ctr"] == pytest.approx(3 / 4.5)


def test_metrics_with_several_values_and_settings() -> None:
    names = (RecMetricEnum.ACCURACY, RecMetricEnum.PRECISION, RecMetricEnum.RECALL)
    module = _module(_config(names, arguments={"threshold": 0.38}))
    module.update(BATCH)
    values = module.compute()
    assert values["accuracy-click|window_accuracy"] == pytest.approx(1.5 / 4.5)
    assert values["precision-click|window_precision"] == pytest.approx(0.5 / 2.5)
    assert values["recall-click|lifetime_recall"] == pytest.approx(0.5 / 1.5)

    module = _module(_config((RecMetricEnum.AUC,), arguments={"exact": True, "grouped_auc": True}))
    module.update({**BATCH, "grouping_keys": torch.tensor([5, 5, 5, 6])})
    values = module.compute()
    # Pairs (positive, negative), by weight: (0.35, 0.1) 1, (0.8, 0.1) 0.5, (0.8, 0.4) 1 of 4.5 in order.
    assert values["auc-click|window_auc"] == pytest.approx(2.5 / 4.5)
    # Group 5: pairs of weight 1 of 3 in order. Group 6 has one class, which counts 0.5.
    assert values["auc-click|window_grouped_auc"] == pytest.approx((1 / 3 + 0.5) / 2)

    module = _module(_config((RecMetricEnum.NE,), arguments={"include_logloss": True}))
    module.update(BATCH)
    values = module.compute()
    loss = -(math.log(0.9) + 2 * math.log(0.6) + math.log(0.35) + 0.5 * math.log(0.8))
    assert values["ne-click|window_logloss"] == pytest.approx(loss / 4.5 / math.log(2))

    names = tuple(
        RecMetricEnum(name)
        for name in (
            "average",
            "weighted_avg",
            "num_positive_samples",
            "sum_weights",
            "weighted_sum_predictions",
            "log_loss",
        )
    )
    module = _module(_config(names))
    module.update(BATCH)
    values = module.compute()
    assert values["log_loss-click|window_log_loss"] == pytest.approx(loss / 4.5)
    assert values["average-click|window_label_average"] == pytest.approx(1.5 / 4.5)
    assert values["average-click|window_prediction_average"] == pytest.approx(1.65 / 4.5)
    assert values["weighted_avg-click|window_weighted_avg"] == pytest.approx(1.65 / 4.5)
    assert values["num_positive_samples-click|window_num_positive_samples"] == pytest.approx(1.5)
    assert values["sum_weights-click|window_sum_weights"] == pytest.approx(4.5)
    assert values["weighted_sum_predictions-click|window_weighted_sum_predictions"] == pytest.approx(1.65)


def test_undefined_values_are_torchrecs_and_bad_ones_stay_nan() -> None:
    module = _module(_config((*FIVE, RecMetricEnum.AUC)))
    values = module.compute()
    assert values["calibration-click|window_calibration"] == 0
    assert values["mse-click|lifetime_rmse"] == 0
    assert values["auc-click|window_auc"] == 0.5
    assert values["ne-click|window_ne"].isnan()
    bad = dict(BATCH)
    bad["click_p"] = torch.tensor([0.1, math.nan, 0.2, 0.3])
    module.update(bad)
    values = module.compute()
    assert values["calibration-click|window_calibration"].isnan()
    assert values["auc-click|window_auc"].isnan()
    assert not values["auc-like|window_auc"].isnan()

    module = _module(_config((RecMetricEnum.AUC,), arguments={"exact": True}))
    assert module.compute()["auc-click|window_auc"] == 0.5
    module.update(bad)
    assert module.compute()["auc-click|window_auc"].isnan()


def test_windows_are_whole_batches_within_the_window() -> None:
    """TorchRec's windows: 100 + 100 of batches 100, 100, 40 in a window of 150 would not fit; 40 + 100 do."""
    config = _config((RecMetricEnum.CTR,), window=150)
    module = _module(config)
    for size, label in ((100, 1.0), (100, 0.5), (40, 0.0)):
        module.update(_output([0.5] * size, [label] * size, [1.0] * size))
    assert module.compute()["ctr-click|window_ctr"] == pytest.approx(50 / 140)


def test_metrics_with_other_tasks_and_windows_do_not_mix() -> None:
    config = MetricsConfig(
        rec_tasks=TASKS,
        rec_metrics={
            RecMetricEnum.CTR: RecMetricDef(rec_task_indices=[1], window_size=4),
            RecMetricEnum.CALIBRATION: RecMetricDef(rec_tasks=TASKS, window_size=100),
        },
    )
    module = _module(config)
    module.update(BATCH)
    module.update(_output([0.5], [1.0], [1.0]))
    values = module.compute()
    assert values["ctr-like|window_ctr"] == 1.0
    assert "ctr-click|window_ctr" not in values
    assert values["calibration-click|window_calibration"] == pytest.approx(2.15 / 2.5)


def test_measures_and_torchmetrics_objects_have_names_of_their_own() -> None:
    tasks = TASKS[:1]
    ndcg = TorchMetric("ndcg", RetrievalNormalizedDCG(top_k=2), groups="indexes")
    config = MetricsConfig(
        rec_tasks=tasks,
        rec_metrics={
            "ndcg": RecMetricDef(rec_tasks=tasks, measure=ndcg, window_size=8),
            "mean_prediction": RecMetricDef(
                rec_tasks=tasks, measure=TermMean("mean_prediction", PREDICTION), window_size=8
            ),
        },
    )
    module = _module(config)
    assert module.get_required_inputs() == ["click_y", "click_p", "click_w", "grouping_keys"]
    out = {**BATCH, "grouping_keys": torch.tensor([1, 1, 2, 2])}
    module.update({**out, "click_y": torch.tensor([1.0, 0.0, 0.0, 1.0])})
    values = module.compute()
    # Group 1 ranks its positive second, group 2 first.
    assert values["ndcg-click|lifetime_ndcg"] == pytest.approx((1 / math.log2(3) + 1) / 2)
    assert values["mean_prediction-click|window_mean_prediction"] == pytest.approx(1.65 / 4.5)
    with pytest.raises(InputError, match="got no 'grouping_keys'"):
        module.update(BATCH)
    with pytest.raises(InputError, match=r"model_out\['grouping_keys'\]: got 3 samples; expected 4"):
        module.update({**BATCH, "grouping_keys": torch.arange(3)})


def test_reports_come_every_few_steps_and_within_the_limits_of_seconds() -> None:
    now = [0.0]
    config = _config(compute_interval_steps=10, min_compute_interval=5.0, max_compute_interval=20.0)
    module = RecMetricModule(config, clock=lambda: now[0])
    reports = []
    for step in range(1, 101):
        now[0] += 0.1 if step < 60 else 10.0
        module.update(BATCH)
        if module.should_compute():
            reports.append(step)
            module.compute()
    # 0.1 s a step: 50 steps are 5 s. 10 s a step: 2 steps are 20 s; the report at 100 is the first after the change.
    assert reports == [10, 20, 50, 100]
    assert module.compute_interval_steps < 10


def test_throughput_counts_samples() -> None:
    now = [0.0]
    config = _config(throughput_metric=ThroughputDef(window_size=100, warmup_steps=1))
    module = RecMetricModule(config, clock=lambda: now[0])
    for _ in range(3):
        now[0] += 2.0
        module.update(BATCH)
    values = module.compute()
    assert values["throughput-throughput|total_examples"] == 12
    assert values["throughput-throughput|window_throughput"] == pytest.approx(8 / 4)


def test_default_and_empty_configs_work() -> None:
    out = {"label": torch.ones(3), "prediction": torch.full((3,), 0.5), "weight": torch.ones(3)}
    module = _module(DefaultMetricsConfig)
    module.update(out)
    assert "ne-DefaultTask|window_ne" in module.compute()
    module = _module(EmptyMetricsConfig)
    module.update(out)
    assert module.compute() == {}


def test_state_metrics_add_their_values() -> None:
    class Rates:
        def get_metrics(self) -> dict[str, float]:
            return {"optimizers|lr": 0.5}

    config = _config(state_metrics=[StateMetricEnum.OPTIMIZERS])
    module = generate_metric_module(
        RecMetricModule, config, 4, 1, 0, {StateMetricEnum.OPTIMIZERS: Rates()}, torch.device("cpu")
    )
    assert module.compute()["optimizers|lr"] == 0.5
    with pytest.raises(ConfigError, match="got no state metric"):
        _module(config)


def test_bad_input_names_the_key() -> None:
    module = _module(_config())
    with pytest.raises(InputError, match=r"got no 'click_w', which task 'click' reads; .* weighted=False"):
        module.update({key: value for key, value in BATCH.items() if key != "click_w"})
    with pytest.raises(InputError, match=r"model_out\['like_y'\]: got 3 samples; expected 4"):
        module.update({**BATCH, "like_y": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"got metric 'rauc'; expected one of RecMetricEnum, such as 'auc'"):
        _module(MetricsConfig(rec_metrics={"rauc": RecMetricDef(rec_tasks=TASKS)}))
    with pytest.raises(ConfigError, match="got no tasks"):
        _module(MetricsConfig(rec_metrics={RecMetricEnum.NE: RecMetricDef()}))
    with pytest.raises(ConfigError, match=r"got arguments \['treshold'\]"):
        _module(_config((RecMetricEnum.RECALL,), arguments={"treshold": 0.2}))
    with pytest.raises(ConfigError, match="world_size=2 with a group of 1"):
        generate_metric_module(RecMetricModule, _config(), 4, 2, 0, {}, torch.device("cpu"))
    with pytest.raises(ConfigError, match="compute_interval_steps=0"):
        MetricsConfig(compute_interval_steps=0)


def test_tasks_without_weights_and_integer_labels() -> None:
    tasks = [RecTaskInfo(name="click", weighted=False), RecTaskInfo(name="like", weight_name="w")]
    module = _module(MetricsConfig(rec_metrics={RecMetricEnum.CTR: RecMetricDef(rec_tasks=tasks)}))
    y = torch.tensor([1, 0, 0, 0])
    module.update({"label": y, "prediction": torch.rand(4).bfloat16(), "w": torch.tensor([3.0, 1, 1, 1])})
    values = module.compute()
    assert values["ctr-click|window_ctr"] == 0.25
    assert values["ctr-like|window_ctr"] == 0.5


# -------------------------------------------------------------------------------------------------------- ranks

RANKS_CONFIG = MetricsConfig(
    rec_metrics={
        **{name: RecMetricDef(rec_tasks=TASKS, window_size=24) for name in FIVE},
        RecMetricEnum.AUC: RecMetricDef(rec_tasks=TASKS, window_size=24, arguments={"exact": True}),
    },
    throughput_metric=ThroughputDef(warmup_steps=1),
)


def _stream(steps: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(11)
    out = []
    for _ in range(steps):
        p, y, w = torch.rand(3, 12, generator=draw)
        out.append(_output(p.tolist(), (y < p).float().tolist(), w.tolist()))
    return out


def _update(module: RecMetricModule, outputs: list[dict[str, Tensor]], rank: int, ranks: int) -> None:
    for out in outputs:
        module.update({key: value[rank::ranks] for key, value in out.items() if key != "unrelated"})


def _without_rates(values: dict[str, Any]) -> dict[str, float]:
    return {
        key: float(value) for key, value in values.items() if not key.endswith("_throughput") and "attempt" not in key
    }


def _first_half(group: Group) -> dict[str, Any]:
    module = RecMetricModule(RANKS_CONFIG, group)
    _update(module, _stream(8)[:4], group.rank, group.size)
    module.sync()
    state = module.state_dict()
    with pytest.raises(InputError, match=r"Call unsync\(\) first"):
        module.compute()
    module.unsync()
    module.compute()
    return state


def _second_half(group: Group, state: dict[str, Any]) -> dict[str, float]:
    module = RecMetricModule(RANKS_CONFIG, group)
    module.load_state_dict(state)
    _update(module, _stream(8)[4:], group.rank, group.size)
    assert module.trained_batches == 8
    return _without_rates(module.compute())


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 2), (2, 1), (1, 2)])
def test_a_job_resumed_on_other_ranks_reports_the_values_of_one_process(before: int, after: int) -> None:
    whole = RecMetricModule(RANKS_CONFIG)
    _update(whole, _stream(8), 0, 1)
    want = _without_rates(whole.compute())
    assert want["throughput-throughput|total_examples"] == 96
    states = run_virtual_ranks(before, _first_half)
    for values in run_virtual_ranks(after, _second_half, states[0]):
        assert values == {key: pytest.approx(value, rel=1e-12) for key, value in want.items()}


def _calls(group: Group) -> int:
    module = RecMetricModule(RANKS_CONFIG, group)
    _update(module, _stream(3), group.rank, group.size)
    group.traffic.reset()
    config = {name: d for name, d in RANKS_CONFIG.rec_metrics.items() if name in FIVE}
    module = RecMetricModule(MetricsConfig(rec_metrics=config, throughput_metric=ThroughputDef()), group)
    _update(module, _stream(3), group.rank, group.size)
    module.compute()
    return sum(sent.calls for sent in group.traffic)


def test_a_report_with_throughput_is_one_all_reduce() -> None:
    assert run_virtual_ranks(2, _calls) == [1, 1]
