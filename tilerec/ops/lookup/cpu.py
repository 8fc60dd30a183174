"""Lookups on the native library: `pooled_lookup`, `sequence_lookup` and `sample_weight_grad` on CPU.

`definition.py` specifies the ops; this file only converts arguments. The C arrays of a layout (tables, keys, means,
shapes and dtypes) are made once and cached: a call with 26 tables must cost microseconds. The reference computes tables
in fp64.

Legend: T tables, F features, N ids, B samples, C sum of the features' dims.
"""

from __future__ import annotations

import ctypes
import functools
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.gradient.definition import new_ticket
from tilerec.ops.lookup.calls import PooledCall, SequenceCall, WeightGradCall
from tilerec.ops.lookup.checks import (
    check_batch,
    check_contiguous,
    check_gradient,
    check_layout,
    check_starts,
    pooled_shape,
    raise_bad_offsets,
    raise_no_rows,
    raise_other_dim,
)
from tilerec.ops.lookup.definition import (
    pooled_lookup_reference,
    raise_bad_id,
    sample_weight_grad_reference,
    sequence_lookup_reference,
)
from tilerec.ops.runtime.cpu.library import BAD_ID, BAD_OFFSETS, DTYPES, INDEX_TYPES, NO_MEMORY, int64_array
from tilerec.ops.runtime.cpu.memory import reused_empty
from tilerec.ops.runtime.cpu.records import LookupRecord, ReportRecord
from tilerec.ops.runtime.devices import check_devices
from tilerec.torch_private import dtype_of


@dataclass(frozen=True)
class LookupLayout:
    """Constants shared by consecutive calls; `head` are the first fields of `LookupRecord`, addresses of `arrays`."""

    head: tuple[int, ...]
    dims: tuple[int, ...]  # per feature
    last_key: int  # -1: no features
    pointers: type[ctypes.Array[ctypes.c_void_p]]
    arrays: tuple[ctypes.Array[ctypes.c_int64], ...]

    @staticmethod
    def of(
        tables: Sequence[int], keys: Sequence[int], means: Sequence[int], rows: Sequence[int], dims: Sequence[int],
        types: Sequence[int],
    ) -> LookupLayout:  # fmt: skip
        """Return the layout; rows, dims and types (native/tilerec.h) are per table."""
        arrays = tuple(int64_array(values) for values in (tables, keys, means, rows, dims, types))
        places = [ctypes.addressof(array) for array in arrays]
        head = (len(tables), *places[:3], len(rows), *places[3:])
        own = tuple(dims[t] for t in tables)
        return LookupLayout(head, own, max(keys, default=-1), ctypes.c_void_p * len(rows), arrays)


@functools.lru_cache(maxsize=128)
def _layout(
    tables: tuple[int, ...], keys: tuple[int, ...], means: tuple[int, ...], shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...], pooled: bool,
) -> LookupLayout | None:  # fmt: skip
    if any(dtype not in DTYPES for dtype in dtypes):
        return None
    check_layout(shapes, tables, keys, means, pooled)
    rows, columns = [shape[0] for shape in shapes], [shape[1] for shape in shapes]
    return LookupLayout.of(tables, keys, means, rows, columns, [DTYPES[d] for d in dtypes])


def _layout_of(
    weights: Sequence[Tensor], tables: Sequence[int], keys: Sequence[int], means: Sequence[int], pooled: bool
) -> LookupLayout | None:
    check_contiguous(weights)
    shapes, dtypes = tuple(map(Tensor.size, weights)), tuple(map(dtype_of, weights))
    return _layout(tuple(tables), tuple(keys), tuple(means), shapes, dtypes, pooled)


# `value` of a TR_BAD_ARGUMENT (native/lookup.h).
_NO_ROWS, _BAD_DIM = 4, 5


def raise_report(
    report: ReportRecord, names: str, weights: Sequence[Tensor], tables: Sequence[int], ids: Tensor,
    pooled: bool = True,
) -> None:  # fmt: skip
    """Raise the error that a report describes."""
    if report.status == NO_MEMORY:
        raise MemoryError("A lookup: out of memory for its workspace.")
    if report.status == BAD_ID:
        rows = weights[tables[report.feature]].shape[0]
        raise_bad_id(names, report.feature, report.position, report.value, rows)
    if report.status == BAD_OFFSETS:
        raise_bad_offsets(names, tables, report.feature, report.position, report.value, ids.numel(), pooled)
    if report.value == _NO_ROWS:
        check_devices(weights, ids, tables, names)
        raise_no_rows(names, tables, report.feature)
    if report.value == _BAD_DIM:
        raise_other_dim(names, tables, report.feature, report.position, weights[tables[0]].shape[1])
    raise AssertionError(f"A lookup has inconsistent arguments (feature {report.feature}, check {report.value})")


