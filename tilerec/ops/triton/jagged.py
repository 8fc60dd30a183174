"""The jagged ops on GPUs; `tilerec/ops/jagged.py` says what each computes, with an example.

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

Legend: N items going in, M items coming out, S segments, P selected segments, W words of an item.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.jagged import REFERENCE
from tilerec.ops.jagged_checks import checked, raise_bad_offsets, raise_bad_order
from tilerec.ops.library import LIBRARY
from tilerec.ops.triton.library import on_own_device
from tilerec.ops.triton.reports import new_report, post, raise_due
from tilerec.ops.triton.rows import tell
from tilerec.ops.triton.search import segment_at, segments_of

# Where an output item comes from.
SELECT = tl.constexpr(0)  # a selected segment
REPEAT = tl.constexpr(1)  # the row of its segment
UNPAD = tl.constexpr(2)  # its column in the row of its bag
PAD = tl.constexpr(3)  # its bag's item at its column

# First number of a report.
_OFFSETS = tl.constexpr(1)  # then segment, offset
_ORDER = tl.constexpr(2)  # then position, segment

# Views of a batch may begin anywhere, in the next batch elsewhere: no kernels for that.
ANYWHERE = ["ids", "offsets", "order", "out_offsets"]

_CHECKED = tl.constexpr(256)
"""Offsets that a program checks."""


@triton.jit
def _check_offsets(offsets, segments, end, program, report, EXACT: tl.constexpr):
    """Tell of an offset of this program's share that descends or leaves [0, end]."""
    if program * _CHECKED <= segments:
        at = program * _CHECKED + tl.arange(0, _CHECKED)
        here = tl.load(offsets + at, mask=at <= segments, other=0)
        there = tl.load(offsets + at + 1, mask=at < segments, other=0)
        there = tl.where(at < segments, there, end)
        bad = (here < 0) | (here > there) | (there > end)
        if EXACT:
            bad |= ((at == 0) & (here != 0)) | ((at == segments) & (here != end))
        bad &= at <= segments
        if tl.sum(bad.to(tl.int32), 0) > 0:
            first = tl.min(tl.where(bad, at, segments), 0)
            tell(report, _OFFSETS, first, tl.load(offsets + tl.minimum(first + 1, segments)))


@triton.jit
def _check_order(offsets, segments, order, out_offsets, selected, program, report):
    """Tell of a selected segment of this program's share that is not there, or is shorter than its copy."""
    if program * _CHECKED < selected:
        at = program * _CHECKED + tl.arange(0, _CHECKED)
        here = at < selected
        count = tl.load(out_offsets + at + 1, mask=here, other=0) - tl.load(
            out_offsets + at, mask=here, other=0
        )
        segment = tl.load(order + at, mask=here, other=0)
        known = here & (segment >= 0) & (segment < segments)
        items = tl.load(offsets + segment + 1, mask=known, other=0) - tl.load(
            offsets + segment, mask=known, other=0
        )
        bad = here & (count > 0) & (count > items)
        if tl.sum(bad.to(tl.int32), 0) > 0:
            first = tl.min(tl.where(bad, at, selected), 0)
            tell(report, _ORDER, first, tl.load(order + first))


@triton.jit
def _sources(
    offsets, segments, order, out_offsets, selected, items, length, item, here, low, high, MODE: tl.constexpr
):
    """Of each output item, the input item that it is, and whether there is one."""
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
    """One tile of output items, each `W` words of its input item, or `padding` where it has none.

    SELECT of items [a, b, c] by order [2, 0, 2], offsets [0, 2, 2, 3], out offsets [0, 1, 3, 4]: output item 2 lies in
    selected segment 1 (items 1 to 2), at 1; that is segment 0, which begins at item 0: item 1, b.
    """
    program = tl.program_id(0).to(tl.int64)
    _check_offsets(out_offsets, selected, items if MODE == PAD else total, program, report, MODE != PAD)
    if MODE == SELECT:
        _check_order(offsets, segments, order, out_offsets, selected, program, report)
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
                    words = tl.load(
                        values + source[:, None] * W + columns, mask=present[:, None] & inside, other=0
                    )
                    words = tl.where(present[:, None], words, padding)
                    tl.store(out + item[:, None] * W + columns, words, mask=here[:, None] & inside)


