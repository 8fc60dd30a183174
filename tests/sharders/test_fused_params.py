"""`fused_params`: FBGEMM's words for an optimizer give our specs, and no word is lost in silence."""

from __future__ import annotations

import warnings
from enum import Enum
from typing import Any

import pytest

from tilerec.errors import ConfigError
from tilerec.sharders.fused_params import EmbOptimType, read_fused_params
from tilerec.spec.optimizer import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)

ADAM = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6}


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ({"learning_rate": 0.1}, SGD(0.1)),
        ({"optimizer": EmbOptimType.EXACT_SGD}, SGD(0.01)),
        ({"optimizer": "sgd", "learning_rate": 0.1}, SGD(0.1)),
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 1e-6}, Adagrad(0.01, eps=1e-6)),
        ({"optimizer": "exact_row_wise_adagrad"}, RowWiseAdagrad(0.01, eps=1e-8)),
        (
            {"optimizer": "row_wise_adagrad", "weight_decay": 0.1, "weight_decay_mode": "decouple", "max_norm": 2.0},
            RowWiseAdagrad(0.01, eps=1e-8, weight_decay=0.1, weight_decay_mode="decoupled", max_norm=2.0),
        ),
        (
            {"optimizer": "row_wise_adagrad", "weight_decay": 0.1, "weight_decay_mode": "none"},
            RowWiseAdagrad(0.01, eps=1e-8),
        ),
        ({"optimizer": EmbOptimType.ADAM, **ADAM}, Adam(0.1, betas=(0.8, 0.99), eps=1e-6)),
        (
            {"optimizer": "adam", **ADAM, "weight_decay": 0.1},
            AdamW(0.1, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
        ),
        ({"optimizer": "lamb", **ADAM}, LAMB(0.1, betas=(0.8, 0.99), eps=1e-6)),
        ({"optimizer": "partial_row_wise_adam", **ADAM}, PartialRowWiseAdam(0.1, betas=(0.8, 0.99), eps=1e-6)),
        ({"optimizer": "partial_row_wise_lamb", **ADAM}, PartialRowWiseLAMB(0.1, betas=(0.8, 0.99), eps=1e-6)),
        (
            {"optimizer": "lars_sgd", "momentum": 0.5, "eta": 0.01},
            LarsSGD(0.01, momentum=0.5, trust_coefficient=0.01),
        ),
        ({"optimizer": "exact_sgd", "stochastic_rounding": False}, SGD(0.01, stochastic_rounding=False)),
        ({"optimizer": "none"}, None),
        ({}, None),
        (None, None),
    ],
)  # fmt: skip
def test_an_optimizer_in_fbgemms_words_is_one_of_ours_with_fbgemms_defaults(given: Any, spec: Any) -> None:
    assert read_fused_params(given, "sharder") == spec


def test_another_librarys_enum_of_the_same_values_is_understood() -> None:
    class Theirs(Enum):
        EXACT_SGD = "exact_sgd"

    assert read_fused_params({"optimizer": Theirs.EXACT_SGD}, "sharder") == SGD(0.01)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"learning_rte": 0.1}, "learning_rte"),
        ({"optimizer": "shampoo"}, "shampoo"),
        ({"output_dtype": "fp16"}, "output_dtype="),
        ({"optimizer": "row_wise_adagrad", "weight_decay_mode": "cowclip"}, "cowclip"),
    ],
)
def test_what_is_not_known_is_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_fused_params(given, "sharder")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prefetch_pipeline": True}, "module.prefetch"),
        ({"optimizer": "exact_sgd", "weight_decay": 0.1}, "no effect with EXACT_SGD"),
    ],
)
def test_what_has_no_effect_is_warned_about(given: Any, says: str) -> None:
    with pytest.warns(UserWarning, match=says):
        read_fused_params(given, "sharder")


def test_a_setting_without_effect_alone_attaches_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read_fused_params({"enforce_hbm": True}, "sharder") is None
