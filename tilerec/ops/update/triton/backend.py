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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.runtime.triton.addresses import capturing, constants, current_stream
from tilerec.ops.update.calls import Gradients, RuleTables, UpdateCall
from tilerec.ops.update.checks import check_names, check_tables
from tilerec.ops.update.counts import check_counts
from tilerec.ops.update.definition import update_rows_reference_
from tilerec.ops.update.triton.counts import pace_table, paces_on_device, refuse_frozen_counts
from tilerec.ops.update.triton.launch import device_guard, launch_update, pointer_or
from tilerec.ops.update.triton.order import order_rows, reuse_order
from tilerec.ops.update.triton.phased_update import rule_apply_to_tables_, rule_partials_of_tables
from tilerec.ops.update.triton.record import read_record
from tilerec.ops.update.triton.row_sums import sum_row_gradients_of_tables
from tilerec.ops.update.triton.rules import PreparedRule, has_kernels, prepare_rule
from tilerec.ops.update.triton.sort import Record, Sorted, sort_occurrences
from tilerec.ops.update.triton.status import EMPTY_STATUS
from tilerec.ops.update.triton.tables import (
    GRADIENT_TYPES,
    CachedLayout,
    KernelTables,
    TableAddresses,
    TableGroup,
    is_supported,
    tables_of,
)

_data_ptr = Tensor.data_ptr
_KNOWN: dict[tuple[object, ...], CachedLayout] = {}


def update_rows_(call: UpdateCall) -> Tensor:
    """See `definition.py`. Skips ids that are no rows (the lookup reported them); the result stays on the device."""
    op, tables, gradients = "update_rows_", call.tables, call.gradients
    device, counts, steps = gradients.ids.device, tables.counts, tables.steps
    check_counts(op, tables)
    if not has_kernels(tables.rule):
        return update_rows_reference_(call)
    made = prepare_rule(tables.rule, tables.hyper)
    names = check_names(op, tables)
    graph = capturing()  # the graph must own the tensors that it reads
    layout = _layout_of(op, tables, gradients, made.slots, names, graph)
    if layout is None:
        return update_rows_reference_(call)
    record = read_record(op, layout, gradients, True)
    if graph and counts is None:
        refuse_frozen_counts(made, [group.dtype for group in layout.groups])
    with device_guard(gradients.ids):
        by_key = paces = None
        if record.total and layout.sentinel:
            by_key = sort_occurrences(
                record, layout.numbers, len(tables.weights), layout.sentinel, layout.dims,
                reuse_order(call.ordered, layout, record),
            )  # fmt: skip
        if counts:  # after the sort, which may run out of memory: an update that fails must not be counted
            paces = paces_on_device(made, tables, device, True)
        if by_key is None:
            return constants(EMPTY_STATUS[:3], device).clone()
        by_value, step = (0.0, 0.0), 0
        if counts is None and min(steps) == max(steps):
            by_value, step = made.paces(steps[0]), steps[0]
        elif counts is None:
            paces = pace_table(made, steps, device)
        for group in layout.groups:
            _update_group(group, layout, record, by_key, made, tables, names, step, by_value, paces)
    return by_key.status[:3]


def _layout_of(
    op: str, tables: RuleTables, gradients: Gradients, kinds: str, names: Sequence[Tensor], graph: bool
) -> KernelTables | None:
    """Return the tables as kernel arguments; None: the kernels do not support them.

    The layout is constant over many steps: it is checked and uploaded once.
    """
    device = gradients.ids.device
    key = (
        device, current_stream(), tables.rule, kinds, len(tables.weights if tables.counts else tables.steps),
        tuple(tables.seeds), tuple(tables.row_offsets), tuple(tables.column_offsets),
        tuple(map(_data_ptr, tables.weights)), tuple(map(_data_ptr, tables.slots)),
        tuple([(n.data_ptr(), n.shape[0]) for n in names]),
    )  # fmt: skip
    seen = _KNOWN.get(key) if gradients.grad.dtype in GRADIENT_TYPES and not graph else None
    if seen is not None and seen.fits(tables):
        return seen.layout
    if not is_supported(device, gradients.grad, tables):
        return None
    check_tables(op, tables, kinds)
    layout = tables_of(op, device, TableAddresses.of(tables, kinds, names))
    if len(_KNOWN) >= 256:
        _KNOWN.clear()
    if not graph:
        _KNOWN[key] = CachedLayout(layout, tables)
    return layout


def _update_group(
    group: TableGroup, layout: KernelTables, record: Record, ordered: Sorted, made: PreparedRule,
    tables: RuleTables, names: Sequence[Tensor], step: int, by_value: tuple[float, float], paces: Tensor | None,
) -> None:  # fmt: skip
    each = len(group.slots)
    own = [tables.slots[start * each + k] for k, start in enumerate(group.slots)]
    rounds = made.rule.h["stochastic_rounding"] and group.dtype != torch.float32
    nothing = ordered.keys  # unread pointer arguments must be valid, and of one dtype for all batches
    numbers = layout.numbers[group.first :] if group.first else layout.numbers
    launch_update(
        group, numbers, record, ordered, made, tables.weights[group.weight], [*own, *[nothing] * (3 - each)], step,
        by_value, paces=pointer_or(paces, nothing),
        names=names[layout.names] if names else nothing,
        ROUND=0 if not rounds else 1 if group.aligned else 2, PER_TABLE=paces is not None, NAMED=bool(names),
    )  # fmt: skip


KERNELS: dict[str, Callable[..., Any]] = {
    "update_rows_": update_rows_,
    "order_rows": order_rows,
    "sum_row_gradients_of_tables": sum_row_gradients_of_tables,
    "rule_partials_of_tables": rule_partials_of_tables,
    "rule_apply_to_tables_": rule_apply_to_tables_,
}
"""Kernels by op name."""
