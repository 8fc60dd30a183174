"""Preparation of exchanges between ranks: sort ids by destination, scatter received rows, gather rows to send.

Terms
  route        one feature's ids, split by one set of row cuts: route r reads the bags of key `keys[r]`
  part         one row range of a route; the ids of a part are sent to one rank
  wire order   the order of parts in the send buffer: `wire[p]` is the position of part p
  present bag  a bag with at least one id in the part; only present bags are sent
  segment      `count` rows of `width` columns, contiguous in the wire buffer. In the other tensor, a row begins at
               element  place + slot * stride,  slot = row number (dense) or an entry of `slots`

  local id = id - first row of its part;   P = present bags of a part, N = its ids

Legend: R routes, K parts, N ids, P present bags, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.gradient.definition import bag_starts
from tilerec.ops.lookup.checks import check_covered, raise_uncovered
from tilerec.ops.lookup.definition import raise_bad_id
from tilerec.ops.runtime.library import LIBRARY

SEGMENTS = "int[] counts, int[] widths, int[] slot_starts, int[] places, int[] strides"


def _feature(names: str, route: int) -> str:
    return names.split(",")[route].rpartition("@")[0] if names and route >= 0 else ""


def raise_bad_offsets(names: str, route: int, position: int, offset: int, ids: int) -> NoReturn:
    """Raise the `InputError` for an offset that descends or is outside of `[0, ids]`; `names` as in `raise_bad_id`.

    A negative route means that the offsets of the whole batch do not cover all values.
    """
    if route < 0:
        raise_uncovered(position, offset, ids)
    raise InputError(
        f"Feature '{_feature(names, route) or route}': offsets[{position}] is {offset}; offsets must not fall and must "
        f"lie in [0, {ids}] (the number of values). Check how lengths and values were put together."
    )


def raise_few_offsets(names: str, route: int, key: int, offsets: int) -> NoReturn:
    """Raise the `InputError` for a key with fewer offsets than bags; `names` as in `raise_bad_id`."""
    raise InputError(
        f"Feature '{_feature(names, route) or f'number {key}'}': the offsets hold fewer bags than the batch sizes "
        f"require ({offsets} offsets in all, or a negative batch size). Check the batch sizes per key."
    )


# A fault is one number: LAST_FAULT - (route, 1 for an id and 0 for an offset, position). An earlier fault has a larger
# number, so a maximum keeps the first fault, whatever the order of programs.
ROUTE_BITS = 43
ID_BIT = 1 << 42
LAST_FAULT = (1 << 62) - 1


def raise_fault(
    fault: int, ids: Tensor, offsets: Tensor, cuts: Sequence[int], ranges: Sequence[int], names: str,
    heads: Sequence[int] = (),
) -> NoReturn:  # fmt: skip
    """Raise the `InputError` for `route_ids`' first result, a fault; other arguments as of `route_ids`.

    Args:
        heads: per route, its rows that are copies of hot rows; `hot_ids` has added their number to ids that are too
            large.
    """
    route, rest = divmod(LAST_FAULT - fault, 1 << ROUTE_BITS)
    of_id, position = divmod(rest, ID_BIT)
    if of_id:
        head = heads[route] if heads else 0
        rows, id = cuts[sum(ranges[: route + 1]) + route], int(ids[position])
        raise_bad_id(names, route, position, id - head if id >= rows else id, rows - head)
    route = -1 if route == len(ranges) else route  # behind the last route: offsets of the whole batch
    raise_bad_offsets(names, route, position, int(offsets[position]), ids.numel())


def check_route(cuts: Sequence[int], ranges: Sequence[int], wire: Sequence[int]) -> None:
    """Assert that cuts, ranges and wire are consistent; arguments as of `route_ids`."""
    lengths, parts = (sum(ranges) + len(ranges), sum(ranges)), sum(place >= 0 for place in wire)
    assert (len(cuts), len(wire)) == lengths, "route_ids: lists whose lengths do not match"
    assert sorted(wire)[len(wire) - parts :] == list(range(parts)), (
        "route_ids: wire uses a position twice, or not at all"
    )
    at = 0
    for r, count in enumerate(ranges):
        own = cuts[at : at + count + 1]
        at += count + 1
        assert [0, *own[1:]] == sorted(own), f"route_ids: cuts of route {r} descend or do not begin at 0"


def _check_offsets(
    offsets: Tensor, bounds: Tensor, first: int, bags: int, ids: int, names: str, r: int, key: int
) -> None:
    """Raise an `InputError` unless a route's offsets are complete, ascending and in `[0, ids]`."""
    if bags < 0 or bounds.numel() != bags + 1:
        raise_few_offsets(names, r, key, offsets.numel())
    bad = (bounds < 0) | (bounds > ids)
    bad[1:] |= bounds[1:] < bounds[:-1]
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise_bad_offsets(names, r, first + at, int(bounds[at]), ids)


