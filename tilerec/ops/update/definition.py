"""Update of rows: sum the step's gradients per row, apply a row rule once per distinct row.

Terms
  gradient record   row gradients that are not yet materialised: an output gradient, its ids, and the position of each
                    feature's bags in both
  distinct rows     the step's (table, row) pairs without repetition, ascending
  part              some columns of a table; its rule runs in phases, and row sums are added over the parts after each
                    phase

  G[t, r] = sum of s * w_p * grad[bag of p] over the occurrences p of row r, in fp32, ordered by (feature, occurrence)
  row, slots = rule(G, row, slots)      exactly once per distinct row

Ops on distinct rows exist for one table and for several tables (`..._of_tables`, `..._to_tables_`). The former call
the latter with lists of one table.

Legend: T tables, F features, N ids, U distinct rows, D columns of a table, W columns of a part, P row sums of the
phases so far, K terms of a phase, S slots per table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.ops.random.definition import ROUNDED, random_words, stochastic_round
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.update.checks import (
    UNKNOWN_ROWS,
    check_ids,
    check_names,
    check_parts,
    check_reach,
    check_record,
    check_rows,
    check_sum,
    check_tables,
    slot_kinds,
)
from tilerec.ops.update.counts import advance, resolve_counts
from tilerec.ops.update.rules import BLOCK, Rule, UpdateCount, add_blocks, block_sums, make_rule

LIBRARY.define(
    "update_rows_(Tensor(a!)[] weights, Tensor(b!)[] slots, Tensor grad, Tensor ids, Tensor? offsets, "
    "Tensor? sample_weights, int[] tables, int[] starts, int[] bags, int[] grad_starts, int[] grad_strides, "
    "int[] means, "
    "str rule, float[] hyper, int[] steps, int[] seeds, int[] row_offsets, int[] column_offsets, "
    "Tensor[]? row_names=None, Tensor(c!)[]? counts=None, Tensor? lr=None, Tensor[]? ordered=None) -> Tensor"
)
LIBRARY.define(
    "sum_row_gradients(Tensor grad, Tensor ids, Tensor? offsets, Tensor? sample_weights, int rows, int dim, "
    "int[] starts, "
    "int[] bags, int[] grad_starts, int[] grad_strides, int[] means) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "sum_row_gradients_of_tables(Tensor grad, Tensor ids, Tensor? offsets, Tensor? sample_weights, int[] rows, "
    "int[] dims, int[] tables, int[] starts, int[] bags, int[] grad_starts, int[] grad_strides, int[] means, "
    "Tensor[]? ordered=None) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "rule_partials(Tensor weight, Tensor[] slots, Tensor rows, Tensor grads, Tensor scalars, int phase, int dim, "
    "bool exact, int column_offset, str rule, float[] hyper, int step) -> Tensor"
)
LIBRARY.define(
    "rule_apply_(Tensor(a!) weight, Tensor(b!)[] slots, Tensor rows, Tensor grads, Tensor scalars, int dim, str rule, "
    "float[] hyper, int step, int[] seed, int row_offset, int column_offset) -> ()"
)
LIBRARY.define(
    "rule_partials_of_tables(Tensor[] weights, Tensor[] slots, Tensor[] rows, Tensor[] grads, Tensor[] scalars, "
    "int phase, int[] dims, bool exact, bool finite, int[] column_offsets, str rule, float[] hyper, int[] steps, "
    "Tensor[]? counts=None, Tensor? lr=None) -> Tensor"
)
LIBRARY.define(
    "rule_apply_to_tables_(Tensor(a!)[] weights, Tensor(b!)[] slots, Tensor[] rows, Tensor[] grads, Tensor[] scalars, "
    "int[] dims, str rule, float[] hyper, int[] steps, int[] seeds, int[] row_offsets, int[] column_offsets, "
    "Tensor[]? row_names=None, Tensor(c!)[]? counts=None, Tensor? lr=None) -> ()"
)


def _accum_dtype(dtype: torch.dtype) -> torch.dtype:
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
    """Return the distinct rows of one table `[U]` (int64, ascending) and their summed gradients `[U, D]`.

    `rows` 0: the table's number of rows is unknown. ids, offsets and the lists per feature: as in
    `update_rows_reference_`.

    Example: two bags, ids (3, 1 | 3), gradient rows (1), (10) of dim 1 -> rows (1, 3), gradients (1, 11).
    """
    rows_U, grads, _ = sum_row_gradients_of_tables_reference(
        grad, ids, offsets, sample_weights, [rows], [dim], [0] * len(starts), starts, bags, grad_starts, grad_strides,
        means,
    )  # fmt: skip
    return rows_U, grads.view(rows_U.numel(), dim)


def sum_row_gradients_of_tables_reference(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    rows: Sequence[int],
    dims: Sequence[int],
    tables: Sequence[int],
    starts: Sequence[int],
    bags: Sequence[int],
    grad_starts: Sequence[int],
    grad_strides: Sequence[int],
    means: Sequence[int],
    ordered: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct rows of T tables, and their summed gradients.

    Args:
        rows, dims: per table: rows (0: unknown) and columns.
        tables: per feature, the table it reads; the rest as in `update_rows_reference_`.
        ordered: the result of `order_rows` for tables of these rows and one column each; read by backends that sort.

    Returns:
        rows (int64, ascending in each table) and gradients (flat), table after table, and the number of distinct rows
        per table (int64 `[T]`, on the CPU).

    Example: tables of 1 and 2 columns, each with one bag, ids (3, 3 | 0), gradient row (1, 5, 7) -> rows (3, 0),
    gradients (2, 5, 7), counts (1, 1).
    """
    op = "sum_row_gradients"
    for own, dim in zip(rows, dims, strict=True):
        check_sum(own, dim)
    check_record(op, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides, means)
    check_reach(
        op, grad.numel(), ids.numel(), None if offsets is None else offsets.numel(), dims, tables, starts, bags,
        grad_starts, grad_strides,
    )  # fmt: skip
    check_ids(op, ids, offsets, [own or UNKNOWN_ROWS for own in rows], tables, starts, bags)
    sums = []
    for t, dim in enumerate(dims):
        per_feature = [
            [value for value, table in zip(values, tables, strict=True) if table == t]
            for values in (starts, bags, grad_starts, grad_strides, means)
        ]
        sums.append(_sum_rows(grad, ids, offsets, sample_weights, dim, *per_feature))
    rows_U = torch.cat([own for own, _ in sums]) if sums else ids.new_zeros(0, dtype=torch.int64)
    grads = torch.cat([own.reshape(-1) for _, own in sums]) if sums else grad.new_zeros(0)
    return rows_U, grads, torch.tensor([own.numel() for own, _ in sums], dtype=torch.int64)


