"""Update ops on the native library; `native/update.h` specifies its functions.

The reference handles tensors that the library cannot read: fp64 rows or gradients, rows that are not contiguous.

Legend: T tables, F features, N ids, U distinct rows, D columns of a table, W columns of a part, K sums of a phase.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.runtime.cpu.library import BAD_ID, BAD_OFFSETS, DTYPES, INDEX_TYPES, NO_MEMORY
from tilerec.ops.runtime.cpu.memory import reused_empty
from tilerec.ops.runtime.cpu.records import GradientArguments, PartsRecord, ReportRecord, RowsRecord
from tilerec.ops.update.calls import (
    ApplyCall,
    Gradients,
    PartialsCall,
    PartRows,
    RuleTables,
    SumCall,
    UpdateCall,
)
from tilerec.ops.update.checks import (
    UNKNOWN_ROWS,
    check_names,
    check_parts,
    check_reach,
    check_record,
    check_sums,
    check_tables,
    raise_bad_offset,
    raise_bad_row,
    slot_kinds,
)
from tilerec.ops.update.counts import advance, resolve_counts
from tilerec.ops.update.definition import update_rows_reference_
from tilerec.ops.update.parts import rule_apply_reference_, rule_partials_reference, sums_per_row
from tilerec.ops.update.row_sums import sum_row_gradients_reference
from tilerec.ops.update.rules import RULES, is_registered, make_rule

# Empty tensors have a null address, which for the library would mean that every id is its own bag.
_EMPTY = ctypes.c_int64()
_EMPTY_ADDRESS = ctypes.addressof(_EMPTY)
_INT64 = torch.empty(0, dtype=torch.int64)  # its `new_empty` takes three quarters of the time of `torch.empty`
_FP32 = {torch.float32}
_SUPPORTED = set(DTYPES)


def _describe(op: str, record: Gradients) -> tuple[GradientArguments, object]:
    """Return the record as the library reads it, and objects to keep alive: the memory of its lists, and tensors.

    ids are int32 or int64, offsets int64, weights fp32, all contiguous. Tensors of this form are not copied.
    """
    check_record(op, record)
    grad, ids, offsets, sample_weights, per_feature = record
    grad = grad.contiguous()
    ids = (ids if ids.dtype in INDEX_TYPES else ids.to(torch.int64)).contiguous()
    if offsets is not None:
        offsets = (offsets if offsets.dtype == torch.int64 else offsets.to(torch.int64)).contiguous()
    if sample_weights is not None:
        sample_weights = sample_weights.to(torch.float32).contiguous()
    features = len(per_feature.tables)
    # One list, one array: `array.extend` takes three times as long.
    numbers = array("q", list(itertools.chain.from_iterable(per_feature)))
    at, each = numbers.buffer_info()[0], 8 * features
    arguments = GradientArguments(
        grad.data_ptr(), ids.data_ptr(), None if offsets is None else offsets.data_ptr() or _EMPTY_ADDRESS,
        None if sample_weights is None else sample_weights.data_ptr(), grad.numel(), ids.numel(),
        0 if offsets is None else offsets.numel(), features, at, at + each, at + 2 * each, at + 3 * each,
        at + 4 * each, at + 5 * each, DTYPES[grad.dtype], INDEX_TYPES[ids.dtype],
    )  # fmt: skip
    return arguments, (numbers, grad, ids, offsets, sample_weights)


@functools.lru_cache(maxsize=64)
def _slot_kinds(rule: str, hyper: tuple[float, ...]) -> str:
    """Return `slot_kinds` of a rule; raise the errors of `make_rule`."""
    return slot_kinds(make_rule(rule, hyper))


class _Rules:
    """Numbers of the rules in the library, and tables of a call as the library reads them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._numbers = {name: int(library.tr_rule_number(name.encode())) for name in RULES}

    def describe(self, op: str, tables: RuleTables) -> tuple[RowsRecord, object] | None:
        """Return the tables, and the memory of their lists; None: the library does not know the slots or the rule."""
        weights, slots, rule, hyper, steps, seeds, row_offsets, column_offsets, *_ = tables
        if is_registered(rule):
            return None
        # A schedule changes the learning rate, on which the slots do not depend.
        kinds = _slot_kinds(rule, (0.0, *hyper[1:]) if hyper else ())
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
            matches = [slot.shape for slot in own] == shapes if kind == "e" else [slot.numel() for slot in own] == rows
        if not matches:
            check_tables(op, tables, kinds)
            raise AssertionError(f"{op}: tables and slots of rule {rule!r} do not fit")
        if not ({slot.dtype for slot in slots} <= _FP32 and all([slot.is_contiguous() for slot in slots])):  # noqa: C419
            return None
        at_weights, at_slots = [w.data_ptr() for w in weights], [s.data_ptr() for s in slots]
        names = check_names(op, tables)
        at_names = [n.data_ptr() for n in names]  # null: the table's rows have no names
        numbers = array(
            "q",
            [*at_weights, *at_slots, *rows, *dims, *steps, *seeds, *row_offsets, *column_offsets, *at_names],
        )
        types = array("i", [DTYPES[w.dtype] for w in weights])
        doubles = array("d", hyper)
        at = numbers.buffer_info()[0]
        # Behind the slots: rows, dims, steps, seeds (two per table), row offsets, column offsets.
        tables_at = at + 8 * (count + len(slots))
        described = RowsRecord(
            at, at + 8 * count, tables_at, tables_at + 8 * count, types.buffer_info()[0], tables_at + 16 * count,
            tables_at + 24 * count, tables_at + 40 * count, tables_at + 48 * count, doubles.buffer_info()[0],
            tables_at + 56 * count if at_names else None, count, len(kinds), len(doubles), self._numbers[rule],
        )  # fmt: skip
        return described, (numbers, types, doubles, names)