def _fake_route_ids(
    ids: Tensor, offsets: Tensor, keys: Any, batches: Any, cuts: Any, ranges: Any, wire: Any, each_id: bool,
    dtype: torch.dtype, names: str, with_positions: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    context = torch.library.get_ctx()
    present, count = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        ids.new_empty(1 + 2 * sum(place >= 0 for place in wire), dtype=torch.int64),
        ids.new_empty(present, dtype=torch.int32),
        ids.new_empty(count, dtype=dtype),
        ids.new_empty(present, dtype=torch.int32),
        ids.new_empty(count if with_positions else 0, dtype=torch.int64),
    )


@LIBRARY.op(
    "route_ids(Tensor ids, Tensor offsets, int[] keys, SymInt[] batches, int[] cuts, int[] ranges, int[] wire, "
    "bool each_id, ScalarType dtype, str names, bool with_positions=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_route_ids,
)
def _route_ids_reference(
    ids: Tensor, offsets: Tensor, keys: Sequence[int], batches: Sequence[int], cuts: Sequence[int],
    ranges: Sequence[int], wire: Sequence[int], each_id: bool, dtype: torch.dtype, names: str,
    with_positions: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Sort the ids of R routes by part, in wire order; within a part, in the order of the batch.

    Args:
        ids, offsets: of the jagged batch, as in `pooled_lookup`.
        keys: per route, the key it reads; batches: as in `pooled_lookup`.
        cuts: concatenated row cuts of all routes, `ranges[r] + 1` each, ascending from 0 to the table's rows.
        ranges: per route, its number of parts.
        wire: per part (route after route), its position in wire order; -1: the part is not sent, since an earlier route
            of the feature sends its ids. Positions are 0 to K - 1, each used once.
        each_id: every id is a bag of its own, numbered within its key (sequence lookups).
        dtype: of the local ids, int32 or int64.
        names: "feature@table" per route, separated by ",", for messages.
        with_positions: False: the last result is empty.

    Returns:
        summary: int64 `[1 + 2 K]`: 0 or a fault (below), then the present bags and ids of each part, in wire order.
        lengths: int32 `[P]`: number of ids of each present bag.
        local: `dtype` `[N]`: local ids.
        slots: int32 `[P]`: number of each present bag within its key.
        positions: int64 `[N]`: position of each id in `ids`.

        On a GPU only `summary` contains P and N. There the last four tensors have an upper bound as their length: the
        number of ids, times the largest number of routes that read one key. Elements behind P (or N) are undefined.

    Raises:
        InputError: an id outside its table; offsets that descend, exceed the number of ids or are too few for the batch
            sizes. On a GPU too few offsets raise at once. The caller raises the other errors: it reads `summary` and
            calls `raise_fault`.

    Example: one route, cuts (0, 2, 4), wire (1, 0), ids (3, 0 | 1), offsets (0, 2, 3) -> summary (0, 1, 1, 2, 2),
    lengths (1, 1, 1), local ids (1 | 0, 1), slots (0 | 0, 1), positions (0, 1, 2).
    """
    check_route(cuts, ranges, wire)
    routes = _read_routes(ids, offsets, keys, batches, cuts, ranges, each_id, names)
    if not routes:
        nothing = torch.zeros(0, dtype=torch.int32, device=ids.device)
        return nothing.new_zeros(1).long(), nothing, nothing.to(dtype), nothing.clone(), nothing.long()
    check_covered(offsets, ids)
    part_N, local_N, bag_N, position_N = (torch.cat(column) for column in zip(*routes, strict=True))
    wire_N = torch.tensor(wire, device=ids.device)[part_N]
    if min(wire) < 0:  # drop ids that another route of the same feature sends
        kept = wire_N >= 0
        wire_N, bag_N, position_N, local_N = wire_N[kept], bag_N[kept], position_N[kept], local_N[kept]
    order_N = torch.argsort(wire_N, stable=True)
    wire_N, bag_N = wire_N[order_N], bag_N[order_N]
    begins = torch.ones_like(wire_N, dtype=torch.bool)
    begins[1:] = (wire_N[1:] != wire_N[:-1]) | (bag_N[1:] != bag_N[:-1])
    starts_P = begins.nonzero()[:, 0]
    ends_P = torch.cat((starts_P[1:], starts_P.new_tensor([wire_N.numel()])))[: starts_P.numel()]
    counted = wire_N[starts_P], wire_N
    parts = sum(place >= 0 for place in wire)
    counts_K2 = torch.stack([torch.bincount(places, minlength=parts) for places in counted], dim=1)
    return (
        torch.nn.functional.pad(counts_K2.view(-1), (1, 0)),
        (ends_P - starts_P).to(torch.int32),
        local_N[order_N].to(dtype),
        bag_N[starts_P].to(torch.int32),
        position_N[order_N] if with_positions else position_N[:0],
    )


def _read_routes(
    ids: Tensor, offsets: Tensor, keys: Sequence[int], batches: Sequence[int], cuts: Sequence[int],
    ranges: Sequence[int], each_id: bool, names: str,
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return per route the part, the local id, the bag and the position of its ids; raise errors of a bad batch."""
    routes = []
    first_part = first_cut = 0
    for r, (first, count, parts) in enumerate(zip(*bag_starts(keys, batches), ranges, strict=True)):
        own = cuts[first_cut : first_cut + parts + 1]
        bounds = offsets[first : first + count + 1]
        _check_offsets(offsets, bounds, first, count, ids.numel(), names, r, keys[r])
        begin, end = int(bounds[0]), int(bounds[-1])
        ids_n = ids[begin:end].to(torch.int64)
        bad = (ids_n < 0) | (ids_n >= own[-1])
        if bool(bad.any()):
            position = int(bad.nonzero()[0])
            raise_bad_id(names, r, begin + position, int(ids_n[position]), own[-1])
        position_n = torch.arange(begin, end, device=ids.device)
        if each_id:
            bag_n = position_n - begin
        else:
            bag_n = torch.repeat_interleave(torch.arange(count, device=ids.device), bounds.diff())
        lower = torch.tensor(own[:-1], dtype=torch.int64, device=ids.device)
        part_n = torch.searchsorted(lower, ids_n, right=True) - 1
        routes.append((first_part + part_n, ids_n - lower[part_n], bag_n, position_n))
        first_part, first_cut = first_part + parts, first_cut + parts + 1
    return routes


class Segment(NamedTuple):
    """A segment in the reference kernels."""

    here: Tensor  # its rows, `[count, width]`
    there: Tensor  # view of the other tensor, one row per slot
    slots: Tensor  # rows of `there`
    number: int


def segments_of(
    rows: Tensor, other: Tensor, slots: Tensor, counts: Sequence[int], widths: Sequence[int],
    slot_starts: Sequence[int], places: Sequence[int], strides: Sequence[int], repeats: Sequence[int] = (),
) -> list[Segment]:  # fmt: skip
    """Return the segments that have rows, after checking all segments.

    Args:
        rows, other, slots, counts, widths, slot_starts, places, strides: as of the ops.
        repeats: per segment, at least 0 if its slots are not rows of `other` (tilerec/ops/distinct).
    """
    at, found = 0, []
    flat = other.view(-1)
    repeats = repeats or [-1] * len(counts)
    lists = (counts, widths, slot_starts, places, strides, repeats)
    for s, (count, width, start, place, stride, repeat) in enumerate(zip(*lists, strict=True)):
        assert min(count, width, stride) >= 0, f"segment {s} has a negative shape"
        assert at + count * width <= rows.numel(), f"segment {s} has more rows than there are"
        here = rows[at : at + count * width].view(count, width)
        at += count * width
        if not count:
            continue
        if start < 0:
            slots_P = torch.arange(count, device=slots.device)
        else:
            assert start + count <= slots.numel(), f"segment {s} has slots that are not there"
            slots_P = slots[start : start + count].to(torch.int64)
        lowest, last = int(slots_P.min()), int(slots_P.max())
        if repeat >= 0:
            last = (flat.numel() - place - width) // max(1, stride)
        end = place + last * stride + width
        assert lowest >= 0, f"segment {s} has negative slots"
        assert 0 <= place <= end <= flat.numel(), f"segment {s} has places outside its tensor"
        there = flat.as_strided((last + 1, width), (stride, 1), flat.storage_offset() + place)
        found.append(Segment(here, there, slots_P, s))
    return found


@LIBRARY.op(f"place_rows_(Tensor(a!) out, Tensor rows, Tensor slots, {SEGMENTS}, int[] adds, bool fresh=False) -> ()")
def _place_rows_reference_(
    out: Tensor, rows: Tensor, slots: Tensor, counts: Sequence[int], widths: Sequence[int],
    slot_starts: Sequence[int], places: Sequence[int], strides: Sequence[int], adds: Sequence[int],
    fresh: bool = False,
) -> None:  # fmt: skip
    """Write the segments of `rows` (1-D, concatenated) into `out` (contiguous); `adds` selects addition per segment.

    Segments and their rows are processed in order, so sums of several rows have the same order on every machine. A
    segment contains each slot once. Segments that share elements of `out` must have the same stride and places less
    than one stride apart (they belong to one block of rows). A GPU processes all other segments concurrently, since
    the range of their slots is available only on the device.

    Args:
        slots: int32 row numbers; those of segment s begin at `slot_starts[s]`. -1: rows 0, 1, 2 …
        counts, widths: shape of each segment.
        places, strides: element of `out` at which slot 0 begins, and elements from one slot to the next.
        adds: 1 adds, 0 overwrites.
        fresh: ignore the content of `out` and treat it as zeros.

    Example: rows (1, 2, 3, 4), one segment of 2 x 2, slots (0, 2), place 1, stride 3, out 9 zeros -> (0, 1, 2, 0, 0, 0,
    0, 3, 4).
    """
    segments = segments_of(rows, out, slots, counts, widths, slot_starts, places, strides)
    if fresh:
        out.zero_()
    for here, there, slots_P, s in segments:
        if adds[s]:
            there.index_add_(0, slots_P, here)
        else:
            there[slots_P] = here


@LIBRARY.op(f"pick_rows_(Tensor(a!) rows, Tensor source, Tensor slots, {SEGMENTS}) -> ()")
def _pick_rows_reference_(rows: Tensor, source: Tensor, slots: Tensor, *lists: Sequence[int]) -> None:
    """Gather the segments of `source` (contiguous) into a 1-D tensor (contiguous, at least as long).

    It is the transpose of `place_rows_`; `lists` are the lists of that op, without `adds`.
    """
    for here, there, slots_P, _ in segments_of(rows, source, slots, *lists):
        here.copy_(there[slots_P])


def pick_rows_from(
    pick_rows_: Callable[..., None], empty: Callable[..., Tensor] = torch.empty
) -> Callable[..., Tensor]:
    """Return `pick_rows`: `pick_rows_` into a new tensor, made by `empty`."""

    def pick_rows(
        source: Tensor, slots: Tensor, counts: Sequence[int], widths: Sequence[int], *lists: Sequence[int]
    ) -> Tensor:
        size = sum([count * width for count, width in zip(counts, widths, strict=True)])
        rows = empty(max(size, 0), dtype=source.dtype, device=source.device)
        pick_rows_(rows, source, slots, counts, widths, *lists)
        return rows

    return pick_rows


_pick_rows_reference = LIBRARY.op(
    f"pick_rows(Tensor source, Tensor slots, {SEGMENTS}) -> Tensor",
    lambda source, _, counts, widths, *__: source.new_empty(
        sum(count * width for count, width in zip(counts, widths, strict=True))
    ),
)(pick_rows_from(_pick_rows_reference_))
