"""Lookups in quantized rows on the native library: the functions and layouts of `ops/lookup/cpu.py`."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tilerec.ops.lookup.checks import check_batch, check_contiguous, check_layout, check_starts, pooled_shape
from tilerec.ops.lookup.cpu import LookupLayout, contiguous_ids, contiguous_int64, raise_report
from tilerec.ops.quantized.calls import QuantizedPooledCall, QuantizedSequenceCall
from tilerec.ops.quantized.checks import check_one_dim, check_rows
from tilerec.ops.quantized.definition import quantized_pooled_reference, quantized_sequence_reference
from tilerec.ops.quantized.served_tables import ServedTables
from tilerec.ops.runtime.cpu.library import DTYPES, INDEX_TYPES
from tilerec.ops.runtime.cpu.memory import reused_empty
from tilerec.ops.runtime.cpu.records import LookupRecord
from tilerec.torch_private import dtype_of

CODE_TYPES = {8: 3, 4: 4, 2: 5}
"""Codes of native/tilerec.h by bits."""

MAX_LAYOUTS = 64
"""Layouts kept for one list of tables: one per order of a batch's keys."""


class _Tables(NamedTuple):
    """A layout, and the addresses of its tables' rows."""

    layout: LookupLayout
    data: ctypes.Array[ctypes.c_void_p]


@functools.lru_cache(maxsize=128)
def _layout(
    tables: tuple[int, ...], keys: tuple[int, ...], means: tuple[int, ...], dims: tuple[int, ...],
    bits: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], pooled: bool,
    names: str,
) -> LookupLayout:  # fmt: skip
    check_rows(shapes, dtypes, dims, bits)
    check_layout(shapes, tables, keys, means, pooled)
    if not pooled:
        check_one_dim(dims, tables, names)
    types = [CODE_TYPES[own] if own else DTYPES[dtype] for own, dtype in zip(bits, dtypes, strict=True)]
    return LookupLayout.of(tables, keys, means, [shape[0] for shape in shapes], dims, types)


def _tables_of(
    call: QuantizedPooledCall | QuantizedSequenceCall, tables: Sequence[int], keys: Sequence[int],
    means: Sequence[int], pooled: bool,
) -> _Tables:  # fmt: skip
    """Return the tables of a call: those of the last call with this list of tables, if nothing has moved since."""
    weights = call.weights
    served = type(weights) is ServedTables and weights.unmoved()
    key = (call.dims, call.bits, tables, keys, means)  # tuples, as the collections pass them
    if served:
        found = weights.layouts.get(key)  # type: ignore[attr-defined]
        if found is not None:
            return cast(_Tables, found)
    check_contiguous(weights)
    shapes, dtypes = tuple(map(Tensor.size, weights)), tuple(map(dtype_of, weights))
    layout = _layout(
        tuple(tables), tuple(keys), tuple(means), tuple(call.dims), tuple(call.bits), shapes, dtypes, pooled,
        call.names,
    )  # fmt: skip
    made = _Tables(layout, layout.pointers(*map(Tensor.data_ptr, weights)))
    if served and len(weights.layouts) < MAX_LAYOUTS:  # type: ignore[attr-defined]
        weights.layouts[key] = made  # type: ignore[attr-defined]
    return made


def _pooled_lookup(function: Callable[..., int]) -> Callable[..., Tensor]:
    def pooled_lookup(call: QuantizedPooledCall) -> Tensor:
        weights, _, _, ids, offsets, sample_weights, (tables, keys, means, batches), dtype, names = call
        check_batch(ids, offsets, sample_weights)
        if dtype not in DTYPES:
            return quantized_pooled_reference(call)
        layout, data = _tables_of(call, tables, keys, means, True)
        out = reused_empty(pooled_shape(layout.dims, layout.last_key, keys, batches, offsets, names), dtype)
        ids, offsets = contiguous_ids(ids), contiguous_int64(offsets)
        if sample_weights is not None:
            sample_weights = sample_weights.to(torch.float32).contiguous()
        sizes = array("q", batches)
        record = LookupRecord(
            *layout.head, ctypes.addressof(data), len(batches), sizes.buffer_info()[0], ids.data_ptr(),
            INDEX_TYPES[ids.dtype], ids.numel(), offsets.data_ptr(), offsets.numel(),
            None if sample_weights is None else sample_weights.data_ptr(), out.data_ptr(), DTYPES[dtype], None,
            torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(record)):
            raise_report(record.report, names, weights, tables, ids)
        return out

    return pooled_lookup


def _sequence_lookup(function: Callable[..., int]) -> Callable[..., Tensor]:
    def sequence_lookup(call: QuantizedSequenceCall) -> Tensor:
        weights, _, _, ids, starts, tables, dtype, names = call
        check_batch(ids, starts, None)
        check_starts(starts, len(tables))
        if not tables or dtype not in DTYPES:
            return quantized_sequence_reference(call)
        layout, data = _tables_of(call, tables, (), (), False)
        out = reused_empty((ids.shape[0], layout.dims[0]), dtype)
        ids, starts = contiguous_ids(ids), contiguous_int64(starts)
        record = LookupRecord(
            *layout.head, ctypes.addressof(data), 0, None, ids.data_ptr(), INDEX_TYPES[ids.dtype], ids.numel(),
            starts.data_ptr(), starts.numel(), None, out.data_ptr(), DTYPES[dtype], None, torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(record)):
            raise_report(record.report, names, weights, tables, ids, pooled=False)
        return out

    return sequence_lookup


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    functions = library.tr_pooled_lookup, library.tr_sequence_lookup
    for function in functions:
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    return {
        "quantized_pooled_lookup": _pooled_lookup(functions[0]),
        "quantized_sequence_lookup": _sequence_lookup(functions[1]),
    }