# `position` of a TR_BAD_ARGUMENT (native/update.h).
_TOO_MANY, _BAD_COLUMN, _NO_ROWS = 5, 6, 7


def _raise(op: str, report: ReportRecord, rows: Sequence[int], tables: Sequence[int], ids: int) -> None:
    """Raise the error that a report describes. rows: per table; tables: per feature."""
    if report.status == NO_MEMORY:
        raise MemoryError(f"{op}: out of memory to sort the ids of {report.value} occurrences or columns.")
    if report.status == BAD_ID:
        table = tables[report.feature]
        raise_bad_row(op, report.value, report.feature, report.position, rows[table], table)
    if report.status == BAD_OFFSETS:
        raise_bad_offset(op, report.feature, report.position, report.value, ids)
    if report.position == _TOO_MANY:
        raise InputError(f"{op}: {report.value} ids read one table; expected fewer than 2^32 - 1. Split the batch.")
    if report.position == _NO_ROWS:
        raise InputError(
            f"{op}: table number {report.feature}, or its optimizer state, has no memory. Give it memory with "
            "to_empty(device=...) and load it, or do not update it."
        )
    if report.position == _BAD_COLUMN:
        raise InputError(f"{op}: column offset {report.value} of table number {report.feature} is outside [0, 2^34).")
    raise AssertionError(
        f"{op}: the gradient record is inconsistent (feature {report.feature}, check {report.position})"
    )


def _is_supported(grad: Tensor, weights: Sequence[Tensor]) -> bool:
    if grad.dtype not in DTYPES:
        return False
    # Lists and sets, as above.
    return {w.dtype for w in weights} <= _SUPPORTED and all([w.is_contiguous() for w in weights])  # noqa: C419


