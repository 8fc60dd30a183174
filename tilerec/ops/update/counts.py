"""Update counts and learning rates that lie where the rows are, so that a captured step goes on with every replay.

Nouns
  count   how many updates a table has had: int64, 0-d. An update reads t = count + 1 and leaves t there
  rate    the learning rate: floating point, 0-d; whoever schedules it writes into it

A number that an op gets by value is frozen in a CUDA graph. What an op reads from a tensor is not: so `update_rows_`
and the ops of parts take counts and rate as tensors, too. On the CPU they mean the same.

    counts (4, 7), rate 0.1    one update    tables see t = 5 and t = 8, and lr 0.1; counts are (5, 8)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.torch_private import foreach_add_


def check_counts(
    op: str, steps: Sequence[int], counts: Sequence[Tensor] | None, lr: Tensor | None, tables: int
) -> None:
    """Raise an `InputError` for counts or a rate that are none, or that are given twice."""
    if counts is None:
        if lr is not None:
            raise InputError(f"{op}: got lr as a tensor without counts; pass both, or lr in hyper[0].")
        return
    if len(steps):
        raise InputError(
            f"{op}: got {len(steps)} steps and {len(counts)} counts, which say the same; pass steps=[]."
        )
    if len(counts) != tables:
        raise InputError(f"{op}: got {len(counts)} counts for {tables} tables; wanted one each.")
    if {count.dtype for count in counts} - {torch.int64} or any([count.dim() for count in counts]):  # noqa: C419
        t = next(t for t, count in enumerate(counts) if count.dtype != torch.int64 or count.dim())
        raise InputError(
            f"{op}: the count of table number {t} has shape {list(counts[t].shape)} and type {counts[t].dtype}, wanted "
            "int64 []; make it with torch.zeros((), dtype=torch.int64, device=...)."
        )
    if lr is not None and (lr.dim() or not lr.is_floating_point()):
        raise InputError(
            f"{op}: lr has shape {list(lr.shape)} and type {lr.dtype}, wanted one floating-point number, []; make it "
            "with torch.tensor(0.1, device=...)."
        )


def numbers_of_step(
    op: str, steps: Sequence[int], hyper: Sequence[float], counts: Sequence[Tensor] | None, lr: Tensor | None,
    tables: int,
) -> tuple[Sequence[int], Sequence[float]]:  # fmt: skip
    """`steps` and `hyper` with what the tensors say in their places; waits for a device that they lie on."""
    check_counts(op, steps, counts, lr, tables)
    if counts is None:
        return steps, hyper
    if lr is not None and len(hyper):
        hyper = [float(lr), *hyper[1:]]
    return [int(count) + 1 for count in counts], hyper


def read_counts(counts: Sequence[Tensor]) -> list[int]:
    """The numbers; waits for a device that they lie on."""
    return list(map(int, map(Tensor.item, counts)))


def advance(counts: Sequence[Tensor] | None) -> None:
    """An update has been made."""
    if not counts:
        return
    if all([count.dtype == torch.int64 and count.is_cpu for count in counts]):  # noqa: C419
        # In place, in a quarter of the time of an op per count: a step has as many as tables.
        for number in map(ctypes.c_int64.from_address, map(Tensor.data_ptr, counts)):
            number.value += 1
    else:
        foreach_add_(list(counts), 1)
