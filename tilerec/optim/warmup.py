"""Learning-rate schedule of stages, written to the optimizer before each step.

Glossary
    i            number of steps so far, over all stages; checkpointed
    stage        a policy for `i <= max_iters`; the next stage starts at `i = max_iters + 1`
    multiplier   the policy's function of `i`; learning rate = lr * lr_scale * multiplier

    NONE, and after the last stage    1   (after the last stage the learning rate is lr, without any lr_scale)
    CONSTANT      value
    LINEAR        value + (1 - value) * i / max_iters
    POLY          (1 - i / decay_iters) ** value; decay_iters is max_iters by default
    STEP          value ** (i // decay_iters)
    INVSQRT       1 / sqrt(max(i, 1))
    COSINE_ANNEALING_WARM_RESTARTS   value + (1 - value) * (1 + cos(pi * (i % sgdr_period) / sgdr_period)) / 2
                  (SGDR: Loshchilov & Hutter, 2017)
    INTERPOLATE   from value at i = start_interpolating_iters to end_value at i = max_iters, linearly

`i` counts from the beginning of training in every stage, not from the beginning of the stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, final

import torch

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.loading_plan import write_setting
from tilerec.optim.wrapper import OptimizerWrapper


@unique
class WarmupPolicy(Enum):
    """Formula of a stage's multiplier; the formulas are at the top of `optim/warmup.py`."""

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"


