"""`place_rows_` and `pick_rows` on GPUs: copy the rows of segments to their places, and from them.

`definition.py` defines segments.

  wave     segments that write different elements of the output; waves run one after another

One launch (and one per wave if rows of several segments are added up in one place): programs own tiles of rows of one
segment, and each lane reads and writes 16 bytes.

Legend: S segments.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.exchange.definition import _pick_rows_reference_, _place_rows_reference_
from tilerec.ops.runtime.triton.addresses import cached_per_stream, upload
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.runtime.triton.reports import new_report, post, raise_due
from tilerec.ops.runtime.triton.rows import take_report
from tilerec.ops.runtime.triton.search import segment_at

# Rows of `table`, int64 [9, S].
_TILES = tl.constexpr(0)  # its first tile
_COUNT = tl.constexpr(1)
_START = tl.constexpr(2)  # first element of its rows
_SLOTS = tl.constexpr(3)
_WIDTH = tl.constexpr(4)
_PLACE = tl.constexpr(5)
_STRIDE = tl.constexpr(6)
_ADDS = tl.constexpr(7)
_NUMBER = tl.constexpr(8)


@triton.jit(do_not_specialize=["segments", "first_tile", "elements"], do_not_specialize_on_alignment=["slots"])
def move_rows(
    flat, rows, slots, table, report, segments, first_tile, elements,
    PICK: tl.constexpr, ADDS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Copy one tile of a segment's rows to their places in `flat` or, with PICK, from them.

    table: [9, S]. Widths, places and strides are multiples of VEC. The kernel loads them, so they can be hinted.
    """
    program = tl.program_id(0).to(tl.int64) + first_tile
    s = table + segment_at(table, segments, program)
    count = tl.load(s + _COUNT * segments)
    width = tl.multiple_of(tl.load(s + _WIDTH * segments), VEC)
    start = tl.multiple_of(tl.load(s + _START * segments), VEC)
    place = tl.multiple_of(tl.load(s + _PLACE * segments), VEC)
    stride = tl.multiple_of(tl.load(s + _STRIDE * segments), VEC)
    own_slots = tl.load(s + _SLOTS * segments)
    row = (program - tl.load(s)) * ROWS + tl.arange(0, ROWS)
    here = row < count
    slot = row
    if own_slots >= 0:
        slot = tl.load(slots + own_slots + row, mask=here, other=0).to(tl.int64)
    element = place + slot * stride
    fits = here & (slot >= 0) & (element >= 0) & (element + width <= elements)
    if tl.sum((here & ~fits).to(tl.int32), 0) > 0:
        lowest = tl.min(tl.where(here, slot, 0), 0)
        take_report(report, tl.load(s + _NUMBER * segments), lowest, 0)
    row_pointers = rows + (start + row * width)[:, None]
    place_pointers = flat + element[:, None]
    for column in range(0, width, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)[None, :]
        inside = fits[:, None] & (columns < width)
        if PICK:
            # Rows outside `flat` are zeros; the report has been taken above.
            taken = tl.load(place_pointers + columns, mask=inside, other=0)
            tl.store(row_pointers + columns, taken, mask=here[:, None] & (columns < width))
        else:
            moved = tl.load(row_pointers + columns, mask=inside, other=0)
            if ADDS and tl.load(s + _ADDS * segments) != 0:
                old = tl.load(place_pointers + columns, mask=inside, other=0)
                if HALF:
                    moved = (old.to(tl.float32) + moved.to(tl.float32)).to(flat.dtype.element_ty)
                else:
                    moved += old
            tl.store(place_pointers + columns, moved, mask=inside)


@dataclass(frozen=True)
class _Moves:
    """Constants of a list of segments, independent of their counts."""

    order: npt.NDArray[np.int64]  # segments, wave after wave
    in_order: bool  # there is one wave
    waves: tuple[int, ...]  # index in `order` of each wave's first segment, and the end of the last wave
    numbers: npt.NDArray[np.int64]  # [5, S]: widths, places, strides, adds, numbers, in that order
    # In the segments' own order: columns, and the rows of each that fit into the tensor (dense rows; rows by slots,
    # for which _MANY means that only the kernel can check).
    widths: npt.NDArray[np.int64]
    dense_rows: npt.NDArray[np.int64]
    slot_rows: npt.NDArray[np.int64]
    some_empty: bool
    unit: int  # a power of two that divides all widths, places and strides
    widest: int
    adds: bool
    sound: bool  # no number is negative


_MANY = 1 << 40


