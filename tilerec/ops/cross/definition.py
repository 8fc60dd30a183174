"""Cross ops: the element-wise passes of a layer of a cross network, each in one pass over its tensors.

    forward    out = x + x0 ⊙ f,   f = factor + bias
    backward   of g, the gradient of out:
                 of_factor = g ⊙ x0
                 of_bias   = Σ over samples of of_factor
                 of_x0     = g ⊙ f    (+ of_x0, the sum of later layers)  (+ g, if x is x0)
               The gradient of x is g, plus a product with the matrices of `factor`, which the caller computes.

Example, one sample and one feature: x = 2, x0 = 3, factor = 4, bias = 1 -> out = 2 + 3 · 5 = 17. For g = 10:
of_factor = 30, of_bias = 30, of_x0 = 50.

These tensors are larger than a cache ([2048, 3456] has 28 MB), so a pass costs its bytes. On the CPU in float32 the
native pass adds the bias at no cost. Elsewhere the product should add it (`adds_bias`): then `bias_I` is None, and
`factor_BI` includes the bias.

Legend: B samples, I features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilerec.ops.cross.checks import check_cross, check_cross_backward
from tilerec.ops.runtime.library import LIBRARY

_OPS = torch.ops.tilerec


@LIBRARY.op(
    "cross_(Tensor x_BI, Tensor x0_BI, Tensor factor_BI, Tensor? bias_I, Tensor(a!) out_BI) -> ()",
    check=check_cross,
    check_fake=True,
)
def cross_reference(x_BI: Tensor, x0_BI: Tensor, factor_BI: Tensor, bias_I: Tensor | None, out_BI: Tensor) -> None:
    """Write `x + x0 ⊙ (factor + bias)` to `out_BI`."""
    torch.addcmul(x_BI, x0_BI, factor_BI if bias_I is None else factor_BI + bias_I, out=out_BI)


@LIBRARY.op(
    "cross_backward_(Tensor grad_BI, Tensor x0_BI, Tensor factor_BI, Tensor? bias_I, bool adds, bool first,"
    " Tensor(a!) of_x0_BI, Tensor(b!) of_factor_BI, Tensor(c!) of_bias_I) -> ()",
    check=check_cross_backward,
    check_fake=True,
)
def cross_backward_reference(
    grad_BI: Tensor, x0_BI: Tensor, factor_BI: Tensor, bias_I: Tensor | None, adds: bool, first: bool,
    of_x0_BI: Tensor, of_factor_BI: Tensor, of_bias_I: Tensor,
) -> None:  # fmt: skip
    """Write the gradients; see the head of the file."""
    f_BI = factor_BI if bias_I is None else factor_BI + bias_I
    if adds:
        of_x0_BI.addcmul_(grad_BI, f_BI)
    else:
        torch.mul(grad_BI, f_BI, out=of_x0_BI)
    if first:
        of_x0_BI.add_(grad_BI)
    torch.mul(grad_BI, x0_BI, out=of_factor_BI)
    torch.sum(of_factor_BI, 0, out=of_bias_I)


def adds_bias(x_BI: Tensor) -> bool:
    """Return True if the ops add the bias at no cost; else the product that computes the factor should add it."""
    return x_BI.device.type == "cpu" and x_BI.dtype == torch.float32


def cross(x_BI: Tensor, x0_BI: Tensor, factor_BI: Tensor, bias_I: Tensor | None, out_BI: Tensor) -> None:
    """Write `x + x0 ⊙ (factor + bias)` to `out_BI`. All are [B, I] of one dtype, the bias [I] or None."""
    _OPS.cross_.default(x_BI, x0_BI, factor_BI, bias_I, out_BI)


def cross_backward(
    grad_BI: Tensor, x0_BI: Tensor, factor_BI: Tensor, bias_I: Tensor | None, *, adds: bool, first: bool,
    of_x0_BI: Tensor, of_factor_BI: Tensor, of_bias_I: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of a layer to `of_x0_BI`, `of_factor_BI` and `of_bias_I`; see the head of the file.

    Args:
        grad_BI: gradient of the layer's output.
        x0_BI, factor_BI, bias_I: as for `cross`.
        adds: `of_x0_BI` holds the sum of later layers, to which this layer's part is added.
        first: the layer's x is x0, so `grad_BI` is a part of x0's gradient.
    """
    _OPS.cross_backward_.default(
        grad_BI, x0_BI, factor_BI, bias_I, adds, first, of_x0_BI, of_factor_BI, of_bias_I
    )  # fmt: skip
