"""The exchange ops on GPUs; `tilerec/ops/exchange.py` says what they mean, with examples.

Nouns (beside those of that file)
  layer    routes that read different keys: the first route of every key, then the second of those that have one …
  entry    a route in its layer; entries stand in the order of their bags
  item     one id in one layer, number  layer * N + position;  V of them. Mostly there is one layer: items are ids
  place    of an item: that of its part in wire order; K where it does not travel
  wave     segments that touch different elements of the output; waves run one after another

`route_ids`, in 11 launches, about 90 bytes per id over memory:

  deal     per item: its bag (searched in the offsets), its route, its part (searched in the cuts) -> place, 1 or 2
           bytes
  sort     items by place, stable, on keys that narrow (torch's radix sort: one pass, or two)
  order    per item in wire order: local id, position, bag number; how many bags begin in each tile
  number   the present bags' numbers: a tile's first is the sum of the tiles before it

Its results are as long as the batch says, so the host waits once, at the end, for two sizes (and learns there what
was wrong, so that it raises at once, as on the CPU). Nothing before waits.

`place_rows_` and `pick_rows` are one launch (and one per wave where rows of several segments are added up in one
place): programs own tiles of rows of one segment, read and write 16 bytes a lane.

Legend: N ids, V items, K parts that travel, P present bags, S segments.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.exchange import (
    _pick_rows_reference_,
    _place_rows_reference_,
    check_route,
    raise_bad_offsets,
    raise_few_offsets,
)
from tilerec.ops.gradient import bag_starts
from tilerec.ops.library import LIBRARY
from tilerec.ops.lookup import raise_bad_id
from tilerec.ops.triton.addresses import constants, upload
from tilerec.ops.triton.jagged import ANYWHERE, key_type
from tilerec.ops.triton.library import on_own_device
from tilerec.ops.triton.reports import new_report, post, raise_due
from tilerec.ops.triton.rows import tell
from tilerec.ops.triton.search import segment_at, segments_of

# A fault is one number, the larger the earlier: _LAST - (route, whether an id, position). So the one that is told is
# the CPU's, whichever program comes first.
_ROUTE_BITS = tl.constexpr(43)
_ID_BIT = tl.constexpr(1 << 42)
_LAST = tl.constexpr((1 << 62) - 1)

# Numbers of an entry.
_FIRST = tl.constexpr(0)  # its route's first bag
_BAGS = tl.constexpr(1)
_CUTS = tl.constexpr(2)  # where its cuts begin
_RANGES = tl.constexpr(3)
_PARTS = tl.constexpr(4)  # where its parts begin
_ROUTE = tl.constexpr(5)


@triton.jit(do_not_specialize=["count", "bags", "width", "parts"], do_not_specialize_on_alignment=ANYWHERE)
def deal_items(
    places_V, bags_V, told, ids, offsets, entries, layers, cuts, wire, count, bags, width, parts,
    EACH_ID: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The places of a tile of ids in one layer, and the number of each one's bag within its key.

    entries: [6, width], `width` in all; layers: where each layer's begin, with the end of the last. STEPS: halvings of
    the longest list of cuts.
    """
    program = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    first_entry = tl.load(layers + layer)
    last_entry = tl.load(layers + layer + 1) - 1
    firsts = entries + _FIRST * width

    # This program's share of the offsets, bag by bag; the first program: each route's first offset, too.
    if program * TILE < bags:
        bag = program * TILE + tl.arange(0, TILE)
        entry = segments_of(firsts, bag, first_entry, last_entry)
        first = tl.load(firsts + entry)
        owned = (bag < bags) & (bag >= first) & (bag < first + tl.load(entries + _BAGS * width + entry))
        here = tl.load(offsets + bag, mask=owned, other=0)
        there = tl.load(offsets + bag + 1, mask=owned, other=0)
        route = tl.load(entries + _ROUTE * width + entry)
        code = (route << _ROUTE_BITS) + bag + 1
        bad = owned & ((there < here) | (there < 0) | (there > count))
        if tl.sum(bad.to(tl.int32), 0) > 0:
            tl.atomic_max(told, tl.max(tl.where(bad, _LAST - code, 0), 0))
    if program == 0:
        for begin in range(first_entry, last_entry + 1, TILE):
            entry = begin + tl.arange(0, TILE)
            known = entry <= last_entry
            bag = tl.load(firsts + entry, mask=known, other=0)
            start = tl.load(offsets + bag, mask=known, other=0)
            code = (tl.load(entries + _ROUTE * width + entry, mask=known, other=0) << _ROUTE_BITS) + bag
            bad = (start < 0) | (start > count)
            if tl.sum(bad.to(tl.int32), 0) > 0:
                tl.atomic_max(told, tl.max(tl.where(bad, _LAST - code, 0), 0))

    if program * TILE < count:
        last = tl.minimum(program * TILE + TILE, count) - 1
        low = segment_at(offsets, bags, program * TILE)
        high = segment_at(offsets, bags, last)
        low_entry = first_entry + segment_at(firsts + first_entry, last_entry + 1 - first_entry, low)
        high_entry = first_entry + segment_at(firsts + first_entry, last_entry + 1 - first_entry, high)
        position = program * TILE + tl.arange(0, TILE)
        inside = position < count
        bag = segments_of(offsets, position, low, high)
        inside &= bag < bags
        inside &= (tl.load(offsets + bag, mask=inside, other=0) <= position) & (
            position < tl.load(offsets + bag + 1, mask=inside, other=0)
        )
        entry = segments_of(firsts, bag, low_entry, high_entry)
        first = tl.load(firsts + entry)
        inside &= (bag >= first) & (bag < first + tl.load(entries + _BAGS * width + entry))
        cut = tl.load(entries + _CUTS * width + entry)
        ranges = tl.load(entries + _RANGES * width + entry)
        id_ = tl.load(ids + position, mask=inside, other=0).to(tl.int64)
        bad = inside & ((id_ < 0) | (id_ >= tl.load(cuts + cut + ranges)))
        if tl.sum(bad.to(tl.int32), 0) > 0:
            route = tl.load(entries + _ROUTE * width + entry)
            code = (route << _ROUTE_BITS) + _ID_BIT + position
            tl.atomic_max(told, tl.max(tl.where(bad, _LAST - code, 0), 0))
        part = position * 0
        for step in tl.static_range(STEPS):
            tried = part + (1 << (STEPS - 1 - step))
            passes = tl.load(cuts + cut + tried, mask=tried < ranges, other=9223372036854775807) <= id_
            part = tl.where(passes, tried, part)
        place = tl.load(wire + tl.load(entries + _PARTS * width + entry) + part, mask=inside & ~bad, other=-1)
        place = tl.where(place < 0, parts, place)
        if EACH_ID:
            number = position - tl.load(offsets + first, mask=inside, other=0)
        else:
            number = bag - first
        item = layer * count + position
        tl.store(places_V + item, place.to(places_V.dtype.element_ty), mask=last >= position)
        tl.store(bags_V + item, number.to(tl.int32), mask=last >= position)


