"""Checks of offsets and orders inside the kernels that read them; each program checks a share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.jagged.checks import raise_bad_offsets, raise_bad_order
from tilerec.ops.runtime.triton.rows import take_report

# First number of a report, and the two others.
OFFSETS = tl.constexpr(1)  # segment, offset
ORDER = tl.constexpr(2)  # position, segment

# A batch's tensors are views of any alignment, which differs from batch to batch: no special kernels for it.
ANYWHERE = ["ids", "offsets", "order", "out_offsets"]

CHECKED = tl.constexpr(256)
"""Offsets that one program checks."""


@triton.jit
def check_offsets(offsets, segments, end, program, report, EXACT: tl.constexpr):
    """Report an offset of this program's share that descends or leaves [0, end].

    EXACT: the offsets must begin at 0 and end at `end`.
    """
    if program * CHECKED <= segments:
        at = program * CHECKED + tl.arange(0, CHECKED)
        here = tl.load(offsets + at, mask=at <= segments, other=0)
        there = tl.load(offsets + at + 1, mask=at < segments, other=0)
        there = tl.where(at < segments, there, end)
        bad = (here < 0) | (here > there) | (there > end)
        if EXACT:
            bad |= ((at == 0) & (here != 0)) | ((at == segments) & (here != end))
        bad &= at <= segments
        if tl.sum(bad.to(tl.int32), 0) > 0:
            first = tl.min(tl.where(bad, at, segments), 0)
            take_report(report, OFFSETS, first, tl.load(offsets + tl.minimum(first + 1, segments)))


@triton.jit
def check_order(offsets, segments, order, out_offsets, selected, program, report):
    """Report a selected segment of this program's share that does not exist, or is shorter than its copy."""
    if program * CHECKED < selected:
        at = program * CHECKED + tl.arange(0, CHECKED)
        here = at < selected
        count = tl.load(out_offsets + at + 1, mask=here, other=0) - tl.load(out_offsets + at, mask=here, other=0)
        segment = tl.load(order + at, mask=here, other=0)
        known = here & (segment >= 0) & (segment < segments)
        items = tl.load(offsets + segment + 1, mask=known, other=0) - tl.load(offsets + segment, mask=known, other=0)
        bad = here & (count > 0) & (count > items)
        if tl.sum(bad.to(tl.int32), 0) > 0:
            first = tl.min(tl.where(bad, at, selected), 0)
            take_report(report, ORDER, first, tl.load(order + first))


def as_int64(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64)).contiguous()


@functools.lru_cache(maxsize=16)
def offset_error_raiser(op: str) -> Callable[[int, int, int], None]:
    def raise_(kind: int, position: int, value: int) -> None:
        if kind == OFFSETS.value:
            raise_bad_offsets(op, position, value)
        raise_bad_order(op, position, value)

    return raise_
