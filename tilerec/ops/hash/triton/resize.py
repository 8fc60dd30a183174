"""Change of the numbers of buckets and slots on a GPU: `zch_resize`.

    1 live    per old row: its new bucket and start, and its score
    2 sort    rows by bucket, best first; `runs` finds where each bucket's rows begin and end
    3 place   per new bucket: in that order each id takes the first empty slot of its window. If an id finds none, all
              are placed in the order of their starts, provided that this keeps every id
    4 carry   per new row: copies the state of its id

A program holds one new bucket, so no program waits for another; it places a bucket's ids one after the other.
Nouns as in `definition.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.hash.checks import raise_misplaced_id
from tilerec.ops.hash.policy import Policy
from tilerec.ops.hash.state import ResizeCall
from tilerec.ops.hash.triton.place import (
    FAR,
    blocks,
    bucket_of,
    high,
    low,
    mixed_bits,
    runs_kernel,
    walk_grid,
    width_of,
    wrapped,
)
from tilerec.ops.hash.triton.policy import MOST, exponent_of, score_of
from tilerec.ops.runtime.triton.reports import new_report, post, raise_all, raise_due

_RESIZED_ROWS = 2**24  # old rows per sort, which needs about 70 bytes each


@triton.jit(do_not_specialize=["count", "offset", "rows", "first", "buckets", "slots", "new_first", "new_held",
                               "new_buckets", "new_slots", "step"])  # fmt: skip
def live_kernel(
    ids_E, used_E, last_E, hits_E, expires_E, moved_E, key_E, start_E, bucket_E, report, count, offset, rows, first,
    buckets, slots, new_first, new_held, new_buckets, new_slots, step,
    POLICY: tl.constexpr, EXPONENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store each old row's new bucket, its new start and its score. Unused rows come last."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = r < count
    live = inside & (tl.load(used_E + r, mask=inside, other=0) != 0)
    mixed = mixed_bits(tl.load(ids_E + r, mask=live, other=0).to(tl.uint64, bitcast=True))
    lost = live & (high(mixed, buckets.to(tl.int64)) != r // slots + first)
    tl.atomic_max(report + 1 + r * 0, rows.to(tl.int64) - offset - r, mask=lost, sem="relaxed")
    tl.store(report + r * 0, 1, mask=lost)
    bucket = high(mixed, new_buckets.to(tl.int64)) - new_first
    tl.store(bucket_E + r, tl.where(live & (lost == 0), bucket, new_held), mask=inside)
    tl.store(start_E + r, low(mixed, new_slots.to(tl.int64)), mask=inside)
    tl.store(moved_E + r, tl.where(live, -2, -1).to(tl.int64), mask=inside)
    last = tl.load(last_E + r, mask=live, other=0)
    key = score_of(last, hits_E + r, expires_E + r, live, step.to(tl.int64), POLICY, EXPONENT)
    tl.store(key_E + r, key, mask=inside)


@triton.jit
def _greater(one, other):
    return tl.maximum(one, other)


@triton.jit
def _place_in_turn(
    order_E, start_E, owner_E, tally_E, begin, end, base, slots, window, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Place one bucket's ids in the order of their starts, from the cut on (`resize._cut`), if that keeps every id.

    c_t ids start at turn t (slot cut + t). The first of those has place P_t = max(t, P_{t-1} + c_{t-1}), that is
    C_{t-1} + max over j <= t of (j - C_{j-1}), where C sums c up to t: a sum and a maximum over prefixes. Ids of equal
    start follow in the order of the sort. 4 slots, starts [3, 3, 0], cut 3 -> places 0, 1, 2: slots 3, 0, 1.
    """
    lane = tl.arange(0, WIDTH)
    at = begin
    while at < end:
        inside = at + tl.arange(0, CHUNK) < end
        r = tl.load(order_E + at + tl.arange(0, CHUNK), mask=inside, other=0)
        start = tl.load(start_E + r, mask=inside, other=0)
        tl.atomic_add(tally_E + base + start, start * 0 + 1, mask=inside, sem="relaxed")
        at += CHUNK
    tl.debug_barrier()

    slot = base * 0
    balance = slot
    least = slot + 1
    cut = slot
    while slot < slots:
        inside = slot + lane < slots
        sums = balance + tl.cumsum(tl.load(tally_E + base + slot + lane, mask=inside, other=1) - 1, axis=0)
        here = tl.min(tl.where(inside, sums, MOST), axis=0)
        lowest = tl.min(tl.where(inside & (sums == here), slot + lane, MOST), axis=0)
        cut = tl.where(here < least, wrapped(lowest + 1, slots), cut)
        least = tl.minimum(least, here)
        balance = tl.min(tl.where(lane == WIDTH - 1, sums, MOST), axis=0)
        slot += WIDTH

    turn = base * 0
    before = turn
    ahead = turn
    farthest = turn
    while turn < slots:
        t = turn + lane
        inside = t < slots
        place_of = tally_E + base + wrapped(cut + t, slots)
        here = tl.load(place_of, mask=inside, other=0)
        counted = before + tl.cumsum(here, axis=0)
        highest = tl.maximum(tl.associative_scan(t - (counted - here), 0, _greater), ahead)
        place = counted - here + highest
        tl.debug_barrier()
        tl.store(place_of, place, mask=inside)
        worst = tl.where(inside & (here > 0), tl.maximum(place + here - t, place + here - slots + window), 0)
        farthest = tl.maximum(farthest, tl.max(worst, axis=0))
        before = tl.max(counted, axis=0)
        ahead = tl.max(highest, axis=0)
        turn += WIDTH

    if farthest <= window:
        slot = base * 0
        while slot < slots:
            tl.store(owner_E + base + slot + lane, lane.to(tl.int64) * 0 - 1, mask=slot + lane < slots)
            slot += WIDTH
        at = begin
        while at < end:
            tl.debug_barrier()
            r = tl.load(order_E + at)
            place_of = tally_E + base + tl.load(start_E + r)
            place = tl.load(place_of)
            tl.debug_barrier()
            tl.store(place_of, place + 1)
            tl.store(owner_E + base + wrapped(cut + place, slots), r)
            at += 1


