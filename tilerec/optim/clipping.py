"""Clipping gradients before the step of the optimizer inside.

Only gradients that exist when `step()` is called can be clipped. A parameter whose optimizer is attached has none: the
backward pass has updated it already. Scale the loss, or set a row rule's `max_norm`, for those.

The norm is the model's, also where its tables are sharded (`norm.py`).
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
from tilerec.optim.tiled import tiled_table_of
from tilerec.optim.wrapper import OptimizerWrapper


@unique
class GradientClipping(Enum):
    """NORM scales all gradients so that their total norm is at most `max_gradient`; VALUE clamps every element."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


@final
class GradientClippingOptimizer(OptimizerWrapper):
    """Clips the gradients of all parameters, then steps the optimizer inside.

    Args:
        optimizer: what to step.
        clipping: a `GradientClipping`, or its value as a string.
        max_gradient: the largest total norm (NORM) or absolute value (VALUE), from 0; 0 makes all gradients 0.
        norm_type: p of the p-norm, > 0; `float("inf")` or "inf" for the largest absolute value.
        enable_global_grad_clip: kept for callers that pass it; the norm is over the whole model, whether it is set or
            not: tiles of all ranks, each once, and replicated parameters once. Every rank steps.
        param_to_pgs: likewise, for parameters of sharded tables; others are refused, as their gradients are taken to be
            the same on all ranks.
        track_grad_norm: compute `last_total_grad_norm` whatever the clipping.

    Raises:
        ConfigError: a setting out of range, or `param_to_pgs` for parameters of no sharded table.
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
                f"GradientClippingOptimizer: clipping is {clipping!r}, wanted one of "
                f"{[kind.value for kind in GradientClipping]}."
            ) from None
        if not max_gradient >= 0:
            raise ConfigError(
                f"GradientClippingOptimizer: got max_gradient={max_gradient}; expected a number from 0. Pass "
                "GradientClipping.NONE to clip nothing."
            )
        self._max_gradient = float(max_gradient)
        try:
            self._norm_type = float(norm_type)
        except ValueError:
            self._norm_type = math.nan
        if not self._norm_type > 0:
            raise ConfigError(
                f"GradientClippingOptimizer: norm_type is {norm_type!r}, wanted a number > 0 or 'inf'."
            )
        others = [p for p in param_to_pgs or () if tiled_table_of(p) is None]
        if others:
            raise ConfigError(
                f"GradientClippingOptimizer: param_to_pgs names {len(others)} parameters of no sharded table, whose "
                "gradients are taken to be the same on all ranks; leave them out (sharded tables need no entry)."
            )
        self._track = track_grad_norm
        self._last_norm: Tensor | None = None
        attached = [name for name, p in self.params.items() if updates_in_backward(p)]  # type: ignore[arg-type]
        if attached and self._clipping is not GradientClipping.NONE:
            warnings.warn(
                f"GradientClippingOptimizer: {', '.join(attached)} are updated by the backward pass and not clipped; "
                "clip the optimizer of the other parameters alone (in_backward_optimizer_filter).",
                stacklevel=2,
            )

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """Total norm before clipping at the last step; None if neither clipping by norm nor tracking."""
        return self._last_norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip the gradients and step; with a closure, the gradients of each of its evaluations. Returns its loss."""
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
        """The norm of all gradients together (0-d), and this rank's; of a sparse one its coalesced values."""
        params = self._parameters()
        total = total_norm(params, self._norm_type)
        return total, grads_of(params)

    @torch.no_grad()
    def clip_grad_norm_(self) -> Tensor:
        """Scale the gradients in place to a total norm of at most `max_gradient`; returns the norm before."""
        total, grads = self.compute_total_grad_norm()
        self._last_norm = total
        scale_grads_(grads, self._max_gradient, total)
        return total

    def _parameters(self) -> list[Tensor]:
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))
