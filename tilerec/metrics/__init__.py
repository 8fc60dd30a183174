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
)
from tilerec.metrics.module import MetricModule
from tilerec.metrics.samples import Samples
from tilerec.metrics.terms import Term
from tilerec.metrics.torch_metric import TorchMetric

__all__ = [
    "MetricModule",
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
    "normalized_entropy",
    "log_loss",
    "auc",
    "grouped_auc",
    "calibration",
]
