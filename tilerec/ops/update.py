"""Updating rows: sum the step's gradients per row, apply a row rule once per distinct row.

Nouns
  gradient record   row gradients not yet materialised: an output gradient, the ids it belongs to, and where
      each feature's
                    bags lie in both
  distinct rows     the step's (table, row) pairs, each once, ascending
  part              some columns of a table; its rule runs in phases, the row sums being added over the parts
                    in between

  G[t, r] = sum of s * w_p * grad[bag of p] over the occurrences p of row r, in the order (feature,
  occurrence), in fp32 row, slots = rule(G, row, slots)      exactly once per distinct row

Legend: T tables, F features, N ids, U distinct rows, D columns of a table, W columns of a part, K terms of a
phase, S slots per table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.library import LIBRARY
from tilerec.ops.random import random_words, stochastic_round
from tilerec.ops.rules import Step, add_blocks, block_sums, make_rule
from tilerec.ops.update_checks import (
    ANY_ROWS,
    check_ids,
    check_part,
    check_reach,
    check_record,
    check_rows,
    check_sum,
    check_tables,
    slot_kinds,
)

LIBRARY.define(
    "update_rows_(Tensor(a!)[] weights, Tensor(b!)[] slots, Tensor grad, Tensor ids, Tensor? offsets, "
    "Tensor? sample_weights, int[] tables, int[] starts, int[] bags, int[] grad_starts, int[] grad_strides, "
    "int[] means, "
    "str rule, float[] hyper, int[] steps, int[] seeds, int[] row_offsets, int[] column_offsets) -> Tensor"
)
LIBRARY.define(
    "sum_row_gradients(Tensor grad, Tensor ids, Tensor? offsets, Tensor? sample_weights, int rows, int dim, "
    "int[] starts, "
    "int[] bags, int[] grad_starts, int[] grad_strides, int[] means) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "rule_partials(Tensor weight, Tensor[] slots, Tensor rows, Tensor grads, Tensor scalars, int phase, int dim, "
    "bool exact, int column_offset, str rule, float[] hyper, int step) -> Tensor"
)
LIBRARY.define(
    "rule_apply_(Tensor(a!) weight, Tensor(b!)[] slots, Tensor rows, Tensor grads, Tensor scalars, int dim, str rule, "
    "float[] hyper, int step, int[] seed, int row_offset, int column_offset) -> ()"
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_row_gradients_reference(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    rows: int,
    dim: int,
    starts: Sequence[int],
    bags: Sequence[int],
    grad_starts: Sequence[int],
    grad_strides: Sequence[int],
    means: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Distinct rows of one table `[U]` (int64, ascending) and their summed gradients `[U, D]`.

    `rows` 0: how many rows the table has is not known. ids, offsets and the lists per feature: as in
    `update_rows_reference_`.

    Example: two bags, ids (3, 1 | 3), gradient rows (1), (10) of dim 1 -> rows (1, 3), gradients (1, 11).
    """
    op, tables = "sum_row_gradients", [0] * len(starts)
    check_sum(rows, dim)
    check_record(op, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides, means)
    check_reach(
        op, grad.numel(), ids.numel(), None if offsets is None else offsets.numel(), [dim], tables, starts, bags,
        grad_starts, grad_strides,
    )  # fmt: skip
    check_ids(op, ids, offsets, [rows or ANY_ROWS], tables, starts, bags)
    return _sum_rows(grad, ids, offsets, sample_weights, dim, starts, bags, grad_starts, grad_strides, means)


