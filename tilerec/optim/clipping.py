"""Gradient clipping before the step of a wrapped optimizer.

Only gradients that exist at the call of `step()` are clipped. A parameter with an attached optimizer has none, since
the backward pass has already updated it. For these, scale the loss, or set a row rule's `max_norm`.

The norm is that of the whole model, also with sharded tables (`norm.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, unique
from typing import Any, final

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.optim.in_backward import updates_in_backward
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.norm import grads_of, scale_grads_, total_norm
from tilerec.optim.sharded_state import tiled_table_of
from tilerec.optim.wrapper import OptimizerWrapper


@unique
class GradientClipping(Enum):
    """Kind of clipping: NORM scales all gradients to a total norm of at most `max_gradient`, VALUE clamps elements."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


@final
class GradientClippingOptimizer(OptimizerWrapper):
    """Optimizer wrapper that clips the gradients of all parameters before each step.

    Args:
        optimizer: the optimizer to step.
        clipping: a `GradientClipping`, or its value as a string.
        max_gradient: the largest total norm (NORM) or absolute value (VALUE), from 0; 0 makes all gradients 0.
        norm_type: p of the p-norm, > 0; `float("inf")` or "inf" for the largest absolute value.
        enable_global_grad_clip: accepted for compatibility, without effect: the norm is always that of the whole model.
            Tiles of all ranks count once each, replicated parameters once. Every rank must step.
        param_to_pgs: accepted without effect for parameters of sharded tables. Other parameters raise, since their
            gradients are assumed to be equal on all ranks.
        track_grad_norm: compute `last_total_grad_norm` with every kind of clipping.

    Raises:
        ConfigError: a setting out of range, or `param_to_pgs` with parameters outside sharded tables.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[nn.Parameter, Sequence[Any]] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        super().__init__(optimizer)
        try:
            self._clipping = GradientClipping(clipping)
        except ValueError:
            raise ConfigError(
                f"GradientClippingOptimizer: got clipping={clipping!r}; expected one of "
                f"{[kind.value for kind in GradientClipping]}. Pass one of these."
            ) from None
        if not max_gradient >= 0:
            raise ConfigError(
                f"GradientClippingOptimizer: got max_gradient={max_gradient}; expected a number from 0. To clip "
                "nothing pass GradientClipping.NONE."
            )
        self._max_gradient = float(max_gradient)
        try:
            self._norm_type = float(norm_type)
        except ValueError:
            self._norm_type = math.nan
        if not self._norm_type > 0:
            raise ConfigError(
                f"GradientClippingOptimizer: got norm_type={norm_type!r}; expected a number > 0 or 'inf'. Pass 2.0 for "
                "the Euclidean norm."
            )
        others = [p for p in param_to_pgs or () if tiled_table_of(p) is None]
        if others:
            raise ConfigError(
                f"GradientClippingOptimizer: got {len(others)} parameters outside sharded tables in param_to_pgs; "
                "expected none, as their gradients are assumed to be equal on all ranks. Leave them out (sharded "
                "tables need no entry)."
            )
        self._track = track_grad_norm
        self._last_norm: Tensor | None = None
        attached = [name for name, p in self.params.items() if updates_in_backward(p)]  # type: ignore[arg-type]
        if attached and self._clipping is not GradientClipping.NONE:
            warnings.warn(
                f"GradientClippingOptimizer: got {', '.join(attached)}, which the backward pass updates without "
                "clipping. Wrap only the optimizer of the other parameters (in_backward_optimizer_filter).",
                stacklevel=2,
            )

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """Total norm before clipping at the last step; None without NORM clipping or `track_grad_norm`."""
        return self._last_norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip the gradients and step. With a closure, clip after each evaluation, and return its loss."""
        if closure is None:
            self._clip()
            return self._optimizer.step()

        def clipped() -> Any:
            loss = closure()
            self._clip()
            return loss

        return self._optimizer.step(clipped)

    def _clip(self) -> None:
        if self._clipping is GradientClipping.NORM:
            self.clip_grad_norm_()
        elif self._track:
            self._last_norm, _ = self.compute_total_grad_norm()
        if self._clipping is GradientClipping.VALUE:
            for grad in grads_of(self._parameters()):
                grad.clamp_(-self._max_gradient, self._max_gradient)

    @torch.no_grad()
    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """Return the total norm of all gradients (0-d), and this rank's gradients; of sparse ones the values."""
        params = self._parameters()
        total = total_norm(params, self._norm_type)
        return total, grads_of(params)

    @torch.no_grad()
    def clip_grad_norm_(self) -> Tensor:
        """Scale the gradients in place to a total norm of at most `max_gradient`; return the norm before scaling."""
        total, grads = self.compute_total_grad_norm()
        self._last_norm = total
        scale_grads_(grads, self._max_gradient, total)
        return total

    def _parameters(self) -> list[Tensor]:
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))
