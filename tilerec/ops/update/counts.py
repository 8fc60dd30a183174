"""Update counts and learning rates in tensors, so that every replay of a captured step uses new values.

Terms
  count   number of a table's updates: int64, 0-d. An update reads t = count + 1 and writes t back
  rate    the learning rate: floating point, 0-d; a schedule writes into it

A CUDA graph freezes numbers that an op gets by value, but not the content of tensors. So `update_rows_` and the ops of
parts also accept counts and the rate as tensors, with the same meaning on the CPU.

    counts (4, 7), rate 0.1    one update    tables use t = 5 and t = 8, and lr 0.1; counts are (5, 8)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.update.calls import RuleTables
from tilerec.torch_private import foreach_add_


def check_counts(op: str, tables: RuleTables) -> None:
    """Raise an `InputError` for counts or a rate that are invalid or given twice."""
    counts, lr = tables.counts, tables.lr
    if counts is None:
        if lr is not None:
            raise InputError(f"{op}: got lr as a tensor without counts. Pass both, or lr in hyper[0].")
        return
    if len(tables.steps):
        raise InputError(
            f"{op}: got {len(tables.steps)} steps and {len(counts)} counts; expected one of the two. Pass steps=[]."
        )
    if len(counts) != len(tables.weights):
        raise InputError(f"{op}: got {len(counts)} counts for {len(tables.weights)} tables; expected one each.")
    if {count.dtype for count in counts} - {torch.int64} or any([count.dim() for count in counts]):  # noqa: C419
        t = next(t for t, count in enumerate(counts) if count.dtype != torch.int64 or count.dim())
        raise InputError(
            f"{op}: the count of table number {t} has shape {list(counts[t].shape)} and type {counts[t].dtype}; "
            "expected int64 []. Make it with torch.zeros((), dtype=torch.int64, device=...)."
        )
    if lr is not None and (lr.dim() or not lr.is_floating_point()):
        raise InputError(
            f"{op}: lr has shape {list(lr.shape)} and type {lr.dtype}; expected one floating-point number, []. Make it "
            "with torch.tensor(0.1, device=...)."
        )


def resolve_counts(op: str, tables: RuleTables) -> RuleTables:
    """Return the tables with the values of `counts` and `lr` in `steps` and `hyper`; synchronizes with their device."""
    check_counts(op, tables)
    if tables.counts is None:
        return tables
    hyper = tables.hyper
    if tables.lr is not None and len(hyper):
        hyper = [float(tables.lr), *hyper[1:]]
    return tables._replace(hyper=hyper, steps=[int(count) + 1 for count in tables.counts], counts=None, lr=None)


def read_counts(counts: Sequence[Tensor]) -> list[int]:
    """Return the counts as ints; synchronizes with their device."""
    return list(map(int, map(Tensor.item, counts)))


def advance(counts: Sequence[Tensor] | None) -> None:
    """Add 1 to each count after an update."""
    if not counts:
        return
    if all([count.dtype == torch.int64 and count.is_cpu for count in counts]):  # noqa: C419
        # Write through ctypes, in a quarter of the time of an op per count: a step has one count per table.
        for number in map(ctypes.c_int64.from_address, map(Tensor.data_ptr, counts)):
            number.value += 1
    else:
        foreach_add_(list(counts), 1)