@functools.lru_cache(maxsize=256)
def _moves(
    widths: tuple[int, ...], places: tuple[int, ...], strides: tuple[int, ...], adds: tuple[int, ...] | None,
    elements: int,
) -> _Moves:  # fmt: skip
    assert len({len(widths), len(places), len(strides), len(widths if adds is None else adds)}) == 1, (
        "rows: lists of different lengths"
    )
    sound = min(*widths, *places, *strides, 0) == 0
    wave_of = [0] * len(widths) if adds is None or not sound else _wave_of(widths, places, strides)
    order = sorted(range(len(widths)), key=lambda s: wave_of[s])
    sizes = [wave_of.count(wave) for wave in range(max(wave_of, default=-1) + 1)]
    # Clamp strides to one behind the tensor's end: larger ones are equally out of range, and could overflow.
    lists = (
        widths, places, [min(stride, elements + 1) for stride in strides], adds or (0,) * len(widths),
        range(len(widths)),
    )  # fmt: skip
    free = [elements - place - width for place, width in zip(places, widths, strict=True)]
    dense = [room // stride + 1 if stride and room >= 0 else _MANY * (room >= 0)
             for room, stride in zip(free, strides, strict=True)]  # fmt: skip
    unit = functools.reduce(math.gcd, (*widths, *places, *strides), 16)
    return _Moves(
        np.array(order, dtype=np.int64), len(sizes) < 2, tuple(itertools.accumulate(sizes, initial=0)),
        np.array(lists, dtype=np.int64)[:, order], np.array(widths, dtype=np.int64), np.array(dense, dtype=np.int64),
        np.array([_MANY * (room >= 0) for room in free], dtype=np.int64), 0 in widths, unit & -unit,
        max(widths, default=0), any(adds or ()), sound,
    )  # fmt: skip


