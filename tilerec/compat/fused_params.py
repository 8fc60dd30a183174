"""`fused_params`: optimizer settings of TorchRec's sharders, with FBGEMM's keys."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
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

_KEYS_USED: dict[EmbOptimType, tuple[str, ...]] = {
    EmbOptimType.SGD: ("learning_rate",),
    EmbOptimType.EXACT_SGD: ("learning_rate",),
    EmbOptimType.EXACT_ADAGRAD: ("learning_rate", "eps", "weight_decay", "initial_accumulator_value"),
    EmbOptimType.ROWWISE_ADAGRAD: (
        "learning_rate",
        "eps",
        "weight_decay",
        "weight_decay_mode",
        "max_norm",
        "initial_accumulator_value",
    ),
    EmbOptimType.ADAM: ("learning_rate", "eps", "weight_decay", "beta1", "beta2"),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: ("learning_rate", "eps", "weight_decay", "beta1", "beta2"),
    EmbOptimType.LAMB: ("learning_rate", "eps", "weight_decay", "beta1", "beta2"),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: ("learning_rate", "eps", "weight_decay", "beta1", "beta2"),
    EmbOptimType.LARS_SGD: ("learning_rate", "weight_decay", "momentum", "eta"),
    EmbOptimType.NONE: (),
}
_KEYS_USED[EmbOptimType.EXACT_ROWWISE_ADAGRAD] = _KEYS_USED[EmbOptimType.ROWWISE_ADAGRAD]

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


def read_cache_params(
    fused_params: Mapping[str, Any] | None, who: str
) -> tuple[CacheParams | None, dict[str, Any]]:
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
    kind = to_enum(
        EmbOptimType, given.pop("optimizer", EmbOptimType.EXACT_SGD), f"{who}: fused_params['optimizer']"
    )
    rounding = given.pop("stochastic_rounding", True)
    for key in sorted(set(given) - set(_KEYS_USED[kind])):
        warnings.warn(f"{who}: fused_params['{key}'] has no effect with {kind.name}.", stacklevel=4)
    mode = _decay_mode(given.get("weight_decay_mode"), who)
    make = _MAKERS[kind]
    return make({**_DEFAULTS, **given, "weight_decay_mode": mode}, {"stochastic_rounding": bool(rounding)})


def _decay_mode(mode: Any, who: str) -> str:
    word = str(getattr(mode, "name", mode)).lower()
    modes = {
        "none": "l2" if mode is None else "none",
        "l2": "l2",
        "decouple": "decoupled",
        "decoupled": "decoupled",
    }
    if word not in modes:
        raise ConfigError(
            f"{who}: fused_params['weight_decay_mode']: got {mode!r}; expected 'l2' or 'decoupled'."
        )
    return modes[word]


def _adam_like(
    cls: Callable[..., OptimizerSpec],
) -> Callable[[dict[str, Any], dict[str, Any]], OptimizerSpec]:
    return lambda n, more: cls(
        n["learning_rate"],
        betas=(n["beta1"], n["beta2"]),
        eps=n["eps"],
        weight_decay=n["weight_decay"],
        **more,
    )


def _sgd(n: dict[str, Any], more: dict[str, Any]) -> OptimizerSpec:
    return SGD(n["learning_rate"], **more)


def _adagrad(n: dict[str, Any], more: dict[str, Any]) -> OptimizerSpec:
    return Adagrad(
        n["learning_rate"],
        eps=n["eps"],
        weight_decay=n["weight_decay"],
        initial_accumulator_value=n["initial_accumulator_value"],
        **more,
    )


def _rowwise_adagrad(n: dict[str, Any], more: dict[str, Any]) -> OptimizerSpec:
    decays = n["weight_decay_mode"] != "none"  # FBGEMM ignores the decay in this mode
    return RowWiseAdagrad(
        n["learning_rate"],
        eps=n["eps"],
        weight_decay=n["weight_decay"] if decays else 0.0,
        weight_decay_mode=n["weight_decay_mode"] if decays else "l2",
        max_norm=n["max_norm"],
        initial_accumulator_value=n["initial_accumulator_value"],
        **more,
    )


def _lars(n: dict[str, Any], more: dict[str, Any]) -> OptimizerSpec:
    return LarsSGD(
        n["learning_rate"],
        weight_decay=n["weight_decay"],
        momentum=n["momentum"],
        trust_coefficient=n["eta"],
        **more,
    )


_MAKERS: dict[EmbOptimType, Callable[[dict[str, Any], dict[str, Any]], OptimizerSpec | None]] = {
    EmbOptimType.SGD: _sgd,
    EmbOptimType.EXACT_SGD: _sgd,
    EmbOptimType.EXACT_ADAGRAD: _adagrad,
    EmbOptimType.ROWWISE_ADAGRAD: _rowwise_adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _rowwise_adagrad,
    EmbOptimType.ADAM: lambda n, more: _adam_like(AdamW if n["weight_decay"] else Adam)(n, more),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _adam_like(PartialRowWiseAdam),
    EmbOptimType.LAMB: _adam_like(LAMB),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _adam_like(PartialRowWiseLAMB),
    EmbOptimType.LARS_SGD: _lars,
    EmbOptimType.NONE: lambda n, more: None,
}
