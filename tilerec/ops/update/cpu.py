"""Update ops on the native library; `native/update.h` specifies its functions.

The reference handles tensors that the library cannot read: fp64 rows or gradients, rows that are not contiguous.

Legend: T tables, F features, N ids, U distinct rows, D columns of a table, W columns of a part, K sums of a phase.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.runtime.cpu.library import BAD_ID, BAD_OFFSETS, DTYPES, INDEX_TYPES, NO_MEMORY
from tilerec.ops.runtime.cpu.memory import reused_empty
from tilerec.ops.runtime.cpu.records import GradientArguments, PartsRecord, ReportRecord, RowsRecord
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.update.checks import (
    UNKNOWN_ROWS,
    check_names,
    check_parts,
    check_reach,
    check_record,
    check_sum,
    check_tables,
    raise_bad_offset,
    raise_bad_row,
)
from tilerec.ops.update.counts import advance, resolve_counts
from tilerec.ops.update.definition import (
    block_count,
    rule_apply_to_tables_reference_,
    rule_partials_of_tables_reference,
    sum_row_gradients_of_tables_reference,
    update_rows_reference_,
)
from tilerec.ops.update.rules import is_registered, make_rule


@dataclass(frozen=True)
class _Rule:
    """A rule's number in the library, and the length of its `hyper`."""

    number: int
    hypers: int


_RULES = {
    "store": _Rule(0, 0),
    "sgd": _Rule(1, 6),
    "adagrad": _Rule(2, 6),
    "rowwise_adagrad": _Rule(3, 7),
    "adam": _Rule(4, 9),
    "partial_rowwise_adam": _Rule(5, 8),
    "lamb": _Rule(6, 8),
    "partial_rowwise_lamb": _Rule(7, 8),
    "lars_sgd": _Rule(8, 6),
}


# Empty tensors have a null address, which for the library would mean that every id is its own bag.
_EMPTY = ctypes.c_int64()
_EMPTY_ADDRESS = ctypes.addressof(_EMPTY)
_FP32 = {torch.float32}
_SUPPORTED = set(DTYPES)


def _slot_kinds(rule: str, hyper: Sequence[float]) -> str:
    """Return "e" (one value per element) or "r" (one per row) per slot: `checks.slot_kinds` without making the rule."""
    if rule == "sgd":
        return "e" if hyper[4] else ""
    if rule in ("adagrad", "lars_sgd"):
        return "e"
    if rule == "rowwise_adagrad":
        return "r"
    if rule == "store":
        return ""
    return ("er" if rule.startswith("partial_rowwise") else "ee") + ("r" if hyper[-1] else "")


def _describe(
    op: str,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    *per_feature: Sequence[int],
) -> tuple[GradientArguments, object]:
    """Return the record as the library reads it, and objects to keep alive: the memory of its lists, and tensors.

    ids are int32 or int64, offsets int64, weights fp32, all contiguous. Tensors of this form are not copied.
    """
    check_record(op, ids, offsets, sample_weights, *per_feature)
    grad = grad.contiguous()
    ids = (ids if ids.dtype in INDEX_TYPES else ids.to(torch.int64)).contiguous()
    if offsets is not None:
        offsets = (offsets if offsets.dtype == torch.int64 else offsets.to(torch.int64)).contiguous()
    if sample_weights is not None:
        sample_weights = sample_weights.to(torch.float32).contiguous()
    features = len(per_feature[0])
    # One list, one array: `array.extend` takes three times as long.
    numbers = array("q", list(itertools.chain.from_iterable(per_feature)))
    at = numbers.buffer_info()[0]
    record = GradientArguments(
        grad.data_ptr(), ids.data_ptr(), None if offsets is None else offsets.data_ptr() or _EMPTY_ADDRESS,
        None if sample_weights is None else sample_weights.data_ptr(), grad.numel(), ids.numel(),
        0 if offsets is None else offsets.numel(), features, *(at + 8 * features * k for k in range(6)),
        DTYPES[grad.dtype], INDEX_TYPES[ids.dtype],
    )  # fmt: skip
    return record, (numbers, grad, ids, offsets, sample_weights)


