"""Lookups of rows: pooled per bag, or one row per id.

Terms
  table    `weights[t]`, a leaf `[rows, dim]`; dims and dtypes may differ
  feature  feature f reads table `tables[f]` with the ids of key `keys[f]` of the jagged batch
  bag      bag i contains `ids[offsets[i] : offsets[i + 1]]`; key k owns a run of bags, one per sample; every id is in
           a bag: offsets begin at 0 and end at N
  sinks    int64 [T]: per table the handle of the sink that receives its row gradients (`ops/gradient`), -1: none;
           or int64 [0]: gradients become ordinary `.grad`s
  ticket   two numbers per lookup; its backward marks them as used, so that a second backward cannot update twice

  out[f, b] = s * sum_p w_p * W[ids_p],   s = 1 (sum) or 1 / L (mean),  p over the L ids of the bag; an empty
  bag gives 0

Legend: T tables, F features, K keys, N ids, B samples, D columns of a table, C = sum of D over features.

Backends override the kernels of `pooled_lookup`, `sequence_lookup` and `sample_weight_grad` for their device. The
autograd formulas below are shared by all backends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilerec.errors import InputError
from tilerec.ops.gradient.definition import (
    bag_starts,
    new_ticket,
    pooled_blocks,
    register_saved_rows,
    submit_pooled,
    submit_sequence,
)
from tilerec.ops.lookup.calls import PooledCall, PooledLayout, SequenceCall, WeightGradCall
from tilerec.ops.lookup.checks import check_covered
from tilerec.ops.lookup.row_location import RowLocation
from tilerec.ops.lookup.saved_rows import (
    SavedRows,
    copy_rows,
    id_segments,
    kept_for_retained_graph,
    positions_in_copies,
)
from tilerec.ops.runtime.dispatch import can_bypass_dispatcher
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.update.calls import Features, Gradients, RuleTables, UpdateCall
from tilerec.torch_private import BelowAutograd, FakeTensor, FunctionalTensor, graph_task_id, will_execute

_OPS = torch.ops.tilerec
_LAYOUT = "int[] tables, int[] keys, int[] means, SymInt[] batches"


def raise_bad_id(names: str, feature: int, position: int, id_: int, rows: int) -> None:
    """Raise the `InputError` for an id outside its table; `names`: "feature@table" per feature, separated by ","."""
    name, _, table = names.split(",")[feature].rpartition("@")
    raise InputError(
        f"Table '{table}': got id {id_} of feature '{name}' (position {position} of the batch's values); expected ids "
        f"in [0, {rows}). Remap the ids, enlarge num_embeddings, or build the collection with on_bad_id='clamp'."
    )


def check_ids(ids: Tensor, begin: int, rows: int, names: str, feature: int) -> None:
    """Raise an `InputError` for the first of a feature's ids [n] outside its table; they begin at position `begin`."""
    bad = (ids < 0) | (ids >= rows)
    if bool(bad.any()):
        position = int(bad.nonzero()[0])
        raise_bad_id(names, feature, begin + position, int(ids[position]), rows)


def _fake_pooled_lookup(call: PooledCall) -> tuple[Tensor, Tensor]:
    weights, _, ids, _, _, (tables, keys, _, batches), dtype, _ = call
    dims = [weights[t].shape[1] for t in tables]
    ticket = torch.empty(2, dtype=torch.int64, device="cpu")
    if call.layout.uniform:
        return ids.new_empty((batches[0], sum(dims)), dtype=dtype), ticket
    return ids.new_empty((sum(batches[k] * d for k, d in zip(keys, dims, strict=True)),), dtype=dtype), ticket


