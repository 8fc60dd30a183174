"""Jagged ops that copy items: every output item is one input item, or padding. Nouns as in `backend.py`.

Legend: N items going in, M items coming out, S segments, P selected segments, W words of an item.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.jagged.triton.offsets import (
    ANYWHERE,
    CHECKED,
    as_int64,
    check_offsets,
    check_order,
    offset_error_raiser,
)
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.addresses import ceil_div
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.runtime.triton.reports import new_report, post, raise_due
from tilerec.ops.runtime.triton.search import segment_at, segments_of

ITEMS = 1024
"""Items of a tile if an item is one number: 4 warps, 8 numbers a lane."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

# Source of an output item.
SELECT = tl.constexpr(0)  # a selected segment
REPEAT = tl.constexpr(1)  # the row of its segment
UNPAD = tl.constexpr(2)  # its column in the row of its bag
PAD = tl.constexpr(3)  # its bag's item at its column


@triton.jit
def _sources(offsets, segments, order, out_offsets, selected, items, length, item, here, low, high, MODE: tl.constexpr):
    """Return the input item of each output item, and a mask of the output items that have one."""
    if MODE == PAD:
        bag = item // length
        column = item - bag * length
        begin = tl.load(out_offsets + bag, mask=here, other=0)
        end = tl.load(out_offsets + bag + 1, mask=here, other=0)
        source = begin + column
        present = here & (source < end)
    else:
        segment = segments_of(out_offsets, item, low, high)
        known = here & (segment < selected)
        begin = tl.load(out_offsets + segment, mask=known, other=0)
        end = tl.load(out_offsets + segment + 1, mask=known, other=0)
        within = item - begin
        present = known & (within >= 0) & (item < end)
        if MODE == REPEAT:
            source = segment
        elif MODE == UNPAD:
            source = segment * length + within
            present &= within < length
        else:
            chosen = tl.load(order + segment, mask=present, other=-1)
            present &= (chosen >= 0) & (chosen < segments)
            first = tl.load(offsets + chosen, mask=present, other=0)
            present &= within < tl.load(offsets + chosen + 1, mask=present, other=0) - first
            source = first + within
    present &= (source >= 0) & (source < items)
    return tl.where(present, source, 0), present


