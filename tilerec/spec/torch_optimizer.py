"""Conversion of other libraries' optimizers to specs: classes of torch and TorchRec, names of FBGEMM.

torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}   ->   SGD(lr=0.1, momentum=0.9)
"EXACT_ROWWISE_ADAGRAD", {"learning_rate": 1}   ->   RowWiseAdagrad(lr=1.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from tilerec.errors import ConfigError
from tilerec.spec.optimizer import (
    SGD,
    SPECS,
    Adagrad,
    Adam,
    AdamW,
    OptimizerSpec,
    RowWiseAdagrad,
    raise_for_unknown_settings,
)

_TORCH: dict[type, type[OptimizerSpec]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}

# FBGEMM's names for its fused optimizers (upper case, as in its enum).
_FBGEMM: dict[str, str] = {
    "EXACT_SGD": "SGD",
    "SGD": "SGD",
    "EXACT_ADAGRAD": "Adagrad",
    "EXACT_ROWWISE_ADAGRAD": "RowWiseAdagrad",
    "ADAM": "Adam",
    "PARTIAL_ROWWISE_ADAM": "PartialRowWiseAdam",
    "LAMB": "LAMB",
    "PARTIAL_ROWWISE_LAMB": "PartialRowWiseLAMB",
    "LARS_SGD": "LarsSGD",
}

# Spelling in fused-embedding configurations -> field of a spec.
_ALIASES = {"learning_rate": "lr", "eta": "trust_coefficient"}

# Settings that select the implementation of torch's own loop. Results do not depend on them, so they are ignored.
_TORCH_IGNORED = ("foreach", "fused")

# torch settings that change results and that no row rule supports -> the value without effect, which is accepted.
_TORCH_UNSUPPORTED: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "dampening": 0,
}

_WHY_UNSUPPORTED = {
    "amsgrad": "the row rules keep no running maximum of the second moment",
    "maximize": "the row rules minimise; negate the loss instead",
    "differentiable": "the update runs in the backward pass and cannot be differentiated",
    "dampening": "the row rules have no dampening; scale momentum or lr instead",
}


def from_torch(cls: Any, kwargs: Mapping[str, Any] | None = None) -> OptimizerSpec:
    """Convert an optimizer class and its keyword arguments to a spec.

    Args:
        cls: `torch.optim.SGD`, `Adagrad`, `Adam` or `AdamW` (exactly these, not subclasses, whose `step` may
            differ); a spec class or a spec; a `torch.optim.Optimizer` subclass whose own attribute
            `optimizer_spec` is a spec class; one of TorchRec's optimizer classes; or a name, such as
            "RowWiseAdagrad" or, as a string or an enum member, FBGEMM's "EXACT_ROWWISE_ADAGRAD".
        kwargs: its settings. Missing settings get the spec's defaults. `learning_rate`, `eta`, `beta1` and `beta2` are
            accepted besides the fields of the spec. `foreach` and `fused` are ignored (they select torch's
            implementation, not its results). `amsgrad`, `maximize`, `differentiable` and `dampening` raise unless off.

    TorchRec's and FBGEMM's fused "Adam" has decoupled decay, so these names with a weight_decay give `AdamW`.

    Raises:
        ConfigError: no spec for `cls`, an unknown or unsupported setting, or a value out of range.
    """
    settings = dict(kwargs or {})
    spec, shown = _spec_class(cls, settings)
    for old, new in _ALIASES.items():
        if old in settings:
            _refuse_both(shown, settings, old, new)
            settings[new] = settings.pop(old)
    if "beta1" in settings or "beta2" in settings:
        _refuse_both(shown, settings, "beta1/beta2", "betas")
        default = getattr(cls if isinstance(cls, OptimizerSpec) else spec, "betas", (0.9, 0.999))
        settings["betas"] = (settings.pop("beta1", default[0]), settings.pop("beta2", default[1]))
    if "weight_decay_mode" in settings:
        settings["weight_decay_mode"] = _decay_mode(settings["weight_decay_mode"])
    for key in _TORCH_IGNORED:
        settings.pop(key, None)
    for key, off in _TORCH_UNSUPPORTED.items():
        if key in settings and settings.pop(key) != off:
            raise ConfigError(
                f"{shown}: got {key}={(kwargs or {})[key]!r}; expected {key}={off!r} ({_WHY_UNSUPPORTED[key]}). Leave "
                "it out, or do not attach the optimizer and call its step() on the parameter's .grad."
            )
    # torch's param groups contain this switch between its two classes.
    if spec is Adam and settings.get("decoupled_weight_decay") is True:
        spec = AdamW
        settings.setdefault("weight_decay", 0.0)
    if spec in (Adam, AdamW) and settings.get("decoupled_weight_decay") is (spec is AdamW):
        del settings["decoupled_weight_decay"]
    if spec is RowWiseAdagrad and settings.get("lr_decay") == 0:
        del settings["lr_decay"]
    raise_for_unknown_settings(spec.__name__, spec, settings, shown)
    return replace(cls, **settings) if isinstance(cls, OptimizerSpec) else spec(**settings)


def _spec_class(cls: Any, settings: Mapping[str, Any]) -> tuple[type[OptimizerSpec], str]:
    """Return the spec class for `cls`, and the text for `cls` in a message."""
    if isinstance(cls, OptimizerSpec):
        return type(cls), repr(cls)
    if isinstance(cls, type):
        shown = f"{cls.__module__}.{cls.__qualname__}"
        if issubclass(cls, OptimizerSpec) and cls.__name__ in SPECS:
            return cls, cls.__name__
        if cls in _TORCH:
            return _TORCH[cls], shown
        own = vars(cls).get("optimizer_spec")
        if isinstance(own, type) and issubclass(own, OptimizerSpec):
            return own, shown
        if cls.__module__.startswith("torchrec.optim.") and cls.__name__ in SPECS:
            return _decoupled(SPECS[cls.__name__], settings), shown
    else:
        shown = name = cls.name if isinstance(cls, Enum) else cls
        if isinstance(name, str):
            if not isinstance(cls, Enum) and name in SPECS:
                return SPECS[name], shown
            if name.upper() in _FBGEMM:
                return _decoupled(SPECS[_FBGEMM[name.upper()]], settings), shown
        shown = repr(cls)
    raise ConfigError(
        f"Optimizer: got {shown}, which has no row rule; expected one of torch.optim.SGD, Adagrad, Adam, AdamW, or of "
        f"tilerec's {', '.join(SPECS)}. Use one, or do not attach it and call its step() on the parameter's .grad."
    )


def _decoupled(spec: type[OptimizerSpec], settings: Mapping[str, Any]) -> type[OptimizerSpec]:
    """Return `AdamW` for FBGEMM's Adam with a weight_decay, which is decoupled; other specs unchanged."""
    return AdamW if spec is Adam and settings.get("weight_decay", 0) else spec


def _refuse_both(shown: str, settings: Mapping[str, Any], old: str, new: str) -> None:
    if new in settings:
        raise ConfigError(f"{shown}: got both {old} and {new}; expected one, as they are the same. Pass {new} only.")


def _decay_mode(mode: Any) -> Any:
    """Convert "none", "l2", "decoupled", "decouple" or an enum member with such a name to a decay mode."""
    word = mode.name if isinstance(mode, Enum) else mode
    word = word.lower() if isinstance(word, str) else word
    return "decoupled" if word == "decouple" else word