@LIBRARY.op(
    "pooled_lookup(Tensor[] weights, Tensor sinks, Tensor ids, Tensor offsets, Tensor? sample_weights, "
    f"{_LAYOUT}, ScalarType dtype, str names) -> (Tensor, Tensor)",
    _fake_pooled_lookup,
    unpack=PooledCall.unpack,
)
def pooled_lookup_reference(call: PooledCall) -> tuple[Tensor, Tensor]:
    weights, _, ids, offsets, sample_weights, layout, dtype, names = call
    tables, keys, means, batches = layout
    starts, bags = bag_starts(keys, batches)
    pooled = []
    for feature, table in enumerate(tables):
        weight = weights[table]
        bounds = offsets[starts[feature] : starts[feature] + bags[feature] + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        ids_n = ids[begin:end].to(torch.int64)
        check_ids(ids_n, begin, weight.shape[0], names, feature)
        accum_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        rows_nD = weight[ids_n].to(accum_dtype)
        if sample_weights is not None:
            rows_nD = rows_nD * sample_weights[begin:end].to(accum_dtype)[:, None]
        lengths_B = bounds[1:] - bounds[:-1]
        bag_n = torch.repeat_interleave(torch.arange(bags[feature], device=ids.device), lengths_B)
        sums_BD = torch.zeros(bags[feature], weight.shape[1], dtype=accum_dtype, device=ids.device).index_add_(
            0, bag_n, rows_nD
        )
        if means[feature]:
            sums_BD = sums_BD / lengths_B.clamp(min=1).to(accum_dtype)[:, None]
        pooled.append(sums_BD.to(dtype))
    if tables:
        check_covered(offsets, ids)
    if layout.uniform:
        out = torch.cat(pooled, dim=1) if pooled else ids.new_zeros((batches[0], 0), dtype=dtype)
    else:
        out = torch.cat([block.reshape(-1) for block in pooled]) if pooled else ids.new_zeros((0,), dtype=dtype)
    return out, new_ticket()


def _fake_sequence_lookup(call: SequenceCall) -> tuple[Tensor, Tensor]:
    ticket = torch.empty(2, dtype=torch.int64, device="cpu")
    shape = (call.ids.shape[0], call.weights[call.tables[0]].shape[1])
    return call.ids.new_empty(shape, dtype=call.dtype), ticket


@LIBRARY.op(
    "sequence_lookup(Tensor[] weights, Tensor sinks, Tensor ids, Tensor starts, int[] tables, ScalarType dtype, "
    "str names) -> (Tensor, Tensor)",
    _fake_sequence_lookup,
    unpack=SequenceCall,
)
def sequence_lookup_reference(call: SequenceCall) -> tuple[Tensor, Tensor]:
    weights, _, ids, starts, tables, dtype, names = call
    bounds = starts.tolist()
    rows = []
    for feature, table in enumerate(tables):
        ids_n = ids[bounds[feature] : bounds[feature + 1]].to(torch.int64)
        check_ids(ids_n, bounds[feature], weights[table].shape[0], names, feature)
        rows.append(weights[table][ids_n].to(dtype))
    return torch.cat(rows), new_ticket()


def _sum_dtype(weights: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of sums over several tables: fp64 if any table is fp64, else fp32."""
    return torch.float64 if any(weight.dtype == torch.float64 for weight in weights) else torch.float32


@LIBRARY.op(
    f"sample_weight_grad(Tensor[] weights, Tensor ids, Tensor offsets, Tensor grad, {_LAYOUT}) -> Tensor",
    lambda call: call.ids.new_empty((call.ids.shape[0],), dtype=_sum_dtype(call.weights)),
    unpack=WeightGradCall.unpack,
)
def sample_weight_grad_reference(call: WeightGradCall) -> Tensor:
    weights, ids, offsets, grad, layout = call
    tables, keys, means, batches = layout
    starts, bags = bag_starts(keys, batches)
    blocks, strides = pooled_blocks([weights[t].shape[1] for t in tables], bags, layout.uniform)
    out_N = torch.zeros(ids.numel(), dtype=_sum_dtype(weights), device=ids.device)
    flat = grad.contiguous().view(-1)
    for feature, table in enumerate(tables):
        weight = weights[table]
        accum_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        bounds = offsets[starts[feature] : starts[feature] + bags[feature] + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        lengths_B = bounds[1:] - bounds[:-1]
        grad_BD = flat.as_strided(
            (bags[feature], weight.shape[1]), (strides[feature], 1), blocks[feature] + flat.storage_offset()
        ).to(accum_dtype)
        if means[feature]:
            grad_BD = grad_BD / lengths_B.clamp(min=1).to(accum_dtype)[:, None]
        bag_n = torch.repeat_interleave(torch.arange(bags[feature], device=ids.device), lengths_B)
        rows_nD = weight[ids[begin:end].to(torch.int64)].to(accum_dtype)
        out_N[begin:end] += (rows_nD * grad_BD[bag_n]).sum(dim=1).to(out_N.dtype)
    return out_N


# Autograd. The leaves are plain attributes of ctx: an update between this forward and its backward is allowed (two
# forwards, then two backwards), and leaves outlive the graph anyway. The batch's tensors use save_for_backward, so they
# are freed with the graph, and an in-place write between forward and backward raises an error.


class _Reach(NamedTuple):
    """Tables that a backward pass reaches."""

    sinks: Tensor  # -1 where the pass does not accumulate into the leaf
    submits: bool  # True if any sink is left
    captured: list[bool]  # autograd.grad(loss, [leaf]): the caller requests the gradient itself


def _reach(ctx: Any, grad: Tensor, sinks: Tensor, wanted: list[bool]) -> _Reach:
    """Return which of the wanted tables the running backward pass reaches.

    `loss.backward()` reaches every leaf. `torch.autograd.grad` and `backward(inputs=...)` reach only some leaves: other
    tables must not be updated.
    """
    nowhere = [False] * len(wanted)
    if graph_task_id() == -1 or isinstance(grad, (FakeTensor, FunctionalTensor)):
        return _Reach(sinks, True, nowhere)  # a compiled graph computes all leaves' gradients or none
    nodes = ctx.next_functions[-len(wanted) :]
    reached, captured = list(wanted), nowhere
    for t, want in enumerate(wanted):
        if not want:
            continue
        try:
            reached[t] = will_execute(nodes[t][0])
        except RuntimeError:  # torch raises it if the pass returns this leaf's gradient to its caller
            reached[t], captured[t] = False, True
    if reached == wanted:
        return _Reach(sinks, True, captured)
    masked = sinks.clone()
    masked[[t for t, want in enumerate(wanted) if want and not reached[t]]] = -1
    return _Reach(masked, any(reached), captured)


def _dense_grads(
    weights: Sequence[Tensor], wanted: Sequence[bool], grad: Tensor, ids: Tensor, offsets: Tensor,
    sample_weights: Tensor | None, layout: PooledLayout,
) -> list[Tensor | None]:  # fmt: skip
    """Return dense gradients of the wanted tables, None for the others; `offsets`: as in `_dense_weight_grads`."""
    chosen = [t for t, want in enumerate(wanted) if want]
    compute = _dense_weight_grads if can_bypass_dispatcher((grad, ids)) else _OPS.dense_weight_grads.default
    dense = compute(
        [weights[t] for t in chosen], [w.shape[1] for w in weights], chosen, grad, ids, offsets, sample_weights, *layout
    )  # fmt: skip
    out: list[Tensor | None] = [None] * len(weights)
    for t, value in zip(chosen, dense, strict=True):
        out[t] = value
    return out


def _reader(
    weights: Sequence[Tensor], sinks: Tensor, ids: Tensor, offsets: Tensor, layout: PooledLayout, names: str,
    location: RowLocation | None,
) -> SavedRows | None:  # fmt: skip
    """Return a reader of the rows that the gradient of sample weights needs; None while torch traces.

    Compiled programs save the tables as torch's own ops do, and raise an error if they were written in between.
    """
    if isinstance(ids, (FakeTensor, FunctionalTensor)):
        return None
    tables, keys, _, batches = layout
    used = list(dict.fromkeys(tables))

    def name(t: int) -> str:
        return names.split(",")[tables.index(t)].rpartition("@")[2] or str(t)

    def copy(features: Sequence[int]) -> list[Tensor]:
        if location is not None:
            return location.copies(features, updates=sinks.shape[0] > 0)
        segments = id_segments(offsets, *bag_starts([keys[f] for f in features], batches))
        return [
            copy_rows(weights[tables[f]], ids[begin:end]) for f, (begin, end) in zip(features, segments, strict=True)
        ]

    reader = SavedRows(tables, {} if location is not None else {t: weights[t] for t in used}, name, copy)
    # Rows without an attached optimizer may be reset, loaded and moved as well; their leaf stores its sink.
    handles = sinks.tolist() if sinks.shape[0] else [getattr(w, "_tilerec_sink", -1) for w in weights]
    register_saved_rows({t: handles[t] for t in used}, reader)
    return reader


def _sample_weight_grad(
    reader: SavedRows | None, weights: Sequence[Tensor], ids: Tensor, offsets: Tensor, grad: Tensor,
    layout: PooledLayout,
) -> Tensor:  # fmt: skip
    """Return the gradient of sample weights, computed from the rows as the forward read them."""
    rows = None if reader is None else reader.rows()
    if rows is not None:
        ids = positions_in_copies(ids, id_segments(offsets, *bag_starts(layout.keys, layout.batches)))
        weights, layout = rows, layout._replace(tables=range(len(rows)))
    out: Tensor = _OPS.sample_weight_grad.default(weights, ids, offsets, grad, *layout)
    return out


def _refuse_captured(captured: Sequence[bool], names: str, tables: Sequence[int]) -> None:
    """Raise the error of `torch.autograd.grad` for a table whose rows are not in its leaf."""
    if any(captured):
        table = names.split(",")[tables.index(captured.index(True))].rpartition("@")[2]
        raise RuntimeError(
            f"Table '{table}': torch.autograd.grad cannot return the gradient of a cached table, which is applied at "
            "the end of the backward pass. Call loss.backward()."
        )


class _PooledLookup(torch.autograd.Function):
    """Inputs: non-tensors in one tuple, the batch's tensors, the tables (every input costs autograd time)."""

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Any, ...], ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        sinks, layout, dtype, names, location = call
        with BelowAutograd():
            if location is None:
                out, ticket = _OPS.pooled_lookup.default(
                    weights, sinks, ids, offsets, sample_weights, *layout, dtype, names
                )
            else:
                out, ticket = location.pooled_lookup(layout, dtype, updates=sinks.shape[0] > 0)
        ctx.save_for_backward(ids, offsets, sample_weights)
        ctx.leaves = (weights, sinks, ticket)
        ctx.layout, ctx.names, ctx.location = layout, names, location
        ctx.reader = None
        if sample_weights is not None and ctx.needs_input_grad[3]:
            ctx.reader = _reader(weights, sinks, ids, offsets, layout, names, location)
        ctx.mark_non_differentiable(ticket)
        return out, ticket

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, sinks, ticket = ctx.leaves
        ids, offsets, sample_weights = ctx.saved_tensors
        grad = grads[0]  # of any strides: the ops copy a slice; a copy in a traced program would check its sizes
        sample_grad = None
        if sample_weights is not None and ctx.needs_input_grad[3]:
            if ctx.location is None:
                sample_grad = _sample_weight_grad(ctx.reader, weights, ids, offsets, grad, ctx.layout)
            else:
                updates = sinks.shape[0] > 0
                sample_grad = ctx.location.sample_weight_grad(grad, ctx.layout, ctx.reader.rows(), updates=updates)
            sample_grad = sample_grad.to(sample_weights.dtype)
        weight_grads: list[Tensor | None] = [None] * len(weights)
        used = set(ctx.layout.tables)
        wanted = [want and t in used for t, want in enumerate(ctx.needs_input_grad[_POOLED:])]
        if any(wanted):
            taken = sample_weights.detach() if sample_weights is not None else None
            if sinks.shape[0]:
                reach = _reach(ctx, grad, sinks, wanted)
                wanted = reach.captured
                if ctx.location is not None:
                    _refuse_captured(wanted, ctx.names, ctx.layout.tables)
                if reach.submits:
                    dims = [w.shape[1] for w in weights]
                    submits = submit_pooled if can_bypass_dispatcher((grad, ids)) else _OPS.submit_pooled_.default
                    submits(reach.sinks, ticket, grad, ids, offsets, taken, dims, *ctx.layout)
            if any(wanted):
                weight_grads = _dense_grads(weights, wanted, grad, ids, offsets, taken, ctx.layout)
        ctx.reader = kept_for_retained_graph(ctx.reader)
        return (None, None, None, sample_grad, *weight_grads)


class _SequenceLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: tuple[Any, ...], ids: Tensor, starts: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        sinks, tables, dtype, names, location = call
        with BelowAutograd():
            if location is None:
                out, ticket = _OPS.sequence_lookup.default(weights, sinks, ids, starts, tables, dtype, names)
            else:
                out, ticket = location.sequence_lookup(dtype, updates=sinks.shape[0] > 0)
        ctx.save_for_backward(ids, starts)
        ctx.leaves = (weights, sinks, ticket)
        ctx.tables, ctx.names, ctx.location = tables, names, location
        ctx.mark_non_differentiable(ticket)
        return out, ticket

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, sinks, ticket = ctx.leaves
        ids, starts = ctx.saved_tensors
        grad = grads[0]  # of any strides: the ops copy a slice; a copy in a traced program would check its sizes
        weight_grads: list[Tensor | None] = [None] * len(weights)
        used = set(ctx.tables)
        wanted = [want and t in used for t, want in enumerate(ctx.needs_input_grad[_SEQUENCE:])]
        if any(wanted):
            if sinks.shape[0]:
                reach = _reach(ctx, grad, sinks, wanted)
                wanted = reach.captured
                if ctx.location is not None:
                    _refuse_captured(wanted, ctx.names, ctx.tables)
                if reach.submits and ctx.location is not None:
                    submit_sequence(reach.sinks, ticket, grad, ids, starts, ctx.tables, ctx.location.starts)
                elif reach.submits:
                    submits = submit_sequence if can_bypass_dispatcher((grad, ids)) else _OPS.submit_sequence_.default
                    submits(reach.sinks, ticket, grad, ids, starts, ctx.tables)
            if any(wanted):
                count = len(ctx.tables)
                layout = PooledLayout(ctx.tables, range(count), [0] * count, [])
                weight_grads = _dense_grads(weights, wanted, grad, ids, starts, None, layout)
        return (*[None] * _SEQUENCE, *weight_grads)


_POOLED, _SEQUENCE = 4, 3  # inputs before the weights


def _differentiates(weights: Sequence[Tensor], sample_weights: Tensor | None) -> bool:
    """Return True if any input needs a gradient; skipping autograd saves its bookkeeping per table."""
    if not torch.is_grad_enabled():
        return False
    return any([w.requires_grad for w in weights]) or (  # noqa: C419 - a list is faster for few items
        sample_weights is not None and sample_weights.requires_grad
    )


def _pooled_lookup_autograd(*args: Any, location: RowLocation | None = None) -> Any:
    """Take the op's arguments, and pass them on without a record."""
    layout = PooledLayout(*args[5:9])
    if _differentiates(args[0], args[4]):
        (weights, sinks, *batch), (dtype, names) = args[:5], args[9:]
        return _PooledLookup.apply((sinks, layout, dtype, names, location), *batch, *weights)
    with BelowAutograd():
        if location is not None:
            return location.pooled_lookup(layout, args[9], updates=False)
        return _OPS.pooled_lookup.default(*args)


def _sequence_lookup_autograd(*args: Any, location: RowLocation | None = None) -> Any:
    weights, sinks, ids, starts, tables, dtype, names = args
    if _differentiates(weights, None):
        return _SequenceLookup.apply((sinks, tables, dtype, names, location), ids, starts, *weights)
    with BelowAutograd():
        if location is not None:
            return location.sequence_lookup(dtype, updates=False)
        return _OPS.sequence_lookup.default(*args)


LIBRARY.impl("pooled_lookup", _pooled_lookup_autograd, "Autograd")
LIBRARY.impl("sequence_lookup", _sequence_lookup_autograd, "Autograd")


def pooled_lookup(
    weights: Sequence[Tensor], sinks: Tensor, ids: Tensor, *rest: Any, location: RowLocation | None = None
) -> Any:
    """Run the op `tilerec::pooled_lookup`.

    Call its autograd formula directly if no mode or tracer is active: the dispatcher would call the same function, but
    box and unbox all arguments first.

    Args:
        location: where the rows are, if not in `weights`; not for compiled programs.
    """
    if location is not None or can_bypass_dispatcher((ids, *weights)):
        return _pooled_lookup_autograd(weights, sinks, ids, *rest, location=location)
    return _OPS.pooled_lookup(weights, sinks, ids, *rest)


def sequence_lookup(
    weights: Sequence[Tensor], sinks: Tensor, ids: Tensor, *rest: Any, location: RowLocation | None = None
) -> Any:
    """Run the op `tilerec::sequence_lookup`; arguments and dispatch as of `pooled_lookup`."""
    if location is not None or can_bypass_dispatcher((ids, *weights)):
        return _sequence_lookup_autograd(weights, sinks, ids, *rest, location=location)
    return _OPS.sequence_lookup(weights, sinks, ids, *rest)


@LIBRARY.op(
    "dense_weight_grads(Tensor[] weights, int[] dims, int[] chosen, Tensor grad, Tensor ids, Tensor bounds, "
    f"Tensor? sample_weights, {_LAYOUT}) -> Tensor[]",
    lambda weights, *_: [torch.empty_like(w) for w in weights],
)
def _dense_weight_grads(
    weights: Sequence[Tensor], dims: Sequence[int], chosen: Sequence[int], grad: Tensor, ids: Tensor, bounds: Tensor,
    sample_weights: Tensor | None, *layout: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Return dense gradients `[rows, dim]` of the chosen tables.

    `bounds` are the offsets of a pooled lookup, or, if `batches` is empty, the starts of a sequence lookup.
    """
    tables, keys, means, batches = PooledLayout(*layout)
    out = [torch.zeros_like(w) for w in weights]
    if batches:
        starts, bags = bag_starts(keys, batches)
        places, strides = pooled_blocks([dims[t] for t in tables], bags, len(batches) == 1)
    else:
        edges = bounds.tolist()
        starts, bags = edges[:-1], [end - begin for begin, end in itertools.pairwise(edges)]
        strides = [dims[t] for t in tables]
        places = [begin * dim for begin, dim in zip(starts, strides, strict=True)]
    position = {t: i for i, t in enumerate(chosen)}
    lists: tuple[Sequence[int], ...] = (
        [position.get(t, -1) for t in tables], starts, bags, places, strides, means,
    )  # fmt: skip
    if len(chosen) < len(dims):
        wanted = [f for f, t in enumerate(tables) if t in position]
        lists = tuple([[values[f] for f in wanted] for values in lists])
    features = Features(*lists)
    record = Gradients(grad.contiguous(), ids, bounds if batches else None, sample_weights, features)
    _OPS.update_rows_.default(*UpdateCall(RuleTables.of_sums(out), record).packed())
    return out
