"""Lookups in quantized rows for serving: pooled per bag, or one row per id.

Terms
  table    `weights[t]`: quantized rows, uint8 `[rows, row_bytes(dims[t], bits[t])]` (`row_format.py`); or, with bits 0,
           floats `[rows, dims[t]]`. One call may mix them
  others   feature, bag, key: as in `ops/lookup/definition.py`

A lookup has the bits of the float lookup in dequantized rows: a number is scale * code + bias in fp32, and then
everything is as there (sums in fp32 in the order of the occurrences, one rounding to the type of the output).

Example, 2 bits: rows [[0, 3], [1, 4]] (scale 1, biases 0 and 1), ids [0, 1, 1], offsets [0, 2, 3], sum:
[[1, 7], [1, 4]].

Rows are read only. Nothing has a gradient: a backward pass that reaches the lookup through sample weights raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.gradient.definition import bag_starts
from tilerec.ops.lookup.calls import PooledCall, SequenceCall
from tilerec.ops.lookup.checks import check_batch, check_layout, check_starts, pooled_shape
from tilerec.ops.lookup.definition import check_ids, pooled_lookup_reference, sequence_lookup_reference
from tilerec.ops.lookup.saved_rows import copy_rows, id_segments, positions_in_copies
from tilerec.ops.quantized.calls import QuantizedPooledCall, QuantizedSequenceCall
from tilerec.ops.quantized.checks import check_one_dim, check_rows
from tilerec.ops.quantized.row_format import dequantize_rows
from tilerec.ops.quantized.served_tables import ServedTables
from tilerec.ops.runtime.dispatch import can_bypass_dispatcher
from tilerec.ops.runtime.library import LIBRARY
from tilerec.torch_private import BelowAutograd, profiler_is_active

_OPS = torch.ops.tilerec


def _fake_pooled(call: QuantizedPooledCall) -> Tensor:
    (tables, keys, _, batches), dims = call.layout, call.dims
    if call.layout.uniform:
        return call.ids.new_empty((batches[0], sum(dims[t] for t in tables)), dtype=call.dtype)
    count = sum(batches[k] * dims[t] for k, t in zip(keys, tables, strict=True))
    return call.ids.new_empty((count,), dtype=call.dtype)


def _floats(weight: Tensor, dim: int, bits: int) -> Tensor:
    return dequantize_rows(weight, dim, bits) if bits else weight


@LIBRARY.op(
    "quantized_pooled_lookup(Tensor[] weights, int[] dims, int[] bits, Tensor ids, Tensor offsets, "
    "Tensor? sample_weights, int[] tables, int[] keys, int[] means, SymInt[] batches, ScalarType dtype, str names) "
    "-> Tensor",
    _fake_pooled,
    unpack=QuantizedPooledCall.unpack,
)
def quantized_pooled_reference(call: QuantizedPooledCall) -> Tensor:
    weights, dims, bits, ids, offsets, sample_weights, layout, dtype, names = call
    tables, keys, means, batches = layout
    shapes = [w.shape for w in weights]
    check_batch(ids, offsets, sample_weights)
    check_rows(shapes, [w.dtype for w in weights], dims, bits)
    check_layout(shapes, tables, keys, means, True)
    pooled_shape([dims[t] for t in tables], max(keys, default=-1), keys, batches, offsets, names)
    segments = id_segments(offsets, *bag_starts(keys, batches))
    copies = []
    for feature, (table, (begin, end)) in enumerate(zip(tables, segments, strict=True)):
        own = ids[begin:end]
        check_ids(own.to(torch.int64), begin, weights[table].shape[0], names, feature)
        copies.append(_floats(copy_rows(weights[table], own), dims[table], bits[table]))
    own_layout = layout._replace(tables=range(len(tables)))
    no_sinks, places = torch.zeros(0, dtype=torch.int64), positions_in_copies(ids, segments)
    # Features of one key share its positions: each has a row per id of the key.
    float_call = PooledCall(copies, no_sinks, places, offsets, sample_weights, own_layout, dtype, names)
    return pooled_lookup_reference(float_call)[0]


@LIBRARY.op(
    "quantized_sequence_lookup(Tensor[] weights, int[] dims, int[] bits, Tensor ids, Tensor starts, int[] tables, "
    "ScalarType dtype, str names) -> Tensor",
    lambda call: call.ids.new_empty((call.ids.shape[0], call.dims[call.tables[0]]), dtype=call.dtype),
    unpack=QuantizedSequenceCall,
)
def quantized_sequence_reference(call: QuantizedSequenceCall) -> Tensor:
    weights, dims, bits, ids, starts, tables, dtype, names = call
    shapes = [w.shape for w in weights]
    check_batch(ids, starts, None)
    check_rows(shapes, [w.dtype for w in weights], dims, bits)
    check_layout(shapes, tables, (), (), False)
    check_one_dim(dims, tables, names)
    check_starts(starts, len(tables))
    edges, copies, places = starts.tolist(), [], torch.zeros_like(ids)
    for feature, table in enumerate(tables):
        begin, end = edges[feature], edges[feature + 1]
        own = ids[begin:end]
        check_ids(own.to(torch.int64), begin, weights[table].shape[0], names, feature)
        copies.append(_floats(copy_rows(weights[table], own), dims[table], bits[table]))
        places[begin:end] = torch.arange(end - begin, dtype=ids.dtype, device=ids.device)
    no_sinks = torch.zeros(0, dtype=torch.int64)
    float_call = SequenceCall(copies, no_sinks, places, starts, range(len(tables)), dtype, names)
    return sequence_lookup_reference(float_call)[0]


class _NoGradient(torch.autograd.Function):
    """A lookup whose sample weights require gradients: computes, and raises an error in the backward pass."""

    @staticmethod
    def forward(ctx: Any, args: tuple[Any, ...], sample_weights: Tensor) -> Tensor:
        with BelowAutograd():
            out: Tensor = _OPS.quantized_pooled_lookup.default(*args[:5], sample_weights, *args[6:])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise InputError(
            "quantized_pooled_lookup: got a backward pass through its sample weights; expected none, as quantized rows "
            "are for inference. Train the float model, or pass weights.detach()."
        )


def _pooled_autograd(*args: Any) -> Tensor:
    sample_weights = args[5]
    if sample_weights is not None and sample_weights.requires_grad and torch.is_grad_enabled():
        out: Tensor = _NoGradient.apply(args, sample_weights)
        return out
    with BelowAutograd():
        return _OPS.quantized_pooled_lookup.default(*args)


def _sequence_autograd(*args: Any) -> Tensor:
    with BelowAutograd():
        out: Tensor = _OPS.quantized_sequence_lookup.default(*args)
    return out


LIBRARY.impl("quantized_pooled_lookup", _pooled_autograd, "Autograd")
LIBRARY.impl("quantized_sequence_lookup", _sequence_autograd, "Autograd")


def _bypasses(weights: Sequence[Tensor], ids: Tensor, others: Tensor, sample_weights: Tensor | None) -> bool:
    """Return True if the CPU kernel may be called directly.

    A sample of 26 tables takes a third of the time then. The dispatcher would box 130 numbers and tensors.
    """
    return (
        type(weights) is ServedTables
        and weights.on_cpu
        and ids.is_cpu
        and others.is_cpu
        and (sample_weights is None or (sample_weights.is_cpu and not sample_weights.requires_grad))
        and can_bypass_dispatcher((ids,))
        and not profiler_is_active()
    )


def quantized_pooled_lookup(
    weights: Sequence[Tensor], dims: Sequence[int], bits: Sequence[int], ids: Tensor, offsets: Tensor,
    sample_weights: Tensor | None, *rest: Any,
) -> Tensor:  # fmt: skip
    """Run the op `tilerec::quantized_pooled_lookup`.

    Call the CPU kernel directly for `ServedTables`, if no mode, tracer or profiler is active.
    """
    args = (weights, dims, bits, ids, offsets, sample_weights, *rest)
    if _bypasses(weights, ids, offsets, sample_weights):
        out: Tensor = LIBRARY.cpu_kernels["quantized_pooled_lookup"](*args)
        return out
    return _OPS.quantized_pooled_lookup.default(*args)


def quantized_sequence_lookup(
    weights: Sequence[Tensor], dims: Sequence[int], bits: Sequence[int], ids: Tensor, starts: Tensor, *rest: Any
) -> Tensor:
    """Run the op `tilerec::quantized_sequence_lookup`; dispatch as of `quantized_pooled_lookup`."""
    args = (weights, dims, bits, ids, starts, *rest)
    if _bypasses(weights, ids, starts, None):
        out: Tensor = LIBRARY.cpu_kernels["quantized_sequence_lookup"](*args)
        return out
    return _OPS.quantized_sequence_lookup.default(*args)
