"""Cases of optimizers that step `.grad`: row-wise Adagrad, clipping, warm-up, and their state by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.golden.digest import digest
from tests.golden.inputs import Numbers
from tests.golden.training import Marks
from tilerec.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    clip_grad_norm_,
)

STEPS = 4


def _parameters() -> dict[str, nn.Parameter]:
    numbers = Numbers(41)
    return {"rows": nn.Parameter(numbers.eighths(9, 5)), "bias": nn.Parameter(numbers.eighths(5))}


def _gradient(step: int, name: str, like: Tensor, sparse: bool, powers: bool) -> Tensor:
    """Multiples of 1/8; or powers of two, whose product with a rate is exact.

    torch's SGD multiplies by the rate and subtracts in one rounding or in two, as the machine can.
    """
    numbers = Numbers(42, step, len(name))
    dense = numbers.eighths(*like.shape)
    if powers:
        return torch.where(dense < 0, -0.5, 2.0)
    if not sparse or like.dim() < 2:
        return dense
    rows = torch.tensor([step, 8, step + 1])
    return torch.sparse_coo_tensor(rows[None], dense[:3], like.shape, check_invariants=True)


def _run(
    make: Callable[[dict[str, nn.Parameter]], Any],
    sparse: bool = False,
    before: Any = None,
    powers: bool = False,
) -> Marks:
    """Some steps; weights, learning rates and state."""
    parameters = _parameters()
    optimizer = make(parameters)
    told: list[Any] = []
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = _gradient(step, name, parameter, sparse, powers)
        if before is not None:
            told.append(before(parameters))
        optimizer.step()
        told.append([group["lr"] for group in optimizer.param_groups])
    state = optimizer.state_dict()
    return {"weights": digest([dict(parameters), told]), "state": digest(state)}


def _rowwise(settings: dict[str, Any], parameters: dict[str, nn.Parameter]) -> Any:
    return KeyedOptimizerWrapper(parameters, lambda params: RowWiseAdagrad(params, **settings))


def _clipped(clipping: GradientClipping, norm: float, parameters: dict[str, nn.Parameter]) -> Any:
    inner = KeyedOptimizerWrapper(parameters, lambda params: torch.optim.SGD(params, lr=0.5, foreach=False))
    return GradientClippingOptimizer(inner, clipping, 0.5, norm)


def _warm(policy: str, value: float, parameters: dict[str, nn.Parameter]) -> Any:
    inner = KeyedOptimizerWrapper(parameters, lambda params: torch.optim.SGD(params, lr=0.5, foreach=False))
    stage = WarmupStage(WarmupPolicy(policy), 3, value, lr_scale=2.0, sgdr_period=2)
    return WarmupOptimizer(inner, [stage], lr=0.25)


def _combined(parameters: dict[str, nn.Parameter]) -> Any:
    parts = [
        (name, KeyedOptimizerWrapper({name: parameter}, lambda params: RowWiseAdagrad(params, lr=0.25)))
        for name, parameter in parameters.items()
    ]
    return CombinedOptimizer(parts)


def _norm(kind: float, parameters: dict[str, nn.Parameter]) -> Tensor:
    return clip_grad_norm_(list(parameters.values()), 1.0, kind)


CASES: dict[str, Callable[[], Marks]] = {
    "stepped/rowwise_adagrad": partial(_run, partial(_rowwise, {"lr": 0.25})),
    "stepped/rowwise_adagrad-decays": partial(
        _run,
        partial(_rowwise, {"lr": 0.25, "lr_decay": 0.1, "weight_decay": 0.02, "maximize": True}),
    ),
    "stepped/rowwise_adagrad-sparse": partial(
        _run, partial(_rowwise, {"lr": 0.25, "weight_decay": 0.02, "eps": 1e-3}), True
    ),
    "stepped/clipped-value": partial(_run, partial(_clipped, GradientClipping.VALUE, 2.0)),
    "stepped/clipped-norm": partial(_run, partial(_clipped, GradientClipping.NORM, 2.0)),
    "stepped/clipped-largest": partial(_run, partial(_clipped, GradientClipping.NORM, float("inf"))),
    "stepped/clip_grad_norm": partial(_run, _combined, False, partial(_norm, 2.0)),
    "stepped/combined": partial(_run, _combined),
    **{
        f"stepped/warm-{policy}": partial(_run, partial(_warm, policy, value), powers=True)
        for policy, value in (
            ("linear", 0.25), ("constant", 0.5), ("poly", 2.0), ("step", 0.5), ("inv_sqrt", 1.0),
            ("cosine_annealing_warm_restarts", 0.25),
        )
    },
}  # fmt: skip
