"""Row updates on the GPU: sort the step's occurrences once, then sum and apply while the row is in registers.

This file has the op. Its steps are in files of their own: the tables (`tables.py`) and the gradient record
(`record.py`) as kernel arguments, the sort (`sort.py`), sums of long runs (`runs.py`), and the kernel that updates rows
(`apply_runs.py`), launched once for each group of tables (`launch.py`).

The host never waits for the device. Grids follow from shapes, numbers of tables and features are uploaded once and
cached, and the report of gradients that are not finite is a tensor. The paces and the stochastic rounding depend on a
table's update count. Kernels get the count by value if all tables of the call share it. Otherwise, or if counts are on
the device, they read it from a small tensor (`counts.py`).

Example: the references' (`definition.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.addresses import capturing, constants, current_stream
from tilerec.ops.runtime.triton.library import on_own_device
from tilerec.ops.update.checks import check_names, check_tables
from tilerec.ops.update.counts import check_counts
from tilerec.ops.update.definition import update_rows_reference_
from tilerec.ops.update.triton.counts import pace_table, paces_on_device
from tilerec.ops.update.triton.launch import device_guard, launch_update, pointer_or
from tilerec.ops.update.triton.order import order_rows, reuse_order
from tilerec.ops.update.triton.record import read_record, same_device
from tilerec.ops.update.triton.rules import PreparedRule, has_kernels, prepare_rule
from tilerec.ops.update.triton.sort import Record, Sorted, sort_occurrences
from tilerec.ops.update.triton.status import EMPTY_STATUS
from tilerec.ops.update.triton.tables import (
    GRADIENT_TYPES,
    CachedLayout,
    KernelTables,
    TableGroup,
    is_supported,
    tables_of,
)

_data_ptr = Tensor.data_ptr
_KNOWN: dict[tuple[object, ...], CachedLayout] = {}


def update_rows_(
    weights: Sequence[Tensor], slots: Sequence[Tensor], grad: Tensor, ids: Tensor, offsets: Tensor | None,
    sample_weights: Tensor | None, tables: Sequence[int], starts: Sequence[int], bags: Sequence[int],
    grad_starts: Sequence[int], grad_strides: Sequence[int], means: Sequence[int], rule: str, hyper: Sequence[float],
    steps: Sequence[int], seeds: Sequence[int], row_offsets: Sequence[int], column_offsets: Sequence[int],
    row_names: Sequence[Tensor] | None = None, counts: Sequence[Tensor] | None = None, lr: Tensor | None = None,
    ordered: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """See `definition.py`. Skips ids that are no rows (the lookup reported them); the result stays on the device."""
    op, device = "update_rows_", ids.device
    check_counts(op, steps, counts, lr, len(weights))
    if not has_kernels(rule):
        return update_rows_reference_(
            weights, slots, grad, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides, means,
            rule, hyper, steps, seeds, row_offsets, column_offsets, row_names, counts, lr,
        )  # fmt: skip
    made = prepare_rule(rule, hyper)
    kinds = made.slots
    names = () if row_names is None else check_names(op, row_names, [w.shape[0] for w in weights])
    # The layout is constant over many steps: check it and upload it once.
    key = (
        device, current_stream(), rule, kinds, len(weights if counts else steps), tuple(seeds), tuple(row_offsets),
        tuple(column_offsets), tuple(map(_data_ptr, weights)), tuple(map(_data_ptr, slots)),
        tuple([(n.data_ptr(), n.shape[0]) for n in names]),
    )  # fmt: skip
    graph = capturing()  # the graph must own the tensors that it reads
    seen = _KNOWN.get(key) if grad.dtype in GRADIENT_TYPES and not graph else None
    if seen is not None and seen.fits(weights, slots):
        layout = seen.layout
    else:
        if not is_supported(device, grad, weights, slots):
            return update_rows_reference_(
                weights, slots, grad, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides,
                means, rule, hyper, steps, seeds, row_offsets, column_offsets, row_names, counts, lr,
            )  # fmt: skip
        check_tables(
            op, weights, slots, kinds, rule, column_offsets, (counts or steps, 1), (seeds, 2), (row_offsets, 1)
        )  # fmt: skip
        same_device(op, device, weights=weights, slots=slots)
        layout = tables_of(
            op, device, tuple([(w.shape[0], w.shape[1]) for w in weights]), tuple([w.dtype for w in weights]),
            tuple([w.data_ptr() for w in weights]), tuple([s.data_ptr() for s in slots]), kinds, tuple(seeds),
            tuple(row_offsets), tuple(column_offsets),
            tuple([n.data_ptr() if n.numel() else 0 for n in names]) or (0,) * len(weights),
        )  # fmt: skip
        if len(_KNOWN) >= 256:
            _KNOWN.clear()
        if not graph:
            _KNOWN[key] = CachedLayout(layout, weights, slots)
    same_device(op, device, gradients=grad, offsets=offsets, sample_weights=sample_weights)
    per_feature = (tables, starts, bags, grad_starts, grad_strides, means)
    record = read_record(op, layout, grad, ids, offsets, sample_weights, per_feature, True)
    if graph and counts is None:
        refuse_frozen_counts(made, [group.dtype for group in layout.groups])
    with device_guard(ids):
        by_key = paces = None
        if record.total and layout.sentinel:
            by_key = sort_occurrences(
                record, layout.numbers, len(weights), layout.sentinel, layout.dims,
                reuse_order(ordered, layout, record),
            )  # fmt: skip
        if counts:  # after the sort, which may run out of memory: an update that fails must not be counted
            paces = paces_on_device(op, made, counts, lr, device, True)
        if by_key is None:
            return constants(EMPTY_STATUS[:3], device).clone()
        by_value, step = (0.0, 0.0), 0
        if counts is None and min(steps) == max(steps):
            by_value, step = made.paces(steps[0]), steps[0]
        elif counts is None:
            paces = pace_table(made, steps, device)
        for group in layout.groups:
            _update_group(group, layout, record, by_key, made, weights, slots, names, step, by_value, paces)
    return by_key.status[:3]


def refuse_frozen_counts(made: PreparedRule, dtypes: Sequence[torch.dtype]) -> None:
    """Raise a `ConfigError` if a graph would repeat an update count and the update depends on it."""
    rounds = made.rule.h["stochastic_rounding"] and any(dtype != torch.float32 for dtype in dtypes)
    if rounds or made.paces(1) != made.paces(2):
        what = "the random words of stochastic rounding" if rounds else "bias correction or lr_decay"
        raise ConfigError(
            f"An update by {type(made.rule).__name__} is captured in a CUDA graph with its update count by value: "
            f"every replay would repeat it, and {what} depends on it. Attach the optimizer with "
            "{'capturable': True}, which keeps count and learning rate on the device (the op: pass counts and lr)."
        )


def _update_group(
    group: TableGroup, layout: KernelTables, record: Record, ordered: Sorted, made: PreparedRule,
    weights: Sequence[Tensor], slots: Sequence[Tensor], names: Sequence[Tensor], step: int,
    by_value: tuple[float, float], paces: Tensor | None,
) -> None:  # fmt: skip
    each = len(group.slots)
    own = [slots[start * each + k] for k, start in enumerate(group.slots)]
    rounds = made.rule.h["stochastic_rounding"] and group.dtype != torch.float32
    nothing = ordered.keys  # unread pointer arguments must be valid, and of one dtype for all batches
    numbers = layout.numbers[group.first :] if group.first else layout.numbers
    launch_update(
        group, numbers, record, ordered, made, weights[group.weight], [*own, *[nothing] * (3 - each)], step,
        by_value, paces=pointer_or(paces, nothing),
        names=names[layout.names] if names else nothing,
        ROUND=0 if not rounds else 1 if group.aligned else 2, PER_TABLE=paces is not None, NAMED=bool(names),
    )  # fmt: skip


def register(key: str = "CUDA") -> None:
    """Register the kernels for the update ops on devices of this dispatch key."""
    for function in (update_rows_, order_rows):
        LIBRARY.impl(function.__name__, on_own_device(function), key, allow_override=True)
