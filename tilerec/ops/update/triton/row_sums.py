"""Row sums of gradient records as a result: sort the occurrences, then add each row's run.

The size of the result depends on the ids, so the host waits once, for the numbers of distinct rows. If a table's rows
are unknown, it waits twice: first for the largest id.

Legend: T tables, N occurrences, U distinct rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from tilerec.ops.runtime.triton.addresses import power_of_two, upload
from tilerec.ops.update.calls import Gradients, SumCall
from tilerec.ops.update.checks import check_sums
from tilerec.ops.update.row_sums import sum_row_gradients_reference
from tilerec.ops.update.triton.launch import device_guard, launch_update
from tilerec.ops.update.triton.order import reuse_order
from tilerec.ops.update.triton.record import read_record
from tilerec.ops.update.triton.rules import prepare_rule
from tilerec.ops.update.triton.sort import PER_TABLE, Record, Sorted, sort_occurrences
from tilerec.ops.update.triton.tables import GRADIENT_TYPES, WIDEST, KernelTables, TableGroup


def sum_row_gradients_of_tables(call: SumCall) -> tuple[Tensor, Tensor, Tensor]:
    """See `tilerec/ops/update/row_sums.py`."""
    op, gradients, dims = "sum_row_gradients", call.gradients, call.dims
    check_sums(call)
    if gradients.grad.dtype not in GRADIENT_TYPES or not dims or not 0 < min(dims) <= max(dims) <= WIDEST:
        return sum_row_gradients_reference(call)
    ids = gradients.ids
    device = ids.device
    known = list(call.rows)
    if not all(known):
        bound = int(ids.max()) + 1 if ids.numel() else 0
        known = [own or max(bound, 1) for own in known]
    if sum(known) >= 1 << 62:
        return sum_row_gradients_reference(call)
    layout = _layout_of(known, dims, [0] * len(dims), [0] * len(dims), device)
    record = read_record(op, layout, gradients, False)
    if not record.total:
        counts = torch.zeros(len(dims), dtype=torch.int64, device="cpu")
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        return torch.empty(0, dtype=torch.int64, device=device), nothing, counts
    with device_guard(ids):
        by_key = sort_occurrences(
            record,
            layout.numbers,
            len(dims),
            layout.sentinel,
            dims,
            reuse_order(call.ordered, layout, record),
        )
        runs, before = _count_runs(by_key.keys, layout, gradients)
        if runs is None:
            return sum_row_gradients_reference(call)  # raises the error of the bad id or offset
        distinct = [b - a for a, b in itertools.pairwise(before)]
        places = list(itertools.accumulate([n * d for n, d in zip(distinct, dims, strict=True)], initial=0))
        rows_U = torch.empty(sum(distinct), dtype=torch.int64, device=device)
        grads = torch.empty(places[-1], dtype=torch.float32, device=device)
        if before[-1]:
            layout = _layout_of(known, dims, places, before, device)
            _sum_runs(layout, record, by_key, grads, runs - 1, rows_U)
    return rows_U, grads, torch.tensor(distinct, dtype=torch.int64, device="cpu")


def _layout_of(
    rows: Sequence[int],
    dims: Sequence[int],
    places: Sequence[int],
    before: Sequence[int],
    device: torch.device,
) -> KernelTables:
    """Return the results as the tables of an update, whose rows are the runs.

    Args:
        places: per table, the element of the results at which its sums begin.
        before: per table, the number of runs of the tables before it.
    """
    first_keys = list(itertools.accumulate(rows, initial=0))
    lists = zip(first_keys, rows, dims, places, before, strict=False)  # the others have an end behind the last
    numbers = [
        [first, dim, place, 0, 0, 0, runs, 0, 0, 0, t, dim, 0, 0, own, 0]
        for t, (first, own, dim, place, runs) in enumerate(lists)
    ]
    sent = upload(list(itertools.chain.from_iterable(numbers)), device).view(-1, PER_TABLE)
    order = tuple(range(len(dims)))
    return KernelTables(sent, order, tuple(first_keys[:-1]), tuple(rows), tuple(dims), first_keys[-1], (), 0)


def _count_runs(keys: Tensor, layout: KernelTables, gradients: Gradients) -> tuple[Tensor | None, list[int]]:
    """Return each occurrence's run, from 1 on, and the number of runs before each table; None: an id is bad."""
    device, (_, _, offsets, _, features) = keys.device, gradients
    heads = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=heads[1:])
    heads.logical_and_(keys < layout.sentinel)
    runs = torch.cumsum(heads, 0)
    edges = upload([*layout.first_keys, layout.sentinel], device)
    at = torch.searchsorted(keys, edges.to(keys.dtype))
    before = torch.nn.functional.pad(runs, (1, 0))[at]
    if offsets is None:
        expected = at[-1:] * 0 + sum(features.bags)
    else:
        some = [(start, start + count) for _, start, count, *_ in zip(*features, strict=True) if count]
        ends = offsets[upload([end for _, end in some], device)]
        expected = (ends - offsets[upload([start for start, _ in some], device)]).sum(dtype=torch.int64)[None]
    *distinct_before, good, wanted = torch.cat((before, at[-1:], expected)).tolist()
    return (runs if good == wanted else None), distinct_before


def _sum_runs(
    layout: KernelTables, record: Record, by_key: Sorted, grads: Tensor, runs: Tensor, rows_U: Tensor
) -> None:
    """Write the runs' sums and rows; `runs`: of each occurrence."""
    dims, nothing = layout.dims, by_key.keys
    columns = triton.next_power_of_2(max(4, *dims))
    group = TableGroup(
        0, len(dims), 0, layout.sentinel, 0, (), torch.float32, columns, power_of_two(dims, 4),
        power_of_two(dims, 16), 4, True,
    )  # fmt: skip
    launch_update(
        group, layout.numbers, record, by_key, prepare_rule("store", []), grads, [nothing] * 3, 0, (0.0, 0.0),
        paces=nothing, names=nothing, ROUND=0, PER_TABLE=False, NAMED=False, runs=runs, rows_out=rows_U,
    )  # fmt: skip
