"""Adadelta and RMSprop as optimizers of tables, for programs that attach `torch.optim.Adadelta` or `RMSprop`.

The formulas are torch's, on the rows that a step touches:

    Adadelta   v = rho v + (1 - rho) g^2;  d = sqrt(u + eps) / sqrt(v + eps) g;  u = rho u + (1 - rho) d^2;  w -= lr d
    RMSprop    v = alpha v + (1 - alpha) g^2;  w -= lr g / (sqrt(v) + eps)

with g += weight_decay w first. Sources: Zeiler (2012); Hinton, Neural Networks for Machine Learning, lecture 6e (2012).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.update.rules import Rule, UpdateCount
from tilerec.optim.registration import register_optimizer
from tilerec.spec.optimizer import SPECS, OptimizerSpec, Slot


@dataclass(frozen=True)
class AdaDelta(OptimizerSpec):
    """Settings of Adadelta: two moments per element."""

    lr: float = 1.0
    _: KW_ONLY
    rho: float = 0.9
    eps: float = 1e-6

    rule = "adadelta"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("square_avg", "element"), Slot("acc_delta", "element"))

    def _tail(self) -> list[float]:
        return [self.rho, self.eps]

    def _check(self) -> None:
        self._number("rho", low=0.0, high=1.0)
        self._number("eps", low=0.0)


class AdaDeltaRule(Rule):
    """v, u: `square_avg`, `acc_delta`."""

    names = ("rho", "eps")
    slot_kinds = ("element", "element")

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        rho, eps = self.h["rho"], self.h["eps"]
        g = step.g_UW + self.wd * step.w_UW if self.wd else step.g_UW
        v = rho * step.slots[0] + (1 - rho) * g * g
        d = torch.sqrt(step.slots[1] + eps) / torch.sqrt(v + eps) * g
        u = rho * step.slots[1] + (1 - rho) * d * d
        return step.w_UW - self.lr * d, [v, u]


@dataclass(frozen=True)
class RMSProp(OptimizerSpec):
    """Settings of RMSprop without momentum: one moment per element."""

    lr: float = 1e-2
    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8

    rule = "rmsprop"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("square_avg", "element"),)

    def _tail(self) -> list[float]:
        return [self.alpha, self.eps]

    def _check(self) -> None:
        self._number("alpha", low=0.0, high=1.0)
        self._number("eps", low=0.0)


class RMSPropRule(Rule):
    """v: `square_avg`."""

    names = ("alpha", "eps")
    slot_kinds = ("element",)

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        g = step.g_UW + self.wd * step.w_UW if self.wd else step.g_UW
        v = self.h["alpha"] * step.slots[0] + (1 - self.h["alpha"]) * g * g
        return step.w_UW - self.lr * g / (torch.sqrt(v) + self.h["eps"]), [v]


_RULES: dict[type[OptimizerSpec], type[Rule]] = {AdaDelta: AdaDeltaRule, RMSProp: RMSPropRule}
_OF_TORCH: dict[type[torch.optim.Optimizer], type[OptimizerSpec]] = {
    torch.optim.Adadelta: AdaDelta,
    torch.optim.RMSprop: RMSProp,
}
_ABSENT = {"momentum": 0, "centered": False, "maximize": False}


def row_rule_of(optimizer_class: Any, settings: Mapping[str, Any]) -> OptimizerSpec | None:
    """Return the description of torch's Adadelta or RMSprop, registered; None for other classes.

    Raises:
        ConfigError: `momentum`, `centered` or `maximize` is set.
    """
    spec = _OF_TORCH.get(optimizer_class) if isinstance(optimizer_class, type) else None
    if spec is None:
        return None
    for name, default in _ABSENT.items():
        if settings.get(name, default) != default:
            raise ConfigError(
                f"{optimizer_class.__name__}: {name}: got {settings[name]!r}; expected {default!r}. Use Adam."
            )
    if spec.__name__ not in SPECS:
        register_optimizer(spec, _RULES[spec])
    speed = ("foreach", "capturable", "differentiable", *_ABSENT)
    return spec(**{name: value for name, value in settings.items() if name not in speed})