def _sum_rows(
    grad: Tensor, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, dim: int, starts: Sequence[int],
    bags: Sequence[int], grad_starts: Sequence[int], grad_strides: Sequence[int], means: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sums of a record that is known to be good."""
    wide = _wide(grad.dtype)
    flat = grad.reshape(-1)
    all_ids, all_rows = [], []
    for first, count, place, stride, mean in zip(starts, bags, grad_starts, grad_strides, means, strict=True):
        if count == 0:  # its places may lie anywhere
            continue
        grad_BD = flat.as_strided((count, dim), (stride, 1), place + flat.storage_offset()).to(wide)
        if offsets is None:
            begin, end = first, first + count
            rows_nD = grad_BD
        else:
            bounds = offsets[first : first + count + 1]
            begin, end = int(bounds[0]), int(bounds[-1])
            lengths_B = bounds[1:] - bounds[:-1]
            if mean:
                grad_BD = grad_BD / lengths_B.clamp(min=1).to(wide)[:, None]
            rows_nD = torch.repeat_interleave(grad_BD, lengths_B, dim=0)
        if sample_weights is not None:
            rows_nD = rows_nD * sample_weights[begin:end].to(wide)[:, None]
        all_ids.append(ids[begin:end].to(torch.int64))
        all_rows.append(rows_nD)
    if not all_ids:
        return ids.new_zeros(0, dtype=torch.int64), grad.new_zeros((0, dim), dtype=wide)
    rows_U, inverse_N = torch.unique(torch.cat(all_ids), return_inverse=True)
    grads_ND = torch.cat(all_rows)
    # index_add_ adds in occurrence order on the CPU, so equal inputs give equal bits.
    return rows_U, grads_ND.new_zeros((rows_U.numel(), dim)).index_add_(0, inverse_N, grads_ND)


def _gather(
    weight: Tensor, slots: Sequence[Tensor], rows: Tensor, grads: Tensor, hyper: Sequence[float]
) -> Any:
    wide = _wide(weight.dtype)
    g = grads.to(wide)
    if len(hyper) > 1 and hyper[1] != 1.0:
        g = g / hyper[1]
    return g, weight[rows].to(wide), [slot[rows].to(wide) for slot in slots]


def rule_partials_reference(
    weight: Tensor,
    slots: Sequence[Tensor],
    rows: Tensor,
    grads: Tensor,
    scalars: Tensor,
    phase: int,
    dim: int,
    exact: bool,
    column_offset: int,
    rule: str,
    hyper: Sequence[float],
    step: int,
) -> Tensor:
    """This part's share of the row sums of a phase: `[U, K, 1]`, or `[U, K, blocks]` if exact."""
    made = make_rule(rule, hyper)
    check_tables("rule_partials", [weight], slots, slot_kinds(made), rule, [column_offset])
    check_part("rule_partials", rule, hyper, weight, rows, grads, scalars, phase)
    check_rows("rule_partials", rows, weight)
    g, w, gathered = _gather(weight, slots, rows, grads, hyper)
    sums = [block_sums(x, column_offset) for x in made.terms(phase, Step(g, w, gathered, scalars, dim, step))]
    if not exact:
        sums = [add_blocks(x)[:, None] for x in sums]
    return torch.stack(sums, dim=1)


def rule_apply_reference_(
    weight: Tensor,
    slots: Sequence[Tensor],
    rows: Tensor,
    grads: Tensor,
    scalars: Tensor,
    dim: int,
    rule: str,
    hyper: Sequence[float],
    step: int,
    seed: Sequence[int],
    row_offset: int,
    column_offset: int,
) -> None:
    """Write the rows and slots of a part, given the reduced row sums `[P, U]` of all phases."""
    made = make_rule(rule, hyper)
    check_tables("rule_apply_", [weight], slots, slot_kinds(made), rule, [column_offset], (seed, 2))
    check_part("rule_apply_", rule, hyper, weight, rows, grads, scalars, None)
    check_rows("rule_apply_", rows, weight)
    g, w, gathered = _gather(weight, slots, rows, grads, hyper)
    new_w, new_slots = made.apply(Step(g, w, gathered, scalars, dim, step))
    if made.h["stochastic_rounding"] and weight.dtype in (torch.bfloat16, torch.float16):
        words = random_words(rows + row_offset, weight.shape[1], seed, column_offset, step)
        new_w = stochastic_round(new_w, words, weight.dtype)
    weight[rows] = new_w.to(weight.dtype)
    for slot, value in zip(slots, new_slots, strict=True):
        slot[rows] = value.to(slot.dtype)


def update_rows_reference_(
    weights: Sequence[Tensor],
    slots: Sequence[Tensor],
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    tables: Sequence[int],
    starts: Sequence[int],
    bags: Sequence[int],
    grad_starts: Sequence[int],
    grad_strides: Sequence[int],
    means: Sequence[int],
    rule: str,
    hyper: Sequence[float],
    steps: Sequence[int],
    seeds: Sequence[int],
    row_offsets: Sequence[int],
    column_offsets: Sequence[int],
) -> Tensor:
    """Sum and apply for tables that share a rule; rows whose summed gradient is not finite are left alone.

    The rule "store" (dense gradients) leaves none alone: infinities and NaNs are stored, and none is counted.

    Args:
        weights: T tables `[rows, dim]`; `slots[t * S + k]` is slot k of table t.
        grad: output gradient; the row gradient of feature f's bag b begins at element `grad_starts[f] + b *
            grad_strides[f]`.
        ids, offsets, sample_weights: as in the lookup; `offsets=None` says that every id is its own bag.
        tables, starts, bags, means: per feature: its table, its first bag, how many bags, 1 for mean pooling.
        hyper: the rule's numbers, `spec/optimizer.py` gives their order.
        steps: per table, its update count after this update.
        seeds, row_offsets, column_offsets: key words (two per table) and global place for stochastic rounding.

    Returns:
        int64 `[3]`: rows skipped, and the table and row of the first of them (-1, -1 if none).

    Example: one table of one column, w = (1, 1, 1), ids (2, 2), gradient rows (1), (3), "sgd" with lr 0.1 ->
    w = (1, 1, 0.6).
    """
    made = make_rule(rule, hyper)
    per_table = len(made.slot_kinds)
    op = "update_rows_"
    check_tables(
        op, weights, slots, slot_kinds(made), rule, column_offsets, (steps, 1), (seeds, 2), (row_offsets, 1)
    )
    check_record(op, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides, means)
    check_reach(
        op, grad.numel(), ids.numel(), None if offsets is None else offsets.numel(), [w.shape[1] for w in weights],
        tables, starts, bags, grad_starts, grad_strides,
    )  # fmt: skip
    check_ids(op, ids, offsets, [w.shape[0] for w in weights], tables, starts, bags)
    skipped, first_table, first_row = 0, -1, -1
    for t, weight in enumerate(weights):
        features = [f for f, table in enumerate(tables) if table == t]
        if not features:
            continue
        dim = weight.shape[1]
        per_feature = [
            [values[f] for f in features] for values in (starts, bags, grad_starts, grad_strides, means)
        ]
        rows, grads = _sum_rows(grad, ids, offsets, sample_weights, dim, *per_feature)
        finite = torch.isfinite(grads).all(dim=1)
        if made.keeps and not bool(finite.all()):
            if not skipped:
                first_table, first_row = t, int(rows[~finite][0])
            skipped += int((~finite).sum())
            rows, grads = rows[finite], grads[finite]
        own = slots[t * per_table : (t + 1) * per_table]
        scalars = grads.new_zeros((0, rows.numel()), dtype=_wide(weight.dtype))
        for phase in range(made.phases):
            sums = rule_partials_reference(
                weight, own, rows, grads, scalars, phase, dim, False, 0, rule, hyper, steps[t]
            )
            scalars = torch.cat((scalars, sums[:, :, 0].T))
        rule_apply_reference_(
            weight, own, rows, grads, scalars, dim, rule, hyper, steps[t], seeds[2 * t : 2 * t + 2], row_offsets[t],
            column_offsets[t],
        )  # fmt: skip
    return torch.tensor([skipped, first_table, first_row])


for _name, _kernel in {
    "update_rows_": update_rows_reference_,
    "sum_row_gradients": sum_row_gradients_reference,
    "rule_partials": rule_partials_reference,
    "rule_apply_": rule_apply_reference_,
}.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("tilerec::update_rows_", lib=LIBRARY)
def _fake_update_rows(weights: Any, slots: Any, grad: Any, *rest: Any) -> Tensor:
    return torch.empty(3, dtype=torch.int64)


@torch.library.register_fake("tilerec::sum_row_gradients", lib=LIBRARY)
def _fake_sum_row_gradients(
    grad: Any, ids: Any, offsets: Any, sample_weights: Any, rows: Any, dim: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    distinct = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(distinct, dtype=torch.int64), grad.new_empty(
        (distinct, dim), dtype=_wide(grad.dtype)
    )


@torch.library.register_fake("tilerec::rule_partials", lib=LIBRARY)
def _fake_rule_partials(
    weight: Any, slots: Any, rows: Any, grads: Any, scalars: Any, phase: Any, dim: Any, exact: Any, column_offset: Any,
    rule: Any, hyper: Any, step: Any,
) -> Tensor:  # fmt: skip
    width = weight.shape[1]
    blocks = (column_offset + width + 7) // 8 - column_offset // 8 if exact else 1
    lamb = rule in ("lamb", "lars_sgd") or (rule == "partial_rowwise_lamb" and phase == 1)
    return grads.new_empty((rows.shape[0], 2 if lamb else 1, blocks), dtype=_wide(weight.dtype))


@torch.library.register_fake("tilerec::rule_apply_", lib=LIBRARY)
def _fake_rule_apply(*args: Any) -> None:
    return None
