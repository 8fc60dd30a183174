"""`fused_params`: optimizer settings of TorchRec's sharders, with FBGEMM's keys."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import Enum, unique
from typing import Any

from tilerec.errors import ConfigError
from tilerec.spec.cache import CacheParams
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
from tilerec.spec.plan import to_enum


@unique
class EmbOptimType(Enum):
    """FBGEMM's names of optimizers."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    NONE = "none"


_DEFAULTS = {
    "learning_rate": 0.01,
    "eps": 1e-8,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "eta": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "max_norm": 0.0,
    "initial_accumulator_value": 0.0,
}
"""Keys that hold numbers, with FBGEMM's defaults."""

_DECAY = {"learning_rate": "lr", "eps": "eps", "weight_decay": "weight_decay"}
_START = {"initial_accumulator_value": "initial_accumulator_value"}
_ROWWISE = {**_DECAY, **_START, "weight_decay_mode": "weight_decay_mode", "max_norm": "max_norm"}
_ADAM = {**_DECAY, "beta1": "betas", "beta2": "betas"}
_LARS = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
    "eta": "trust_coefficient",
}

_SPECS: dict[EmbOptimType, tuple[type[OptimizerSpec] | None, dict[str, str]]] = {
    EmbOptimType.SGD: (SGD, {"learning_rate": "lr"}),
    EmbOptimType.EXACT_SGD: (SGD, {"learning_rate": "lr"}),
    EmbOptimType.EXACT_ADAGRAD: (Adagrad, {**_DECAY, **_START}),
    EmbOptimType.ROWWISE_ADAGRAD: (RowWiseAdagrad, _ROWWISE),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (RowWiseAdagrad, _ROWWISE),
    EmbOptimType.ADAM: (Adam, _ADAM),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: (PartialRowWiseAdam, _ADAM),
    EmbOptimType.LAMB: (LAMB, _ADAM),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: (PartialRowWiseLAMB, _ADAM),
    EmbOptimType.LARS_SGD: (LarsSGD, _LARS),
    EmbOptimType.NONE: (None, {}),
}
"""Optimizer of each name, and its arguments by FBGEMM's key."""

_WITHOUT_EFFECT = {
    "bounds_check_mode": "ids are checked by the collection (on_bad_id=)",
    "cache_precision": "lines of a cache have their table's data type",
    "cache_sets": "cache_load_factor sets the number of cache lines",
    "enforce_hbm": "the plan's compute_kernel places a table in device or host memory",
    "gather_uvm_cache_stats": "caches always keep statistics: module.cache_stats()",
    "prefetch_pipeline": "module.prefetch() is optional with every cache",
    "record_cache_metrics": "caches always keep statistics: module.cache_stats()",
    "uvm_host_mapped": "host memory of tables is pinned where it is",
    "use_experimental_tbe": "tilerec has one implementation",
}
"""Keys for FBGEMM's internals, each with the reason why it has no effect."""


def read_cache_params(fused_params: Mapping[str, Any] | None, who: str) -> tuple[CacheParams | None, dict[str, Any]]:
    """Return the cache that `fused_params` describe, or None, and the remaining keys.

    Args:
        fused_params: cache keys are `cache_algorithm`, `cache_load_factor` and `cache_reserved_memory` (bytes).
        who: name of the sharder, for errors.

    Raises:
        ConfigError: a cache key has a bad value.
    """
    rest = dict(fused_params or {})
    given = {key: rest.pop(f"cache_{key}", None) for key in ("algorithm", "load_factor", "reserved_memory")}
    if all(value is None for value in given.values()):
        return None, rest
    try:
        return CacheParams(**given), rest
    except ConfigError as error:
        raise ConfigError(f"{who}: fused_params: {error}") from None


def read_fused_params(fused_params: Mapping[str, Any] | None, who: str) -> OptimizerSpec | None:
    """Return the optimizer that `fused_params` describe, or None if they describe none.

    Args:
        fused_params: keys are `optimizer` (an `EmbOptimType`, FBGEMM's own member, or its value; default `exact_sgd`),
            `learning_rate`, `eps`, `beta1`, `beta2`, `weight_decay`, `weight_decay_mode`, `momentum`, `eta`,
            `max_norm`, `initial_accumulator_value` and `stochastic_rounding`. Defaults are FBGEMM's. ADAM's decay is
            decoupled (AdamW), as in FBGEMM. Without any of these keys there is no optimizer.
        who: name of the sharder, for errors.

    Raises:
        ConfigError: tilerec lacks the optimizer, or a key is unknown.

    Warns of keys without effect, in general or with this optimizer.
    """
    given = dict(fused_params or {})
    for key in [key for key in given if key in _WITHOUT_EFFECT]:
        del given[key]
        warnings.warn(f"{who}: fused_params['{key}'] has no effect: {_WITHOUT_EFFECT[key]}.", stacklevel=4)
    known = {"optimizer", "weight_decay_mode", "stochastic_rounding", *_DEFAULTS}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"{who}: fused_params: got {unknown}; expected keys from {sorted(known)}. For the dtype of outputs use the "
            "collection's output_dtype=, for that of tables their config's data_type=."
        )
    if not given:
        return None
    kind = to_enum(EmbOptimType, given.pop("optimizer", EmbOptimType.EXACT_SGD), f"{who}: fused_params['optimizer']")
    rounding = given.pop("stochastic_rounding", True)
    spec, argument_of = _SPECS[kind]
    for key in sorted(set(given) - set(argument_of)):
        warnings.warn(f"{who}: fused_params['{key}'] has no effect with {kind.name}.", stacklevel=4)
    n = {**_DEFAULTS, **given, "weight_decay_mode": _decay_mode(given.get("weight_decay_mode"), who)}
    if spec is None:
        return None
    if spec is RowWiseAdagrad and n["weight_decay_mode"] == "none":  # FBGEMM ignores the decay in this mode
        n.update(weight_decay=0.0, weight_decay_mode="l2")
    if spec is Adam and n["weight_decay"]:
        spec = AdamW
    arguments = {argument: n[key] for key, argument in argument_of.items()}
    if "betas" in arguments:
        arguments["betas"] = n["beta1"], n["beta2"]
    return spec(**arguments, stochastic_rounding=bool(rounding))


def _decay_mode(mode: Any, who: str) -> str:
    word = str(getattr(mode, "name", mode)).lower()
    modes = {
        "none": "l2" if mode is None else "none",
        "l2": "l2",
        "decouple": "decoupled",
        "decoupled": "decoupled",
    }
    if word not in modes:
        raise ConfigError(f"{who}: fused_params['weight_decay_mode']: got {mode!r}; expected 'l2' or 'decoupled'.")
    return modes[word]