def _describe_rows(
    op: str,
    weights: Sequence[Tensor],
    slots: Sequence[Tensor],
    rule: str,
    hyper: Sequence[float],
    steps: Sequence[int],
    seeds: Sequence[int],
    row_offsets: Sequence[int],
    column_offsets: Sequence[int],
    row_names: Sequence[Tensor] | None = None,
) -> tuple[RowsRecord, object] | None:
    """Return the tables as the library reads them, and the memory of its lists; None: it has no such slots or rule."""
    known = _RULES.get(rule)
    if known is None or (rule != "store" and len(hyper) != known.hypers):
        if is_registered(rule):
            return None
        make_rule(rule, hyper)  # raises
        raise AssertionError(f"{op}: rule {rule!r} with {len(hyper)} numbers is unknown here")
    kinds = _slot_kinds(rule, hyper)
    count = len(weights)
    # Lists and sets, not generators: with 26 tables every tenth of a microsecond counts 26 times.
    shapes = [w.shape for w in weights]
    matches = (
        len(slots) == count * len(kinds)
        and len(steps) == len(row_offsets) == len(column_offsets) == count
        and len(seeds) == 2 * count
    )
    try:
        rows, dims = [rows for rows, _ in shapes], [dim for _, dim in shapes]
    except ValueError:
        matches = False
    for k, kind in enumerate(kinds):
        if not matches:
            break
        own = slots[k :: len(kinds)]
        # Compare row slots by number of elements only (comparing shapes takes three times as long).
        matches = (
            [slot.shape for slot in own] == shapes if kind == "e" else [slot.numel() for slot in own] == rows
        )
    if not matches:
        check_tables(
            op, weights, slots, kinds, rule, column_offsets, (steps, 1), (seeds, 2), (row_offsets, 1)
        )
        raise AssertionError(f"{op}: tables and slots of rule {rule!r} do not fit")
    if not ({slot.dtype for slot in slots} <= _FP32 and all([slot.is_contiguous() for slot in slots])):  # noqa: C419
        return None
    at_weights, at_slots = [w.data_ptr() for w in weights], [s.data_ptr() for s in slots]
    names = None if row_names is None else check_names(op, row_names, rows)
    at_names = [] if names is None else [n.data_ptr() for n in names]  # null: the table's rows have no names
    numbers = array(
        "q", [*at_weights, *at_slots, *rows, *dims, *steps, *seeds, *row_offsets, *column_offsets, *at_names]
    )
    types = array("i", [DTYPES[w.dtype] for w in weights])
    doubles = array("d", hyper)
    at = numbers.buffer_info()[0]
    # Behind the slots: rows, dims, steps, seeds (two per table), row offsets, column offsets.
    tables_at = at + 8 * (count + len(slots))
    described = RowsRecord(
        at, at + 8 * count, tables_at, tables_at + 8 * count, types.buffer_info()[0], tables_at + 16 * count,
        tables_at + 24 * count, tables_at + 40 * count, tables_at + 48 * count, doubles.buffer_info()[0],
        tables_at + 56 * count if at_names else None, count, len(kinds), len(doubles), known.number,
    )  # fmt: skip
    return described, (numbers, types, doubles, names)


# `position` of a TR_BAD_ARGUMENT (native/update.h).
_TOO_MANY, _BAD_COLUMN, _NO_ROWS = 5, 6, 7


def _raise(op: str, report: ReportRecord, rows: Sequence[int], tables: Sequence[int], ids: int) -> None:
    if report.status == NO_MEMORY:
        raise MemoryError(f"{op}: out of memory to sort the ids of {report.value} occurrences or columns.")
    if report.status == BAD_ID:
        table = tables[report.feature]
        raise_bad_row(op, report.value, report.feature, report.position, rows[table], table)
    if report.status == BAD_OFFSETS:
        raise_bad_offset(op, report.feature, report.position, report.value, ids)
    if report.position == _TOO_MANY:
        raise InputError(
            f"{op}: {report.value} ids read one table; expected fewer than 2^32 - 1. Split the batch."
        )
    if report.position == _NO_ROWS:
        raise InputError(
            f"{op}: table number {report.feature}, or its optimizer state, has no memory. Give it memory with "
            "to_empty(device=...) and load it, or do not update it."
        )
    if report.position == _BAD_COLUMN:
        raise InputError(
            f"{op}: column offset {report.value} of table number {report.feature} is outside [0, 2^34)."
        )
    raise AssertionError(
        f"{op}: the gradient record is inconsistent (feature {report.feature}, check {report.position})"
    )


def _is_supported(grad: Tensor, weights: Sequence[Tensor]) -> bool:
    if grad.dtype not in DTYPES:
        return False
    # Lists and sets, as above.
    return {w.dtype for w in weights} <= _SUPPORTED and all([w.is_contiguous() for w in weights])  # noqa: C419