@triton.jit(do_not_specialize=["segments", "total"], do_not_specialize_on_alignment=ANYWHERE)
def write_segment_ids(out, offsets, report, segments, total, TILE: tl.constexpr):
    """One tile of `segment_ids`."""
    program = tl.program_id(0).to(tl.int64)
    _check_offsets(offsets, segments, total, program, report, True)
    first = program * TILE
    if first < total:
        low = segment_at(offsets, segments, first)
        high = segment_at(offsets, segments, tl.minimum(first + TILE, total) - 1)
        item = first + tl.arange(0, TILE)
        tl.store(out + item, segments_of(offsets, item, low, high), mask=item < total)


@triton.jit(do_not_specialize=["items", "segments"], do_not_specialize_on_alignment=ANYWHERE)
def sum_segments(
    out, values, offsets, report, items, segments, W: tl.constexpr, SUM: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The sums of a group of segments, `COLUMNS` columns of them, item after item.

    `AHEAD` items are loaded before the first of them is added: a chain of additions waits for memory once for all.
    """
    program = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _check_offsets(offsets, segments, items, program, report, False)
    segment = program * GROUP + tl.arange(0, GROUP)
    here = segment < segments
    begin = tl.load(offsets + segment, mask=here, other=0)
    end = tl.load(offsets + segment + 1, mask=here, other=0)
    begin = tl.maximum(begin, 0)
    count = tl.minimum(end, items) - begin
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = here[:, None] & (columns < W)
    total = tl.zeros((GROUP, COLUMNS), SUM)
    longest = tl.max(count, 0)
    step = longest * 0
    while step < longest:
        for ahead in tl.static_range(AHEAD):
            at = step + ahead
            item = tl.load(
                values + (begin + at)[:, None] * W + columns, mask=inside & (at < count)[:, None], other=0
            )
            total += item.to(SUM)
        step += AHEAD
    tl.store(out + segment[:, None] * W + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["items", "segments", "selected", "total"], do_not_specialize_on_alignment=ANYWHERE
)
def sum_copies(
    out, grads, offsets, order, out_offsets, first_copy, copies, report, items, segments, selected, total,
    W: tl.constexpr, SUM: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of the transpose of a selection: each of `items` input items, the sum over its copies.

    Segment s was selected at the places `copies[first_copy[s] : first_copy[s + 1]]`, ascending, so the copies are added
    in output order without an atomic. Order [2, 0, 2]: first_copy [0, 1, 1, 3], copies [1, 0, 2].
    """
    program = tl.program_id(0).to(tl.int64)
    _check_offsets(out_offsets, selected, total, program, report, True)
    _check_order(offsets, segments, order, out_offsets, selected, program, report)
    first = program * TILE
    if first < items:
        low = segment_at(offsets, segments, first)
        high = segment_at(offsets, segments, tl.minimum(first + TILE, items) - 1)
        for at in range(0, TILE, GROUP):
            item = first + at + tl.arange(0, GROUP)
            segment = segments_of(offsets, item, low, high)
            here = (item < items) & (segment < segments)
            within = item - tl.load(offsets + segment, mask=here, other=0)
            there = here & (within >= 0) & (item < tl.load(offsets + segment + 1, mask=here, other=0))
            copy = tl.load(first_copy + segment, mask=there, other=0)
            stop = tl.load(first_copy + segment + 1, mask=there, other=0)
            most = tl.max(stop - copy, 0)
            for column in range(0, W, COLUMNS):
                columns = column + tl.arange(0, COLUMNS)[None, :]
                inside = columns < W
                sums = tl.zeros((GROUP, COLUMNS), SUM)
                step = most * 0
                while step < most:
                    more = there & (copy + step < stop)
                    place = tl.load(copies + copy + step, mask=more, other=0)
                    begin = tl.load(out_offsets + place, mask=more, other=0)
                    more &= within < tl.load(out_offsets + place + 1, mask=more, other=0) - begin
                    source = begin + within
                    more &= (source >= 0) & (source < total)
                    grad = tl.load(
                        grads + source[:, None] * W + columns, mask=more[:, None] & inside, other=0
                    )
                    sums += grad.to(SUM)
                    step += 1
                tl.store(
                    out + item[:, None] * W + columns, sums.to(out.dtype.element_ty),
                    mask=(item < items)[:, None] & inside,
                )  # fmt: skip


@triton.jit(do_not_specialize=["items", "segments", "buckets"], do_not_specialize_on_alignment=ANYWHERE)
def deal_ids(keys, counts, ids, offsets, cuts, report, items, segments, buckets, TILE: tl.constexpr):
    """The bucket of each id of a tile, and one more in its segment's count there.

    Counts are integers: the order of their atomic additions leaves no trace.
    """
    program = tl.program_id(0).to(tl.int64)
    _check_offsets(offsets, segments, items, program, report, True)
    first = program * TILE
    if first < items:
        low = segment_at(offsets, segments, first)
        high = segment_at(offsets, segments, tl.minimum(first + TILE, items) - 1)
        item = first + tl.arange(0, TILE)
        here = item < items
        segment = segments_of(offsets, item, low, high)
        begin = tl.load(offsets + segment, mask=here & (segment < segments), other=0)
        end = tl.load(offsets + segment + 1, mask=here & (segment < segments), other=0)
        id_ = tl.load(ids + item, mask=here, other=0).to(tl.int64)
        bucket = segments_of(cuts, id_, 0, buckets - 1)
        tl.store(keys + item, bucket.to(keys.dtype.element_ty), mask=here)
        one = tl.full((TILE,), 1, counts.dtype.element_ty)
        tl.atomic_add(
            counts + bucket * segments + segment,
            one,
            mask=here & (begin <= item) & (item < end),
            sem="relaxed",
        )


@triton.jit(do_not_specialize=["items"])
def local_ids(out, ids, keys, positions, cuts, items, TILE: tl.constexpr):
    """Each id, in the order of `positions`, minus the first row of its bucket."""
    item = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = item < items
    cut = tl.load(cuts + tl.load(keys + item, mask=here, other=0).to(tl.int64), mask=here, other=0)
    id_ = tl.load(ids + tl.load(positions + item, mask=here, other=0), mask=here, other=0)
    tl.store(out + item, (id_.to(tl.int64) - cut).to(out.dtype.element_ty), mask=here)


# ---------------------------------------------------------------------------------------------------------------
# host

_TILE = 1024
"""Items of a tile whose items are one number: 4 warps, 8 numbers a lane."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_SUMS = {
    torch.float32: tl.float32,
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float64: tl.float64,
}
_COUNTED = {torch.int64: tl.int64, torch.int32: tl.int64, torch.int16: tl.int64, torch.int8: tl.int64,
            torch.uint8: tl.int64}  # fmt: skip


def _long(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64)).contiguous()


def _ceil_div(whole: int, part: int) -> int:
    return -(-whole // part)


@functools.lru_cache(maxsize=16)
def _raise(op: str) -> Callable[[int, int, int], None]:
    def raise_(kind: int, position: int, value: int) -> None:
        if kind == _OFFSETS.value:
            raise_bad_offsets(op, position, value)
        raise_bad_order(op, position, value)

    return raise_


def _words(tensor: Tensor, leading: int) -> tuple[Tensor, int]:
    """The tensor's memory as words, and how many make an item; `leading` dimensions are not the item's."""
    size = tensor.element_size()
    flat = tensor.contiguous().view(-1)
    item = tensor.shape[leading:].numel() * size
    word = 8 if item == 8 or size == 8 else 4
    while word > 1 and (item % word or flat.data_ptr() % word or flat.storage_offset() * size % word):
        word //= 2
    return flat.view(_WORDS[word]), item // word


@functools.lru_cache(maxsize=256)
def _padding(value: float, dtype: torch.dtype, word: torch.dtype) -> int:
    """A word of elements of this value."""
    elements = torch.full((word.itemsize // dtype.itemsize,), value, dtype=dtype, device="cpu")
    return int(elements.view(word).item())


def tiles(width: int, size: int) -> tuple[int, int, int]:
    """Items of a tile and of a group, and columns at a time, for items of `width` numbers of `size` bytes.

    Rows are read 16 bytes a lane by one warp, 4 KB at a time: 128 numbers of 4 bytes -> groups of 8 rows, tiles of 64.
    Of rows that are no multiple of 16 bytes a lane reads 16 numbers at a time.
    """
    if width == 1:
        return _TILE, _TILE, 1
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
        # A fresh tensor's memory begins at a multiple of every word.
        into = out.view(-1).view(words.dtype)
        pad = 0 if padding is None else _padding(padding, values.dtype, words.dtype)
    else:  # items of no bytes: their offsets are checked all the same
        words, into = (torch.empty(max(n, 1), dtype=torch.uint8, device=device) for n in (items, total))
        width, pad = 1, 0
    tile, group, columns = tiles(width, words.element_size())
    programs = max(_ceil_div(total, tile), _ceil_div(selected + 1, _CHECKED.value))
    report = new_report(device)
    copy_items[(programs,)](
        into, words, offsets, order, out_offsets, report, items, offsets.shape[0] - 1, selected, total, length, pad,
        MODE=mode, W=width, TILE=tile, GROUP=group, COLUMNS=columns,
        num_warps=4 if width == 1 else 1, enable_fp_fusion=False,
    )  # fmt: skip
    post(report, _raise(op))
    return out


def segment_ids(offsets_S1: Tensor, total: int) -> Tensor:
    raise_due(offsets_S1.device)
    offsets_S1, segments = _long(offsets_S1), offsets_S1.shape[0] - 1
    out_N = torch.empty(total, dtype=torch.int64, device=offsets_S1.device)
    report = new_report(out_N.device)
    programs = max(_ceil_div(total, _TILE), _ceil_div(segments + 1, _CHECKED.value))
    write_segment_ids[(programs,)](
        out_N, offsets_S1, report, segments, total, TILE=_TILE, num_warps=4, enable_fp_fusion=False
    )
    post(report, _raise("segment_ids"))
    return out_N


def select_segments(
    values_N: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int
) -> Tensor:
    return _copy(
        "select_segments", SELECT.value, values_N, 1, (total,), _long(offsets_S1), _long(order_P),
        _long(out_offsets_P1), values_N.shape[0], order_P.shape[0], total,
    )  # fmt: skip


def repeat_segments(rows_S: Tensor, offsets_S1: Tensor, total: int) -> Tensor:
    offsets_S1, segments = _long(offsets_S1), rows_S.shape[0]
    return _copy(
        "repeat_segments", REPEAT.value, rows_S, 1, (total,), offsets_S1, offsets_S1, offsets_S1, segments, segments,
        total,
    )  # fmt: skip


def jagged_to_padded(values_N: Tensor, offsets_B1: Tensor, length: int, padding: float) -> Tensor:
    if values_N.element_size() > 8:
        return REFERENCE["jagged_to_padded"](values_N, offsets_B1, length, padding)
    offsets_B1, bags = _long(offsets_B1), offsets_B1.shape[0] - 1
    return _copy(
        "jagged_to_padded", PAD.value, values_N, 1, (bags, length), offsets_B1, offsets_B1, offsets_B1,
        values_N.shape[0], bags, bags * length, length, padding,
    )  # fmt: skip


def padded_to_jagged(padded_BL: Tensor, offsets_B1: Tensor, total: int) -> Tensor:
    offsets_B1, (bags, length) = _long(offsets_B1), padded_BL.shape[:2]
    return _copy(
        "padded_to_jagged", UNPAD.value, padded_BL, 2, (total,), offsets_B1, offsets_B1, offsets_B1, bags * length,
        bags, total, length,
    )  # fmt: skip


def select_segments_backward(
    grad_M: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int
) -> Tensor:
    sum_type = _SUMS.get(grad_M.dtype) or _COUNTED.get(grad_M.dtype)
    if sum_type is None:
        return REFERENCE["select_segments_backward"](grad_M, offsets_S1, order_P, out_offsets_P1, total)
    device = grad_M.device
    raise_due(device)
    offsets_S1, order_P, out_offsets_P1 = _long(offsets_S1), _long(order_P), _long(out_offsets_P1)
    segments, selected = offsets_S1.shape[0] - 1, order_P.shape[0]
    grad_M, width = grad_M.contiguous(), grad_M.shape[1:].numel()
    out_N = torch.empty((total, *grad_M.shape[1:]), dtype=grad_M.dtype, device=device)
    # Segments are sorted, not items: few of them, and keys of 4 bytes if there are many.
    keys_P = order_P.to(torch.int32) if selected > 4096 and segments < 1 << 31 else order_P
    sorted_P, copies_P = torch.sort(keys_P, stable=True)
    numbers_S1 = torch.arange(segments + 1, dtype=sorted_P.dtype, device=device)
    first_copy_S1 = torch.searchsorted(sorted_P, numbers_S1)
    tile, group, columns = tiles(width, grad_M.element_size()) if width else (_TILE, _TILE, 1)
    group = max(group // (4 // min(grad_M.element_size(), 4)), 1)  # sums are 4 bytes wide
    programs = max(_ceil_div(total, tile) if width else 0, _ceil_div(selected + 1, _CHECKED.value))
    report = new_report(device)
    sum_copies[(programs,)](
        out_N, grad_M, offsets_S1, order_P, out_offsets_P1, first_copy_S1, copies_P, report, total if width else 0,
        segments, selected, grad_M.shape[0], W=max(width, 1), SUM=sum_type, TILE=tile, GROUP=group, COLUMNS=columns,
        num_warps=4 if width == 1 else 1, enable_fp_fusion=False,
    )  # fmt: skip
    post(report, _raise("select_segments_backward"))
    return out_N


def segment_sum(values_N: Tensor, offsets_S1: Tensor) -> Tensor:
    sum_type = _SUMS.get(values_N.dtype) or _COUNTED.get(values_N.dtype)
    if sum_type is None:
        return REFERENCE["segment_sum"](values_N, offsets_S1)
    device = values_N.device
    raise_due(device)
    offsets_S1, values_N = _long(offsets_S1), values_N.contiguous()
    segments, width = offsets_S1.shape[0] - 1, values_N.shape[1:].numel()
    out_S = torch.empty((segments, *values_N.shape[1:]), dtype=values_N.dtype, device=device)
    # A lane reads 16 bytes of an item at a time, as one or, of shorter rows, from several segments.
    lanes = 512 // values_N.element_size()
    columns = min(1 << (max(width, 1) - 1).bit_length(), lanes)
    group = lanes // columns
    # Programs past the last segment, if any, only check offsets.
    programs = max(_ceil_div(segments, group), _ceil_div(segments + 1, _CHECKED.value))
    report = new_report(device)
    sum_segments[(programs, max(_ceil_div(width, columns), 1))](
        out_S, values_N, offsets_S1, report, values_N.shape[0], segments, W=width, SUM=sum_type, GROUP=group,
        COLUMNS=columns, AHEAD=8, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    post(report, _raise("segment_sum"))
    return out_S


def bucketize_by_cuts(ids_N: Tensor, lengths_S: Tensor, cuts_C1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    known = (torch.int32, torch.int64)
    if ids_N.dtype not in known or lengths_S.dtype not in known:
        return REFERENCE["bucketize_by_cuts"](ids_N, lengths_S, cuts_C1)
    device = ids_N.device
    raise_due(device)
    ids_N, cuts_C1 = ids_N.contiguous(), _long(cuts_C1)
    offsets_S1 = torch.ops.tilerec.offsets_from_lengths.default(lengths_S)
    items, segments, buckets = ids_N.shape[0], lengths_S.shape[0], cuts_C1.shape[0] - 1
    lengths_CS = torch.zeros(buckets * segments, dtype=lengths_S.dtype, device=device)
    keys_N = torch.empty(items, dtype=key_type(buckets), device=device)
    tile = 256
    programs = max(_ceil_div(items, tile), _ceil_div(segments + 1, _CHECKED.value))
    report = new_report(device)
    deal_ids[(programs,)](
        keys_N,
        lengths_CS,
        ids_N,
        offsets_S1,
        cuts_C1,
        report,
        items,
        segments,
        buckets,
        TILE=tile,
        num_warps=1,
        enable_fp_fusion=False,
    )
    post(report, _raise("bucketize_by_cuts"))
    keys_N, positions_N = torch.sort(keys_N, stable=True)
    local_ids_N = torch.empty_like(ids_N)
    if items:
        local_ids[(_ceil_div(items, _TILE),)](
            local_ids_N,
            ids_N,
            keys_N,
            positions_N,
            cuts_C1,
            items,
            TILE=_TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return lengths_CS, local_ids_N, positions_N


def key_type(keys: int) -> torch.dtype:
    """The narrowest integers that hold 0 to `keys` - 1: a radix sort takes one pass over each of their bytes."""
    if keys <= 1 << 8:
        return torch.uint8
    return torch.int16 if keys <= 1 << 15 else torch.int32


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
