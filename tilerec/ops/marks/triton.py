"""`mark_rows_` on a GPU: one launch per table; the host never waits.

A program reads `ROWS` row numbers and sets their bits by atomic ors. Rows that repeat set the same bit again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.marks.definition import mark_rows_reference_
from tilerec.ops.runtime.triton.launch import launch

_ROWS = 256


@triton.jit(do_not_specialize=["entries", "count"], do_not_specialize_on_alignment=["rows_N"])
def mark_kernel(words_W, rows_N, entries, count, ROWS: tl.constexpr):
    """Set the bits of a program's rows."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows_N + n, mask=n < entries, other=-1).to(tl.int64)
    here = (row >= 0) & (row < count.to(tl.int64))
    row = tl.where(here, row, 0)
    bit = tl.full([ROWS], 1, tl.int32) << (row & 31).to(tl.int32)
    tl.atomic_or(words_W + (row >> 5), bit, mask=here, sem="relaxed")


def mark_rows_(marks: Sequence[Tensor], rows: Sequence[Tensor], counts: Sequence[int]) -> None:
    for words_W, rows_N, count in zip(marks, rows, counts, strict=True):
        if not words_W.is_contiguous() or not rows_N.is_contiguous():
            mark_rows_reference_([words_W], [rows_N], [count])
        elif rows_N.numel() and count:
            grid = (triton.cdiv(rows_N.numel(), _ROWS),)
            launch(mark_kernel, grid, words_W, rows_N, rows_N.numel(), count, ROWS=_ROWS, num_warps=4)


KERNELS: dict[str, Any] = {"mark_rows_": mark_rows_}
