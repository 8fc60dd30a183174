"""Rules in phases, on some columns of tables' rows: the plain-PyTorch reference. Terms as in `definition.py`.

Legend: T parts, U distinct rows, W columns of a part, P row sums of the phases so far, K terms of a phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.ops.random.definition import ROUNDED, random_words, stochastic_round
from tilerec.ops.update.calls import ApplyCall, PartialsCall, PartRows, RuleTables
from tilerec.ops.update.checks import check_names, check_parts, check_rows, check_tables, slot_kinds
from tilerec.ops.update.counts import advance, resolve_counts
from tilerec.ops.update.row_sums import accum_dtype
from tilerec.ops.update.rules import BLOCK, Rule, UpdateCount, add_blocks, block_sums, make_rule


class Part(NamedTuple):
    """Part t of a call, and the part's rows in this step."""

    t: int
    weight: Tensor
    slots: Sequence[Tensor]
    rows_U: Tensor
    grads_UW: Tensor
    scalars_PU: Tensor
    dim: int  # columns of the whole row


def _each_part(tables: RuleTables, parts: PartRows) -> list[Part]:
    per_part = zip(tables.weights, *parts, strict=True)
    return [
        Part(t, weight, tables.slots_of(t), rows_U, grads_UW, scalars_PU, dim)
        for t, (weight, rows_U, grads_UW, scalars_PU, dim) in enumerate(per_part)
    ]


def block_count(column_offset: int, width: int) -> int:
    """Return the number of aligned blocks of 8 columns that a part touches. Example: columns 5 to 10 -> 2."""
    return (column_offset % BLOCK + width + BLOCK - 1) // BLOCK


def sums_per_row(call: PartialsCall, made: Rule) -> list[int]:
    """Return the number of sums that each part of a call returns per row."""
    each = made.sums(call.phase) + int(call.finite)
    if not call.exact:
        return [each] * len(call.tables.weights)
    places = zip(call.tables.column_offsets, call.tables.columns, strict=True)
    return [each * block_count(offset, width) for offset, width in places]


def rule_partials_reference(call: PartialsCall) -> Tensor:
    """Return the contributions of T parts to the row sums of a phase, flat.

    Each part has `[U, K, 1]` sums, or `[U, K, blocks]` if exact. Counts do not change, since the update follows later.

    Example: a part of 2 columns, "rowwise_adagrad", gradient rows (3, 4), (1, inf), finite -> (25, 1, inf, 0).
    """
    op = "rule_partials"
    tables = resolve_counts(op, call.tables)
    made = make_rule(tables.rule, tables.hyper)
    check_tables(op, tables, slot_kinds(made), call.parts.dims)
    check_parts(op, made, tables, call.parts, call.phase)
    check_rows(op, call.parts.rows, tables.weights)
    return torch.cat(
        [
            partials(made, tables, part, call.phase, tables.column_offsets[part.t], call.exact, call.finite).reshape(-1)
            for part in _each_part(tables, call.parts)
        ]
    )


def _gathered(made: Rule, tables: RuleTables, part: Part) -> UpdateCount:
    dtype, grad_scale = accum_dtype(part.weight.dtype), made.h["grad_scale"]
    g = part.grads_UW.to(dtype)
    if grad_scale != 1.0:
        g = g / grad_scale
    w, slots = part.weight[part.rows_U].to(dtype), [slot[part.rows_U].to(dtype) for slot in part.slots]
    return UpdateCount(g, w, slots, part.scalars_PU, part.dim, tables.steps[part.t])


def partials(
    made: Rule, tables: RuleTables, part: Part, phase: int, column_offset: int, exact: bool, finite: bool
) -> Tensor:
    """Return a part's contribution to the row sums of a phase, as `rule_partials_reference` describes it.

    `column_offset`: the column at which the part begins in the row.
    """
    terms = made.terms(phase, _gathered(made, tables, part))
    sums = [block_sums(x, column_offset) for x in terms]
    if not exact:
        sums = [add_blocks(x)[:, None] for x in sums]
    if finite:
        whole_U = torch.isfinite(part.grads_UW).all(dim=1)
        sums.append(whole_U[:, None].to(sums[0].dtype).expand_as(sums[0]))
    return torch.stack(sums, dim=1)


def rule_apply_reference_(call: ApplyCall) -> None:
    """Update the rows and slots of T parts, given the reduced row sums of all phases.

    Example: two parts of one column each, w = (1, 1) and (2, 2), rows (1) and (0), gradients (3) and (5), "sgd" with lr
    0.1 -> (1, 0.7) and (1.5, 2).
    """
    op = "rule_apply_"
    tables = resolve_counts(op, call.tables)
    made = make_rule(tables.rule, tables.hyper)
    check_tables(op, tables, slot_kinds(made), call.parts.dims)
    check_parts(op, made, tables, call.parts, None)
    check_rows(op, call.parts.rows, tables.weights)
    names = names_of(op, tables)
    for part in _each_part(tables, call.parts):
        apply_(made, tables, part, names[part.t])
    advance(call.tables.counts)


def names_of(op: str, tables: RuleTables) -> list[Tensor | None]:
    """Return the row names of each table, None for a table without."""
    if tables.row_names is None:
        return [None] * len(tables.weights)
    return [names if names.numel() else None for names in check_names(op, tables)]


def apply_(made: Rule, tables: RuleTables, part: Part, names: Tensor | None) -> None:
    """Update the rows and slots of a part; its scalars are the row sums of all phases."""
    t, weight, rows_U = part.t, part.weight, part.rows_U
    new_w, new_slots = made.apply(_gathered(made, tables, part))
    if made.h["stochastic_rounding"] and weight.dtype in ROUNDED:
        named_U = rows_U if names is None else names[rows_U]
        words = random_words(
            named_U + tables.row_offsets[t], weight.shape[1], tables.seeds[2 * t : 2 * t + 2],
            tables.column_offsets[t], tables.steps[t],
        )  # fmt: skip
        new_w = stochastic_round(new_w, words, weight.dtype)
    weight[rows_U] = new_w.to(weight.dtype)
    for slot, value in zip(part.slots, new_slots, strict=True):
        slot[rows_U] = value.to(slot.dtype)
