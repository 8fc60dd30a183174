"""Lookups by the native library: `pooled_lookup`, `sequence_lookup` and `sample_weight_grad` on CPU.

`tilerec/ops/lookup.py` says what they mean; here only arguments change form. What a layout (tables, keys, means, shapes
and dtypes) needs as C arrays is made once and kept: a call with 26 tables must cost microseconds. Tables in fp64 go to
the reference.

Legend: T tables, F features, N ids, B samples, C sum of the features' dims.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.cpu.library import BAD_ID, BAD_OFFSETS, DTYPES, INDEX_TYPES, int64_array
from tilerec.ops.cpu.records import Lookup, Report
from tilerec.ops.gradient import new_ticket
from tilerec.ops.library import LIBRARY
from tilerec.ops.lookup import (
    _pooled_lookup_reference,
    _sample_weight_grad_reference,
    _sequence_lookup_reference,
    raise_bad_id,
)


@dataclass(frozen=True)
class _Layout:
    """What stays the same from call to call; `head` are the first fields of `Lookup`, addresses of `arrays`."""

    head: tuple[int, ...]
    width: int
    dims: tuple[int, ...]  # per feature
    pointers: type[ctypes.Array[ctypes.c_void_p]]
    arrays: tuple[ctypes.Array[ctypes.c_int64], ...]


@functools.lru_cache(maxsize=128)
def _layout(
    tables: tuple[int, ...],
    keys: tuple[int, ...],
    means: tuple[int, ...],
    shapes: tuple[tuple[int, int], ...],
    dtypes: tuple[torch.dtype, ...],
) -> _Layout | None:
    if any(dtype not in DTYPES for dtype in dtypes):
        return None
    rows, columns = [shape[0] for shape in shapes], [shape[1] for shape in shapes]
    arrays = tuple(int64_array(v) for v in (tables, keys, means, rows, columns, [DTYPES[d] for d in dtypes]))
    places = [ctypes.addressof(array) for array in arrays]
    dims = tuple(columns[t] for t in tables)
    head = (len(tables), *places[:3], len(shapes), *places[3:])
    return _Layout(head, sum(dims), dims, ctypes.c_void_p * len(shapes), arrays)


def _layout_of(
    weights: Sequence[Tensor], tables: Sequence[int], keys: Sequence[int], means: Sequence[int]
) -> _Layout | None:
    if not all(map(Tensor.is_contiguous, weights)):
        t, weight = next((t, w) for t, w in enumerate(weights) if not w.is_contiguous())
        raise InputError(
            f"Table {t} of a lookup: weight of shape {tuple(weight.shape)} has strides {weight.stride()}, "
            "wanted contiguous rows; pass weight.contiguous()."
        )
    return _layout(
        tuple(tables),
        tuple(keys),
        tuple(means),
        tuple([w.shape for w in weights]),
        tuple([w.dtype for w in weights]),
    )


def _raise(report: Report, names: str, rows: Sequence[int], ids: int) -> None:
    """Turn a report into the error its caller sees."""
    if report.status == BAD_ID:
        raise_bad_id(names, report.feature, report.position, report.value, rows[report.feature])
    feature = names.split(",")[report.feature].partition("@")[0] if names else str(report.feature)
    if report.status == BAD_OFFSETS:
        raise InputError(
            f"Feature '{feature}': offsets[{report.position}] is {report.value}; offsets must not fall and must lie in "
            f"[0, {ids}] (the number of values); check how lengths and values were put together."
        )
    raise InputError(
        f"Feature '{feature}': the offsets hold fewer bags than the batch sizes say; check the batch sizes per key."
    )


def _int64(offsets: Tensor) -> Tensor:
    return (offsets if offsets.dtype == torch.int64 else offsets.to(torch.int64)).contiguous()


def _rows(weights: Sequence[Tensor], tables: Sequence[int]) -> list[int]:
    return [weights[t].shape[0] for t in tables]


def _pooled_lookup(function: Callable[..., int]) -> Callable[..., tuple[Tensor, Tensor]]:
    def pooled_lookup(
        weights: Sequence[Tensor],
        sinks: Tensor,
        ids: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        tables: Sequence[int],
        keys: Sequence[int],
        means: Sequence[int],
        batches: Sequence[int],
        dtype: torch.dtype,
        names: str,
    ) -> tuple[Tensor, Tensor]:
        layout = _layout_of(weights, tables, keys, means)
        if layout is None or dtype not in DTYPES or ids.dtype not in INDEX_TYPES:
            return _pooled_lookup_reference(
                weights, sinks, ids, offsets, sample_weights, tables, keys, means, batches, dtype, names
            )
        if len(batches) == 1:
            out = torch.empty((batches[0], layout.width), dtype=dtype)
        else:
            out = torch.empty(
                sum(batches[k] * d for k, d in zip(keys, layout.dims, strict=True)), dtype=dtype
            )
        ids, offsets = ids.contiguous(), _int64(offsets)
        if sample_weights is not None:
            sample_weights = sample_weights.to(torch.float32).contiguous()
        data = layout.pointers(*map(Tensor.data_ptr, weights))
        sizes = int64_array(batches)
        call = Lookup(
            *layout.head, ctypes.addressof(data), len(batches), ctypes.addressof(sizes), ids.data_ptr(),
            INDEX_TYPES[ids.dtype], ids.numel(), offsets.data_ptr(), offsets.numel(),
            None if sample_weights is None else sample_weights.data_ptr(), out.data_ptr(), DTYPES[dtype], None,
            torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(call)):
            _raise(call.report, names, _rows(weights, tables), ids.numel())
        return out, new_ticket()

    return pooled_lookup


def _sequence_lookup(function: Callable[..., int]) -> Callable[..., tuple[Tensor, Tensor]]:
    def sequence_lookup(
        weights: Sequence[Tensor],
        sinks: Tensor,
        ids: Tensor,
        starts: Tensor,
        tables: Sequence[int],
        dtype: torch.dtype,
        names: str,
    ) -> tuple[Tensor, Tensor]:
        layout = _layout_of(weights, tables, (), ())
        if layout is None or not tables or dtype not in DTYPES or ids.dtype not in INDEX_TYPES:
            return _sequence_lookup_reference(weights, sinks, ids, starts, tables, dtype, names)
        out = torch.empty((ids.shape[0], layout.dims[0]), dtype=dtype)
        ids, starts = ids.contiguous(), _int64(starts)
        data = layout.pointers(*map(Tensor.data_ptr, weights))
        call = Lookup(
            *layout.head, ctypes.addressof(data), 0, None, ids.data_ptr(), INDEX_TYPES[ids.dtype], ids.numel(),
            starts.data_ptr(), starts.numel(), None, out.data_ptr(), DTYPES[dtype], None, torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(call)):
            _raise(call.report, names, _rows(weights, tables), ids.numel())
        return out, new_ticket()

    return sequence_lookup


def _sample_weight_grad(function: Callable[..., int]) -> Callable[..., Tensor]:
    def sample_weight_grad(
        weights: Sequence[Tensor],
        ids: Tensor,
        offsets: Tensor,
        grad: Tensor,
        tables: Sequence[int],
        keys: Sequence[int],
        means: Sequence[int],
        batches: Sequence[int],
    ) -> Tensor:
        layout = _layout_of(weights, tables, keys, means)
        if layout is None or grad.dtype not in DTYPES or ids.dtype not in INDEX_TYPES:
            return _sample_weight_grad_reference(weights, ids, offsets, grad, tables, keys, means, batches)
        out_N = torch.zeros(ids.numel(), dtype=torch.float32)
        ids, offsets, grad = ids.contiguous(), _int64(offsets), grad.contiguous()
        data = layout.pointers(*map(Tensor.data_ptr, weights))
        sizes = int64_array(batches)
        call = Lookup(
            *layout.head, ctypes.addressof(data), len(batches), ctypes.addressof(sizes), ids.data_ptr(),
            INDEX_TYPES[ids.dtype], ids.numel(), offsets.data_ptr(), offsets.numel(), None, grad.data_ptr(),
            DTYPES[grad.dtype], out_N.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(call)):
            _raise(
                call.report,
                ",".join(f"{f}@{t}" for f, t in enumerate(tables)),
                _rows(weights, tables),
                ids.numel(),
            )
        return out_N

    return sample_weight_grad


def register(library: ctypes.CDLL) -> None:
    """Let the native library serve the three ops on CPU."""
    kernels = {
        "pooled_lookup": _pooled_lookup(library.tr_pooled_lookup),
        "sequence_lookup": _sequence_lookup(library.tr_sequence_lookup),
        "sample_weight_grad": _sample_weight_grad(library.tr_sample_weight_grad),
    }
    for name, kernel in kernels.items():
        function = getattr(library, f"tr_{name}")
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        LIBRARY.impl(name, kernel, "CPU", allow_override=True)
