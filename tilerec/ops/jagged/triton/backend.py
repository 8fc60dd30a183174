"""Triton kernels of the jagged ops on GPUs. `definition.py` defines each op, with an example.

Nouns
  item     one row of a jagged tensor's values
  word     the unit of a copy: 4 bytes, fewer if an item is no whole number of them, 8 for items of 8 bytes. Copies are
           independent of number types, so NaNs keep their bits, and fp8, bool and bf16 share kernels
  tile     the neighbouring items of the output that one program writes
  group    the items of a tile that a program has in flight at once
  copies   the output items that were copied from one input item; the transpose adds them

Programs own equal numbers of *output items* and search for their segments (`runtime/triton/search.py`). So a segment
of a million items is as fast as a million segments of one item, and kernels write only the result. torch's kernels,
run one after another, write four int64 numbers per item before they move it. Kernels also check offsets and orders.
They read nothing outside of the tensors, whatever the offsets hold, and items without a source are zeros.

Launches, and bytes of memory traffic per item of w bytes, for large inputs (the reference: torch 2.13's kernels,
counted in its source). An op that is not in `KERNELS` is torch's own:

  op                        here            reference
  offsets_from_lengths      as reference    3-4: fill, (cast,) scan (2): 16 bytes a length, the least possible
  segment_ids               1:  8           4:  8 + 32 a segment; bad offsets end the process (an assertion)
  select_segments           1:  2w          10: 2w + 64
  its transpose             6:  2w          30: 5w + 350; sorts segments here, items there
  bucketize_by_cuts (int64) 11: 60          30: 350; sorts keys of 1 byte (up to 256 buckets), not 8
  jagged_to_padded          1:  2w          9:  4w + 40
  padded_to_jagged          1:  2w          10: 4w + 64
  segment_sum               1:  w           1-3: w, halves 5w (they pass through fp32)
  repeat_segments           1:  w           5:  w + 16

Kernels add item after item, as the CPU does: a column's items are one chain of additions, whose loads run ahead of it.

`item_copies.py`, `sum.py` and `bucketize.py` have the ops, `offsets.py` their common checks.

Legend: N items going in, M items coming out, S segments, P selected segments, W words of an item.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilerec.ops.jagged.triton.bucketize import bucketize_by_cuts
from tilerec.ops.jagged.triton.item_copies import (
    jagged_to_padded,
    padded_to_jagged,
    repeat_segments,
    segment_ids,
    select_segments,
)
from tilerec.ops.jagged.triton.sum import segment_sum, select_segments_backward

KERNELS: dict[str, Callable[..., Any]] = {
    "segment_ids": segment_ids,
    "select_segments": select_segments,
    "select_segments_backward": select_segments_backward,
    "bucketize_by_cuts": bucketize_by_cuts,
    "jagged_to_padded": jagged_to_padded,
    "padded_to_jagged": padded_to_jagged,
    "segment_sum": segment_sum,
    "repeat_segments": repeat_segments,
}
"""Kernels by op name."""
