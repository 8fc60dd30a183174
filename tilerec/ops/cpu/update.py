"""The update ops served by the native library: `native/update.h` says what its functions do.

Tensors the library does not read (fp64 rows or gradients, rows that are not contiguous) go to the reference.

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

from tilerec.errors import InputError, TilerecError
from tilerec.ops.cpu.library import BAD_ID, BAD_OFFSETS, DTYPES, INDEX_TYPES, NO_MEMORY
from tilerec.ops.cpu.records import Gradient, Report, Rows
from tilerec.ops.library import LIBRARY
from tilerec.ops.update import (
    rule_apply_reference_,
    rule_partials_reference,
    sum_row_gradients_reference,
    update_rows_reference_,
)


@dataclass(frozen=True)
class _Rule:
    """A rule as the library knows it: its number, and how many numbers its `hyper` has."""

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


_FP32 = {torch.float32}
_SERVED = set(DTYPES)


def _slot_kinds(rule: str, hyper: Sequence[float]) -> str:
    """Per slot "e" (one value per element) or "r" (one per row)."""
    if rule == "sgd":
        return "e" if hyper[4] else ""
    if rule in ("adagrad", "lars_sgd"):
        return "e"
    if rule == "rowwise_adagrad":
        return "r"
    if rule == "store":
        return ""
    return ("er" if rule.startswith("partial_rowwise") else "ee") + ("r" if hyper[-1] else "")


def _sums(rule: str, phase: int) -> int:
    """How many row sums a phase of the rule takes."""
    return 2 if rule in ("lamb", "lars_sgd") or (rule == "partial_rowwise_lamb" and phase == 1) else 1


def _describe(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    *per_feature: Sequence[int],
) -> tuple[Gradient, array[int]]:
    """The record as the library reads it, and the memory behind its lists."""
    features = len(per_feature[0])
    # One list, one array: `array.extend` takes three times as long.
    numbers = array("q", list(itertools.chain.from_iterable(per_feature)))
    assert len(numbers) == 6 * features, "the per-feature lists of a gradient record are equally long"
    at = numbers.buffer_info()[0]
    record = Gradient(
        grad.data_ptr(), ids.data_ptr(), None if offsets is None else offsets.data_ptr(),
        None if sample_weights is None else sample_weights.data_ptr(), grad.numel(), ids.numel(),
        0 if offsets is None else offsets.numel(), features, *(at + 8 * features * k for k in range(6)),
        DTYPES[grad.dtype], INDEX_TYPES[ids.dtype],
    )  # fmt: skip
    return record, numbers


def _describe_rows(
    weights: Sequence[Tensor],
    slots: Sequence[Tensor],
    rule: str,
    hyper: Sequence[float],
    *per_table: Sequence[int],
) -> tuple[Rows, object]:
    """The tables as the library reads them, and the memory behind its lists. `per_table`: steps, seeds, two offsets."""
    known = _RULES.get(rule)
    if known is None:
        raise TilerecError(f"row rule {rule!r} is unknown; the rules are {sorted(_RULES)}.")
    assert rule == "store" or len(hyper) == known.hypers, (
        f"rule {rule!r}: {len(hyper)} numbers, wanted {known.hypers}"
    )
    kinds = _slot_kinds(rule, hyper)
    count = len(weights)
    assert len(slots) == count * len(kinds), (
        f"rule {rule!r}: {len(slots)} slots for {count} tables, wanted {kinds!r} each"
    )
    shapes = [w.shape for w in weights]
    rows, dims = [shape[0] for shape in shapes], [shape[1] for shape in shapes]
    for k, kind in enumerate(kinds):
        own = slots[k :: len(kinds)]
        wanted = [r * d for r, d in zip(rows, dims, strict=True)] if kind == "e" else rows
        sizes, dtypes = [slot.numel() for slot in own], {slot.dtype for slot in own}
        assert sizes == wanted, f"rule {rule!r}: slot {k} has {sizes} numbers, wanted {wanted}"
        assert dtypes <= _FP32, f"rule {rule!r}: slot {k} is {dtypes}, wanted float32"
        assert all([slot.is_contiguous() for slot in own]), f"rule {rule!r}: slot {k} is not contiguous"  # noqa: C419
    at_weights, at_slots = [w.data_ptr() for w in weights], [s.data_ptr() for s in slots]
    numbers = array("q", [*at_weights, *at_slots, *rows, *dims, *itertools.chain.from_iterable(per_table)])
    assert len(numbers) == len(slots) + 8 * count, "steps, seeds and offsets name every table"
    types = array("i", [DTYPES[w.dtype] for w in weights])
    doubles = array("d", hyper)
    at = numbers.buffer_info()[0]
    # Behind the slots: rows, dims, steps, seeds (two per table), row offsets, column offsets.
    tables_at = at + 8 * (count + len(slots))
    described = Rows(
        at, at + 8 * count, tables_at, tables_at + 8 * count, types.buffer_info()[0], tables_at + 16 * count,
        tables_at + 24 * count, tables_at + 40 * count, tables_at + 48 * count, doubles.buffer_info()[0],
        count, len(kinds), len(doubles), known.number,
    )  # fmt: skip
    return described, (numbers, types, doubles)


def _raise(op: str, report: Report, rows: Sequence[int], tables: Sequence[int]) -> None:
    if report.status == NO_MEMORY:
        raise MemoryError(f"{op}: no memory to sort the ids of {report.value} occurrences or columns.")
    if report.status == BAD_ID:
        table = tables[report.feature]
        raise InputError(
            f"{op}: id {report.value} of feature number {report.feature} (position {report.position}) is outside "
            f"[0, {rows[table]}) of table number {table}; the ids were changed after the lookup, or never looked up."
        )
    if report.status == BAD_OFFSETS:
        raise InputError(
            f"{op}: offsets of feature number {report.feature} fall, or leave the ids, at bag {report.position} "
            f"(offset {report.value}); offsets must ascend from 0 to the number of ids."
        )
    raise AssertionError(
        f"{op}: the gradient record contradicts itself (feature {report.feature}, check {report.position})"
    )


def _served(grad: Tensor, weights: Sequence[Tensor]) -> bool:
    if grad.dtype not in DTYPES:
        return False
    # Lists and sets, not generators: with 26 tables every tenth of a microsecond counts 26 times.
    return {w.dtype for w in weights} <= _SERVED and all([w.is_contiguous() for w in weights])  # noqa: C419


def register(library: ctypes.CDLL) -> None:
    """Let the library serve the update ops on the CPU."""
    pointer, number, count = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    call_update = _function(library, "tr_update_rows", None, pointer, pointer, number, pointer, pointer)
    call_begin = _function(library, "tr_sum_begin", pointer, pointer, count, count, number, pointer, pointer)
    call_finish = _function(library, "tr_sum_finish", None, pointer, pointer, pointer)
    call_free = _function(library, "tr_sum_free", None, pointer)
    call_partials = _function(
        library,
        "tr_rule_partials",
        None,
        *[pointer] * 4,
        count,
        count,
        number,
        number,
        number,
        pointer,
        pointer,
    )
    call_apply = _function(
        library, "tr_rule_apply", None, pointer, pointer, pointer, pointer, count, count, number, pointer
    )

    def update_rows_(
        weights: Sequence[Tensor], slots: Sequence[Tensor], grad: Tensor, ids: Tensor, offsets: Tensor | None,
        sample_weights: Tensor | None, tables: Sequence[int], starts: Sequence[int], bags: Sequence[int],
        grad_starts: Sequence[int], grad_strides: Sequence[int], means: Sequence[int], rule: str,
        hyper: Sequence[float], steps: Sequence[int], seeds: Sequence[int], row_offsets: Sequence[int],
        column_offsets: Sequence[int],
    ) -> Tensor:  # fmt: skip
        if not _served(grad, weights):
            return update_rows_reference_(
                weights, slots, grad, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides,
                means, rule, hyper, steps, seeds, row_offsets, column_offsets,
            )  # fmt: skip
        grad, ids = grad.contiguous(), ids.contiguous()
        record, kept = _describe(
            grad, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides, means
        )
        rows, also_kept = _describe_rows(
            weights, slots, rule, hyper, steps, seeds, row_offsets, column_offsets
        )
        skipped, report = torch.zeros(3, dtype=torch.int64), Report()
        call_update(
            ctypes.byref(rows),
            ctypes.byref(record),
            torch.get_num_threads(),
            skipped.data_ptr(),
            ctypes.byref(report),
        )
        if report.status:
            _raise("update_rows_", report, [w.shape[0] for w in weights], tables)
        del kept, also_kept
        return skipped

    def sum_row_gradients(
        grad: Tensor, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, rows: int, dim: int,
        starts: Sequence[int], bags: Sequence[int], grad_starts: Sequence[int], grad_strides: Sequence[int],
        means: Sequence[int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if grad.dtype not in DTYPES:
            return sum_row_gradients_reference(
                grad, ids, offsets, sample_weights, rows, dim, starts, bags, grad_starts, grad_strides, means
            )
        grad, ids = grad.contiguous(), ids.contiguous()
        tables = [0] * len(starts)
        record, kept = _describe(
            grad, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides, means
        )
        distinct, report = ctypes.c_int64(), Report()
        handle = call_begin(
            ctypes.byref(record),
            rows,
            dim,
            torch.get_num_threads(),
            ctypes.byref(distinct),
            ctypes.byref(report),
        )
        if report.status:
            _raise("sum_row_gradients", report, [rows], tables)
        try:
            rows_U = torch.empty(distinct.value, dtype=torch.int64)
            grads_UD = torch.empty((distinct.value, dim), dtype=torch.float32)
            call_finish(handle, rows_U.data_ptr(), grads_UD.data_ptr())
        finally:
            call_free(handle)
        del kept
        return rows_U, grads_UD

    def rule_partials(
        weight: Tensor, slots: Sequence[Tensor], rows: Tensor, grads: Tensor, scalars: Tensor, phase: int, dim: int,
        exact: bool, column_offset: int, rule: str, hyper: Sequence[float], step: int,
    ) -> Tensor:  # fmt: skip
        if grads.dtype != torch.float32 or not _served(grads, [weight]):
            return rule_partials_reference(
                weight, slots, rows, grads, scalars, phase, dim, exact, column_offset, rule, hyper, step
            )
        part, kept = _describe_rows([weight], slots, rule, hyper, [step], [0, 0], [0], [column_offset])
        rows, grads, scalars = _for_rows(weight, rows, grads, scalars)
        width = weight.shape[1]
        blocks = (column_offset + width + 7) // 8 - column_offset // 8 if exact else 1
        out, report = torch.empty((rows.numel(), _sums(rule, phase), blocks), dtype=torch.float32), Report()
        call_partials(
            ctypes.byref(part), rows.data_ptr(), grads.data_ptr(), scalars.data_ptr(), rows.numel(), dim, phase, exact,
            torch.get_num_threads(), out.data_ptr(), ctypes.byref(report),
        )  # fmt: skip
        if report.status:
            _raise("rule_partials", report, [weight.shape[0]], [0])
        del kept
        return out

    def rule_apply_(
        weight: Tensor, slots: Sequence[Tensor], rows: Tensor, grads: Tensor, scalars: Tensor, dim: int, rule: str,
        hyper: Sequence[float], step: int, seed: Sequence[int], row_offset: int, column_offset: int,
    ) -> None:  # fmt: skip
        if grads.dtype != torch.float32 or not _served(grads, [weight]):
            return rule_apply_reference_(
                weight, slots, rows, grads, scalars, dim, rule, hyper, step, seed, row_offset, column_offset
            )
        part, kept = _describe_rows([weight], slots, rule, hyper, [step], seed, [row_offset], [column_offset])
        rows, grads, scalars = _for_rows(weight, rows, grads, scalars)
        report = Report()
        call_apply(
            ctypes.byref(part), rows.data_ptr(), grads.data_ptr(), scalars.data_ptr(), rows.numel(), dim,
            torch.get_num_threads(), ctypes.byref(report),
        )  # fmt: skip
        if report.status:
            _raise("rule_apply_", report, [weight.shape[0]], [0])
        del kept
        return None

    for kernel in (update_rows_, sum_row_gradients, rule_partials, rule_apply_):
        LIBRARY.impl(kernel.__name__, kernel, "CPU")


def _for_rows(weight: Tensor, rows: Tensor, grads: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arrays of a phase, contiguous, their shapes checked."""
    distinct, width = rows.numel(), weight.shape[1]
    assert grads.shape == (distinct, width), f"gradients {tuple(grads.shape)}, wanted ({distinct}, {width})"
    assert scalars.shape[1:] == (distinct,), f"scalars {tuple(scalars.shape)}, wanted [P, {distinct}]"
    return rows.to(torch.int64).contiguous(), grads.contiguous(), scalars.to(torch.float32).contiguous()


def _function(
    library: ctypes.CDLL, name: str, result: type | None, *arguments: type
) -> Callable[..., int | None]:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function
