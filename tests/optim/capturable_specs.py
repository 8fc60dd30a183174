"""Specs of capturable optimizers."""

from __future__ import annotations

from tilerec.spec.optimizer import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    OptimizerSpec,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)

SPECS: dict[str, OptimizerSpec] = {
    "sgd": SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": Adagrad(lr=0.1, lr_decay=0.1),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled", max_norm=0.5),
    "adam": Adam(lr=0.1),
    "adamw": AdamW(lr=0.1, row_step=True),
    "partial_rowwise_adam": PartialRowWiseAdam(lr=0.1),
    "lamb": LAMB(lr=0.1, weight_decay=0.1),
    "partial_rowwise_lamb": PartialRowWiseLAMB(lr=0.1, row_step=True),
    "lars_sgd": LarsSGD(lr=0.1, trust_coefficient=0.5),
}
