"""Lookup of ids on a GPU: `zch_buckets`, `zch_find`.

Nouns as in `definition.py` and `backend.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.hash.checks import COUNTER_LIMIT, raise_bad_count, raise_bad_ttl, raise_wrong_bucket
from tilerec.ops.hash.policy import IdOutcome
from tilerec.ops.hash.triton.place import (
    ANYWHERE,
    UNSPECIALIZED,
    as_bytes,
    blocks,
    bucket_of,
    high,
    low,
    mixed_bits,
    wrapped,
)
from tilerec.ops.runtime.triton.reports import Raise, new_report, post, raise_due

LIMIT = tl.constexpr(COUNTER_LIMIT)
HIT, MISSING = tl.constexpr(int(IdOutcome.HIT)), tl.constexpr(int(IdOutcome.MISSING))
ENTRIES, PROBES = 16, 8  # ids of a program, and slots of each id that it reads at once


@triton.jit(do_not_specialize=["count", "buckets"], do_not_specialize_on_alignment=["ids_N"])
def buckets_kernel(ids_N, buckets_N, count, buckets, BLOCK: tl.constexpr):
    """Store the bucket of each id. Ids 0, 1, -1 of 768 buckets -> 0, 259, 542."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id_ = tl.load(ids_N + n, mask=n < count, other=0)
    tl.store(buckets_N + n, high(mixed_bits(id_.to(tl.uint64, bitcast=True)), buckets.to(tl.int64)), mask=n < count)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ANYWHERE)
