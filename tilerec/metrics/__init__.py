"""Quality measures of predictions, over windows and lifetimes, tasks and ranks; TorchRec's names for them."""

from tilerec.metrics.auc import AUC, GroupedAUC
from tilerec.metrics.functional import auc, calibration, grouped_auc, log_loss, normalized_entropy
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
from tilerec.metrics.metrics_config import (
    DefaultMetricsConfig,
    DefaultTaskInfo,
    EmptyMetricsConfig,
    MetricsConfig,
    RecComputeMode,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    StateMetricEnum,
    ThroughputDef,
)
from tilerec.metrics.module import MetricModule
from tilerec.metrics.ranking import ranking_scores
from tilerec.metrics.rec_metric_module import RecMetricModule, StateMetric, generate_metric_module
from tilerec.metrics.samples import Samples
from tilerec.metrics.terms import Term
from tilerec.metrics.throughput import ThroughputMetric
from tilerec.metrics.torch_metric import TorchMetric

__all__ = [
    "MetricModule",
    "ranking_scores",
    "Measure",
    "Samples",
    "Term",
    "TorchMetric",
    "NE",
    "LogLoss",
    "Calibration",
    "CTR",
    "MSE",
    "RMSE",
    "MAE",
    "Accuracy",
    "Precision",
    "Recall",
    "AUC",
    "GroupedAUC",
    "TermMean",
    "TermTotal",
    "RecMetricModule",
    "generate_metric_module",
    "MetricsConfig",
    "RecTaskInfo",
    "RecMetricDef",
    "RecMetricEnum",
    "RecComputeMode",
    "StateMetric",
    "StateMetricEnum",
    "ThroughputDef",
    "ThroughputMetric",
    "DefaultMetricsConfig",
    "DefaultTaskInfo",
    "EmptyMetricsConfig",
    "normalized_entropy",
    "log_loss",
    "auc",
    "grouped_auc",
    "calibration",
]