@triton.jit(do_not_specialize=["count", "items", "parts"], do_not_specialize_on_alignment=ANYWHERE)
def order_items(
    local_V, positions_V, numbers_V, begun_T, ids, places_V, order_V, bags_V, lower, count, items, parts,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of a tile of items in wire order: local ids, positions, bag numbers; and how many bags begin in it."""
    program = tl.program_id(0).to(tl.int64)
    item = program * TILE + tl.arange(0, TILE)
    here = item < items
    place = tl.load(places_V + item, mask=here, other=0).to(tl.int64)
    here &= place < parts
    source = tl.load(order_V + item, mask=here, other=0)
    number = tl.load(bags_V + source, mask=here, other=0)
    after = here & (item > 0)
    before = tl.load(places_V + item - 1, mask=after, other=0).to(tl.int64)
    number_before = tl.load(bags_V + tl.load(order_V + item - 1, mask=after, other=0), mask=after, other=0)
    begins = here & ((item == 0) | (place != before) | (number != number_before))
    tl.store(begun_T + program, tl.sum(begins.to(tl.int32), 0))
    position = source % count
    id_ = tl.load(ids + position, mask=here, other=0).to(tl.int64)
    local = id_ - tl.load(lower + place, mask=here, other=0)
    tl.store(local_V + item, local.to(local_V.dtype.element_ty), mask=here)
    tl.store(positions_V + item, position, mask=here)
    tl.store(numbers_V + item, number, mask=here)


@triton.jit(do_not_specialize=["items", "parts"])
def number_bags(lengths_P, slots_P, told, places_V, numbers_V, begun_T, items, parts, TILE: tl.constexpr):
    """Number the present bags of a tile, and count.

    A count is (end - begin), added up in integers by the item that begins and by the one that ends: of a bag, of the
    bags and of the ids of a part. What nobody begins is 0.
    """
    program = tl.program_id(0).to(tl.int64)
    earlier = tl.full((), 0, tl.int64)
    for begin in range(0, program, TILE):
        tile = begin + tl.arange(0, TILE)
        earlier += tl.sum(tl.load(begun_T + tile, mask=tile < program, other=0), 0).to(tl.int64)
    item = program * TILE + tl.arange(0, TILE)
    here = item < items
    place = tl.load(places_V + item, mask=here, other=0).to(tl.int64)
    here &= place < parts
    number = tl.load(numbers_V + item, mask=here, other=0)
    after, more = here & (item > 0), here & (item + 1 < items)
    before = tl.load(places_V + item - 1, mask=after, other=0).to(tl.int64)
    behind = tl.load(places_V + item + 1, mask=more, other=0).to(tl.int64)
    starts = here & ((item == 0) | (place != before))
    begins = starts | (here & (number != tl.load(numbers_V + item - 1, mask=after, other=0)))
    stops = here & ((item + 1 == items) | (place != behind))
    ends = stops | (here & (number != tl.load(numbers_V + item + 1, mask=more & (behind < parts), other=0)))
    bag = earlier + tl.cumsum(begins.to(tl.int32), 0) - 1
    tl.store(slots_P + bag, number, mask=begins)
    tl.atomic_add(lengths_P + bag, (-item).to(tl.int32), mask=begins, sem="relaxed")
    tl.atomic_add(lengths_P + bag, (item + 1).to(tl.int32), mask=ends, sem="relaxed")
    counts = told + 3 + 2 * place
    tl.atomic_add(counts, -bag, mask=starts, sem="relaxed")
    tl.atomic_add(counts, bag + 1, mask=stops, sem="relaxed")
    tl.atomic_add(counts + 1, -item, mask=starts, sem="relaxed")
    tl.atomic_add(counts + 1, item + 1, mask=stops, sem="relaxed")
    # The last item that travels says how many there were.
    final = stops & ((item + 1 == items) | (behind >= parts))
    tl.store(told + 1 + item * 0, bag + 1, mask=final)
    tl.store(told + 2 + item * 0, item + 1, mask=final)


# ---------------------------------------------------------------------------------------------------------------
# rows

# Numbers of a segment.
_TILES = tl.constexpr(0)  # its first tile
_COUNT = tl.constexpr(1)
_START = tl.constexpr(2)  # element of its rows
_SLOTS = tl.constexpr(3)
_WIDTH = tl.constexpr(4)
_PLACE = tl.constexpr(5)
_STRIDE = tl.constexpr(6)
_ADDS = tl.constexpr(7)
_NUMBER = tl.constexpr(8)


@triton.jit(
    do_not_specialize=["segments", "first_tile", "elements"], do_not_specialize_on_alignment=["slots"]
)
def move_rows(
    flat, rows, slots, table, report, segments, first_tile, elements,
    PICK: tl.constexpr, ADDS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """One tile of a segment's rows, to their places in `flat` or, with PICK, from them.

    table: [9, S]. Widths, places and strides are multiples of VEC: what is loaded can be hinted.
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
    good = here & (slot >= 0) & (element >= 0) & (element + width <= elements)
    if tl.sum((here & ~good).to(tl.int32), 0) > 0:
        lowest = tl.min(tl.where(here, slot, 0), 0)
        tell(report, tl.load(s + _NUMBER * segments), lowest, 0)
    mine = rows + (start + row * width)[:, None]
    theirs = flat + element[:, None]
    for column in range(0, width, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)[None, :]
        inside = good[:, None] & (columns < width)
        if PICK:
            # What is not there is zero, and told.
            taken = tl.load(theirs + columns, mask=inside, other=0)
            tl.store(mine + columns, taken, mask=here[:, None] & (columns < width))
        else:
            moved = tl.load(mine + columns, mask=inside, other=0)
            if ADDS and tl.load(s + _ADDS * segments) != 0:
                old = tl.load(theirs + columns, mask=inside, other=0)
                if HALF:
                    moved = (old.to(tl.float32) + moved.to(tl.float32)).to(flat.dtype.element_ty)
                else:
                    moved += old
            tl.store(theirs + columns, moved, mask=inside)


# ---------------------------------------------------------------------------------------------------------------
# host: routing

_TILE = 256


@dataclass(frozen=True)
class _Layout:
    """What is known of routes before a batch: all but where their bags lie."""

    order: tuple[int, ...]  # routes, layer after layer, each in the order of its keys
    layers: tuple[int, ...]
    cut_starts: tuple[int, ...]
    part_starts: tuple[int, ...]
    lower: tuple[int, ...]  # first row of each part, in wire order
    parts: int
    steps: int


@functools.lru_cache(maxsize=64)
def _layout(
    keys: tuple[int, ...], cuts: tuple[int, ...], ranges: tuple[int, ...], wire: tuple[int, ...]
) -> _Layout:
    check_route(cuts, ranges, wire)
    cut_starts = list(itertools.accumulate([count + 1 for count in ranges], initial=0))
    part_starts = list(itertools.accumulate(ranges, initial=0))
    seen: dict[int, int] = {}
    layer_of = []
    for key in keys:
        layer_of.append(seen.get(key, 0))
        seen[key] = layer_of[-1] + 1
    order = sorted(range(len(keys)), key=lambda r: (layer_of[r], keys[r]))
    sizes = [layer_of.count(layer) for layer in range(max(layer_of, default=-1) + 1)]
    parts = sum(place >= 0 for place in wire)
    lower = [0] * max(parts, 1)
    for r, count in enumerate(ranges):
        for c in range(count):
            place = wire[part_starts[r] + c]
            if place >= 0:
                lower[place] = cuts[cut_starts[r] + c]
    return _Layout(
        tuple(order), tuple(itertools.accumulate(sizes, initial=0)), tuple(cut_starts), tuple(part_starts),
        tuple(lower), parts, max(max(ranges, default=1) - 1, 0).bit_length(),
    )  # fmt: skip


def route_ids(
    ids: Tensor,
    offsets: Tensor,
    keys: Sequence[int],
    batches: Sequence[int],
    cuts: Sequence[int],
    ranges: Sequence[int],
    wire: Sequence[int],
    each_id: bool,
    dtype: torch.dtype,
    names: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    device = ids.device
    raise_due(device)
    layout = _layout(tuple(keys), tuple(cuts), tuple(ranges), tuple(wire))
    first_bags, bags = bag_starts(keys, batches)
    for r, (first, own) in enumerate(zip(first_bags, bags, strict=True)):
        if own < 0 or first + own + 1 > offsets.numel():
            raise_few_offsets(names, r, keys[r], offsets.numel())
    ids = (ids if ids.dtype in (torch.int32, torch.int64) else ids.to(torch.int64)).contiguous()
    offsets = offsets.to(torch.int64).contiguous()
    count, parts, layers = ids.numel(), layout.parts, len(layout.layers) - 1
    items = count * layers
    if not layers:
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        return nothing.new_zeros((0, 2)).long(), nothing, nothing.to(dtype), nothing, nothing.long()

    entries = [
        column[r]
        for column in (first_bags, bags, layout.cut_starts, ranges, layout.part_starts, range(len(keys)))
        for r in layout.order
    ]
    # A batch of one size has its bags where the last one had them.
    sent = constants(tuple(entries), device) if len(batches) == 1 else upload(entries, device)
    told = torch.zeros(3 + 2 * parts, dtype=torch.int64, device=device)
    places_V = torch.empty(items, dtype=key_type(parts + 1), device=device)
    bags_V = torch.empty(items, dtype=torch.int32, device=device)
    programs = max(-(-max(count, offsets.numel() - 1) // _TILE), 1)
    deal_items[(programs, layers)](
        places_V, bags_V, told, ids, offsets, sent, constants(layout.layers, device), constants(tuple(cuts), device),
        constants(tuple(wire), device), count, offsets.numel() - 1, len(keys), parts,
        EACH_ID=each_id, STEPS=layout.steps, TILE=_TILE, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    places_V, order_V = torch.sort(places_V, stable=True)
    local_V = torch.empty(items, dtype=dtype, device=device)
    positions_V = torch.empty(items, dtype=torch.int64, device=device)
    numbers_V, slots_P = (torch.empty(items, dtype=torch.int32, device=device) for _ in range(2))
    lengths_P = torch.zeros(items, dtype=torch.int32, device=device)
    tiles = -(-items // _TILE)
    if items:
        begun_T = torch.empty(tiles, dtype=torch.int32, device=device)
        order_items[(tiles,)](
            local_V, positions_V, numbers_V, begun_T, ids, places_V, order_V, bags_V,
            constants(layout.lower, device), count, items, parts, TILE=_TILE, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        number_bags[(tiles,)](
            lengths_P,
            slots_P,
            told,
            places_V,
            numbers_V,
            begun_T,
            items,
            parts,
            TILE=_TILE,
            num_warps=1,
            enable_fp_fusion=False,
        )
    fault, present, moved = told[:3].tolist()  # the one wait
    if fault:
        _raise_fault(fault, ids, offsets, cuts, ranges, layout, names)
    counts = told[3:].view(parts, 2)
    return counts, lengths_P[:present], local_V[:moved], slots_P[:present], positions_V[:moved]


def _raise_fault(
    fault: int, ids: Tensor, offsets: Tensor, cuts: Sequence[int], ranges: Sequence[int], layout: _Layout, names: str
) -> None:  # fmt: skip
    code = _LAST.value - fault
    route, rest = divmod(code, 1 << _ROUTE_BITS.value)
    of_id, position = divmod(rest, _ID_BIT.value)
    if of_id:
        rows = cuts[layout.cut_starts[route] + ranges[route]]
        raise_bad_id(names, route, position, int(ids[position]), rows)
    raise_bad_offsets(names, route, position, int(offsets[position]), ids.numel())


# ---------------------------------------------------------------------------------------------------------------
# host: rows


@dataclass(frozen=True)
class _Moves:
    """What is known of segments before their counts."""

    order: npt.NDArray[np.int64]  # segments, wave after wave
    in_order: bool  # there is one wave
    waves: tuple[int, ...]  # where each wave begins in it, with the end of the last
    numbers: npt.NDArray[np.int64]  # [5, S]: widths, places, strides, adds, numbers, in that order
    # In the segments' own order: columns, and how many rows the tensor holds of each (one after another; by slots, as
    # far as that can be said).
    widths: npt.NDArray[np.int64]
    dense_rows: npt.NDArray[np.int64]
    slot_rows: npt.NDArray[np.int64]
    some_empty: bool
    unit: int  # what all of widths, places and strides are multiples of
    widest: int
    adds: bool
    sound: bool  # nothing is negative


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
    # Strides beyond the tensor are as good as one behind its end, and cannot overflow.
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
    """The wave of each segment: segments of the same places one after another, all others at once.

    Columns that overlap in part, or rows that overlap: every segment waits for the one before.
    """
    columns: dict[int, set[tuple[int, int]]] = {}
    for width, place, stride in zip(widths, places, strides, strict=True):
        if width > stride:
            return list(range(len(widths)))
        if width:
            columns.setdefault(stride, set()).add((place % stride, width))
    for intervals in columns.values():
        end = 0
        for begin, width in sorted(intervals):
            if begin < end:
                return list(range(len(widths)))
            end = begin + width
        stride = next(s for s, own in columns.items() if own is intervals)
        if end > stride:  # a row's end is in the next one's beginning
            return list(range(len(widths)))
    seen: dict[tuple[int, int, int], int] = {}
    waves = []
    for target in zip(widths, places, strides, strict=True):
        waves.append(seen.get(target, 0))
        seen[target] = waves[-1] + 1
    return waves


def _refuse(
    op: str, flat: Tensor, rows: Tensor, slots: Tensor, counts: Sequence[int], widths: Sequence[int],
    slot_starts: Sequence[int], places: Sequence[int], strides: Sequence[int],
) -> None:  # fmt: skip
    """Name the first segment that does not fit."""
    at = 0
    lists = zip(counts, widths, slot_starts, places, strides, strict=True)
    for s, (count, width, start, place, stride) in enumerate(lists):
        assert min(count, width, stride) >= 0, f"{op}: segment {s} has a negative shape"
        assert at + count * width <= rows.numel(), f"{op}: segment {s} has more rows than there are"
        at += count * width
        if count:
            assert start < 0 or start + count <= slots.numel(), (
                f"{op}: segment {s} has slots that are not there"
            )
            end = place + (count - 1) * stride * (start < 0) + width
            assert 0 <= place <= end <= flat.numel(), f"{op}: segment {s} has places outside its tensor"


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


def _move(
    op: str, flat: Tensor, rows: Tensor, slots: Tensor, counts: Sequence[int], widths: Sequence[int],
    slot_starts: Sequence[int], places: Sequence[int], strides: Sequence[int], adds: Sequence[int] | None,
) -> None:  # fmt: skip
    device = flat.device
    raise_due(device)
    segments = len(counts)
    assert len(slot_starts) == segments, f"{op}: lists of different lengths"
    if not segments:
        return
    elements = flat.numel()
    moves = _moves(
        tuple(widths), tuple(places), tuple(strides), None if adds is None else tuple(adds), elements
    )
    count_S, start_S = now = np.array((counts, slot_starts), dtype=np.int64)
    fits_S = np.where(start_S < 0, moves.dense_rows, np.minimum(slots.numel() - start_S, moves.slot_rows))
    row_starts_S1 = np.zeros(segments + 1, dtype=np.int64)
    np.cumsum(count_S * moves.widths, out=row_starts_S1[1:])
    if not (
        moves.sound and (count_S <= fits_S).all() and count_S.min() >= 0 and row_starts_S1[-1] <= rows.numel()
    ):
        _refuse(op, flat, rows, slots, counts, widths, slot_starts, places, strides)
    adding = adds is not None and moves.adds
    if not adding:
        flat, rows = flat.view(-1).view(_BITS[flat.element_size()]), rows.view(_BITS[rows.element_size()])
    size = flat.element_size()
    vec = min(moves.unit, 16 // size)
    while vec > 1 and (flat.data_ptr() % (vec * size) or rows.data_ptr() % (vec * size)):
        vec //= 2
    columns = min(1 << max(moves.widest - 1, 0).bit_length(), 512 // size)
    tile = max(min(4096 // size, 512 * vec) // columns, 1)  # 4 KB under way, 16 loads a lane at most
    table = np.empty((9, segments), dtype=np.int64)
    table[_COUNT.value :: 2][:2] = now if moves.in_order else now[:, moves.order]
    table[_START.value] = row_starts_S1[:-1] if moves.in_order else row_starts_S1[moves.order]
    table[_WIDTH.value :] = moves.numbers
    tiles_S = (table[_COUNT.value] + (tile - 1)) // tile
    if moves.some_empty:  # segments of no columns have no tiles
        tiles_S *= table[_WIDTH.value] > 0
    ends_S = tiles_S.cumsum()
    np.subtract(ends_S, tiles_S, out=table[_TILES.value])
    if not ends_S[-1]:
        return
    sent = upload(table.reshape(-1), device)
    report = new_report(device)
    done = 0
    for end in moves.waves[1:]:
        to = int(ends_S[end - 1])
        if to > done:
            move_rows[(to - done,)](
                flat, rows, slots, sent, report, segments, done, elements,
                PICK=adds is None, ADDS=adding, HALF=flat.dtype in _HALVES, ROWS=tile, COLUMNS=columns, VEC=vec,
                num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        done = max(done, to)
    post(report, _raise_segment(op))


def _serves(flat: Tensor, rows: Tensor, slots: Tensor) -> bool:
    """Whether the tensors are such as the kernel reads; the reference says what is wrong with others."""
    return (
        flat.dtype == rows.dtype
        and flat.element_size() <= 8
        and slots.dtype == torch.int32
        and flat.is_contiguous()
        and rows.is_contiguous()
        and slots.is_contiguous()
    )


def place_rows_(
    out: Tensor,
    rows: Tensor,
    slots: Tensor,
    counts: Sequence[int],
    widths: Sequence[int],
    slot_starts: Sequence[int],
    places: Sequence[int],
    strides: Sequence[int],
    adds: Sequence[int],
    fresh: bool = False,
) -> None:
    if not _serves(out, rows, slots) or (any(adds) and out.dtype not in _SUMMED):
        _place_rows_reference_(out, rows, slots, counts, widths, slot_starts, places, strides, adds, fresh)
        return
    if fresh:
        out.zero_()
    _move("place_rows_", out, rows, slots, counts, widths, slot_starts, places, strides, adds)


def pick_rows_(
    rows: Tensor,
    source: Tensor,
    slots: Tensor,
    counts: Sequence[int],
    widths: Sequence[int],
    slot_starts: Sequence[int],
    places: Sequence[int],
    strides: Sequence[int],
) -> None:
    if _serves(source, rows, slots):
        _move("pick_rows_", source, rows, slots, counts, widths, slot_starts, places, strides, None)
    else:
        _pick_rows_reference_(rows, source, slots, counts, widths, slot_starts, places, strides)


def pick_rows(
    source: Tensor,
    slots: Tensor,
    counts: Sequence[int],
    widths: Sequence[int],
    slot_starts: Sequence[int],
    places: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    size = sum([count * width for count, width in zip(counts, widths, strict=True)])
    rows = torch.empty(max(size, 0), dtype=source.dtype, device=source.device)
    pick_rows_(rows, source, slots, counts, widths, slot_starts, places, strides)
    return rows


def kernels() -> dict[str, Callable[..., Any]]:
    """The kernels by op name."""
    return {
        "route_ids": route_ids,
        "place_rows_": place_rows_,
        "pick_rows": pick_rows,
        "pick_rows_": pick_rows_,
    }


def register(key: str = "CUDA") -> None:
    """Let these kernels serve the ops on tensors of a dispatch key."""
    for name, kernel in kernels().items():
        LIBRARY.impl(name, on_own_device(kernel), key, allow_override=True)
