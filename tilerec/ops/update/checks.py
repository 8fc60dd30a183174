"""Argument checks of the update ops, for every backend: inconsistent records, tables and phases.

Every function raises an `InputError`. The reference calls all of them. A backend calls the cheap ones, performs the
others while it reads, and calls these functions for the error messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.update.calls import Features, Gradients, PartRows, RecordSizes, RuleTables, SumCall
from tilerec.ops.update.rules import Rule

_INDEX_TYPES = (torch.int64, torch.int32)
UNKNOWN_ROWS = (1 << 63) - 1
"""Number of rows of a table if it is unknown: it allows every 64-bit id but the last."""


def slot_kinds(rule: Rule) -> str:
    """Return one letter per slot of the rule: "e" (one number per element) or "r" (one per row)."""
    return "".join(kind[0] for kind in rule.slot_kinds)


def check_record(op: str, record: Gradients) -> None:
    """Raise an `InputError` for tensors of a record that are not flat lists, or for lists of different lengths."""
    _, ids, offsets, sample_weights, features = record
    count = len(features.tables)
    if (
        [len(values) for values in features] == [count] * 6
        and ids.dim() == 1
        and ids.dtype in _INDEX_TYPES
        and (offsets is None or (offsets.dim() == 1 and offsets.dtype in _INDEX_TYPES))
        and (sample_weights is None or sample_weights.shape == ids.shape)
    ):
        return  # the usual case; this check runs at every update
    for name, values in zip(Features._fields[1:], features[1:], strict=True):
        if len(values) != count:
            raise InputError(
                f"{op}: {name} has {len(values)} entries for {count} features; expected one per feature. "
                "Check how the record was made."
            )
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(
            f"{op}: ids have shape {list(ids.shape)} and type {ids.dtype}; expected a flat list of integers. "
            "Flatten them as the lookup does."
        )
    if offsets is not None and (offsets.dim() != 1 or offsets.is_floating_point()):
        raise InputError(
            f"{op}: offsets have shape {list(offsets.shape)} and type {offsets.dtype}; expected a flat list of "
            "integers. Make them with offsets_from_lengths()."
        )
    if sample_weights is not None and sample_weights.shape != ids.shape:
        raise InputError(
            f"{op}: sample_weights have shape {list(sample_weights.shape)}, the ids {list(ids.shape)}; "
            "expected one weight per id. Check how weights and values were put together."
        )


def check_reach(op: str, sizes: RecordSizes, dims: Sequence[int], features: Features) -> None:
    """Raise an `InputError` for a feature whose bags lie outside the gradient, the ids or the offsets.

    `dims`: columns per table.
    """
    for f, (table, start, count, place, stride, _) in enumerate(zip(*features, strict=True)):
        label = f"{op}: feature number {f}"
        if not 0 <= table < len(dims):
            raise InputError(f"{label} reads table number {table}; expected [0, {len(dims)}). Check the tables.")
        if start < 0 or count < 0:
            raise InputError(
                f"{label} has {count} bags from bag {start} on; expected no negative number. Check the batch sizes."
            )
        if count == 0:
            continue
        first, last = min(place, place + (count - 1) * stride), max(place, place + (count - 1) * stride)
        if first < 0 or last + dims[table] > sizes.grad:
            raise InputError(
                f"{label} reads elements [{first}, {last + dims[table]}) of a gradient of {sizes.grad}. Pass the "
                "gradient of the lookup's whole output."
            )
        if sizes.offsets is None and start + count > sizes.ids:
            raise InputError(
                f"{label} reads ids [{start}, {start + count}) of {sizes.ids}. Check the starts of the features."
            )
        if sizes.offsets is not None and start + count >= sizes.offsets:
            raise InputError(
                f"{label} has bags [{start}, {start + count}), but there are {sizes.offsets} offsets; expected "
                f"{start + count + 1} or more. Check the batch sizes."
            )


def check_tables(op: str, tables: RuleTables, kinds: str, dims: Sequence[int] | None = None) -> None:
    """Raise an `InputError` for tables, slots or per-table lists that do not match.

    `kinds`: of the rule's slots (`slot_kinds`); `dims`: of parts, the columns of whole rows.
    """
    weights, slots, rule, count = tables.weights, tables.slots, tables.rule, len(tables.weights)
    lists: list[tuple[Sequence[object], int]] = [
        (tables.column_offsets, 1), (tables.counts or tables.steps, 1), (tables.seeds, 2), (tables.row_offsets, 1),
    ]  # fmt: skip
    for values, each in lists if dims is None else [*lists, (dims, 1)]:
        if len(values) != each * count:
            raise InputError(
                f"{op}: a list of {len(values)} numbers for {count} tables; expected {each} per table (steps, seeds, "
                "row_offsets, column_offsets)."
            )
    for t, offset in enumerate(tables.column_offsets):
        if not 0 <= offset < 1 << 34:
            raise InputError(f"{op}: column offset {offset} of table number {t} is outside [0, 2^34).")
    if len(slots) != count * len(kinds):
        raise InputError(
            f"{op}: rule {rule!r} got {len(slots)} slots for {count} tables; expected {len(kinds)} per table. Make "
            "them from the optimizer's spec."
        )
    for t, weight in enumerate(weights):
        if weight.dim() != 2:
            raise InputError(
                f"{op}: the weight of table number {t} has shape {list(weight.shape)}; expected [rows, dim]."
            )
        for k, kind in enumerate(kinds):
            slot = slots[t * len(kinds) + k]
            if slot.shape != (weight.shape if kind == "e" else weight.shape[:1]):
                raise InputError(
                    f"{op}: slot {k} of table number {t} (rule {rule!r}) has shape {list(slot.shape)}; expected "
                    f"{list(weight.shape if kind == 'e' else weight.shape[:1])}. Make it from the optimizer's spec."
                )


def check_names(op: str, tables: RuleTables) -> list[Tensor]:
    """Return row names in the form that backends read: per table int64 `[rows]`, contiguous, or empty.

    The list is empty if the call has no row names.
    """
    if tables.row_names is None:
        return []
    if len(tables.row_names) != len(tables.weights):
        raise InputError(
            f"{op}: {len(tables.row_names)} tensors of row names for {len(tables.weights)} tables; expected one each."
        )
    for t, (names, weight) in enumerate(zip(tables.row_names, tables.weights, strict=True)):
        count = weight.shape[0]
        if names.dtype != torch.int64 or names.dim() != 1 or names.shape[0] not in (0, count):
            raise InputError(
                f"{op}: row names of table number {t} have shape {list(names.shape)} and type {names.dtype}; expected "
                f"int64 [{count}], or [0] if rows use their own numbers."
            )
    return [names.contiguous() for names in tables.row_names]


def check_parts(op: str, made: Rule, tables: RuleTables, parts: PartRows, phase: int | None) -> None:
    """Raise an `InputError` for arrays of a phase that do not match; `phase` None: the apply, after all phases."""
    if phase is not None and not 0 <= phase < made.phases:
        raise InputError(f"{op}: phase {phase} of rule {tables.rule!r}, which has {made.phases} phases.")
    for name, values in zip(("rows", "gradients", "scalars", "dims"), parts, strict=True):
        if len(values) != len(tables.weights):
            raise InputError(f"{op}: {len(values)} {name} for {len(tables.weights)} tables; expected one per table.")
    wanted = sum(made.sums(p) for p in range(made.phases if phase is None else phase))
    for t, (weight, rows_U, grads_UW, scalars_PU) in enumerate(zip(tables.weights, *parts[:3], strict=True)):
        distinct, width = rows_U.numel(), weight.shape[1]
        if rows_U.dim() != 1 or rows_U.is_floating_point():
            raise InputError(
                f"{op}: rows have shape {list(rows_U.shape)} and type {rows_U.dtype}; expected flat integers (table "
                f"number {t})."
            )
        if grads_UW.shape != (distinct, width):
            raise InputError(
                f"{op}: gradients have shape {list(grads_UW.shape)}; expected [{distinct}, {width}] (rows, the part's "
                f"columns; table number {t})."
            )
        if scalars_PU.shape != (wanted, distinct):
            raise InputError(
                f"{op}: scalars have shape {list(scalars_PU.shape)}; expected [{wanted}, {distinct}]: the row sums of "
                f"the phases so far, concatenated (table number {t})."
            )


def raise_bad_row(op: str, id_: int, feature: int, position: int, rows: int, table: int) -> None:
    """Raise the `InputError` for an id of a record that is not a row of its table."""
    raise InputError(
        f"{op}: id {id_} of feature number {feature} (position {position}) is outside [0, {rows}) of table number "
        f"{table}. The ids were changed after the lookup, or never looked up."
    )


def raise_bad_offset(op: str, feature: int, position: int, value: int, ids: int) -> None:
    """Raise the `InputError` for offsets that do not ascend within the number of ids."""
    raise InputError(
        f"{op}: offsets of feature number {feature}: offsets[{position}] is {value}; expected ascending numbers in "
        f"[0, {ids}], up to the number of ids."
    )


def check_sums(call: SumCall) -> None:
    """Raise an `InputError` for a table with a negative number of rows or columns."""
    for rows, dim in zip(call.rows, call.dims, strict=True):
        if rows < 0 or dim < 0:
            raise InputError(
                f"sum_row_gradients: a table of {rows} rows of {dim} columns; expected no negative number."
            )


def check_ids(op: str, record: Gradients, rows: Sequence[int]) -> None:
    """Raise an `InputError` for the first bad offset or id; `rows`: per table."""
    ids, offsets = record.ids, record.offsets
    for f, (table, start, count) in enumerate(zip(*record.features[:3], strict=True)):
        begin, end = start, start + count
        if offsets is not None and count:
            bounds = offsets[start : start + count + 1]
            bad = (bounds < 0) | (bounds > ids.numel())
            bad[1:] |= bounds[1:] < bounds[:-1]
            if bool(bad.any()):
                place = int(bad.nonzero()[0])
                raise_bad_offset(op, f, start + place, int(bounds[place]), ids.numel())
            begin, end = int(bounds[0]), int(bounds[-1])
        own = ids[begin:end].to(torch.int64)
        bad = (own < 0) | (own > rows[table] - 1)
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            raise_bad_row(op, int(own[place]), f, begin + place, rows[table], table)


def check_rows(op: str, rows: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Raise an `InputError` for the first of a phase's rows that is not in its part."""
    for t, (rows_U, weight) in enumerate(zip(rows, weights, strict=True)):
        bad = (rows_U < 0) | (rows_U >= weight.shape[0])
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            raise_bad_row(op, int(rows_U[place]), t, place, weight.shape[0], t)