def register(library: ctypes.CDLL) -> None:
    """Register the native update kernels for CPU tensors."""
    pointer, number, count = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    call_update = _function(library, "tr_update_rows", None, pointer, pointer, number, pointer, pointer)
    call_begin = _function(library, "tr_sum_begin", pointer, *[pointer] * 3, count, number, pointer, pointer)
    call_finish = _function(library, "tr_sum_finish", None, pointer, pointer, pointer)
    call_free = _function(library, "tr_sum_free", None, pointer)
    call_partials = _function(
        library, "tr_rule_partials", None, pointer, pointer, *[number] * 4, pointer, pointer
    )
    call_apply = _function(library, "tr_rule_apply", None, pointer, pointer, number, pointer)

    def update_rows_(
        weights: Sequence[Tensor], slots: Sequence[Tensor], grad: Tensor, ids: Tensor, offsets: Tensor | None,
        sample_weights: Tensor | None, tables: Sequence[int], starts: Sequence[int], bags: Sequence[int],
        grad_starts: Sequence[int], grad_strides: Sequence[int], means: Sequence[int], rule: str,
        hyper: Sequence[float], steps: Sequence[int], seeds: Sequence[int], row_offsets: Sequence[int],
        column_offsets: Sequence[int], row_names: Sequence[Tensor] | None = None,
        counts: Sequence[Tensor] | None = None, lr: Tensor | None = None, ordered: Sequence[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        op = "update_rows_"
        steps, hyper = resolve_counts(op, steps, hyper, counts, lr, len(weights))
        rows = None
        if _is_supported(grad, weights):
            rows = _describe_rows(
                op, weights, slots, rule, hyper, steps, seeds, row_offsets, column_offsets, row_names
            )
        if rows is None:
            result = update_rows_reference_(
                weights, slots, grad, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides,
                means, rule, hyper, steps, seeds, row_offsets, column_offsets, row_names,
            )  # fmt: skip
            advance(counts)
            return result
        record, kept = _describe(
            op, grad, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides, means
        )
        skipped, report = torch.zeros(3, dtype=torch.int64), ReportRecord()
        call_update(
            ctypes.byref(rows[0]),
            ctypes.byref(record),
            torch.get_num_threads(),
            skipped.data_ptr(),
            ctypes.byref(report),
        )
        if report.status:
            check_reach(
                op, record.grad_count, record.ids_count, record.offsets_count if offsets is not None else None,
                [w.shape[1] for w in weights], tables, starts, bags, grad_starts, grad_strides,
            )  # fmt: skip
            _raise(op, report, [w.shape[0] for w in weights], tables, record.ids_count)
        del kept, rows
        advance(counts)
        return skipped

    def sum_row_gradients_of_tables(
        grad: Tensor, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, rows: Sequence[int],
        dims: Sequence[int], tables: Sequence[int], starts: Sequence[int], bags: Sequence[int],
        grad_starts: Sequence[int], grad_strides: Sequence[int], means: Sequence[int],
        ordered: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if grad.dtype not in DTYPES:
            return sum_row_gradients_of_tables_reference(
                grad,
                ids,
                offsets,
                sample_weights,
                rows,
                dims,
                tables,
                starts,
                bags,
                grad_starts,
                grad_strides,
                means,
            )
        op = "sum_row_gradients"
        for own, dim in zip(rows, dims, strict=True):
            check_sum(own, dim)
        record, kept = _describe(
            op, grad, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides, means
        )
        counts, report = torch.empty(len(dims), dtype=torch.int64), ReportRecord()
        sizes = array("q", [*rows, *dims])
        at = sizes.buffer_info()[0]
        handle = call_begin(
            ctypes.byref(record), at, at + 8 * len(dims), len(dims), torch.get_num_threads(), counts.data_ptr(),
            ctypes.byref(report),
        )  # fmt: skip
        if report.status:
            check_reach(
                op, record.grad_count, record.ids_count, record.offsets_count if offsets is not None else None, dims,
                tables, starts, bags, grad_starts, grad_strides,
            )  # fmt: skip
            _raise(op, report, [own or UNKNOWN_ROWS for own in rows], tables, record.ids_count)
        try:
            distinct = counts.tolist()
            rows_U = torch.empty(sum(distinct), dtype=torch.int64)
            size = sum([count * dim for count, dim in zip(distinct, dims, strict=True)])
            grads = reused_empty(size, torch.float32)
            call_finish(handle, rows_U.data_ptr(), grads.data_ptr())
        finally:
            call_free(handle)
        del kept, sizes
        return rows_U, grads, counts

    def rule_partials_of_tables(
        weights: Sequence[Tensor], slots: Sequence[Tensor], rows: Sequence[Tensor], grads: Sequence[Tensor],
        scalars: Sequence[Tensor], phase: int, dims: Sequence[int], exact: bool, finite: bool,
        column_offsets: Sequence[int], rule: str, hyper: Sequence[float], steps: Sequence[int],
        counts: Sequence[Tensor] | None = None, lr: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        op = "rule_partials"
        steps, hyper = resolve_counts(op, steps, hyper, counts, lr, len(weights))
        described = None
        if _parts_are_supported(weights, grads):
            zeros = [0] * len(weights)
            described = _describe_rows(
                op, weights, slots, rule, hyper, steps, zeros + zeros, zeros, column_offsets
            )
        if described is None:
            return rule_partials_of_tables_reference(
                weights,
                slots,
                rows,
                grads,
                scalars,
                phase,
                dims,
                exact,
                finite,
                column_offsets,
                rule,
                hyper,
                steps,
            )
        made = make_rule(rule, hyper)
        check_parts(op, made, rule, weights, rows, grads, scalars, dims, phase)
        parts, kept, rows_of_parts = _describe_parts(rows, grads, scalars, dims)
        kinds = made.sums(phase) + int(finite)
        sizes = [kinds * distinct for distinct in rows_of_parts]
        if exact:
            sizes = [
                size * block_count(offset, weight.shape[1])
                for size, offset, weight in zip(sizes, column_offsets, weights, strict=True)
            ]
        out, report = torch.empty(sum(sizes), dtype=torch.float32), ReportRecord()
        at = out.data_ptr()
        outs = array("q", [at + 4 * before for before in itertools.accumulate(sizes[:-1], initial=0)])
        call_partials(
            ctypes.byref(described[0]), ctypes.byref(parts), phase, exact, finite, torch.get_num_threads(),
            outs.buffer_info()[0], ctypes.byref(report),
        )  # fmt: skip
        if report.status:
            _raise(op, report, [w.shape[0] for w in weights], range(len(weights)), 0)
        del described, kept, outs
        return out

    def rule_apply_to_tables_(
        weights: Sequence[Tensor], slots: Sequence[Tensor], rows: Sequence[Tensor], grads: Sequence[Tensor],
        scalars: Sequence[Tensor], dims: Sequence[int], rule: str, hyper: Sequence[float], steps: Sequence[int],
        seeds: Sequence[int], row_offsets: Sequence[int], column_offsets: Sequence[int],
        row_names: Sequence[Tensor] | None = None, counts: Sequence[Tensor] | None = None, lr: Tensor | None = None,
    ) -> None:  # fmt: skip
        op = "rule_apply_"
        steps, hyper = resolve_counts(op, steps, hyper, counts, lr, len(weights))
        described = None
        if _parts_are_supported(weights, grads):
            described = _describe_rows(
                op, weights, slots, rule, hyper, steps, seeds, row_offsets, column_offsets, row_names
            )
        if described is None:
            rule_apply_to_tables_reference_(
                weights, slots, rows, grads, scalars, dims, rule, hyper, steps, seeds, row_offsets, column_offsets,
                row_names,
            )  # fmt: skip
            advance(counts)
            return
        check_parts(op, make_rule(rule, hyper), rule, weights, rows, grads, scalars, dims, None)
        parts, kept, _ = _describe_parts(rows, grads, scalars, dims)
        report = ReportRecord()
        call_apply(
            ctypes.byref(described[0]), ctypes.byref(parts), torch.get_num_threads(), ctypes.byref(report)
        )
        if report.status:
            _raise(op, report, [w.shape[0] for w in weights], range(len(weights)), 0)
        del described, kept
        advance(counts)

    for kernel in (
        update_rows_,
        sum_row_gradients_of_tables,
        rule_partials_of_tables,
        rule_apply_to_tables_,
    ):
        LIBRARY.impl(kernel.__name__, kernel, "CPU")


def _parts_are_supported(weights: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    return {g.dtype for g in grads} <= _FP32 and bool(grads) and _is_supported(grads[0], weights)


def _describe_parts(
    rows: Sequence[Tensor], grads: Sequence[Tensor], scalars: Sequence[Tensor], dims: Sequence[int]
) -> tuple[PartsRecord, object, list[int]]:
    """Return the parts as the library reads them, objects to keep alive, and the number of rows of each part."""
    rows = [
        r if r.dtype == torch.int64 and r.is_contiguous() else r.to(torch.int64).contiguous() for r in rows
    ]
    grads = [g if g.is_contiguous() else g.contiguous() for g in grads]
    strided = []
    for s in scalars:  # sums may be strided (several tables share a tensor), the rows of a sum may not
        if s.dtype != torch.float32 or (s.shape[1] > 1 and s.stride(1) != 1):
            s = s.to(torch.float32).contiguous()
        strided.append(s)
    counts = [r.numel() for r in rows]
    numbers = array(
        "q",
        [
            *[r.data_ptr() for r in rows], *[g.data_ptr() for g in grads], *[s.data_ptr() for s in strided], *counts,
            *[s.stride(0) for s in strided], *dims,
        ],
    )  # fmt: skip
    at, each = numbers.buffer_info()[0], 8 * len(counts)
    return PartsRecord(*[at + each * k for k in range(6)]), (numbers, rows, grads, strided), counts


def _function(
    library: ctypes.CDLL, name: str, result: type | None, *arguments: type
) -> Callable[..., int | None]:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function
