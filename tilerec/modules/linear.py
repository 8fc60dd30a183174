"""Linear layers of the dense part, computed by the faster of torch's two CPU libraries.

torch computes float32 products on the CPU with MKL, which has AVX-512 kernels for Intel's processors only. oneDNN is in
the same torch and has them for all. On an AMD EPYC with AVX-512, one thread, layers of 512 x 512 reach 103 GFLOP/s with
MKL and 228 with oneDNN, forward, and 31 and 15 ms per step of 2,048 samples. Both compute in float32; the sums are
added in different orders.

`linear` takes oneDNN for large products on such processors, and MKL for those on others. Results and gradients are in
memory that later steps use again, and a relu after the product writes into its result. All else is
`torch.nn.functional.linear`: other devices and types, autocast, tracers, small products.
`torch.backends.mkldnn.flags(enabled=False)` turns oneDNN off.

Legend of the shapes in names: B samples, I input features, O output features.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilerec.ops.backends import reused_empty
from tilerec.ops.runtime.dispatch import can_bypass_dispatcher
from tilerec.torch_private import onednn_is_enabled, onednn_linear

MIN_PRODUCTS = 1 << 23
"""Multiplications B I O of a large product. oneDNN gains from 1 << 20 on, but below this less than 0.1 ms a step."""
MIN_WIDTH = 8
"""Smallest I and O for oneDNN: MKL's products of a matrix and a vector are as fast."""


