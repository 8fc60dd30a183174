"""Optimizers of the golden runs: every rule, with every kind of weight decay and every setting that has a branch."""

from __future__ import annotations

from typing import Any

from tilerec.optim import OptimizerSpec

_SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "SGD", "lr": 0.125},
    "sgd_momentum": {"optimizer": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "sgd_nesterov": {"optimizer": "SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True, "grad_scale": 3.0},
    "adagrad": {"optimizer": "Adagrad", "lr": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1},
    "adagrad_lr_decay": {"optimizer": "Adagrad", "lr": 0.1, "lr_decay": 0.05, "eps": 1e-3},
    "rowwise_adagrad": {"optimizer": "RowWiseAdagrad", "lr": 0.1},
    "rowwise_adagrad_l2": {
        "optimizer": "RowWiseAdagrad", "lr": 0.1, "weight_decay": 0.02, "initial_accumulator_value": 0.25,
    },
    "rowwise_adagrad_decoupled": {
        "optimizer": "RowWiseAdagrad", "lr": 0.1, "weight_decay": 0.02, "weight_decay_mode": "decoupled", "eps": 1e-3,
    },
    "rowwise_adagrad_max_norm": {"optimizer": "RowWiseAdagrad", "lr": 0.1, "max_norm": 0.5, "capturable": True},
    "adam": {"optimizer": "Adam", "lr": 0.01, "weight_decay": 0.02},
    "adam_row_step": {"optimizer": "Adam", "lr": 0.01, "row_step": True, "betas": [0.8, 0.99]},
    "adamw": {"optimizer": "AdamW", "lr": 0.01, "weight_decay": 0.02},
    "partial_rowwise_adam": {"optimizer": "PartialRowWiseAdam", "lr": 0.01, "weight_decay": 0.02},
    "partial_rowwise_adam_row_step": {"optimizer": "PartialRowWiseAdam", "lr": 0.01, "row_step": True},
    "lamb": {"optimizer": "LAMB", "lr": 0.01, "weight_decay": 0.02},
    "partial_rowwise_lamb": {"optimizer": "PartialRowWiseLAMB", "lr": 0.01, "weight_decay": 0.02},
    "lars_sgd": {"optimizer": "LarsSGD", "lr": 0.1, "weight_decay": 0.02, "trust_coefficient": 0.5},
}  # fmt: skip

OPTIMIZERS: dict[str, OptimizerSpec | None] = {
    "none": None,
    **{name: OptimizerSpec.from_json(settings) for name, settings in _SETTINGS.items()},
}
"""By name; None leaves gradients in `.grad`."""
