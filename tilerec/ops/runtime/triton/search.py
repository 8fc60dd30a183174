"""Binary and wide searches for an item's segment in offsets, by one program.

A program owns neighbouring items. It finds the segments of its first and its last item, many probes at a time. Then it
finds each item's segment between the two: bags of ten items take three or four probes each, all in the same cache
lines, and one segment of a million items takes none. So programs own equal numbers of items, whatever the lengths of
the segments.

  offsets [0, 2, 2, 5]:  items 0 1 -> segment 0,  items 2 3 4 -> segment 2 (the last that begins at or before the item)
"""

from __future__ import annotations

import triton
import triton.language as tl

WAYS = tl.constexpr(128)
"""Probes at a time: a search in 100,000 offsets takes 3 dependent loads; halving takes 17."""

_NEVER = tl.constexpr(9223372036854775807)


@triton.jit
def segment_at(offsets, segments, item):
    """Return the last s in [0, segments) with offsets[s] <= item, a scalar; 0 where there is none.

    Offsets that fall give some segment in the range, and nothing outside of it is read.
    """
    low = tl.full((), 0, tl.int64)
    high = low + segments
    ways = 1 + tl.arange(0, WAYS)
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        at = low + ways * step
        passed = tl.sum((tl.load(offsets + at, mask=at < high, other=_NEVER) <= item).to(tl.int32), 0)
        low = low + passed * step
        high = tl.minimum(low + step, high)
    return low


@triton.jit
def segments_of(offsets, items, low, high):
    """Return for each item the last s in [low, high] with offsets[s] <= item; `low` where there is none."""
    step = (high - low) * 0 + 1
    while step <= high - low:
        step = step * 2
    found = items * 0 + low
    while step > 1:
        step = step // 2
        tried = found + step
        passes = tl.load(offsets + tried, mask=tried <= high, other=_NEVER) <= items
        found = tl.where(passes, tried, found)
    return found
