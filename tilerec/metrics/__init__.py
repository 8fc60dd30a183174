"""Quality measures of predictions: normalized entropy, log loss, AUC, calibration."""

from tilerec.metrics.functional import auc, calibration, log_loss, normalized_entropy
from tilerec.metrics.measure import AUC, NE, Calibration, LogLoss, Measure
from tilerec.metrics.module import MetricModule

__all__ = [
    "MetricModule",
    "Measure",
    "NE",
    "LogLoss",
    "AUC",
    "Calibration",
    "normalized_entropy",
    "log_loss",
    "auc",
    "calibration",
]