def _wave_of(widths: Sequence[int], places: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the wave of each segment: segments of the same places run one after another, all others at once.

    A block is a run of segments of one stride whose places lie less than that stride apart, counted from the first of
    them. Segments of two blocks must not overlap: the slots of a block end before the next block. Callers of
    `place_rows_` guarantee this. It holds in a flat output, where slots lie one after another, and in an output of one
    row per bag, which is one block. If columns overlap in part within a block, or rows reach into the next, every
    segment gets its own wave.

    Example: width 4, stride 8, places 0, 4, 0, 20 (another block): waves 0, 0, 1, 0; places 0, 2: waves 0, 1.
    """
    columns: dict[int, set[tuple[int, int]]] = {}
    for width, place, stride in zip(widths, places, strides, strict=True):
        if width > stride:
            return list(range(len(widths)))
        if width:
            columns.setdefault(stride, set()).add((place, width))
    for stride, intervals in columns.items():
        block = end = -stride
        for begin, width in sorted(intervals):
            if begin >= block + stride:
                block = end = begin
            elif begin < end:
                return list(range(len(widths)))
            end = begin + width
            if end > block + stride:  # the row's end overlaps the next row's begin
                return list(range(len(widths)))
    seen: dict[tuple[int, int, int], int] = {}
    waves = []
    for target in zip(widths, places, strides, strict=True):
        waves.append(seen.get(target, 0))
        seen[target] = waves[-1] + 1
    return waves


def _refuse(op: str, elements: int, row_elements: int, slot_count: int, lists: tuple[tuple[int, ...], ...]) -> None:
    """Raise an `AssertionError` for the first segment that does not fit."""
    at = 0
    for s, (count, width, start, place, stride) in enumerate(zip(*lists, strict=True)):
        assert min(count, width, stride) >= 0, f"{op}: segment {s} has a negative shape"
        assert at + count * width <= row_elements, f"{op}: segment {s} has more rows than there are"
        at += count * width
        if count:
            assert start < 0 or start + count <= slot_count, f"{op}: segment {s} has slots that are not there"
            end = place + (count - 1) * stride * (start < 0) + width
            assert 0 <= place <= end <= elements, f"{op}: segment {s} has places outside its tensor"


@functools.lru_cache(maxsize=4)
def _raise_segment(op: str) -> Callable[[int, int, int], None]:
    def raise_(segment: int, lowest: int, _: int) -> None:
        what = "negative slots" if lowest < 0 else "places outside its tensor"
        raise AssertionError(f"{op}: segment {segment} has {what}")

    return raise_


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALVES = (torch.float16, torch.bfloat16)
_SUMMED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip


class _Plan(NamedTuple):
    """Arguments of a call's launches."""

    table: Tensor  # int64 [9 * S], on the device
    ends: tuple[int, ...]  # of each wave's tiles
    adds: bool
    vec: int
    columns: int
    tile: int  # rows of a tile


def _plan(
    op: str, lists: tuple[tuple[int, ...], ...], adds: tuple[int, ...] | None, elements: int, row_elements: int,
    slot_count: int, size: int, aligned: int, device: torch.device,
) -> _Plan:  # fmt: skip
    """Return the plan of a call, and check its segments.

    size: bytes of an element; aligned: bytes that divide the addresses of flat and rows, a power of two up to 16.
    """
    counts, widths, slot_starts, places, strides = lists
    segments = len(counts)
    moves = _moves(widths, places, strides, adds, elements)
    count_S, start_S = now = np.array((counts, slot_starts), dtype=np.int64)
    fits_S = np.where(start_S < 0, moves.dense_rows, np.minimum(slot_count - start_S, moves.slot_rows))
    row_starts_S1 = np.zeros(segments + 1, dtype=np.int64)
    np.cumsum(count_S * moves.widths, out=row_starts_S1[1:])
    if not (moves.sound and (count_S <= fits_S).all() and count_S.min() >= 0 and row_starts_S1[-1] <= row_elements):
        _refuse(op, elements, row_elements, slot_count, lists)
    vec = max(min(moves.unit, aligned // size), 1)
    columns = min(1 << max(moves.widest - 1, 0).bit_length(), 512 // size)
    tile = max(min(4096 // size, 512 * vec) // columns, 1)  # 4 KB in flight, 16 loads a lane at most
    table = np.empty((9, segments), dtype=np.int64)
    table[_COUNT.value :: 2][:2] = now if moves.in_order else now[:, moves.order]
    table[_START.value] = row_starts_S1[:-1] if moves.in_order else row_starts_S1[moves.order]
    table[_WIDTH.value :] = moves.numbers
    tiles_S = (table[_COUNT.value] + (tile - 1)) // tile
    if moves.some_empty:  # segments of no columns have no tiles
        tiles_S *= table[_WIDTH.value] > 0
    ends_S = tiles_S.cumsum()
    np.subtract(ends_S, tiles_S, out=table[_TILES.value])
    ends = tuple([int(ends_S[end - 1]) for end in moves.waves[1:]])
    return _Plan(upload(table.reshape(-1), device), ends, adds is not None and moves.adds, vec, columns, tile)


_kept_plan = cached_per_stream(64)(_plan)


def _move(
    op: str, flat: Tensor, rows: Tensor, slots: Tensor, lists: Sequence[Sequence[int]], adds: Sequence[int] | None,
) -> None:  # fmt: skip
    """`lists`: of the segments, in the order of the ops' arguments."""
    device, (counts, _, slot_starts, _, _) = flat.device, lists
    raise_due(device)
    segments = len(counts)
    assert len(slot_starts) == segments, f"{op}: lists of different lengths"
    if not segments:
        return
    elements, where = flat.numel(), flat.data_ptr() | rows.data_ptr() | 16
    # Cache plans without slots: their segments have one row per bag, most likely as many in the next step.
    plan = (_kept_plan if max(slot_starts) < 0 else _plan)(
        op, tuple(map(tuple, lists)), None if adds is None else tuple(adds), elements, rows.numel(), slots.numel(),
        flat.element_size(), where & -where, device,
    )  # fmt: skip
    if not plan.ends[-1]:
        return
    if not plan.adds:
        flat, rows = flat.view(-1).view(_BITS[flat.element_size()]), rows.view(_BITS[rows.element_size()])
    report = new_report(device)
    done = 0
    for end in plan.ends:
        if end > done:
            launch(move_rows, (end - done,),
                flat, rows, slots, plan.table, report, segments, done, elements,
                PICK=adds is None, ADDS=plan.adds, HALF=flat.dtype in _HALVES, ROWS=plan.tile, COLUMNS=plan.columns,
                VEC=plan.vec, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        done = max(done, end)
    post(report, _raise_segment(op))


def _serves(flat: Tensor, rows: Tensor, slots: Tensor) -> bool:
    """Return True if the kernel reads such tensors; the reference raises the errors for others."""
    return (
        flat.dtype == rows.dtype
        and flat.element_size() <= 8
        and slots.dtype == torch.int32
        and flat.is_contiguous()
        and rows.is_contiguous()
        and slots.is_contiguous()
    )


def place_rows_(out: Tensor, rows: Tensor, slots: Tensor, *rest: Any) -> None:
    lists, fresh = rest[:6], rest[6:] == (True,)
    if not _serves(out, rows, slots) or (any(lists[-1]) and out.dtype not in _SUMMED):
        _place_rows_reference_(out, rows, slots, *rest)
        return
    if fresh:
        out.zero_()
    _move("place_rows_", out, rows, slots, lists[:-1], lists[-1])


def pick_rows_(rows: Tensor, source: Tensor, slots: Tensor, *lists: Sequence[int]) -> None:
    if _serves(source, rows, slots):
        _move("pick_rows_", source, rows, slots, lists, None)
    else:
        _pick_rows_reference_(rows, source, slots, *lists)
