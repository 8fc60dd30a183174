"""`rec_measures`: the measures that a `MetricsConfig` names, by window and tasks."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from tilerec.errors import ConfigError
from tilerec.metrics.auc import AUC, GroupedAUC
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
    TermMean,
    TermTotal,
)
from tilerec.metrics.metrics_config import MetricsConfig, RecMetricDef, RecMetricEnum, RecTaskInfo
from tilerec.metrics.terms import LABEL, PREDICTION, WEIGHT
from tilerec.metrics.torch_metric import TorchMetric


class RecMeasures(NamedTuple):
    """The measures of one window and list of tasks.

    measures: by name. The name of a part of a metric of several numbers begins with that metric and a space.
    prefixes: TorchRec's name of the metric of each measure.
    """

    tasks: tuple[RecTaskInfo, ...]
    measures: dict[str, Measure | TorchMetric]
    prefixes: dict[str, str]

    @property
    def needs_groups(self) -> bool:
        """Whether a measure needs the groups of samples."""
        return any(
            measure.needs_groups if isinstance(measure, Measure) else bool(measure.groups)
            for measure in self.measures.values()
        )


def rec_measures(config: MetricsConfig) -> list[tuple[int, RecMeasures]]:
    """Return the metrics by window and tasks."""
    found: dict[tuple[int, tuple[RecTaskInfo, ...]], RecMeasures] = {}
    for name, definition in config.rec_metrics.items():
        if definition.rec_tasks and definition.rec_task_indices:
            raise ConfigError(
                f"RecMetricDef of {str(name)!r}: got rec_tasks and rec_task_indices; expected only one of them."
            )
        tasks = tuple(definition.rec_tasks) or tuple(config.rec_tasks[index] for index in definition.rec_task_indices)
        if not tasks:
            raise ConfigError(f"RecMetricDef of {str(name)!r}: got no tasks; expected rec_tasks or rec_task_indices.")
        fused = found.setdefault((definition.window_size, tasks), RecMeasures(tasks, {}, {}))
        prefix, measures = _measures(name, definition)
        for measure in measures:
            fused.measures[measure.name] = measure
            fused.prefixes[measure.name] = prefix
    return [(window, fused) for (window, _), fused in found.items()]


def _measures(name: RecMetricEnum | str, definition: RecMetricDef) -> tuple[str, list[Measure | TorchMetric]]:
    """Return TorchRec's name of a metric, and its measures. A measure of another metric's name has a prefix."""
    if definition.measure is not None:
        return definition.measure.name, [definition.measure]
    given = dict(definition.arguments or {})
    threshold = {"threshold": given.pop("threshold", 0.5)}
    try:
        metric = RecMetricEnum(name)
    except ValueError:
        near = difflib.get_close_matches(str(name), [known.value for known in RecMetricEnum], 1)
        raise ConfigError(
            f"MetricsConfig: got metric {str(name)!r}; expected one of RecMetricEnum"
            f"{f', such as {near[0]!r}' if near else ''}. For another metric pass RecMetricDef(measure=...)."
        ) from None
    measures: dict[RecMetricEnum, Callable[[], list[Measure | TorchMetric]]] = {
        RecMetricEnum.NE: lambda: [
            NE(),
            *([LogLoss(2.0, name="ne logloss")] if given.pop("include_logloss", False) else []),
        ],
        RecMetricEnum.LOG_LOSS: lambda: [LogLoss()],
        RecMetricEnum.CTR: lambda: [CTR()],
        RecMetricEnum.CALIBRATION: lambda: [Calibration()],
        RecMetricEnum.MSE: lambda: [MSE(), RMSE()],
        RecMetricEnum.MAE: lambda: [MAE()],
        RecMetricEnum.AUC: lambda: _auc(given),
        RecMetricEnum.ACCURACY: lambda: [Accuracy(**threshold)],
        RecMetricEnum.PRECISION: lambda: [Precision(**threshold)],
        RecMetricEnum.RECALL: lambda: [Recall(**threshold)],
        RecMetricEnum.AVERAGE: lambda: [
            TermMean("average label_average", LABEL),
            TermMean("average prediction_average", PREDICTION),
        ],
        RecMetricEnum.WEIGHTED_AVG: lambda: [TermMean("weighted_avg", PREDICTION)],
        RecMetricEnum.NUM_POSITIVE_SAMPLES: lambda: [TermTotal("num_positive_samples", LABEL)],
        RecMetricEnum.SUM_WEIGHTS: lambda: [TermTotal("sum_weights", WEIGHT)],
        RecMetricEnum.WEIGHTED_SUM_PREDICTIONS: lambda: [TermTotal("weighted_sum_predictions", PREDICTION)],
    }
    found = measures[metric]()
    if given:
        raise ConfigError(
            f"RecMetricDef of {metric.value!r}: got arguments {sorted(given)}; expected those of "
            "docs/metrics.md. Remove them."
        )
    return metric.value, found


def _auc(given: dict[str, Any]) -> list[Measure | TorchMetric]:
    exact, grouped = bool(given.pop("exact", False)), bool(given.pop("grouped_auc", False))
    bins = {"bins": given.pop("bins")} if "bins" in given else {}
    more = [GroupedAUC("groups", exact=True, one_class=0.5)] if grouped else []
    return [AUC(**bins, exact=exact), *more]
