"""Assignment of rows to ids on a GPU: `zch_assign_`, `zch_assign_each_`. `backend.py` explains the algorithm.

Nouns as there and in `definition.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.hash.policy import IdOutcome
from tilerec.ops.hash.state import AssignCall
from tilerec.ops.hash.triton.find import ENTRIES, LIMIT, PROBES, find_kernel, raises
from tilerec.ops.hash.triton.place import (
    ANYWHERE,
    FAR,
    SECOND_HASH_MASK,
    UNSPECIALIZED,
    as_bytes,
    blocks,
    high,
    low,
    mixed_bits,
    runs_kernel,
    search,
    walk_grid,
    width_of,
    wrapped,
)
from tilerec.ops.hash.triton.policy import exponent_of, victim
from tilerec.ops.runtime.triton.reports import new_report, post, raise_due
from tilerec.ops.runtime.upload import capturing

HIT, INSERTED, EVICTED, REJECTED, NOT_ADMITTED, MISSING = (tl.constexpr(int(outcome)) for outcome in IdOutcome)


@triton.jit
def _event(
    n, ids_N, counts_N, may_insert_N, ttl_N, ids_E, used_E, since_E, last_E, hits_E, expires_E, counters_C,
    base, first_row, counters_each, slots, window, step, now, ttl, threshold, every, rows_N, probes_N, outcomes_N,
    evicted_ids_N, POLICY: tl.constexpr, EXPONENT: tl.constexpr, EVICT: tl.constexpr, EXPIRING: tl.constexpr,
    ADMITS: tl.constexpr, COUNTS: tl.constexpr, INSERTS: tl.constexpr, TTLS: tl.constexpr, STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Process one event: rules 1 to 6 of `zch_assign_`.

    Returns the id, the row from which an id was evicted (-2: none was), the row that the id has now (-1: none), and the
    number of slots that a search for it probes from now on.

    All reads and decisions come before all writes: a faster lane must not overwrite a value that another still reads.
    """
    id_ = tl.load(ids_N + n)
    mixed = mixed_bits(id_.to(tl.uint64, bitcast=True))
    start = low(mixed, slots)
    end, match = search(id_, ids_E, used_E, base, start, slots, window, WIDTH)
    each = n * 0 + 1
    if COUNTS:
        each = tl.load(counts_N + n)
    until = now + ttl
    if TTLS:
        until = now + tl.load(ttl_N + n)
    hit = (match == end) & (end < FAR)
    enters = (match != end) | (end == FAR)
    if INSERTS:
        enters = enters & (tl.load(may_insert_N + n) != 0)
    admitted = enters
    if ADMITS:
        again = mixed_bits(mixed ^ SECOND_HASH_MASK)
        one = counters_C + high(again, counters_each)
        other = counters_C + low(again, counters_each)
        of_one = tl.load(one).to(tl.int64)
        of_other = tl.load(other).to(tl.int64)
        seen = tl.minimum(tl.minimum(of_one, of_other) + each, LIMIT)
        admitted = enters & (seen >= threshold)
    place = end
    if EVICT:  # a compile-time constant, so the two conditions stay separate  # noqa: SIM102
        if admitted & (end == FAR):
            reach = window
            if STEPS:  # computed here, not once per kernel, so that it occupies no register
                reach = tl.where(step % every.to(tl.int64) == 0, window, 0)
            place = victim(last_E, hits_E, expires_E, base, start, slots, reach, step, now, POLICY, EXPONENT, WIDTH)
    puts = admitted & (place < FAR)
    settled = hit | puts
    evicts = puts & (end == FAR)
    row = base + tl.where(settled, wrapped(start + place, slots), 0)
    old = tl.load(ids_E + row)
    outcome = tl.where(puts, tl.where(evicts, EVICTED, INSERTED), REJECTED)
    outcome = tl.where(admitted, outcome, tl.where(enters, NOT_ADMITTED, tl.where(hit, HIT, MISSING)))
    tl.debug_barrier()
    if ADMITS:
        tl.store(one, tl.maximum(of_one, seen).to(tl.int32), mask=enters)
        tl.store(other, tl.maximum(of_other, seen).to(tl.int32), mask=enters)
    tl.store(last_E + row, step, mask=settled)
    tl.store(ids_E + row, id_, mask=puts)
    tl.store(used_E + row, 1, mask=puts)
    tl.store(since_E + row, step, mask=puts)
    tl.store(hits_E + row, each, mask=puts)
    if EXPIRING:
        tl.store(expires_E + row, until, mask=puts)
    tl.store(rows_N + n, tl.where(settled, first_row + row, -1))
    tl.store(probes_N + n, tl.where(end < FAR, end + 1, window).to(tl.int32))
    tl.store(outcomes_N + n, outcome.to(tl.uint8))
    tl.store(evicted_ids_N + n, old, mask=evicts)
    return id_, tl.where(evicts, row, -2), tl.where(settled, row, -1), place + 1


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ANYWHERE)
def walk_kernel(
    ids_N, counts_N, may_insert_N, ttl_N, ids_E, used_E, since_E, last_E, hits_E, expires_E, counters_BC,
    order_N, needs_B, begin_B, end_B, report, rows_N, probes_N, outcomes_N, evicted_ids_N, step_there, now_there,
    first, held, slots, window, counters_each, step, now, ttl, threshold, every,
    POLICY: tl.constexpr, EXPONENT: tl.constexpr, EVICT: tl.constexpr, EXPIRING: tl.constexpr, ADMITS: tl.constexpr,
    COUNTS: tl.constexpr, INSERTS: tl.constexpr, TTLS: tl.constexpr, STEPS: tl.constexpr, NOWS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Process one bucket's entries in their order: mark hits, run events. `backend.py` has an example.

    The cost is two or three dependent memory accesses per event, and one check per CHUNK entries.
    """
    first, held, slots, window = (
        first.to(tl.int64),
        held.to(tl.int64),
        slots.to(tl.int64),
        window.to(tl.int64),
    )
    step, now, ttl, threshold = step.to(tl.int64), now.to(tl.int64), ttl.to(tl.int64), threshold.to(tl.int64)
    if STEPS:
        step = tl.load(step_there)
    if NOWS:
        now = tl.load(now_there)
    counters_each = counters_each.to(tl.int64)
    first_row = first * slots
    lane = tl.arange(0, CHUNK)
    refused = tl.load(report) != 0
    bucket = tl.program_id(0).to(tl.int64)
    while bucket < held:
        base = bucket * slots
        at = tl.load(begin_B + bucket)
        end = tl.load(end_B + bucket)
        if refused | (tl.load(needs_B + bucket) == 0):
            end = at
        while at < end:
            tl.debug_barrier()  # earlier chunks may have reassigned rows
            inside = at + lane < end
            n = tl.load(order_N + at + lane, mask=inside, other=0)
            id_ = tl.load(ids_N + n, mask=inside, other=0)
            row = tl.load(rows_N + n, mask=inside, other=-1) - first_row
            had = inside & (row >= 0)
            event = inside & ((row < 0) | (tl.load(ids_E + row, mask=had, other=0) != id_))
            done = tl.min(lane * 0, axis=0)
            next_ = tl.min(tl.where(event, lane, CHUNK), axis=0)
            while next_ < CHUNK:
                # Hits before the event: mark their rows as touched.
                tl.store(last_E + row, step + lane * 0, mask=had & (event == 0) & (lane >= done) & (lane < next_))
                tl.debug_barrier()
                event_id, evicted_row, event_row, probes = _event(
                    tl.load(order_N + at + next_), ids_N, counts_N, may_insert_N, ttl_N, ids_E, used_E, since_E,
                    last_E, hits_E, expires_E, counters_BC + bucket * counters_each, base, first_row, counters_each,
                    slots, window, step, now, ttl, threshold, every, rows_N, probes_N, outcomes_N, evicted_ids_N,
                    POLICY, EXPONENT, EVICT, EXPIRING, ADMITS, COUNTS, INSERTS, TTLS, STEPS, WIDTH,
                )  # fmt: skip
                event = event | (had & (row == evicted_row))  # a later entry of the evicted id
                # Further entries of the same id, common for hot ids: all are hits, as no event can evict a touched row.
                again = event & (lane > next_) & (id_ == event_id) & (lane * 0 + event_row >= 0)
                tl.store(rows_N + n, lane * 0 + (first_row + event_row), mask=again)
                tl.store(outcomes_N + n, (lane * 0 + HIT).to(tl.uint8), mask=again)
                tl.store(probes_N + n, lane * 0 + probes.to(tl.int32), mask=again)
                event = event & (again == 0)
                done = next_ + 1
                next_ = tl.min(tl.where(event & (lane >= done), lane, CHUNK), axis=0)
            tl.store(last_E + row, step + lane * 0, mask=had & (event == 0) & (lane >= done))
            at += CHUNK
        bucket += tl.num_programs(0)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ANYWHERE)
def hit_kernel(
    counts_N, ttl_N, rows_N, outcomes_N, last_E, hits_E, expires_E, report, step_there, now_there,
    count, first, slots, step, now, ttl, COUNTS: tl.constexpr, TTLS: tl.constexpr, EXPIRING: tl.constexpr,
    STEPS: tl.constexpr, NOWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add each hit's count: sums and maxima of integers, equal in any order. hits 3, two hits -> 5."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < tl.where(tl.load(report) == 0, count, 0)
    hit = inside & (tl.load(outcomes_N + n, mask=inside, other=MISSING) == HIT)
    row = tl.load(rows_N + n, mask=hit, other=0) - first.to(tl.int64) * slots
    each = n * 0 + 1
    if COUNTS:
        each = tl.load(counts_N + n, mask=hit, other=0)
    step, now = step.to(tl.int64), now.to(tl.int64)
    if STEPS:
        step = tl.load(step_there)
    if NOWS:
        now = tl.load(now_there)
    tl.store(last_E + row, n * 0 + step, mask=hit)
    tl.atomic_add(hits_E + row, each, mask=hit, sem="relaxed")
    if EXPIRING:
        until = n * 0 + now + ttl
        if TTLS:
            until = now + tl.load(ttl_N + n, mask=hit, other=0)
        tl.atomic_max(expires_E + row, until, mask=hit, sem="relaxed")


def key_type(held: int) -> torch.dtype:
    """Return the narrowest dtype that numbers all buckets: the fewer the bits, the fewer the passes of the sort."""
    return torch.int16 if held <= 2**15 else torch.int32


def zch_assign_each_(call: AssignCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `tilerec/ops/hash/assign.py`. Bad entries change nothing; a later op raises for them."""
    ids_E, used_E, since_E, last_E, hits_E, expires_E, counters_BC = call.state
    buckets, slots, max_probe, first = call.table
    step, now, ttl, evict, threshold = call.step, call.now, call.ttl, call.evict, call.threshold
    step_there, now_there = call.step_there, call.now_there
    ids_N = call.ids_N.contiguous()
    counts_N = None if call.counts_N is None else call.counts_N.contiguous()
    ttl_N = None if call.ttl_N is None else call.ttl_N.contiguous()
    inserts_N = None if call.may_insert_N is None else as_bytes(call.may_insert_N)
    raise_due(ids_N.device)
    count, held, window = ids_N.shape[0], call.held, min(max_probe, slots)
    rows_N, probes_N = torch.empty_like(ids_N), torch.empty_like(ids_N, dtype=torch.int32)
    outcomes_N, evicted_ids_N = torch.empty_like(ids_N, dtype=torch.uint8), torch.empty_like(ids_N)
    if count == 0:
        return rows_N, outcomes_N, probes_N, evicted_ids_N

    if step_there is None:  # then it is known here whether anybody is evicted, and no kernel has to find out
        evict = int(call.evicts(step))
    given = {"COUNTS": counts_N is not None, "TTLS": ttl_N is not None}
    clocks = {"STEPS": step_there is not None, "NOWS": now_there is not None}
    clocks_there = (ids_N if step_there is None else step_there, ids_N if now_there is None else now_there)
    entries_N = (
        ids_N, ids_N if counts_N is None else counts_N, ids_N if inserts_N is None else inserts_N,
        ids_N if ttl_N is None else ttl_N,
    )  # fmt: skip
    used_bytes_E, expiring = used_E.view(torch.uint8), expires_E.shape[0] > 0
    # Initially zero: flags of the buckets that need a walk, and the begin and end of each bucket's run.
    needs_B, begin_B, end_B = torch.zeros(3, held, dtype=torch.int64, device=ids_N.device)
    report = new_report(ids_N.device)  # a graph's report is zero before the first replay, too
    if capturing():
        report.zero_()  # an error of one replay must not make the next one skip its entries
    key_N = torch.empty_like(ids_N, dtype=key_type(held))

    grid, entries = blocks(count, ids_N, ENTRIES)
    find_kernel[grid](
        *entries_N, ids_E, used_bytes_E, count, first, held, buckets, slots, window, rows_N, probes_N, outcomes_N,
        evicted_ids_N, key_N, needs_B, report,
        ASSIGNS=True, INSERTS=inserts_N is not None, ENTRIES=entries, PROBES=PROBES, num_warps=1, **given,
    )  # fmt: skip
    if held:
        sorted_N, order_N = torch.sort(key_N, stable=True)
        grid, block = blocks(count, ids_N, 128)
        runs_kernel[grid](sorted_N, begin_B, end_B, count, held, BLOCK=block)
        walk_kernel[walk_grid(held, ids_N)](
            *entries_N, ids_E, used_bytes_E, since_E, last_E, hits_E, expires_E, counters_BC, order_N, needs_B,
            begin_B, end_B, report, rows_N, probes_N, outcomes_N, evicted_ids_N, *clocks_there, first, held, slots,
            window, counters_BC.shape[1], step, now, ttl, threshold, max(evict, 1),
            POLICY=call.policy, EXPONENT=exponent_of(call.policy, call.exponent), EVICT=evict > 0, EXPIRING=expiring,
            ADMITS=threshold > 1, INSERTS=inserts_N is not None, WIDTH=width_of(window), CHUNK=128, num_warps=1,
            **given, **clocks,
        )  # fmt: skip
        hit_kernel[grid](
            entries_N[1], entries_N[3], rows_N, outcomes_N, last_E, hits_E, expires_E, report, *clocks_there, count,
            first, slots, step, now, ttl, EXPIRING=expiring, BLOCK=block, **given, **clocks,
        )  # fmt: skip
    post(report, raises("zch_assign_", ids_N, counts_N, ttl_N, first, held, buckets))
    return rows_N, outcomes_N, probes_N, evicted_ids_N


def zch_assign_(call: AssignCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `tilerec/ops/hash/assign.py`. Waits for the device once, so this call raises for bad entries."""
    rows_N, outcomes_N, probes_N, evicted_ids_N = zch_assign_each_(call)
    at_M = (outcomes_N == IdOutcome.EVICTED).nonzero().squeeze(1)
    raise_due(rows_N.device)
    return rows_N, outcomes_N, probes_N, rows_N[at_M], evicted_ids_N[at_M]
