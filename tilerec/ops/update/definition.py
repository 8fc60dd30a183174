"""Update of rows: sum the step's gradients per row, apply a row rule once per distinct row.

Terms
  gradient record   row gradients that are not yet materialised: an output gradient, its ids, and the position of each
                    feature's bags in both
  distinct rows     the step's (table, row) pairs without repetition, ascending
  part              some columns of a table; its rule runs in phases, and row sums are added over the parts after each
                    phase

  G[t, r] = sum of s * w_p * grad[bag of p] over the occurrences p of row r, in fp32, ordered by (feature, occurrence)
  row, slots = rule(G, row, slots)      exactly once per distinct row

This file has the ops and `update_rows_`. `calls.py` has the records of their arguments, `row_sums.py`, `parts.py`
and `order.py` have the other references, and `rules.py` has the rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.update.calls import ApplyCall, OrderCall, PartialsCall, SumCall, UpdateCall
from tilerec.ops.update.checks import check_ids, check_reach, check_record, check_tables, slot_kinds
from tilerec.ops.update.counts import advance, resolve_counts
from tilerec.ops.update.order import fake_order_rows, order_rows_reference
from tilerec.ops.update.parts import (
    Part,
    apply_,
    names_of,
    partials,
    rule_apply_reference_,
    rule_partials_reference,
    sums_per_row,
)
from tilerec.ops.update.row_sums import accum_dtype, sum_row_gradients_reference, sum_rows
from tilerec.ops.update.rules import make_rule

_PER_FEATURE = "int[] tables, int[] starts, int[] bags, int[] grad_starts, int[] grad_strides, int[] means"
_COUNTING = "Tensor(c!)[]? counts=None, Tensor? lr=None"


@LIBRARY.op(
    "update_rows_(Tensor(a!)[] weights, Tensor(b!)[] slots, Tensor grad, Tensor ids, Tensor? offsets, "
    f"Tensor? sample_weights, {_PER_FEATURE}, str rule, float[] hyper, int[] steps, int[] seeds, int[] row_offsets, "
    f"int[] column_offsets, Tensor[]? row_names=None, {_COUNTING}, Tensor[]? ordered=None) -> Tensor",
    lambda call: call.gradients.ids.new_empty(3, dtype=torch.int64),
    unpack=UpdateCall.unpack,
)
def update_rows_reference_(call: UpdateCall) -> Tensor:
    """Sum gradients and apply one rule to several tables. Rows whose summed gradient is not finite are skipped.

    The rule "store" (dense gradients) skips no row: it stores infinities and NaNs, and counts none.

    Returns:
        int64 `[3]`, on the ids' device: number of skipped rows, then table and row of the first one (-1, -1 if none).

    Example: one table of one column, w = (1, 1, 1), ids (2, 2), gradient rows (1), (3), "sgd" with lr 0.1 ->
    w = (1, 1, 0.6).
    """
    op, record = "update_rows_", call.gradients
    tables = resolve_counts(op, call.tables)
    made = make_rule(tables.rule, tables.hyper)
    check_tables(op, tables, slot_kinds(made))
    check_record(op, record)
    check_reach(op, record.sizes, tables.columns, record.features)
    check_ids(op, record, tables.rows)
    names = names_of(op, tables)
    skipped, first_table, first_row = 0, -1, -1
    for t, weight in enumerate(tables.weights):
        if t not in record.features.tables:
            continue
        dim = weight.shape[1]
        rows, grads = sum_rows(record, t, dim)
        finite = torch.isfinite(grads).all(dim=1)
        if made.keeps and not bool(finite.all()):
            if not skipped:
                own = names[t]
                bad_U = rows[~finite] if own is None else own[rows[~finite]]
                first_table, first_row = t, int(bad_U.min())
            skipped += int((~finite).sum())
            rows, grads = rows[finite], grads[finite]
        scalars = grads.new_zeros((0, rows.numel()), dtype=accum_dtype(weight.dtype))
        part = Part(t, weight, tables.slots_of(t), rows, grads, scalars, dim)
        for phase in range(made.phases):
            sums = partials(made, tables, part, phase, 0, exact=False, finite=False)
            part = part._replace(scalars_PU=torch.cat((part.scalars_PU, sums[:, :, 0].T)))
        apply_(made, tables, part, names[t])
    advance(call.tables.counts)
    return torch.tensor([skipped, first_table, first_row], device=record.ids.device)


def _fake_sum_row_gradients(call: SumCall) -> tuple[Tensor, Tensor, Tensor]:
    context, (grad, ids, *_) = torch.library.get_ctx(), call.gradients
    return (
        ids.new_empty(context.new_dynamic_size(), dtype=torch.int64),
        grad.new_empty(context.new_dynamic_size(), dtype=accum_dtype(grad.dtype)),
        torch.empty(len(call.dims), dtype=torch.int64),
    )


def _fake_rule_partials(call: PartialsCall) -> Tensor:
    made = make_rule(call.tables.rule, call.tables.hyper)
    per_row = zip(call.parts.rows, sums_per_row(call, made), strict=True)
    size = sum(rows_U.shape[0] * each for rows_U, each in per_row)
    return call.parts.grads[0].new_empty(size, dtype=accum_dtype(call.tables.weights[0].dtype))


LIBRARY.op(
    "sum_row_gradients_of_tables(Tensor grad, Tensor ids, Tensor? offsets, Tensor? sample_weights, int[] rows, "
    f"int[] dims, {_PER_FEATURE}, Tensor[]? ordered=None) -> (Tensor, Tensor, Tensor)",
    _fake_sum_row_gradients,
    unpack=SumCall.unpack,
)(sum_row_gradients_reference)
LIBRARY.op(
    "rule_partials_of_tables(Tensor[] weights, Tensor[] slots, Tensor[] rows, Tensor[] grads, Tensor[] scalars, "
    "int phase, int[] dims, bool exact, bool finite, int[] column_offsets, str rule, float[] hyper, int[] steps, "
    "Tensor[]? counts=None, Tensor? lr=None) -> Tensor",
    _fake_rule_partials,
    unpack=PartialsCall.unpack,
)(rule_partials_reference)
LIBRARY.op(
    "rule_apply_to_tables_(Tensor(a!)[] weights, Tensor(b!)[] slots, Tensor[] rows, Tensor[] grads, Tensor[] scalars, "
    "int[] dims, str rule, float[] hyper, int[] steps, int[] seeds, int[] row_offsets, int[] column_offsets, "
    f"Tensor[]? row_names=None, {_COUNTING}) -> ()",
    unpack=ApplyCall.unpack,
)(rule_apply_reference_)
LIBRARY.op(
    f"order_rows(Tensor[] weights, Tensor ids, Tensor? offsets, Tensor? sample_weights, {_PER_FEATURE}) -> Tensor[]",
    fake_order_rows,
    unpack=OrderCall.unpack,
)(order_rows_reference)