def find_kernel(
    ids_N, counts_N, may_insert_N, ttl_N, ids_E, used_E, count, first, held, buckets, slots, window, rows_N,
    probes_N, outcomes_N, evicted_ids_N, key_N, needs_B, report, ASSIGNS: tl.constexpr, COUNTS: tl.constexpr,
    INSERTS: tl.constexpr, TTLS: tl.constexpr, ENTRIES: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Store the row of every id and the number of slots probed, ENTRIES ids and PROBES neighbouring slots at a time.

    8 lanes read 8 neighbouring slots, 64 bytes, of one id's window. The reads of an id stop at its slot, or at an empty
    one. With ASSIGNS the kernel also stores the sort's key (the bucket), flags of buckets with ids to insert, and the
    outcomes of a batch without insertions.
    """
    n = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = n < count
    id_ = tl.load(ids_N + n, mask=inside, other=0)
    mixed = mixed_bits(id_.to(tl.uint64, bitcast=True))
    bucket = high(mixed, buckets.to(tl.int64)) - first
    ours = inside & (bucket >= 0) & (bucket < held)
    stray = inside & ((bucket < 0) | (bucket >= held))
    tl.atomic_max(report + 1 + n * 0, count - n, mask=stray, sem="relaxed")
    tl.store(report + n * 0, 1, mask=stray)
    start = low(mixed, slots.to(tl.int64))
    base = bucket * slots

    row = n * 0 - 1
    probes = n * 0
    looking = ours
    nearest = tl.arange(0, PROBES)[None, :]
    done = tl.program_id(0).to(tl.int64) * 0
    while (done < window) & (tl.max(looking.to(tl.int32), axis=0) > 0):
        distance = done + nearest
        slot = wrapped(start[:, None] + distance, slots)
        reads = looking[:, None] & (distance < window)
        there = tl.load(ids_E + base[:, None] + slot, mask=reads, other=0)
        full = tl.load(used_E + base[:, None] + slot, mask=reads, other=1) != 0
        same = reads & full & (there == id_[:, None])
        end = tl.min(tl.where(same | (reads & (full == 0)), nearest, PROBES), axis=1)
        match = tl.min(tl.where(same, nearest, PROBES), axis=1)
        ends = looking & (end < PROBES)
        row = tl.where(ends & (end == match), base + wrapped(start + done + end, slots), row)
        probes = tl.where(ends, done + end + 1, probes)
        looking = looking & (end == PROBES)
        done += PROBES
    probes = tl.where(looking, window, probes)
    tl.store(rows_N + n, tl.where(row >= 0, row + first.to(tl.int64) * slots, row), mask=inside)
    tl.store(probes_N + n, probes.to(tl.int32), mask=inside)

    if ASSIGNS:
        tl.store(outcomes_N + n, tl.where(row >= 0, HIT, MISSING).to(tl.uint8), mask=inside)
        tl.store(evicted_ids_N + n, n * 0, mask=inside)
        tl.store(key_N + n, tl.where(ours, bucket, 0).to(key_N.dtype.element_ty), mask=inside)
        enters = ours & (row < 0)
        if INSERTS:
            enters = enters & (tl.load(may_insert_N + n, mask=inside, other=0) != 0)
        tl.store(needs_B + bucket, n * 0 + 1, mask=enters)
        bad = inside & (n < 0)
        if COUNTS:
            each = tl.load(counts_N + n, mask=inside, other=1)
            bad = bad | (each < 1) | (each > LIMIT)
        if TTLS:
            lives = tl.load(ttl_N + n, mask=inside, other=0)
            bad = bad | (lives < 0) | (lives > 2**61)
        if COUNTS or TTLS:
            tl.atomic_max(report + 2 + n * 0, count - n, mask=bad, sem="relaxed")
            tl.store(report + n * 0, 1, mask=bad)


def raises(
    op: str, ids_N: Tensor, counts_N: Tensor | None, ttl_N: Tensor | None, first: int, held: int, buckets: int
) -> Raise:
    """Return the function that raises the error of a taken report. Reports hold positions; it reads the ids there."""
    count = ids_N.shape[0]

    def raise_(stray: int, bad: int, _: int) -> None:
        if stray:
            id_ = int(ids_N[count - stray])
            raise_wrong_bucket(op, count - stray, id_, bucket_of(id_, buckets), first, held, buckets)
        at = count - bad
        each = 1 if counts_N is None else int(counts_N[at])
        if not 1 <= each <= COUNTER_LIMIT:
            raise_bad_count(op, at, each)
        assert ttl_N is not None
        raise_bad_ttl(op, at, int(ttl_N[at]))

    return raise_


def zch_buckets(ids_N: Tensor, buckets: int) -> Tensor:
    """See `tilerec/ops/hash/find.py`."""
    ids_N = ids_N.contiguous()
    raise_due(ids_N.device)
    buckets_N = torch.empty_like(ids_N)
    if ids_N.shape[0]:
        grid, block = blocks(ids_N.shape[0], ids_N, 128)
        buckets_kernel[grid](ids_N, buckets_N, ids_N.shape[0], buckets, BLOCK=block)
    return buckets_N


def zch_find(
    ids_N: Tensor, ids_E: Tensor, used_E: Tensor, first: int, buckets: int, slots: int, max_probe: int
) -> tuple[Tensor, Tensor]:
    """See `tilerec/ops/hash/find.py`. An id of a bucket that is not held gets row -1, and a later op raises."""
    ids_N = ids_N.contiguous()
    raise_due(ids_N.device)
    count, held = ids_N.shape[0], ids_E.shape[0] // slots
    rows_N, probes_N = torch.empty_like(ids_N), torch.empty_like(ids_N, dtype=torch.int32)
    if count:
        report = new_report(ids_N.device)
        grid, entries = blocks(count, ids_N, ENTRIES)
        find_kernel[grid](
            ids_N, ids_N, ids_N, ids_N, ids_E, as_bytes(used_E), count, first, held, buckets, slots,
            min(max_probe, slots), rows_N, probes_N, probes_N, rows_N, rows_N, rows_N, report,
            ASSIGNS=False, COUNTS=False, INSERTS=False, TTLS=False, ENTRIES=entries, PROBES=PROBES, num_warps=1,
        )  # fmt: skip
        post(report, raises("zch_find", ids_N, None, None, first, held, buckets))
    return rows_N, probes_N