@triton.jit(
    do_not_specialize=["items", "segments", "selected", "total", "length", "padding"],
    do_not_specialize_on_alignment=ANYWHERE,
)
def copy_items(
    out, values, offsets, order, out_offsets, report, items, segments, selected, total, length, padding,
    MODE: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write one tile of output items, each `W` words of its input item, or `padding` if it has none.

    SELECT of items [a, b, c] by order [2, 0, 2], offsets [0, 2, 2, 3], out offsets [0, 1, 3, 4]: output item 2 lies in
    selected segment 1 (items 1 to 2), at 1. That is segment 0, which begins at item 0: item 1, b.
    """
    program = tl.program_id(0).to(tl.int64)
    check_offsets(out_offsets, selected, items if MODE == PAD else total, program, report, MODE != PAD)
    if MODE == SELECT:
        check_order(offsets, segments, order, out_offsets, selected, program, report)
    first = program * TILE
    if first < total:
        low = tl.full((), 0, tl.int64)
        high = low
        if MODE != PAD:
            low = segment_at(out_offsets, selected, first)
            high = segment_at(out_offsets, selected, tl.minimum(first + TILE, total) - 1)
        for at in range(0, TILE, GROUP):
            item = first + at + tl.arange(0, GROUP)
            here = item < total
            source, present = _sources(
                offsets, segments, order, out_offsets, selected, items, length, item, here, low, high, MODE
            )
            if W == 1:
                word = tl.load(values + source, mask=present, other=0)
                tl.store(out + item, tl.where(present, word, padding), mask=here)
            else:
                for column in range(0, W, COLUMNS):
                    columns = column + tl.arange(0, COLUMNS)[None, :]
                    inside = columns < W
                    words = tl.load(values + source[:, None] * W + columns, mask=present[:, None] & inside, other=0)
                    words = tl.where(present[:, None], words, padding)
                    tl.store(out + item[:, None] * W + columns, words, mask=here[:, None] & inside)


@triton.jit(do_not_specialize=["segments", "total"], do_not_specialize_on_alignment=ANYWHERE)
def write_segment_ids(out, offsets, report, segments, total, TILE: tl.constexpr):
    """Write one tile of `segment_ids`."""
    program = tl.program_id(0).to(tl.int64)
    check_offsets(offsets, segments, total, program, report, True)
    first = program * TILE
    if first < total:
        low = segment_at(offsets, segments, first)
        high = segment_at(offsets, segments, tl.minimum(first + TILE, total) - 1)
        item = first + tl.arange(0, TILE)
        tl.store(out + item, segments_of(offsets, item, low, high), mask=item < total)


def _words(tensor: Tensor, leading: int) -> tuple[Tensor, int]:
    """Return the tensor's memory as words, and the words of an item; the first `leading` dimensions count items."""
    size = tensor.element_size()
    flat = tensor.contiguous().view(-1)
    item = tensor.shape[leading:].numel() * size
    word = 8 if item == 8 or size == 8 else 4
    while word > 1 and (item % word or flat.data_ptr() % word or flat.storage_offset() * size % word):
        word //= 2
    return flat.view(_WORDS[word]), item // word


@functools.lru_cache(maxsize=256)
def _padding(value: float, dtype: torch.dtype, word: torch.dtype) -> int:
    """Return a word of elements of this value."""
    elements = torch.full((word.itemsize // dtype.itemsize,), value, dtype=dtype, device="cpu")
    return int(elements.view(word).item())


def tiles(width: int, size: int) -> tuple[int, int, int]:
    """Return the items of a tile and of a group, and the columns per load, for items of `width` numbers.

    One warp reads rows 16 bytes a lane, 4 KB at a time: 128 numbers of `size` = 4 bytes -> groups of 8 rows, tiles of
    64. If rows are no multiple of 16 bytes, a lane reads 16 numbers at a time.
    """
    if width == 1:
        return ITEMS, ITEMS, 1
    columns = min(1 << (width - 1).bit_length(), 512 // size)
    group = max((512 if width * size % 16 else 4096 // size) // columns, 1)
    return 8 * group, group, columns


def _copy(
    op: str, mode: int, values: Tensor, leading: int, shape: tuple[int, ...], offsets: Tensor, order: Tensor,
    out_offsets: Tensor, items: int, selected: int, total: int, length: int = 0, padding: float | None = None,
) -> Tensor:  # fmt: skip
    """Launch `copy_items`; `shape`: of the leading dimensions of the result."""
    device = values.device
    raise_due(device)
    out = torch.empty((*shape, *values.shape[leading:]), dtype=values.dtype, device=device)
    if values.shape[leading:].numel():
        words, width = _words(values, leading)
        # The memory of a new tensor is aligned to every word size.
        into = out.view(-1).view(words.dtype)
        pad = 0 if padding is None else _padding(padding, values.dtype, words.dtype)
    else:  # items of no bytes: the kernel still checks the offsets
        words, into = (torch.empty(max(n, 1), dtype=torch.uint8, device=device) for n in (items, total))
        width, pad = 1, 0
    tile, group, columns = tiles(width, words.element_size())
    programs = max(ceil_div(total, tile), ceil_div(selected + 1, CHECKED.value))
    report = new_report(device)
    launch(copy_items, (programs,),
        into, words, offsets, order, out_offsets, report, items, offsets.shape[0] - 1, selected, total, length, pad,
        MODE=mode, W=width, TILE=tile, GROUP=group, COLUMNS=columns,
        num_warps=4 if width == 1 else 1, enable_fp_fusion=False,
    )  # fmt: skip
    post(report, offset_error_raiser(op))
    return out


def segment_ids(offsets_S1: Tensor, total: int) -> Tensor:
    raise_due(offsets_S1.device)
    offsets_S1, segments = as_int64(offsets_S1), offsets_S1.shape[0] - 1
    out_N = torch.empty(total, dtype=torch.int64, device=offsets_S1.device)
    report = new_report(out_N.device)
    programs = max(ceil_div(total, ITEMS), ceil_div(segments + 1, CHECKED.value))
    launch(write_segment_ids, (programs,),
        out_N, offsets_S1, report, segments, total, TILE=ITEMS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    post(report, offset_error_raiser("segment_ids"))
    return out_N


def select_segments(
    values_N: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int
) -> Tensor:
    return _copy(
        "select_segments", SELECT.value, values_N, 1, (total,), as_int64(offsets_S1), as_int64(order_P),
        as_int64(out_offsets_P1), values_N.shape[0], order_P.shape[0], total,
    )  # fmt: skip


def repeat_segments(rows_S: Tensor, offsets_S1: Tensor, total: int) -> Tensor:
    offsets_S1, segments = as_int64(offsets_S1), rows_S.shape[0]
    return _copy(
        "repeat_segments", REPEAT.value, rows_S, 1, (total,), offsets_S1, offsets_S1, offsets_S1, segments, segments,
        total,
    )  # fmt: skip


def jagged_to_padded(values_N: Tensor, offsets_B1: Tensor, length: int, padding: float) -> Tensor:
    if values_N.element_size() > 8:
        return LIBRARY.references["jagged_to_padded"](values_N, offsets_B1, length, padding)
    offsets_B1, bags = as_int64(offsets_B1), offsets_B1.shape[0] - 1
    return _copy(
        "jagged_to_padded", PAD.value, values_N, 1, (bags, length), offsets_B1, offsets_B1, offsets_B1,
        values_N.shape[0], bags, bags * length, length, padding,
    )  # fmt: skip


def padded_to_jagged(padded_BL: Tensor, offsets_B1: Tensor, total: int) -> Tensor:
    offsets_B1, (bags, length) = as_int64(offsets_B1), padded_BL.shape[:2]
    return _copy(
        "padded_to_jagged", UNPAD.value, padded_BL, 2, (total,), offsets_B1, offsets_B1, offsets_B1, bags * length,
        bags, total, length,
    )  # fmt: skip
