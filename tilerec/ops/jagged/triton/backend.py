"""The jagged ops on GPUs; `definition.py` says what each computes, with an example.

Nouns
  item     one row of a jagged tensor's values
  word     what a copy moves: 4 bytes, fewer where the items are no whole number of them, 8 for items of 8 bytes.
           Copies know no number types, so that NaNs keep their bits and fp8, bool and bf16 are one kernel
  tile     the neighbouring items of the output that one program makes
  group    as many of them as it has under way at once
  copies   what one item of the input became in the output; the transpose adds them

Programs own equal numbers of *output items* and search for their segments (`search.py`), so a segment of a million
items is as fast as a million of one, and nothing is written but the result: torch's kernels, one after another, write
four int64 numbers per item before they move it. Offsets and orders are checked along the way; nothing outside of the
tensors is read, whatever they hold, and items without a source are zeros.

Launches and bytes over memory per item of w bytes, large inputs (the reference: torch 2.13's kernels, counted in its
source). An op that is not in `kernels` is torch's own:

  op                        here            reference
  offsets_from_lengths      as reference    3-4: fill, (cast,) scan (2): 16 bytes a length, all it must move
  segment_ids               1:  8           4:  8 + 32 a segment; and offsets that lie end the process (an assertion)
  select_segments           1:  2w          10: 2w + 64
  its transpose             6:  2w          30: 5w + 350; sorts segments here, items there
  bucketize_by_cuts (int64) 11: 60          30: 350; sorts keys of 1 byte (up to 256 buckets), not 8
  jagged_to_padded          1:  2w          9:  4w + 40
  padded_to_jagged          1:  2w          10: 4w + 64
  segment_sum               1:  w           1-3: w, halves 5w (they pass through fp32)
  repeat_segments           1:  w           5:  w + 16

Sums are added item after item, as on the CPU: a column's items are one chain of additions, whose loads run ahead of it.

`copy.py`, `sum.py` and `bucketize.py` have the ops, `offsets.py` what all of them check.

Legend: N items going in, M items coming out, S segments, P selected segments, W words of an item.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilerec.ops.jagged.checks import checked
from tilerec.ops.jagged.triton.bucketize import bucketize_by_cuts
from tilerec.ops.jagged.triton.copy import (
    jagged_to_padded,
    padded_to_jagged,
    repeat_segments,
    segment_ids,
    select_segments,
)
from tilerec.ops.jagged.triton.sum import segment_sum, select_segments_backward
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.library import on_own_device


def kernels() -> dict[str, Callable[..., Any]]:
    """The kernels by op name."""
    made: dict[str, Callable[..., Any]] = {
        "segment_ids": segment_ids,
        "select_segments": select_segments,
        "select_segments_backward": select_segments_backward,
        "bucketize_by_cuts": bucketize_by_cuts,
        "jagged_to_padded": jagged_to_padded,
        "padded_to_jagged": padded_to_jagged,
        "segment_sum": segment_sum,
        "repeat_segments": repeat_segments,
    }
    return {name: checked(name, kernel) for name, kernel in made.items()}


def register(key: str = "CUDA") -> None:
    """Let these kernels serve the ops on tensors of a dispatch key."""
    for name, kernel in kernels().items():
        LIBRARY.impl(name, on_own_device(kernel), key, allow_override=True)