def _sum_rows(
    grad: Tensor, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, dim: int, starts: Sequence[int],
    bags: Sequence[int], grad_starts: Sequence[int], grad_strides: Sequence[int], means: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the row sums of a record that has been checked."""
    accum_dtype = _accum_dtype(grad.dtype)
    flat = grad.contiguous().view(-1)  # `reshape` may return a strided view
    all_ids, all_rows = [], []
    for first, count, place, stride, mean in zip(starts, bags, grad_starts, grad_strides, means, strict=True):
        if count == 0:  # its place may be out of bounds
            continue
        grad_BD = flat.as_strided((count, dim), (stride, 1), place + flat.storage_offset()).to(accum_dtype)
        if offsets is None:
            begin, end = first, first + count
            rows_nD = grad_BD
        else:
            bounds = offsets[first : first + count + 1]
            begin, end = int(bounds[0]), int(bounds[-1])
            lengths_B = bounds[1:] - bounds[:-1]
            if mean:
                grad_BD = grad_BD / lengths_B.clamp(min=1).to(accum_dtype)[:, None]
            rows_nD = torch.repeat_interleave(grad_BD, lengths_B, dim=0)
        if sample_weights is not None:
            rows_nD = rows_nD * sample_weights[begin:end].to(accum_dtype)[:, None]
        all_ids.append(ids[begin:end].to(torch.int64))
        all_rows.append(rows_nD)
    if not all_ids:
        return ids.new_zeros(0, dtype=torch.int64), grad.new_zeros((0, dim), dtype=accum_dtype)
    rows_U, inverse_N = torch.unique(torch.cat(all_ids), return_inverse=True)
    grads_ND = torch.cat(all_rows)
    # index_add_ adds in occurrence order on the CPU, so equal inputs give equal bits.
    return rows_U, grads_ND.new_zeros((rows_U.numel(), dim)).index_add_(0, inverse_N, grads_ND)


def _gather(weight: Tensor, slots: Sequence[Tensor], rows: Tensor, grads: Tensor, grad_scale: float) -> Any:
    accum_dtype = _accum_dtype(weight.dtype)
    g = grads.to(accum_dtype)
    if grad_scale != 1.0:
        g = g / grad_scale
    return g, weight[rows].to(accum_dtype), [slot[rows].to(accum_dtype) for slot in slots]


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
    """Return this part's contribution to the row sums of a phase: `[U, K, 1]`, or `[U, K, blocks]` if exact."""
    flat = rule_partials_of_tables_reference(
        [weight],
        slots,
        [rows],
        [grads],
        [scalars],
        phase,
        [dim],
        exact,
        False,
        [column_offset],
        rule,
        hyper,
        [step],
    )
    return _of_one_table(flat, weight, rows, phase, exact, column_offset, rule, hyper)


def _of_one_table(
    flat: Tensor, weight: Tensor, rows: Tensor, phase: int, exact: bool, column_offset: int, rule: str,
    hyper: Sequence[float],
) -> Tensor:  # fmt: skip
    """Return the sums of one table's part as a view of shape `[U, K, blocks]`."""
    blocks = block_count(column_offset, weight.shape[1]) if exact else 1
    return flat.view(rows.numel(), make_rule(rule, hyper).sums(phase), blocks)


def block_count(column_offset: int, width: int) -> int:
    """Return the number of aligned blocks of 8 columns that a part touches. Example: columns 5 to 10 -> 2."""
    return (column_offset % BLOCK + width + BLOCK - 1) // BLOCK


def rule_partials_of_tables_reference(
    weights: Sequence[Tensor],
    slots: Sequence[Tensor],
    rows: Sequence[Tensor],
    grads: Sequence[Tensor],
    scalars: Sequence[Tensor],
    phase: int,
    dims: Sequence[int],
    exact: bool,
    finite: bool,
    column_offsets: Sequence[int],
    rule: str,
    hyper: Sequence[float],
    steps: Sequence[int],
    counts: Sequence[Tensor] | None = None,
    lr: Tensor | None = None,
) -> Tensor:
    """Return the contributions of T parts to the row sums of a phase, flat.

    Each part has `[U, K, 1]` sums, or `[U, K, blocks]` if exact.

    Args:
        weights, slots, steps, column_offsets, counts, lr: as in `update_rows_reference_`, but counts do not change,
            since the update follows later.
        rows, grads, scalars: per part: distinct rows `[U]`, their gradients `[U, W]`, the row sums so far `[P, U]`.
        dims: per part, the columns of the whole row.
        exact: return one sum per aligned block of 8 global columns that the part touches.
        finite: return one more sum, K + 1 in all: 1 everywhere if the row's gradient is finite in this part, else 0.

    Example: a part of 2 columns, "rowwise_adagrad", gradient rows (3, 4), (1, inf), finite -> (25, 1, inf, 0).
    """
    op = "rule_partials"
    steps, hyper = resolve_counts(op, steps, hyper, counts, lr, len(weights))
    made = make_rule(rule, hyper)
    check_tables(op, weights, slots, slot_kinds(made), rule, column_offsets, (dims, 1), (steps, 1))
    check_parts(op, made, rule, weights, rows, grads, scalars, dims, phase)
    check_rows(op, rows, weights)
    return torch.cat(
        [
            _partials(made, part, phase, dims[t], steps[t], exact, finite, column_offsets[t]).reshape(-1)
            for t, part in enumerate(_parts(weights, slots, rows, grads, scalars))
        ]
    )


class _Part(NamedTuple):
    """One part of a table, and the part's rows in this step."""

    weight: Tensor
    slots: Sequence[Tensor]
    rows_U: Tensor
    grads_UW: Tensor
    scalars_PU: Tensor


def _parts(
    weights: Sequence[Tensor], slots: Sequence[Tensor], rows: Sequence[Tensor], grads: Sequence[Tensor],
    scalars: Sequence[Tensor],
) -> list[_Part]:  # fmt: skip
    each = len(slots) // len(weights) if weights else 0
    own = [slots[t * each : (t + 1) * each] for t in range(len(weights))]
    return [_Part(*part) for part in zip(weights, own, rows, grads, scalars, strict=True)]


def _partials(
    made: Rule, part: _Part, phase: int, dim: int, step: int, exact: bool, finite: bool, column_offset: int
) -> Tensor:
    g, w, gathered = _gather(part.weight, part.slots, part.rows_U, part.grads_UW, made.h["grad_scale"])
    terms = made.terms(phase, UpdateCount(g, w, gathered, part.scalars_PU, dim, step))
    sums = [block_sums(x, column_offset) for x in terms]
    if not exact:
        sums = [add_blocks(x)[:, None] for x in sums]
    if finite:
        whole_U = torch.isfinite(part.grads_UW).all(dim=1)
        sums.append(whole_U[:, None].to(sums[0].dtype).expand_as(sums[0]))
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
    """Update the rows and slots of a part, given the reduced row sums `[P, U]` of all phases."""
    rule_apply_to_tables_reference_(
        [weight],
        slots,
        [rows],
        [grads],
        [scalars],
        [dim],
        rule,
        hyper,
        [step],
        seed,
        [row_offset],
        [column_offset],
    )


def rule_apply_to_tables_reference_(
    weights: Sequence[Tensor],
    slots: Sequence[Tensor],
    rows: Sequence[Tensor],
    grads: Sequence[Tensor],
    scalars: Sequence[Tensor],
    dims: Sequence[int],
    rule: str,
    hyper: Sequence[float],
    steps: Sequence[int],
    seeds: Sequence[int],
    row_offsets: Sequence[int],
    column_offsets: Sequence[int],
    row_names: Sequence[Tensor] | None = None,
    counts: Sequence[Tensor] | None = None,
    lr: Tensor | None = None,
) -> None:
    """Update the rows and slots of T parts, given the reduced row sums of all phases.

    weights, slots, steps, seeds, row_offsets, column_offsets, row_names, counts, lr: as in `update_rows_reference_`;
    rows, grads, scalars, dims: as in `rule_partials_of_tables_reference`.

    Example: two parts of one column each, w = (1, 1) and (2, 2), rows (1) and (0), gradients (3) and (5), "sgd" with lr
    0.1 -> (1, 0.7) and (1.5, 2).
    """
    op = "rule_apply_"
    steps, hyper = resolve_counts(op, steps, hyper, counts, lr, len(weights))
    made = make_rule(rule, hyper)
    check_tables(
        op, weights, slots, slot_kinds(made), rule, column_offsets, (dims, 1), (steps, 1), (seeds, 2), (row_offsets, 1)
    )  # fmt: skip
    check_parts(op, made, rule, weights, rows, grads, scalars, dims, None)
    check_rows(op, rows, weights)
    names = _names(op, row_names, weights)
    for t, part in enumerate(_parts(weights, slots, rows, grads, scalars)):
        key, place = seeds[2 * t : 2 * t + 2], (row_offsets[t], column_offsets[t])
        _apply(made, part, dims[t], steps[t], key, *place, names[t])
    advance(counts)


def _names(op: str, row_names: Sequence[Tensor] | None, weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the row names of each table, None for a table without."""
    if row_names is None:
        return [None] * len(weights)
    checked = check_names(op, row_names, [weight.shape[0] for weight in weights])
    return [names if names.numel() else None for names in checked]


def _apply(
    made: Rule, part: _Part, dim: int, step: int, seed: Sequence[int], row_offset: int, column_offset: int,
    names: Tensor | None,
) -> None:  # fmt: skip
    weight, rows_U = part.weight, part.rows_U
    g, w, gathered = _gather(weight, part.slots, rows_U, part.grads_UW, made.h["grad_scale"])
    new_w, new_slots = made.apply(UpdateCount(g, w, gathered, part.scalars_PU, dim, step))
    if made.h["stochastic_rounding"] and weight.dtype in ROUNDED:
        named_U = rows_U if names is None else names[rows_U]
        words = random_words(named_U + row_offset, weight.shape[1], seed, column_offset, step)
        new_w = stochastic_round(new_w, words, weight.dtype)
    weight[rows_U] = new_w.to(weight.dtype)
    for slot, value in zip(part.slots, new_slots, strict=True):
        slot[rows_U] = value.to(slot.dtype)


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
    row_names: Sequence[Tensor] | None = None,
    counts: Sequence[Tensor] | None = None,
    lr: Tensor | None = None,
    ordered: Sequence[Tensor] | None = None,
) -> Tensor:
    """Sum gradients and apply one rule to several tables. Rows whose summed gradient is not finite are skipped.

    The rule "store" (dense gradients) skips no row: it stores infinities and NaNs, and counts none.

    Args:
        weights: T tables `[rows, dim]`; `slots[t * S + k]` is slot k of table t.
        grad: output gradient; the row gradient of feature f's bag b begins at element `grad_starts[f] + b *
            grad_strides[f]`.
        ids, offsets, sample_weights: as in the lookup; with `offsets=None` every id is its own bag.
        tables, starts, bags, means: per feature: its table, first bag, number of bags, 1 for mean pooling.
        hyper: the rule's numbers, in the order that `spec/optimizer.py` defines.
        steps: per table, its update count after this update.
        seeds, row_offsets, column_offsets: key words (two per table) and global position, for stochastic rounding.
        row_names: per table int64 `[rows]`, or `[0]`: random words and the result use the number `names[r]` for row r
            (lines of a cache hold rows with any numbers). None: they use r.
        counts: per table its update count on the ids' device, int64 0-d. The update reads `counts[t] + 1` in place of
            `steps` (then empty) and writes it back, even if the record has no rows of the table. So a captured call
            advances the count with every replay.
        lr: 0-d, only with `counts`: the learning rate, in place of `hyper[0]`.
        ordered: the result of `order_rows` for the same tables, ids, weights and lists per feature, for backends that
            sort; the reference ignores it.

    Returns:
        int64 `[3]`, on the ids' device: number of skipped rows, then table and row of the first one (-1, -1 if none).

    Example: one table of one column, w = (1, 1, 1), ids (2, 2), gradient rows (1), (3), "sgd" with lr 0.1 ->
    w = (1, 1, 0.6).
    """
    op = "update_rows_"
    steps, hyper = resolve_counts(op, steps, hyper, counts, lr, len(weights))
    made = make_rule(rule, hyper)
    per_table = len(made.slot_kinds)
    check_tables(
        op, weights, slots, slot_kinds(made), rule, column_offsets, (steps, 1), (seeds, 2), (row_offsets, 1)
    )
    check_record(op, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides, means)
    check_reach(
        op, grad.numel(), ids.numel(), None if offsets is None else offsets.numel(), [w.shape[1] for w in weights],
        tables, starts, bags, grad_starts, grad_strides,
    )  # fmt: skip
    check_ids(op, ids, offsets, [w.shape[0] for w in weights], tables, starts, bags)
    names = _names(op, row_names, weights)
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
                own = names[t]
                bad_U = rows[~finite] if own is None else own[rows[~finite]]
                first_table, first_row = t, int(bad_U.min())
            skipped += int((~finite).sum())
            rows, grads = rows[finite], grads[finite]
        scalars = grads.new_zeros((0, rows.numel()), dtype=_accum_dtype(weight.dtype))
        part = _Part(weight, slots[t * per_table : (t + 1) * per_table], rows, grads, scalars)
        for phase in range(made.phases):
            sums = _partials(made, part, phase, dim, steps[t], False, False, 0)
            part = part._replace(scalars_PU=torch.cat((part.scalars_PU, sums[:, :, 0].T)))
        key, place = seeds[2 * t : 2 * t + 2], (row_offsets[t], column_offsets[t])
        _apply(made, part, dim, steps[t], key, *place, names[t])
    advance(counts)
    return torch.tensor([skipped, first_table, first_row], device=ids.device)


def _sum_row_gradients(
    grad: Tensor, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, rows: int, dim: int,
    starts: Sequence[int], *per_feature: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the op of several tables for one table, on its backend."""
    rows_U, grads, _ = torch.ops.tilerec.sum_row_gradients_of_tables(
        grad, ids, offsets, sample_weights, [rows], [dim], [0] * len(starts), starts, *per_feature
    )
    return rows_U, grads.view(rows_U.numel(), dim)


def _rule_partials(
    weight: Tensor, slots: Sequence[Tensor], rows: Tensor, grads: Tensor, scalars: Tensor, phase: int, dim: int,
    exact: bool, column_offset: int, rule: str, hyper: Sequence[float], step: int,
) -> Tensor:  # fmt: skip
    flat = torch.ops.tilerec.rule_partials_of_tables(
        [weight],
        slots,
        [rows],
        [grads],
        [scalars],
        phase,
        [dim],
        exact,
        False,
        [column_offset],
        rule,
        hyper,
        [step],
    )
    return _of_one_table(flat, weight, rows, phase, exact, column_offset, rule, hyper)


def _rule_apply_(
    weight: Tensor, slots: Sequence[Tensor], rows: Tensor, grads: Tensor, scalars: Tensor, dim: int, rule: str,
    hyper: Sequence[float], step: int, seed: Sequence[int], row_offset: int, column_offset: int,
) -> None:  # fmt: skip
    torch.ops.tilerec.rule_apply_to_tables_(
        [weight],
        slots,
        [rows],
        [grads],
        [scalars],
        [dim],
        rule,
        hyper,
        [step],
        seed,
        [row_offset],
        [column_offset],
    )


for _name, _kernel in {
    "update_rows_": update_rows_reference_,
    "sum_row_gradients": _sum_row_gradients,
    "sum_row_gradients_of_tables": sum_row_gradients_of_tables_reference,
    "rule_partials": _rule_partials,
    "rule_partials_of_tables": rule_partials_of_tables_reference,
    "rule_apply_": _rule_apply_,
    "rule_apply_to_tables_": rule_apply_to_tables_reference_,
}.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


@LIBRARY.fake("update_rows_")
def _fake_update_rows(weights: Any, slots: Any, grad: Any, ids: Any, *rest: Any) -> Tensor:
    return ids.new_empty(3, dtype=torch.int64)


@LIBRARY.fake("sum_row_gradients")
def _fake_sum_row_gradients(
    grad: Any, ids: Any, offsets: Any, sample_weights: Any, rows: Any, dim: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    distinct = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(distinct, dtype=torch.int64), grad.new_empty(
        (distinct, dim), dtype=_accum_dtype(grad.dtype)
    )


@LIBRARY.fake("sum_row_gradients_of_tables")
def _fake_sum_row_gradients_of_tables(
    grad: Any, ids: Any, offsets: Any, sample_weights: Any, rows: Any, dims: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    return (
        ids.new_empty(context.new_dynamic_size(), dtype=torch.int64),
        grad.new_empty(context.new_dynamic_size(), dtype=_accum_dtype(grad.dtype)),
        torch.empty(len(dims), dtype=torch.int64),
    )


@LIBRARY.fake("rule_partials_of_tables")
def _fake_rule_partials_of_tables(
    weights: Any, slots: Any, rows: Any, grads: Any, scalars: Any, phase: Any, dims: Any, exact: Any, finite: Any,
    column_offsets: Any, rule: Any, hyper: Any, steps: Any, counts: Any = None, lr: Any = None,
) -> Tensor:  # fmt: skip
    kinds = make_rule(rule, hyper).sums(phase) + int(finite)
    size = sum(
        own.shape[0] * kinds * (block_count(offset, weight.shape[1]) if exact else 1)
        for own, weight, offset in zip(rows, weights, column_offsets, strict=True)
    )
    return grads[0].new_empty(size, dtype=_accum_dtype(weights[0].dtype))


@LIBRARY.fake("rule_apply_to_tables_")
def _fake_rule_apply_to_tables(*args: Any) -> None:
    return None


@LIBRARY.fake("rule_partials")
def _fake_rule_partials(
    weight: Any, slots: Any, rows: Any, grads: Any, scalars: Any, phase: Any, dim: Any, exact: Any, column_offset: Any,
    rule: Any, hyper: Any, step: Any,
) -> Tensor:  # fmt: skip
    blocks = block_count(column_offset, weight.shape[1]) if exact else 1
    return grads.new_empty(
        (rows.shape[0], make_rule(rule, hyper).sums(phase), blocks), dtype=_accum_dtype(weight.dtype)
    )


@LIBRARY.fake("rule_apply_")
def _fake_rule_apply(*args: Any) -> None:
    return None