def linear(input: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Return `input @ weightᵀ + bias`, as `torch.nn.functional.linear`, within rounding.

    Args:
        input: [B, I]; other numbers of dimensions are computed by torch.
        weight_OI: [O, I].
        bias_O: [O], or None.
        relu: return `relu(input @ weightᵀ + bias)`.

    Returns:
        [B, O], with gradients of any order.
    """
    if _is_large(input, weight_OI, bias_O):
        product: Tensor = _Linear.apply(input, weight_OI, bias_O, relu)
        return product
    product = F.linear(input, weight_OI, bias_O)
    return torch.relu(product) if relu else product


def product(input: Tensor, weight_OI: Tensor) -> Tensor:
    """Return `input @ weightᵀ` [B, O], without gradients; large results are in memory that is used again."""
    if _uses_onednn(input, weight_OI, None):
        return _product(input, weight_OI)
    return torch.mm(input, weight_OI.t(), out=_room(input, weight_OI.shape[0]))


def input_gradient(grad_BO: Tensor, weight_OI: Tensor) -> Tensor:
    """Return `grad @ weight` [B, I], without gradients of its own."""
    if _uses_onednn(grad_BO, weight_OI.t(), None):
        return _product(grad_BO, weight_OI.t())
    return torch.mm(grad_BO, weight_OI, out=_room(grad_BO, weight_OI.shape[1]))


def add_input_gradient(total_BI: Tensor, grad_BO: Tensor, weight_OI: Tensor, *, in_place: bool) -> Tensor:
    """Return `total + grad @ weight` [B, I], without gradients of its own; in_place: `total` may be overwritten."""
    if _uses_onednn(grad_BO, weight_OI.t(), None):
        return _product(grad_BO, weight_OI.t()).add_(total_BI)
    out_BI = total_BI if in_place else _room(total_BI, total_BI.shape[1])
    return torch.addmm(total_BI, grad_BO, weight_OI, out=out_BI)


def weight_gradient(grad_BO: Tensor, input_BI: Tensor) -> Tensor:
    """Return `gradᵀ @ input` [O, I], without gradients of its own."""
    if _uses_onednn(grad_BO.t(), input_BI.t(), None):
        return _transposed_product(grad_BO, input_BI)
    if grad_BO.shape[1] > input_BI.shape[1]:  # MKL takes 17 ms for [64, 2048] @ [2048, 3456], and 26 for its transpose
        return (input_BI.t() @ grad_BO).t().contiguous()
    return grad_BO.t() @ input_BI


@final
class Linear(nn.Linear):
    """`torch.nn.Linear` whose large products on the CPU use the faster library; see the head of the file."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _room(like: Tensor, width: int) -> Tensor:
    """Return memory for a result of `like`'s rows."""
    return reused_empty((like.shape[0], width), like.dtype, like.device)


def _uses_onednn(input: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    return (
        _is_large(input, weight_OI, bias_O)  # a compiler evaluates its first condition only
        and min(weight_OI.shape) >= MIN_WIDTH
        and _onednn_is_faster()
        and onednn_is_enabled()
    )


def _is_large(input: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Return True for a large product of float32 matrices on the CPU that nothing traces."""
    tensors = (input, weight_OI) if bias_O is None else (input, weight_OI, bias_O)
    if not can_bypass_dispatcher(tensors):
        return False
    if any(t.device.type != "cpu" or t.dtype != torch.float32 for t in tensors):
        return False
    width, features = weight_OI.shape
    return (
        input.dim() == 2
        and input.shape[1] == features  # torch's own error for other shapes
        and (bias_O is None or bias_O.shape == (width,))
        and input.shape[0] * width * features >= MIN_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
    )


@functools.cache
def _onednn_is_faster() -> bool:
    """Return True on processors with AVX-512 that are not Intel's; there MKL is as fast."""
    if onednn_linear is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "vendor_id" in described and "GenuineIntel" not in described


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `left @ rightᵀ + bias` by oneDNN; the operands may be any views."""
    assert onednn_linear is not None
    (rows, columns), (row_stride, column_stride) = right.shape, right.stride()
    if not ((column_stride == 1 and row_stride >= columns) or (row_stride == 1 and column_stride >= rows)):
        right = right.contiguous()  # oneDNN refuses elements that share memory
    return onednn_linear(left, right, bias, "none", [], "")


def _transposed_product(left_BO: Tensor, right_BI: Tensor) -> Tensor:
    """Return `leftᵀ @ right`; the op transposes its first operand in memory, so that is the narrower one."""
    if left_BO.shape[1] <= right_BI.shape[1]:
        return _product(left_BO.t(), right_BI.t())
    return _product(right_BI.t(), left_BO.t()).t().contiguous()


class _Linear(torch.autograd.Function):
    """The product and its gradients; gradients of gradients by torch's own differentiable products."""

    @staticmethod
    def forward(ctx: Any, input_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, relu: bool) -> Tensor:
        if _uses_onednn(input_BI, weight_OI, bias_O):
            out_BO = _product(input_BI, weight_OI, bias_O)
        elif bias_O is None:
            out_BO = product(input_BI, weight_OI)
        else:
            out_BO = torch.addmm(bias_O, input_BI, weight_OI.t(), out=_room(input_BI, weight_OI.shape[0]))
        if relu:
            out_BO.relu_()
        ctx.save_for_backward(input_BI, weight_OI, out_BO if relu else None)
        return out_BO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input_BI, weight_OI, activated_BO = ctx.saved_tensors
        grad_BO = grads[0]
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        again = torch.is_grad_enabled()  # create_graph=True
        if activated_BO is not None:
            grad_BO = _relu_gradient(grad_BO, activated_BO, again=again)
        elif not again:
            grad_BO = grad_BO.contiguous()
        grad_BI = grad_OI = grad_O = None
        if of_input:
            grad_BI = grad_BO @ weight_OI if again else input_gradient(grad_BO, weight_OI)
        if of_weight:
            grad_OI = grad_BO.t() @ input_BI if again else weight_gradient(grad_BO, input_BI)
        if of_bias:
            grad_O = grad_BO.sum(0)
        return grad_BI, grad_OI, grad_O, None


def _relu_gradient(grad_BO: Tensor, activated_BO: Tensor, *, again: bool) -> Tensor:
    """Return the gradient where the activated value is positive or NaN, else 0; again: it is differentiable."""
    if again:
        return torch.ops.aten.threshold_backward(grad_BO, activated_BO, 0)
    room_BO = _room(activated_BO, activated_BO.shape[1])
    return torch.ops.aten.threshold_backward.grad_input(grad_BO, activated_BO, 0, grad_input=room_BO)
