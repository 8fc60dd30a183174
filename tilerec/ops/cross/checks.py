"""Checks of the cross ops' arguments."""

from __future__ import annotations

from torch import Tensor

from tilerec.errors import InputError


def _like(op: str, x_BI: Tensor, **others: Tensor) -> None:
    if x_BI.dim() != 2:
        raise InputError(f"{op}: got x of shape {list(x_BI.shape)}; expected [samples, features]. Reshape it.")
    for name, other in others.items():
        if other.shape != x_BI.shape or other.dtype != x_BI.dtype:
            raise InputError(
                f"{op}: got {name} of shape {list(other.shape)} and {other.dtype}; expected {list(x_BI.shape)} and "
                f"{x_BI.dtype}, as x. Pass tensors of one shape and type."
            )


def _per_feature(op: str, x_BI: Tensor, name: str, values_I: Tensor) -> None:
    if values_I.shape != x_BI.shape[1:] or values_I.dtype != x_BI.dtype:
        raise InputError(
            f"{op}: got {name} of shape {list(values_I.shape)} and {values_I.dtype}; expected {list(x_BI.shape[1:])} "
            f"and {x_BI.dtype}. Pass one number per feature."
        )


def check_cross(x_BI: Tensor, x0_BI: Tensor, factor_BI: Tensor, bias_I: Tensor | None, out_BI: Tensor) -> None:
    _like("cross_", x_BI, x0=x0_BI, factor=factor_BI, out=out_BI)
    if bias_I is not None:
        _per_feature("cross_", x_BI, "bias", bias_I)


def check_cross_backward(
    grad_BI: Tensor, x0_BI: Tensor, factor_BI: Tensor, bias_I: Tensor | None, adds: bool, first: bool,
    of_x0_BI: Tensor, of_factor_BI: Tensor, of_bias_I: Tensor,
) -> None:  # fmt: skip
    op = "cross_backward_"
    _like(op, grad_BI, x0=x0_BI, factor=factor_BI, of_x0=of_x0_BI, of_factor=of_factor_BI)
    _per_feature(op, grad_BI, "of_bias", of_bias_I)
    if bias_I is not None:
        _per_feature(op, grad_BI, "bias", bias_I)
