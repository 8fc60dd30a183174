"""Cross ops on the native CPU library (native/cross.cpp): contiguous float32 results; else the reference."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.cross.definition import cross_backward_reference, cross_reference
from tilerec.ops.runtime.cpu.records import CrossingRecord


def _serves(*results: Tensor) -> bool:
    return all(one.dtype == torch.float32 and one.is_contiguous() for one in results)


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    forward, backward = library.tr_cross, library.tr_cross_backward
    forward.argtypes = backward.argtypes = [ctypes.c_void_p]
    forward.restype = backward.restype = None

    def call(function: Any, given: tuple[Tensor | None, ...], adds: bool, first: bool, **results: Tensor) -> None:
        read = [None if one is None else one.contiguous() for one in given]  # keeps copies until the end of the call
        record = CrossingRecord(*(None if one is None else one.data_ptr() for one in read))
        for name, result in results.items():
            setattr(record, name, result.data_ptr())
        assert read[0] is not None
        record.samples, record.features = read[0].shape
        record.adds, record.first, record.threads = adds, first, torch.get_num_threads()
        function(ctypes.byref(record))

    def cross_(x_BI: Tensor, x0_BI: Tensor, factor_BI: Tensor, bias_I: Tensor | None, out_BI: Tensor) -> None:
        if not _serves(out_BI):
            return cross_reference(x_BI, x0_BI, factor_BI, bias_I, out_BI)
        return call(forward, (x_BI, x0_BI, factor_BI, bias_I), False, False, out=out_BI)

    def cross_backward_(
        grad_BI: Tensor, x0_BI: Tensor, factor_BI: Tensor, bias_I: Tensor | None, adds: bool, first: bool,
        of_x0_BI: Tensor, of_factor_BI: Tensor, of_bias_I: Tensor,
    ) -> None:  # fmt: skip
        if not _serves(of_x0_BI, of_factor_BI, of_bias_I):
            return cross_backward_reference(
                grad_BI, x0_BI, factor_BI, bias_I, adds, first, of_x0_BI, of_factor_BI, of_bias_I
            )  # fmt: skip
        return call(
            backward, (grad_BI, x0_BI, factor_BI, bias_I), adds, first, of_x0=of_x0_BI, of_factor=of_factor_BI,
            of_bias=of_bias_I,
        )  # fmt: skip

    return {"cross_": cross_, "cross_backward_": cross_backward_}