@triton.jit(do_not_specialize=["held", "slots", "window"])
def place_kernel(
    order_E, start_E, begin_B, end_B, owner_E, tally_E, held, slots, window, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the old row of each slot of a new bucket: in order, each id gets the first empty slot of its window."""
    held, slots, window = held.to(tl.int64), slots.to(tl.int64), window.to(tl.int64)
    lane = tl.arange(0, WIDTH)
    bucket = tl.program_id(0).to(tl.int64)
    while bucket < held:
        base = bucket * slots
        begin = tl.load(begin_B + bucket)
        end = tl.load(end_B + bucket)
        unplaced = begin * 0
        at = begin
        while at < end:
            r = tl.load(order_E + at)
            start = tl.load(start_E + r)
            done = start * 0
            place = done + FAR
            tl.debug_barrier()
            while (done < window) & (place == FAR):
                inside = done + lane < window
                owner = tl.load(owner_E + base + wrapped(start + done + lane, slots), mask=inside, other=0)
                place = tl.min(tl.where(inside & (owner < 0), done + lane, FAR), axis=0)
                done += WIDTH
            tl.debug_barrier()
            tl.store(owner_E + base + wrapped(start + place, slots), r, mask=place < FAR)
            unplaced += (place == FAR).to(tl.int64)
            at += 1
        if (unplaced > 0) & (end - begin <= slots):
            tl.debug_barrier()
            _place_in_turn(order_E, start_E, owner_E, tally_E, begin, end, base, slots, window, WIDTH, CHUNK)
        bucket += tl.num_programs(0)


@triton.jit(do_not_specialize=["count", "offset"])
def carry_kernel(
    owner_E, ids_E, since_E, last_E, hits_E, expires_E, new_ids_E, new_used_E, new_since_E, new_last_E, new_hits_E,
    new_expires_E, moved_E, count, offset, EXPIRING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the state of each id to its new row; a row without an id gets zeros."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < count
    r = tl.load(owner_E + e, mask=inside, other=-1)
    taken = r >= 0
    tl.store(new_used_E + e, taken.to(tl.uint8), mask=inside)
    tl.store(new_ids_E + e, tl.load(ids_E + r, mask=taken, other=0), mask=inside)
    tl.store(new_since_E + e, tl.load(since_E + r, mask=taken, other=0), mask=inside)
    tl.store(new_last_E + e, tl.load(last_E + r, mask=taken, other=0), mask=inside)
    tl.store(new_hits_E + e, tl.load(hits_E + r, mask=taken, other=0), mask=inside)
    if EXPIRING:
        tl.store(new_expires_E + e, tl.load(expires_E + r, mask=taken, other=0), mask=inside)
    tl.store(moved_E + r, e + offset, mask=taken)


def zch_resize(call: ResizeCall) -> tuple[Tensor, ...]:
    """See `tilerec/ops/hash/resize.py`. Waits for the device at the end: a bad state must not be replaced."""
    ids_E, used_E, since_E, last_E, hits_E, expires_E, _ = call.state
    buckets, slots, max_probe, first = call.table
    new_buckets, new_slots = call.new_buckets, call.new_slots
    raise_due(ids_E.device)
    rows, held = ids_E.shape[0], call.held
    expiring = expires_E.shape[0] > 0
    used_bytes_E = used_E.view(torch.uint8)
    old = (ids_E, used_bytes_E, since_E, last_E, hits_E, *([expires_E] if expiring else []))
    new_rows = call.become(held) * new_slots
    new = [torch.empty(new_rows, dtype=values.dtype, device=values.device) for values in old]
    moved_E, report = torch.empty_like(ids_E), new_report(ids_E.device)

    merged = max(buckets // new_buckets, 1)
    at_once = max(_RESIZED_ROWS // (slots * merged), 1) * merged
    for begin in range(0, held, at_once):
        end = min(begin + at_once, held)
        new_begin, new_end = call.become(begin), call.become(end)
        _resize_part(
            [values[begin * slots : end * slots] for values in (*old, moved_E)],
            [values[new_begin * new_slots : new_end * new_slots] for values in new],
            report, rows, begin * slots, first + begin, buckets, slots,
            call.become(first) + new_begin, new_end - new_begin, new_buckets, new_slots,
            min(max_probe, new_slots), call.step, call.policy, call.exponent,
        )  # fmt: skip

    def raise_(lost: int, _: int, __: int) -> None:
        row = rows - lost
        id_ = int(ids_E[row])
        raise_misplaced_id(
            "zch_resize", row + first * slots, id_, bucket_of(id_, buckets), row // slots + first, buckets
        )

    post(report, raise_)
    raise_all(ids_E.device)
    new_ids_E, new_used_E, *others = new
    others += [] if expiring else [expires_E.new_empty(0)]
    return (new_ids_E, new_used_E.view(torch.bool), *others, moved_E)


def _resize_part(
    old: list[Tensor], new: list[Tensor], report: Tensor, rows: int, offset: int, first: int, buckets: int,
    slots: int, new_first: int, new_held: int, new_buckets: int, new_slots: int, window: int,
    step: int, policy: int, exponent: float,
) -> None:  # fmt: skip
    """Resize some old buckets and the new ones that share their ids. `offset`: number of old rows before them."""
    ids_E, used_E, since_E, last_E, hits_E, *expires, moved_E = old
    count, expires_E, new_expires_E = ids_E.shape[0], (*expires, last_E)[0], new[-1]
    key_E, start_E, bucket_E = torch.empty((3, count), dtype=torch.int64, device=ids_E.device)
    grid, block = blocks(count, ids_E, 128)
    live_kernel[grid](
        ids_E, used_E, last_E, hits_E, expires_E, moved_E, key_E, start_E, bucket_E, report, count, offset, rows, first,
        buckets, slots, new_first, new_held, new_buckets, new_slots, step,
        POLICY=policy, EXPONENT=exponent_of(policy, exponent), BLOCK=block,
    )  # fmt: skip
    # Sort best first, equal rows by number; then stably by bucket, which keeps that order within each.
    if policy == Policy.LFU:
        order_E = torch.sort(last_E, descending=True, stable=True).indices
        order_E = order_E[torch.sort(key_E[order_E], descending=True, stable=True).indices]
    else:
        order_E = torch.sort(key_E, descending=True, stable=True).indices
    sorted_E, within_E = torch.sort(bucket_E[order_E], stable=True)
    order_E = order_E[within_E]

    begin_B, end_B = torch.zeros((2, new_held), dtype=torch.int64, device=ids_E.device)
    runs_kernel[grid](sorted_E, begin_B, end_B, count, new_held, BLOCK=block)
    owner_E = torch.full((new_held * new_slots,), -1, dtype=torch.int64, device=ids_E.device)
    place_kernel[walk_grid(new_held, ids_E)](
        order_E, start_E, begin_B, end_B, owner_E, torch.zeros_like(owner_E), new_held, new_slots, window,
        WIDTH=width_of(new_slots), CHUNK=128, num_warps=1,
    )  # fmt: skip
    grid, block = blocks(owner_E.shape[0], ids_E, 128)
    carry_kernel[grid](
        owner_E, ids_E, since_E, last_E, hits_E, expires_E, *new[:5], new_expires_E, moved_E, owner_E.shape[0],
        new_first * new_slots, EXPIRING=len(expires) > 0, BLOCK=block,
    )  # fmt: skip
