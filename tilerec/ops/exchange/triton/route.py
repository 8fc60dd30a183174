"""`route_ids` on GPUs: sort ids by part, in wire order. `definition.py` defines both.

Nouns (beside those of that file)
  layer    routes that read different keys: the first route of every key, then the second of those that have one …
  entry    a route in its layer; entries stand in the order of their bags
  item     one id in one layer, number  layer * N + position;  V of them. Mostly there is one layer: items are ids
  place    of an item: the place of its part in wire order; K if the id does not travel

In 10 launches, with about 90 bytes of memory traffic per id:

  deal     per item: its bag (searched in the offsets), its route, its part (searched in the cuts) -> place, 1 or 2
           bytes
  sort     items by place, stable, on keys that narrow (torch's radix sort: one pass, or two)
  order    per item in wire order: local id, position, bag number; per tile the number of bags that begin in it
  number   the numbers of the present bags: a tile's first is the sum of the tiles before it

The host never waits. Results have the largest possible length (V). Their actual lengths, and the fault if there is one,
are in `summary`, which the caller copies to the host together with its other numbers (`sharding/route.py`).

Legend: N ids, V items, K parts that travel, P present bags.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.exchange.definition import (
    ID_BIT,
    LAST_FAULT,
    ROUTE_BITS,
    _route_ids_reference,
    check_route,
    raise_few_offsets,
)
from tilerec.ops.gradient.definition import bag_starts
from tilerec.ops.jagged.triton.bucketize import key_type
from tilerec.ops.jagged.triton.offsets import ANYWHERE
from tilerec.ops.runtime.triton.addresses import constants, upload
from tilerec.ops.runtime.triton.launch import GRID_Y, launch
from tilerec.ops.runtime.triton.reports import raise_due
from tilerec.ops.runtime.triton.search import segment_at, segments_of

_ROUTE_BITS = tl.constexpr(ROUTE_BITS)
_ID_BIT = tl.constexpr(ID_BIT)
_LAST = tl.constexpr(LAST_FAULT)

# Rows of `entries`, int64 [6, width].
_FIRST = tl.constexpr(0)  # its route's first bag
_BAGS = tl.constexpr(1)
_CUTS = tl.constexpr(2)  # index of its first cut
_RANGES = tl.constexpr(3)
_PARTS = tl.constexpr(4)  # index of its first part
_ROUTE = tl.constexpr(5)


@triton.jit
def _report_fault(summary, bad, code):
    """Report the first fault: the one with the least code (`definition.py`) where `bad` is True."""
    if tl.sum(bad.to(tl.int32), 0) > 0:
        tl.atomic_max(summary, tl.max(tl.where(bad, _LAST - code, 0), 0))


@triton.jit
def _check_ends(summary, offsets, count, bags, width):
    """Report offsets that do not begin at 0 or do not end at `count`: every id must be in a bag.

    The code is that of a route behind the last, so a route's own fault takes precedence over this one.
    """
    edge = tl.arange(0, 2).to(tl.int64)
    code = ((edge * 0 + width) << _ROUTE_BITS) + edge * bags
    bad = tl.load(offsets + edge * bags) != edge * count
    _report_fault(summary, bad, code)


@triton.jit(do_not_specialize=["count", "bags", "width", "parts"], do_not_specialize_on_alignment=ANYWHERE)
def deal_items(
    places_V, bags_V, summary, ids, offsets, entries, layers, cuts, wire, count, bags, width, parts,
    EACH_ID: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the places of a tile of ids in one layer, and the number of each id's bag within its key.

    entries: [6, width], one column per entry of all layers; layers: each layer's first entry, and the end of the last
    layer. STEPS: halvings of the longest list of cuts.
    """
    program = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    first_entry = tl.load(layers + layer)
    last_entry = tl.load(layers + layer + 1) - 1
    firsts = entries + _FIRST * width

    # Check this program's share of the offsets, bag by bag. The first program also checks each route's first offset.
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
        _report_fault(summary, bad, code)
    if (program == 0) & (layer == 0):
        _check_ends(summary, offsets, count, bags, width)
    if program == 0:
        for begin in range(first_entry, last_entry + 1, TILE):
            entry = begin + tl.arange(0, TILE)
            known = entry <= last_entry
            bag = tl.load(firsts + entry, mask=known, other=0)
            start = tl.load(offsets + bag, mask=known, other=0)
            code = (tl.load(entries + _ROUTE * width + entry, mask=known, other=0) << _ROUTE_BITS) + bag
            bad = (start < 0) | (start > count)
            _report_fault(summary, bad, code)

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
            tl.atomic_max(summary, tl.max(tl.where(bad, _LAST - code, 0), 0))
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
    WITH_POSITIONS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store local ids, positions and bag numbers of a tile of items in wire order, and the bags that begin in it."""
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
    if WITH_POSITIONS:
        tl.store(positions_V + item, position, mask=here)
    tl.store(numbers_V + item, number, mask=here)


@triton.jit(do_not_specialize=["items", "parts"])
def number_bags(lengths_P, slots_P, summary, places_V, numbers_V, begun_T, items, parts, TILE: tl.constexpr):
    """Number the present bags of a tile, and count ids per bag, and bags and ids per part.

    A count is (end - begin). The first item adds -begin and the last item adds end, in integers, to the count of its
    bag or part. A bag or part without items keeps 0.

    summary: [1 + 2 K], the counts from 1 on.
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
    counts = summary + 1 + 2 * place
    tl.atomic_add(counts, -bag, mask=starts, sem="relaxed")
    tl.atomic_add(counts, bag + 1, mask=stops, sem="relaxed")
    tl.atomic_add(counts + 1, -item, mask=starts, sem="relaxed")
    tl.atomic_add(counts + 1, item + 1, mask=stops, sem="relaxed")


