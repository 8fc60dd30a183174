"""Clipping gradients before the step of the optimizer inside.

Only gradients that exist when `step()` is called can be clipped. A parameter whose optimizer is attached has none: the
backward pass has updated it already. Scale the loss, or set a row rule's `max_norm`, for those.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, unique
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.optim.in_backward import updates_in_backward
from tilerec.optim.keyed import KeyedOptimizer
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
        max_gradient: the largest total norm (NORM) or absolute value (VALUE), > 0.
        norm_type: p of the p-norm, > 0; `float("inf")` or "inf" for the largest absolute value.
        enable_global_grad_clip: take the norm over the gradients of all ranks. Works where this process is the only
            one; with more it is refused, as is `param_to_pgs`, until gradients of sharded parameters are known here.
        track_grad_norm: compute `last_total_grad_norm` whatever the clipping.

    Raises:
        ConfigError: a setting out of range, or a global norm over several ranks.
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
        if not max_gradient > 0:
            raise ConfigError(f"GradientClippingOptimizer: max_gradient is {max_gradient}, wanted > 0.")
        self._max_gradient = float(max_gradient)
        try:
            self._norm_type = float(norm_type)
        except ValueError:
            self._norm_type = math.nan
        if not self._norm_type > 0:
            raise ConfigError(
                f"GradientClippingOptimizer: norm_type is {norm_type!r}, wanted a number > 0 or 'inf'."
            )
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if param_to_pgs or (enable_global_grad_clip and ranks > 1):
            raise ConfigError(
                f"GradientClippingOptimizer: a norm over {ranks} ranks and param_to_pgs are not supported; pass "
                "enable_global_grad_clip=False, and clip sharded parameters with torch.nn.utils.clip_grad_norm_ on "
                "their DTensor gradients."
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
        """Evaluate the closure, if given, to make the gradients; clip them; step. Returns the closure's loss."""
        loss = KeyedOptimizer.step(self, closure)
        if self._clipping is GradientClipping.NORM:
            self.clip_grad_norm_()
        elif self._track:
            self._last_norm, _ = self.compute_total_grad_norm()
        if self._clipping is GradientClipping.VALUE:
            for grad in self._grads():
                grad.clamp_(-self._max_gradient, self._max_gradient)
        self._optimizer.step()
        return loss

    @torch.no_grad()
    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients together (0-d), and the gradients; of a sparse one its coalesced values."""
        grads = self._grads()
        return torch.nn.utils.get_total_norm(grads, self._norm_type), grads

    @torch.no_grad()
    def clip_grad_norm_(self) -> Tensor:
        """Scale the gradients in place to a total norm of at most `max_gradient`; returns the norm before."""
        total, grads = self.compute_total_grad_norm()
        self._last_norm = total
        scale = torch.clamp(self._max_gradient / (total + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device))
        return total

    def _grads(self) -> list[Tensor]:
        grads = []
        for parameter in dict.fromkeys(p for group in self.param_groups for p in group["params"]):
            grad = parameter.grad
            if grad is None:
                continue
            if grad.layout is torch.sparse_coo:
                # Duplicate entries are one element of the gradient: add them before looking at sizes.
                parameter.grad = grad.coalesce()
                grad = parameter.grad._values()
            grads.append(grad.detach())
        return grads