@final
@dataclass(frozen=True)
class WarmupStage:
    """One stage of a learning-rate schedule.

    Args:
        policy: a `WarmupPolicy`, or its value as a string.
        max_iters: the last step of this stage, counted from the beginning of training; above that of the stage before.
        value: LINEAR's start, CONSTANT's level, POLY's power, STEP's factor, the cosine's minimum, INTERPOLATE's start.
        lr_scale: factor of the learning rate during this stage.
        decay_iters: STEP's steps per factor, or the step at which POLY is 0. Values below 1 mean 1 for STEP and
            `max_iters` for POLY.
        sgdr_period: the cosine's period in steps.
        start_interpolating_iters, end_value: INTERPOLATE's first step and last value; both required there.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "policy", WarmupPolicy(self.policy))
        except ValueError:
            raise ConfigError(
                f"WarmupStage: got policy={self.policy!r}; expected one of {[p.value for p in WarmupPolicy]}. Pass one "
                "of these."
            ) from None
        if self.max_iters < 1:
            raise ConfigError(
                f"WarmupStage: got max_iters={self.max_iters}; expected at least 1. Pass the last step of the stage."
            )
        if self.policy is WarmupPolicy.POLY and 0 < self.decay_iters < self.max_iters:
            raise ConfigError(
                f"WarmupStage: got decay_iters={self.decay_iters} for POLY; expected at least max_iters, "
                f"{self.max_iters}. End the stage earlier: a smaller one gives negative learning rates."
            )
        if self.sgdr_period < 1:
            raise ConfigError(
                f"WarmupStage: got sgdr_period={self.sgdr_period}; expected at least 1. Pass the period in steps."
            )
        if self.policy is WarmupPolicy.INTERPOLATE:
            if self.start_interpolating_iters is None or self.end_value is None:
                raise ConfigError(
                    f"WarmupStage: got start_interpolating_iters={self.start_interpolating_iters} and "
                    f"end_value={self.end_value} for INTERPOLATE; expected numbers. Pass both."
                )
            if self.start_interpolating_iters >= self.max_iters:
                raise ConfigError(
                    f"WarmupStage: got start_interpolating_iters={self.start_interpolating_iters}; expected less than "
                    f"max_iters, {self.max_iters}. Start earlier."
                )

    def multiplier(self, i: int) -> float:
        """Return the policy's multiplier after `i` steps, without `lr_scale`."""
        value = self.value
        if self.policy is WarmupPolicy.CONSTANT:
            return value
        if self.policy is WarmupPolicy.LINEAR:
            return value + (1.0 - value) * i / self.max_iters
        if self.policy is WarmupPolicy.POLY:
            return math.pow(1.0 - i / (self.decay_iters if self.decay_iters > 0 else self.max_iters), value)
        if self.policy is WarmupPolicy.STEP:
            return math.pow(value, i // max(self.decay_iters, 1))
        if self.policy is WarmupPolicy.INVSQRT:
            return 1.0 / math.sqrt(max(i, 1))
        if self.policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
            angle = math.pi * (i % self.sgdr_period) / self.sgdr_period
            return value + (1.0 - value) * (1.0 + math.cos(angle)) / 2.0
        if self.policy is WarmupPolicy.INTERPOLATE:
            assert self.start_interpolating_iters is not None
            assert self.end_value is not None
            done = i - self.start_interpolating_iters
            part = max(done, 0) / (self.max_iters - self.start_interpolating_iters)
            return value + (self.end_value - value) * part
        return 1.0


@final
class WarmupOptimizer(OptimizerWrapper):
    """Optimizer wrapper that writes the stages' learning rate: at construction, and after every `step()`.

    All param groups get the same value. With fused updates the value applies to the next backward pass.

    Args:
        optimizer: the optimizer to warm up.
        stages: stages in order of `max_iters`.
        lr: the learning rate that is multiplied, and the learning rate after the last stage.
        lr_param: the setting to write.
        param_name: name of the position in the state dict: {"warmup": int64 tensor [steps, stage]}.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        last = 0
        for stage in stages:
            if stage.max_iters <= last:
                raise ConfigError(
                    f"WarmupOptimizer: got {stage}; expected max_iters above {last}, that of the stage before. Count "
                    "max_iters from the beginning of training."
                )
            last = stage.max_iters
        self._stages = tuple(stages)
        self._lr = lr
        self._lr_param = lr_param
        self._param_name = param_name
        self._steps = 0
        self._write()

    def _stage(self) -> int:
        """Return the number of the current stage; `len(stages)` after the last."""
        return next((n for n, s in enumerate(self._stages) if self._steps <= s.max_iters), len(self._stages))

    def _write(self) -> None:
        number = self._stage()
        lr = self._lr
        if number < len(self._stages):
            stage = self._stages[number]
            lr = lr * stage.lr_scale * stage.multiplier(self._steps)
        for group in self.param_groups:
            write_setting(group, self._lr_param, lr)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        self._steps += 1
        self._write()
        return loss

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        super().add_param_group(param_group)
        self._write()

    def set_optimizer_step(self, step: int) -> None:
        """Set the step count of the wrapped optimizer, and continue the warm-up from `step`."""
        super().set_optimizer_step(step)
        self._steps = step
        self._write()

    def post_load_state_dict(self) -> None:
        super().post_load_state_dict()
        self._write()

    def _state_dict(self) -> dict[str, Any]:
        out = super()._state_dict()
        if self._param_name in out["state"]:
            raise ConfigError(
                f"WarmupOptimizer: got the name '{self._param_name}' twice in the state; expected different names. "
                "Pass another param_name."
            )
        out["state"][self._param_name] = {"warmup": torch.tensor([self._steps, self._stage()])}
        return out

    def _state_names(self) -> list[str]:
        return [*super()._state_names(), self._param_name]

    def _plan_load(self, given: Mapping[str, Any], plan: list[Callable[[], None]]) -> None:
        state = dict(given.get("state", {}))
        own = state.pop(self._param_name, None)
        position = own.get("warmup") if isinstance(own, Mapping) else None
        if not isinstance(position, torch.Tensor) or position.shape != (2,):
            raise ConfigError(
                f"WarmupOptimizer: got {own!r} as state of '{self._param_name}'; expected "
                "{'warmup': tensor([steps, stage])}. Load it to the wrapped optimizer if it was saved without warm-up."
            )
        steps = int(position[0])
        plan.append(lambda: self._set_steps(steps))
        super()._plan_load({**given, "state": state}, plan)

    def _set_steps(self, steps: int) -> None:
        self._steps = steps
