"""`cache_lines_` on GPUs: convert ids to line numbers, for all tables of a batch in one launch.

Nouns as in `definition.py`, which also has an example.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.cache.definition import lines_dtype
from tilerec.ops.cache.triton.books import (
    S_BEGIN,
    S_COUNT,
    S_START,
    S_TABLE,
    S_TILE,
    tile_items,
    upload_segments,
)
from tilerec.ops.runtime.triton.addresses import base, constants, distances
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.runtime.triton.search import segment_at

# Rows of `tables`.
_LINE_OF, _DIRTY, _ROWS, _STRANGER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit(
    do_not_specialize=["segment_count", "table_count"],
    do_not_specialize_on_alignment=["ids", "segments", "tables", "line_of", "dirty"],
)
def lines_kernel(
    ids,
    segments,
    tables,
    line_of,
    dirty,
    out,
    segment_count,
    table_count,
    WRITES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Convert a tile of a segment's ids. With WRITES, mark their lines as dirty; equal stores of 1 may collide."""
    program = tl.program_id(0).to(tl.int64)
    s = segments + segment_at(segments + S_TILE * segment_count, segment_count, program)
    at = (program - tl.load(s + S_TILE * segment_count)) * TILE + tl.arange(0, TILE)
    here = at < tl.load(s + S_COUNT * segment_count)
    id_ = tl.load(ids + tl.load(s + S_BEGIN * segment_count) + at, mask=here, other=0).to(tl.int64)
    table = tl.load(s + S_TABLE * segment_count)
    value = id_
    if table >= 0:
        own = tables + table
        good = here & (id_ >= 0) & (id_ < tl.load(own + _ROWS * table_count))
        line = tl.load(line_of + tl.load(own + _LINE_OF * table_count) + id_, mask=good, other=-1).to(tl.int64)
        line = tl.maximum(line, -1)
        value = tl.where(good, line, tl.load(own + _STRANGER * table_count))
        if WRITES:
            marks = dirty + tl.load(own + _DIRTY * table_count) + line
            tl.store(marks, (line * 0 + 1).to(tl.uint8), mask=good & (line >= 0))
    tl.store(out + tl.load(s + S_START * segment_count) + at, value.to(out.dtype.element_ty), mask=here)


def cache_lines_(
    ids: Tensor, begins: Sequence[int], ends: Sequence[int], tables: Sequence[int], line_of: Sequence[Tensor],
    dirty: Sequence[Tensor], strangers: Sequence[int],
) -> Tensor:  # fmt: skip
    """See `definition.py`."""
    ids = ids.contiguous()
    tile = tile_items(ids)
    segments, tiles, total = upload_segments(tuple(begins), tuple(ends), tuple(tables), tile, ids.device)
    out = torch.empty(total, dtype=lines_dtype(ids, tables), device=ids.device)
    if not total:
        return out
    if not line_of:
        line_of = [ids.new_empty(0, dtype=torch.int32)]
        strangers = [-1]
    marks = distances(dirty) if dirty else [0] * len(line_of)
    rows = [own.shape[0] for own in line_of]
    numbers = constants([*distances(line_of), *marks, *rows, *strangers], ids.device)
    marked = base(dirty).view(torch.uint8) if dirty else ids
    launch(
        lines_kernel, (tiles,), ids, segments, numbers, base(line_of), marked, out, len(tables), len(line_of),
        WRITES=bool(dirty), TILE=tile, num_warps=1,
    )  # fmt: skip
    return out