def _parts_are_supported(weights: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    return {g.dtype for g in grads} <= _FP32 and bool(grads) and _is_supported(grads[0], weights)


def _describe_parts(parts: PartRows) -> tuple[PartsRecord, object, list[int]]:
    """Return the parts as the library reads them, objects to keep alive, and the number of rows of each part."""
    rows = [r if r.dtype == torch.int64 and r.is_contiguous() else r.to(torch.int64).contiguous() for r in parts.rows]
    grads = [g if g.is_contiguous() else g.contiguous() for g in parts.grads]
    strided = []
    for s in parts.scalars:  # sums may be strided (several tables share a tensor), the rows of a sum may not
        if s.dtype != torch.float32 or (s.shape[1] > 1 and s.stride(1) != 1):
            s = s.to(torch.float32).contiguous()
        strided.append(s)
    counts = [r.numel() for r in rows]
    numbers = array(
        "q",
        [
            *[r.data_ptr() for r in rows], *[g.data_ptr() for g in grads], *[s.data_ptr() for s in strided], *counts,
            *[s.stride(0) for s in strided], *parts.dims,
        ],
    )  # fmt: skip
    at, each = numbers.buffer_info()[0], 8 * len(counts)
    return PartsRecord(*[at + each * k for k in range(6)]), (numbers, rows, grads, strided), counts


def _update_rows_(library: ctypes.CDLL, rules: _Rules) -> Callable[[UpdateCall], Tensor]:
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    call_update = _function(library, "tr_update_rows", None, pointer, pointer, number, pointer, pointer)

    def update_rows_(call: UpdateCall) -> Tensor:
        op, gradients, counts = "update_rows_", call.gradients, call.tables.counts
        tables = resolve_counts(op, call.tables)
        rows = rules.describe(op, tables) if _is_supported(gradients.grad, tables.weights) else None
        if rows is None:
            result = update_rows_reference_(call._replace(tables=tables))
            advance(counts)
            return result
        record, kept = _describe(op, gradients)
        skipped, report = _INT64.new_empty(3), ReportRecord()
        threads = torch.get_num_threads()
        call_update(ctypes.byref(rows[0]), ctypes.byref(record), threads, skipped.data_ptr(), ctypes.byref(report))
        if report.status:
            check_reach(op, gradients.sizes, tables.columns, gradients.features)
            _raise(op, report, tables.rows, gradients.features.tables, record.ids_count)
        del kept, rows
        advance(counts)
        return skipped

    return update_rows_


def _sum_row_gradients(library: ctypes.CDLL) -> Callable[[SumCall], tuple[Tensor, Tensor, Tensor]]:
    pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    call_begin = _function(library, "tr_sum_begin", pointer, *[pointer] * 3, size, number, pointer, pointer)
    call_finish = _function(library, "tr_sum_finish", None, pointer, pointer, pointer)
    call_free = _function(library, "tr_sum_free", None, pointer)

    def sum_row_gradients_of_tables(call: SumCall) -> tuple[Tensor, Tensor, Tensor]:
        op, gradients, rows, dims = "sum_row_gradients", call.gradients, call.rows, call.dims
        if gradients.grad.dtype not in DTYPES:
            return sum_row_gradients_reference(call)
        check_sums(call)
        record, kept = _describe(op, gradients)
        counts, report = torch.empty(len(dims), dtype=torch.int64), ReportRecord()
        sizes = array("q", [*rows, *dims])
        at = sizes.buffer_info()[0]
        handle = call_begin(
            ctypes.byref(record), at, at + 8 * len(dims), len(dims), torch.get_num_threads(), counts.data_ptr(),
            ctypes.byref(report),
        )  # fmt: skip
        if report.status:
            check_reach(op, gradients.sizes, dims, gradients.features)
            known = [own or UNKNOWN_ROWS for own in rows]
            _raise(op, report, known, gradients.features.tables, record.ids_count)
        try:
            distinct = counts.tolist()
            rows_U = torch.empty(sum(distinct), dtype=torch.int64)
            grads = reused_empty(sum([n * dim for n, dim in zip(distinct, dims, strict=True)]), torch.float32)
            call_finish(handle, rows_U.data_ptr(), grads.data_ptr())
        finally:
            call_free(handle)
        del kept, sizes
        return rows_U, grads, counts

    return sum_row_gradients_of_tables


def _rule_partials(library: ctypes.CDLL, rules: _Rules) -> Callable[[PartialsCall], Tensor]:
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    call_partials = _function(library, "tr_rule_partials", None, pointer, pointer, *[number] * 4, pointer, pointer)

    def rule_partials_of_tables(call: PartialsCall) -> Tensor:
        op, tables = "rule_partials", resolve_counts("rule_partials", call.tables)
        call = call._replace(tables=tables)
        supported = _parts_are_supported(tables.weights, call.parts.grads)
        described = rules.describe(op, tables) if supported else None
        if described is None:
            return rule_partials_reference(call)
        made = make_rule(tables.rule, tables.hyper)
        check_parts(op, made, tables, call.parts, call.phase)
        parts, kept, rows = _describe_parts(call.parts)
        sizes = [count * each for count, each in zip(rows, sums_per_row(call, made), strict=True)]
        out, report = torch.empty(sum(sizes), dtype=torch.float32), ReportRecord()
        at = out.data_ptr()
        outs = array("q", [at + 4 * before for before in itertools.accumulate(sizes[:-1], initial=0)])
        call_partials(
            ctypes.byref(described[0]), ctypes.byref(parts), call.phase, call.exact, call.finite,
            torch.get_num_threads(), outs.buffer_info()[0], ctypes.byref(report),
        )  # fmt: skip
        if report.status:
            _raise(op, report, tables.rows, range(len(tables.weights)), 0)
        del described, kept, outs
        return out

    return rule_partials_of_tables


def _rule_apply_(library: ctypes.CDLL, rules: _Rules) -> Callable[[ApplyCall], None]:
    pointer = ctypes.c_void_p
    call_apply = _function(library, "tr_rule_apply", None, pointer, pointer, ctypes.c_int32, pointer)

    def rule_apply_to_tables_(call: ApplyCall) -> None:
        op, counts = "rule_apply_", call.tables.counts
        tables = resolve_counts(op, call.tables)
        supported = _parts_are_supported(tables.weights, call.parts.grads)
        described = rules.describe(op, tables) if supported else None
        if described is None:
            rule_apply_reference_(call._replace(tables=tables))
            advance(counts)
            return
        check_parts(op, make_rule(tables.rule, tables.hyper), tables, call.parts, None)
        parts, kept, _ = _describe_parts(call.parts)
        report = ReportRecord()
        call_apply(ctypes.byref(described[0]), ctypes.byref(parts), torch.get_num_threads(), ctypes.byref(report))
        if report.status:
            _raise(op, report, tables.rows, range(len(tables.weights)), 0)
        del described, kept
        advance(counts)

    return rule_apply_to_tables_


def _function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> Callable[..., int | None]:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    rules = _Rules(library)
    return {
        "update_rows_": _update_rows_(library, rules),
        "sum_row_gradients_of_tables": _sum_row_gradients(library),
        "rule_partials_of_tables": _rule_partials(library, rules),
        "rule_apply_to_tables_": _rule_apply_(library, rules),
    }