_TILE = 256


@dataclass(frozen=True)
class _Layout:
    """Constants of a list of routes, equal for all batches; the positions of bags are not among them."""

    order: tuple[int, ...]  # routes, layer after layer, each in the order of its keys
    layers: tuple[int, ...]
    cut_starts: tuple[int, ...]
    part_starts: tuple[int, ...]
    lower: tuple[int, ...]  # first row of each part, in wire order
    parts: int
    steps: int


@functools.lru_cache(maxsize=64)
def _layout(keys: tuple[int, ...], cuts: tuple[int, ...], ranges: tuple[int, ...], wire: tuple[int, ...]) -> _Layout:
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
    ids: Tensor, offsets: Tensor, keys: Sequence[int], batches: Sequence[int], cuts: Sequence[int],
    ranges: Sequence[int], wire: Sequence[int], each_id: bool, dtype: torch.dtype, names: str,
    with_positions: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    device = ids.device
    raise_due(device)
    layout = _layout(tuple(keys), tuple(cuts), tuple(ranges), tuple(wire))
    if len(layout.layers) > GRID_Y:  # 65,535 or more routes read one key
        return _route_ids_reference(
            ids, offsets, keys, batches, cuts, ranges, wire, each_id, dtype, names, with_positions
        )
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
        return nothing.new_zeros(1).long(), nothing, nothing.to(dtype), nothing.clone(), nothing.long()

    entries = [
        column[r]
        for column in (first_bags, bags, layout.cut_starts, ranges, layout.part_starts, range(len(keys)))
        for r in layout.order
    ]
    # With one batch size for all keys, the next batch most likely has its bags at the same positions: cache the upload.
    sent = constants(tuple(entries), device) if len(batches) == 1 else upload(entries, device)
    summary = torch.zeros(1 + 2 * parts, dtype=torch.int64, device=device)
    places_V = torch.empty(items, dtype=key_type(parts + 1), device=device)
    bags_V = torch.empty(items, dtype=torch.int32, device=device)
    programs = max(-(-max(count, offsets.numel() - 1) // _TILE), 1)
    launch(deal_items, (programs, layers),
        places_V, bags_V, summary, ids, offsets, sent, constants(layout.layers, device), constants(tuple(cuts), device),
        constants(tuple(wire), device), count, offsets.numel() - 1, len(keys), parts,
        EACH_ID=each_id, STEPS=layout.steps, TILE=_TILE, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    places_V, order_V = torch.sort(places_V, stable=True)
    local_V = torch.empty(items, dtype=dtype, device=device)
    positions_V = torch.empty(items if with_positions else 0, dtype=torch.int64, device=device)
    numbers_V, slots_P = (torch.empty(items, dtype=torch.int32, device=device) for _ in range(2))
    lengths_P = torch.zeros(items, dtype=torch.int32, device=device)
    tiles = -(-items // _TILE)
    if items:
        begun_T = torch.empty(tiles, dtype=torch.int32, device=device)
        launch(order_items, (tiles,),
            local_V, positions_V, numbers_V, begun_T, ids, places_V, order_V, bags_V,
            constants(layout.lower, device), count, items, parts, WITH_POSITIONS=with_positions, TILE=_TILE,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        launch(number_bags, (tiles,),
            lengths_P, slots_P, summary, places_V, numbers_V, begun_T, items, parts, TILE=_TILE, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return summary, lengths_P, local_V, slots_P, positions_V
