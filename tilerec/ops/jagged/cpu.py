"""Jagged ops on the native CPU library (native/jagged.cpp); `definition.py` specifies each op.

Results equal the reference bit for bit, for any number of threads. Inputs that the library cannot read (sums of halves
and of unusual integers, padding of elements wider than 8 bytes) are converted, or the reference computes the op.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.jagged.checks import raise_bad_offsets, raise_bad_order
from tilerec.ops.runtime.cpu.library import BAD_ID, BAD_OFFSETS, INDEX_TYPES, NO_MEMORY, OK
from tilerec.ops.runtime.cpu.records import ReportRecord
from tilerec.ops.runtime.library import LIBRARY

_SUM_TYPES = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
_HALVES = (torch.float16, torch.bfloat16)

_P, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_REPORT = ctypes.POINTER(ReportRecord)
# Arguments of the library's functions, by op; a function's name begins with "tr_".
_SIGNATURES: dict[str, list[Any]] = {
    "offsets_from_lengths": [_P, _I32, _I64, _P, _I32, _REPORT],
    "segment_ids": [_P, _I64, _I64, _P, _I32, _REPORT],
    "select_segments": [_P, _I64, _I64, _P, _I64, _P, _P, _I64, _I64, _P, _I32, _REPORT],
    "select_segments_backward": [_P, _I32, _I64, _P, _I64, _P, _P, _I64, _I64, _P, _I64, _I32, _REPORT],
    "take_segments_": [_P, _P, _P, _P, _I64, _I64, _I32, _P, _I64, _P, _I64, _P, _REPORT],
    "bucketize_by_cuts": [_P, _I32, _I64, _P, _I32, _I64, _P, _I64, _P, _P, _P, _I32, _REPORT],
    "jagged_to_padded": [_P, _I64, _I64, _P, _I64, _I64, _P, _I64, _P, _I32, _REPORT],
    "padded_to_jagged": [_P, _I64, _I64, _I64, _P, _I64, _P, _I32, _REPORT],
    "segment_sum": [_P, _I32, _I64, _I64, _P, _I64, _P, _I32, _REPORT],
    "repeat_segments": [_P, _I64, _P, _I64, _I64, _P, _I32, _REPORT],
}


class _Kernels:
    """The kernels, each a method with its op's name."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._native = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"tr_{name.rstrip('_')}")
            function.argtypes, function.restype = arguments, None
            self._native[name] = function

    def _call(self, op: str, *arguments: Any) -> None:
        report = ReportRecord()
        self._native[op](*arguments, torch.get_num_threads(), report)
        if report.status != OK:
            raise _error(op, report)

    def offsets_from_lengths(self, lengths_S: Tensor) -> Tensor:
        if lengths_S.dtype not in INDEX_TYPES:
            return LIBRARY.references["offsets_from_lengths"](lengths_S)
        lengths_S = lengths_S.contiguous()
        offsets_S1 = torch.empty(lengths_S.shape[0] + 1, dtype=torch.int64)
        self._call(
            "offsets_from_lengths", lengths_S.data_ptr(), INDEX_TYPES[lengths_S.dtype],
            lengths_S.shape[0], offsets_S1.data_ptr(),
        )  # fmt: skip
        return offsets_S1

    def segment_ids(self, offsets_S1: Tensor, total: int) -> Tensor:
        offsets_S1 = _int64(offsets_S1)
        out_N = torch.empty(total, dtype=torch.int64)
        self._call("segment_ids", offsets_S1.data_ptr(), offsets_S1.shape[0] - 1, total, out_N.data_ptr())
        return out_N

    def select_segments(
        self, values_N: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int
    ) -> Tensor:
        values_N, offsets_S1 = values_N.contiguous(), _int64(offsets_S1)
        order_P, out_offsets_P1 = _int64(order_P), _int64(out_offsets_P1)
        out_M = torch.empty((total, *values_N.shape[1:]), dtype=values_N.dtype)
        self._call(
            "select_segments", values_N.data_ptr(), _item_bytes(values_N, 1), values_N.shape[0],
            offsets_S1.data_ptr(), offsets_S1.shape[0] - 1, order_P.data_ptr(), out_offsets_P1.data_ptr(),
            order_P.shape[0], total, out_M.data_ptr(),
        )  # fmt: skip
        return out_M

    def select_segments_backward(
        self, grad_M: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int
    ) -> Tensor:
        dtype = grad_M.dtype
        sum_M = (grad_M.float() if dtype in _HALVES else grad_M).contiguous()
        if sum_M.dtype not in (torch.float32, torch.float64):
            return LIBRARY.references["select_segments_backward"](grad_M, offsets_S1, order_P, out_offsets_P1, total)
        offsets_S1, order_P, out_offsets_P1 = _int64(offsets_S1), _int64(order_P), _int64(out_offsets_P1)
        out_N = torch.empty((total, *sum_M.shape[1:]), dtype=sum_M.dtype)
        self._call(
            "select_segments_backward", sum_M.data_ptr(), _SUM_TYPES[sum_M.dtype],
            sum_M.shape[1:].numel(), offsets_S1.data_ptr(), offsets_S1.shape[0] - 1, order_P.data_ptr(),
            out_offsets_P1.data_ptr(), order_P.shape[0], sum_M.shape[0], out_N.data_ptr(), total,
        )  # fmt: skip
        return out_N.to(dtype)

    def take_segments_(
        self,
        values: list[Tensor],
        offsets: list[Tensor],
        orders: list[Tensor],
        outs: list[Tensor],
        lengths: list[Tensor],
    ) -> None:
        values = [values_N.contiguous() for values_N in values]
        kinds = {offsets_S1.dtype for offsets_S1 in offsets}
        narrow = kinds == {torch.int32}
        offsets = [offsets_S1.contiguous() if narrow else _int64(offsets_S1) for offsets_S1 in offsets]
        count, report = len(values), ReportRecord()
        ends = list(accumulate(offsets_S1.shape[0] - 1 for offsets_S1 in offsets))
        sources = (
            (_P * count)(*[values_N.data_ptr() for values_N in values]),
            (_P * count)(*[offsets_S1.data_ptr() for offsets_S1 in offsets]),
            (_I64 * count)(*[values_N.shape[0] for values_N in values]), (_I64 * count)(*ends), count,
            _item_bytes(values[0], 1), INDEX_TYPES[torch.int32 if narrow else torch.int64],
        )  # fmt: skip
        for order_P, out_M, lengths_P in zip(orders, outs, lengths, strict=True):
            self._native["take_segments_"](
                *sources, order_P.data_ptr(), order_P.shape[0], out_M.data_ptr(), out_M.shape[0],
                lengths_P.data_ptr(), report,
            )  # fmt: skip
            if report.status != OK:
                raise _error("take_segments_", report)

    def bucketize_by_cuts(self, ids_N: Tensor, lengths_S: Tensor, cuts_C1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if ids_N.dtype not in INDEX_TYPES or lengths_S.dtype not in INDEX_TYPES:
            return LIBRARY.references["bucketize_by_cuts"](ids_N, lengths_S, cuts_C1)
        ids_N, lengths_S, cuts_C1 = ids_N.contiguous(), lengths_S.contiguous(), _int64(cuts_C1)
        buckets = cuts_C1.shape[0] - 1
        lengths_CS = torch.empty(buckets * lengths_S.shape[0], dtype=lengths_S.dtype)
        local_ids_N, positions_N = torch.empty_like(ids_N), torch.empty(ids_N.shape[0], dtype=torch.int64)
        self._call(
            "bucketize_by_cuts", ids_N.data_ptr(), INDEX_TYPES[ids_N.dtype], ids_N.shape[0],
            lengths_S.data_ptr(), INDEX_TYPES[lengths_S.dtype], lengths_S.shape[0], cuts_C1.data_ptr(),
            buckets, lengths_CS.data_ptr(), local_ids_N.data_ptr(), positions_N.data_ptr(),
        )  # fmt: skip
        return lengths_CS, local_ids_N, positions_N

    def jagged_to_padded(self, values_N: Tensor, offsets_B1: Tensor, length: int, padding: float) -> Tensor:
        if values_N.element_size() > 8:
            return LIBRARY.references["jagged_to_padded"](values_N, offsets_B1, length, padding)
        values_N, offsets_B1 = values_N.contiguous(), _int64(offsets_B1)
        bags = offsets_B1.shape[0] - 1
        element = torch.full((1,), padding, dtype=values_N.dtype)
        out_BL = torch.empty((bags, length, *values_N.shape[1:]), dtype=values_N.dtype)
        self._call(
            "jagged_to_padded", values_N.data_ptr(), _item_bytes(values_N, 1), values_N.shape[0],
            offsets_B1.data_ptr(), bags, length, element.data_ptr(), values_N.element_size(),
            out_BL.data_ptr(),
        )  # fmt: skip
        return out_BL

    def padded_to_jagged(self, padded_BL: Tensor, offsets_B1: Tensor, total: int) -> Tensor:
        padded_BL, offsets_B1 = padded_BL.contiguous(), _int64(offsets_B1)
        out_N = torch.empty((total, *padded_BL.shape[2:]), dtype=padded_BL.dtype)
        self._call(
            "padded_to_jagged", padded_BL.data_ptr(), _item_bytes(padded_BL, 2), padded_BL.shape[0],
            padded_BL.shape[1], offsets_B1.data_ptr(), total, out_N.data_ptr(),
        )  # fmt: skip
        return out_N

    def segment_sum(self, values_N: Tensor, offsets_S1: Tensor) -> Tensor:
        dtype = values_N.dtype
        sum_N = (values_N.float() if dtype in _HALVES else values_N).contiguous()
        if sum_N.dtype not in _SUM_TYPES:
            return LIBRARY.references["segment_sum"](values_N, offsets_S1)
        offsets_S1 = _int64(offsets_S1)
        out_S = torch.empty((offsets_S1.shape[0] - 1, *sum_N.shape[1:]), dtype=sum_N.dtype)
        self._call(
            "segment_sum", sum_N.data_ptr(), _SUM_TYPES[sum_N.dtype], sum_N.shape[0],
            sum_N.shape[1:].numel(), offsets_S1.data_ptr(), offsets_S1.shape[0] - 1, out_S.data_ptr(),
        )  # fmt: skip
        return out_S.to(dtype)

    def repeat_segments(self, rows_S: Tensor, offsets_S1: Tensor, total: int) -> Tensor:
        rows_S, offsets_S1 = rows_S.contiguous(), _int64(offsets_S1)
        out_N = torch.empty((total, *rows_S.shape[1:]), dtype=rows_S.dtype)
        self._call(
            "repeat_segments", rows_S.data_ptr(), _item_bytes(rows_S, 1), offsets_S1.data_ptr(),
            offsets_S1.shape[0] - 1, total, out_N.data_ptr(),
        )  # fmt: skip
        return out_N


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    made = _Kernels(library)
    return {name: getattr(made, name) for name in _SIGNATURES}


def _int64(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64)).contiguous()


def _item_bytes(tensor: Tensor, leading: int) -> int:
    return tensor.shape[leading:].numel() * tensor.element_size()


def _error(op: str, report: ReportRecord) -> Exception:
    if report.status == BAD_OFFSETS:
        raise_bad_offsets(op, report.position, report.value)
    if report.status == BAD_ID:
        raise_bad_order(op, report.position, report.value)
    if report.status == NO_MEMORY:
        return MemoryError(f"{op}: out of memory for its workspace.")
    return AssertionError(f"{op}: the native library rejected argument {report.value}.")