def contiguous_ids(ids: Tensor) -> Tensor:
    """Return the ids contiguous and in a type that kernels read."""
    return (ids if ids.dtype in INDEX_TYPES else ids.to(torch.int64)).contiguous()


def contiguous_int64(offsets: Tensor) -> Tensor:
    """Return the offsets contiguous and in int64."""
    return (offsets if offsets.dtype == torch.int64 else offsets.to(torch.int64)).contiguous()


def _pooled_lookup(function: Callable[..., int]) -> Callable[..., tuple[Tensor, Tensor]]:
    def pooled_lookup(call: PooledCall) -> tuple[Tensor, Tensor]:
        weights, _, ids, offsets, sample_weights, (tables, keys, means, batches), dtype, names = call
        check_batch(ids, offsets, sample_weights)
        layout = _layout_of(weights, tables, keys, means, True)
        if layout is None or dtype not in DTYPES:
            return pooled_lookup_reference(call)
        out = reused_empty(pooled_shape(layout.dims, layout.last_key, keys, batches, offsets, names), dtype)
        ids, offsets = contiguous_ids(ids), contiguous_int64(offsets)
        if sample_weights is not None:
            sample_weights = sample_weights.to(torch.float32).contiguous()
        data = layout.pointers(*map(Tensor.data_ptr, weights))
        sizes = array("q", batches)
        record = LookupRecord(
            *layout.head, ctypes.addressof(data), len(batches), sizes.buffer_info()[0], ids.data_ptr(),
            INDEX_TYPES[ids.dtype], ids.numel(), offsets.data_ptr(), offsets.numel(),
            None if sample_weights is None else sample_weights.data_ptr(), out.data_ptr(), DTYPES[dtype], None,
            torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(record)):
            raise_report(record.report, names, weights, tables, ids)
        return out, new_ticket()

    return pooled_lookup


def _sequence_lookup(function: Callable[..., int]) -> Callable[..., tuple[Tensor, Tensor]]:
    def sequence_lookup(call: SequenceCall) -> tuple[Tensor, Tensor]:
        weights, _, ids, starts, tables, dtype, names = call
        check_batch(ids, starts, None)
        check_starts(starts, len(tables))
        layout = _layout_of(weights, tables, (), (), False)
        if layout is None or not tables or dtype not in DTYPES:
            return sequence_lookup_reference(call)
        out = reused_empty((ids.shape[0], layout.dims[0]), dtype)
        ids, starts = contiguous_ids(ids), contiguous_int64(starts)
        data = layout.pointers(*map(Tensor.data_ptr, weights))
        record = LookupRecord(
            *layout.head, ctypes.addressof(data), 0, None, ids.data_ptr(), INDEX_TYPES[ids.dtype], ids.numel(),
            starts.data_ptr(), starts.numel(), None, out.data_ptr(), DTYPES[dtype], None, torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(record)):
            raise_report(record.report, names, weights, tables, ids, pooled=False)
        return out, new_ticket()

    return sequence_lookup


def _sample_weight_grad(function: Callable[..., int]) -> Callable[..., Tensor]:
    def sample_weight_grad(call: WeightGradCall) -> Tensor:
        weights, ids, offsets, grad, (tables, keys, means, batches) = call
        check_batch(ids, offsets, None)
        layout = _layout_of(weights, tables, keys, means, True)
        if layout is None or grad.dtype not in DTYPES:
            return sample_weight_grad_reference(call)
        wanted = pooled_shape(layout.dims, layout.last_key, keys, batches, offsets, "")
        check_gradient(grad, wanted, math.prod(wanted))
        out_N = torch.zeros(ids.numel(), dtype=torch.float32)
        ids, offsets, grad = contiguous_ids(ids), contiguous_int64(offsets), grad.contiguous()
        data = layout.pointers(*map(Tensor.data_ptr, weights))
        sizes = array("q", batches)
        record = LookupRecord(
            *layout.head, ctypes.addressof(data), len(batches), sizes.buffer_info()[0], ids.data_ptr(),
            INDEX_TYPES[ids.dtype], ids.numel(), offsets.data_ptr(), offsets.numel(), None, grad.data_ptr(),
            DTYPES[grad.dtype], out_N.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(record)):
            names = ",".join(f"{f}@{t}" for f, t in enumerate(tables))
            raise_report(record.report, names, weights, tables, ids)
        return out_N

    return sample_weight_grad


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    functions = library.tr_pooled_lookup, library.tr_sequence_lookup, library.tr_sample_weight_grad
    for function in functions:
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    return {
        "pooled_lookup": _pooled_lookup(functions[0]),
        "sequence_lookup": _sequence_lookup(functions[1]),
        "sample_weight_grad": _sample_weight_grad(functions[2]),
    }
