"""TorchRec's names for settings of metrics (`torchrec.metrics.metrics_config`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tilerec.errors import ConfigError
from tilerec.metrics.measure import Measure
from tilerec.metrics.torch_metric import TorchMetric


class RecMetricEnum(str, Enum):
    """TorchRec's names of the metrics that tilerec computes."""

    NE = "ne"
    LOG_LOSS = "log_loss"
    CTR = "ctr"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    AUC = "auc"
    ACCURACY = "accuracy"
    PRECISION = "precision"
    RECALL = "recall"
    AVERAGE = "average"
    WEIGHTED_AVG = "weighted_avg"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    SUM_WEIGHTS = "sum_weights"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"


class RecComputeMode(Enum):
    """Accepted for compatibility: tilerec always computes tasks and metrics together."""

    FUSED_TASKS_COMPUTATION = 1
    UNFUSED_TASKS_COMPUTATION = 2
    FUSED_TASKS_AND_STATES_COMPUTATION = 3


class StateMetricEnum(str, Enum):
    """Names of sources of further values; see `StateMetric`."""

    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"


@dataclass(frozen=True)
class RecTaskInfo:
    """A task: its name, and the keys of its tensors in a model's output.

    Attributes:
        name: part of the keys of values.
        label_name, prediction_name, weight_name: keys of tensors [N] or [N, 1].
        weighted: whether there are weights; without them all weights are 1.
        group_name: key of the group of each sample, integers [N], for grouped AUC; all tasks of a metric share it.
    """

    name: str = "DefaultTask"
    label_name: str = "label"
    prediction_name: str = "prediction"
    weight_name: str = "weight"
    weighted: bool = True
    group_name: str = "grouping_keys"


@dataclass(frozen=True)
class RecMetricDef:
    """Tasks and window of a metric.

    Attributes:
        rec_tasks: tasks, or
        rec_task_indices: their positions in `MetricsConfig.rec_tasks`.
        window_size: number of samples of the window, over all ranks.
        arguments: settings of the metric: `threshold` of accuracy, precision and recall; `bins`, `exact` and
            `grouped_auc` of AUC; `include_logloss` of NE.
        measure: for a metric under a name of your own: a measure, or a metric of torchmetrics.
    """

    rec_tasks: Sequence[RecTaskInfo] = ()
    rec_task_indices: Sequence[int] = ()
    window_size: int = 10_000_000
    arguments: Mapping[str, Any] | None = None
    measure: Measure | TorchMetric | None = None


@dataclass(frozen=True)
class ThroughputDef:
    """Settings of `ThroughputMetric`; `window_size` is in seconds."""

    window_size: float = 100
    warmup_steps: int = 100


@dataclass(frozen=True)
class MetricsConfig:
    """Settings of `generate_metric_module`.

    Attributes:
        rec_tasks: tasks that `rec_task_indices` count.
        rec_metrics: metrics by TorchRec's name, or by any name for a `RecMetricDef` with a `measure`.
        throughput_metric: None for no throughput.
        state_metrics: names of further sources of values.
        compute_interval_steps: number of updates from one `should_compute` to the next.
        min_compute_interval, max_compute_interval: seconds; the number of updates is adapted to stay between them.
        rec_compute_mode, fused_update_limit, compute_on_all_ranks, should_validate_update, enable_pt2_compile,
        should_clone_update_inputs, use_cpu_offloaded_rec_metric_module: accepted without effect: updates are always
            fused and immediate, store no inputs, and every rank computes.
    """

    rec_tasks: Sequence[RecTaskInfo] = ()
    rec_metrics: Mapping[RecMetricEnum | str, RecMetricDef] = field(default_factory=dict)
    throughput_metric: ThroughputDef | None = None
    rec_compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION
    fused_update_limit: int = 0
    state_metrics: Sequence[StateMetricEnum] = ()
    compute_interval_steps: int = 100
    min_compute_interval: float = 0.0
    max_compute_interval: float = math.inf
    compute_on_all_ranks: bool = False
    should_validate_update: bool = False
    enable_pt2_compile: bool = False
    should_clone_update_inputs: bool = False
    use_cpu_offloaded_rec_metric_module: bool | None = None

    def __post_init__(self) -> None:
        if self.compute_interval_steps < 1:
            raise ConfigError(
                f"MetricsConfig: got compute_interval_steps={self.compute_interval_steps}; expected at least 1."
            )
        if not 0 <= self.min_compute_interval <= self.max_compute_interval:
            raise ConfigError(
                f"MetricsConfig: got min_compute_interval={self.min_compute_interval}, "
                f"max_compute_interval={self.max_compute_interval}; expected 0 <= min <= max, in seconds."
            )


DefaultTaskInfo = RecTaskInfo()
"""One task with TorchRec's default keys."""

DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo])},
    throughput_metric=ThroughputDef(),
)
"""Normalized entropy of `DefaultTaskInfo`, and throughput."""

EmptyMetricsConfig = MetricsConfig()
"""No metrics."""
