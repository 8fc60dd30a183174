"""Calls of update ops with every rule and kind of record: kernels against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.update.definition import update_rows_reference_
from tilerec.ops.update.triton.backend import update_rows_

COMMON = [0.1, 1.0, 0.05, 1.0]  # lr, grad_scale, weight_decay, stochastic_rounding


ELEMENT, ROW = "element", "row"


RULES: dict[str, tuple[str, list[float], tuple[str, ...]]] = {
    "store": ("store", [], ()),
    "sgd": ("sgd", [*COMMON, 0.0, 0.0], ()),
    "sgd-momentum": ("sgd", [*COMMON, 0.9, 0.0], (ELEMENT,)),
    "sgd-nesterov-scaled": ("sgd", [0.1, 8.0, 0.0, 1.0, 0.9, 1.0], (ELEMENT,)),
    "adagrad": ("adagrad", [*COMMON, 1e-8, 0.01], (ELEMENT,)),
    "rowwise-none": ("rowwise_adagrad", [*COMMON, 1e-8, 0.0, 0.0], (ROW,)),
    "rowwise-l2": ("rowwise_adagrad", [*COMMON, 1e-8, 1.0, 0.0], (ROW,)),
    "rowwise-decoupled-maxnorm": ("rowwise_adagrad", [*COMMON, 1e-8, 2.0, 0.7], (ROW,)),
    "adam": ("adam", [*COMMON, 1e-8, 0.9, 0.999, 0.0, 0.0], (ELEMENT, ELEMENT)),
    "adamw-row-step": ("adam", [*COMMON, 1e-8, 0.9, 0.999, 1.0, 1.0], (ELEMENT, ELEMENT, ROW)),
    "partial-adam": ("partial_rowwise_adam", [*COMMON, 1e-8, 0.9, 0.999, 0.0], (ELEMENT, ROW)),
    "lamb": ("lamb", [*COMMON, 1e-8, 0.9, 0.999, 0.0], (ELEMENT, ELEMENT)),
    "partial-lamb-row-step": ("partial_rowwise_lamb", [*COMMON, 1e-8, 0.9, 0.999, 1.0], (ELEMENT, ROW, ROW)),
    "lars": ("lars_sgd", [*COMMON, 0.9, 0.02], (ELEMENT,)),
}


SGD = RULES["sgd"]


def slots_for(kinds: Sequence[str], rows: int, dim: int) -> list[Tensor]:
    made = [torch.rand(rows, dim) if kind == ELEMENT else torch.rand(rows) for kind in kinds]
    if len(kinds) == 3:  # the third slot counts a row's updates
        made[2] = torch.randint(0, 5, (rows,)).float()
    return made


class Call:
    """A call of the op: tables, slots, record and rule; made twice, the kernels against the reference."""

    def __init__(
        self, weights: Sequence[Tensor], rule: tuple[str, list[float], tuple[str, ...]], record: tuple[Any, ...],
        steps: Sequence[int] | None = None, column_offsets: Sequence[int] | None = None, names: Any = None,
    ) -> None:  # fmt: skip
        count = len(weights)
        self.weights, (self.rule, self.hyper, self.kinds) = list(weights), rule
        self.slots = [s for w in weights for s in slots_for(self.kinds, *w.shape)]
        self.record = record
        self.rest = (
            self.rule, self.hyper, list(steps or [3] * count), [5, 6] * count, [2**33] * count,
            list(column_offsets or [0] * count), names,
        )  # fmt: skip

    def run(self, function: Any) -> tuple[list[int], list[Tensor], list[Tensor]]:
        weights, slots = [w.clone() for w in self.weights], [s.clone() for s in self.slots]
        told = function(weights, slots, *self.record, *self.rest)
        return told.tolist(), weights, slots

    def check(self, rtol: float = 3e-6, twice: bool = False) -> None:
        """Equal to the reference; stochastic rounding draws the same words. Twice: a second run has the same bits."""
        told, weights, slots = self.run(update_rows_)
        want_told, want_weights, want_slots = self.run(update_rows_reference_)
        assert told == want_told
        for a, b in zip(slots, want_slots, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-7, equal_nan=True)
        units = {
            torch.float32: rtol,
            torch.bfloat16: 2**-7,
            torch.float16: 2**-10,
            torch.float8_e4m3fn: 0.125,
        }
        for a, b in zip(weights, want_weights, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=units[a.dtype], atol=2e-6, equal_nan=True)
            if a.dtype != torch.float32 and a.numel():
                same = (
                    (a == b) | (a.isnan() & b.isnan())
                    if a.dtype != torch.float8_e4m3fn
                    else a.float() == b.float()
                )
                assert (~same).float().mean() < 0.02
        again = self.run(update_rows_) if twice else (told, weights, slots)
        for a, b in zip((*weights, *slots), (*again[1], *again[2]), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def pooled(
    dims: Sequence[int], lengths: Sequence[int], rows: int, batch: int, dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64, weighted: bool = False, means: Sequence[int] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Feature f reads table f with the bags of key f."""
    features = len(dims)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    count = int(offsets[-1])
    return (
        torch.randn(batch, sum(dims)).to(dtype), torch.randint(0, rows, (count,)).to(index), offsets.to(index),
        torch.rand(count) if weighted else None, list(range(features)), [f * batch for f in range(features)],
        [batch] * features, [sum(dims[:f]) for f in range(features)], [sum(dims)] * features,
        list(means or [0] * features),
    )  # fmt: skip


def single(ids: Tensor, grad: Tensor) -> tuple[Any, ...]:
    """One table; every id is its own bag."""
    n, dim = grad.shape
    return grad, ids, None, None, [0], [0], [n], [0], [dim], [0]
