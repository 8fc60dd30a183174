"""Assignment of rows to ids, in order: `zch_assign_`, `zch_assign_each_`. Terms as in `definition.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.ops.hash.checks import COUNTER_LIMIT, MAX_TIME, check_assign, raise_bad_count, raise_bad_ttl
from tilerec.ops.hash.place import SECOND, by_bucket, high, local_buckets, low, mixed, tensor_like, window_of
from tilerec.ops.hash.policy import IdOutcome, Policy, Score, score
from tilerec.ops.hash.state import AssignCall
from tilerec.ops.runtime.library import LIBRARY

# Order of `AssignCall.packed`.
_ARGUMENTS = (
    "(Tensor ids_N, Tensor?[] entries, Tensor(a!)[] state, int[] table, SymInt[] numbers, float exponent, "
    "Tensor?[] clocks)"
)
_FORM: dict[str, Any] = {"unpack": AssignCall.unpack, "check": check_assign, "check_fake": True}


class Bucket(NamedTuple):
    """One bucket as Python lists."""

    ids: list[int]
    used: list[bool]
    since: list[int]
    last: list[int]
    hits: list[int]
    expires: list[int]
    counters: list[int]

    def search(self, id_: int, window: Iterable[int]) -> tuple[int | None, bool, int]:
        """Return the slot of the id or the first empty one (None: neither), whether the id is there, and probes."""
        probes = 0
        for probes, slot in enumerate(window, 1):
            if not self.used[slot]:
                return slot, False, probes
            if self.ids[slot] == id_:
                return slot, True, probes
        return None, False, probes

    def admits(self, places: tuple[int, int], count: int, threshold: int) -> bool:
        if threshold <= 1:
            return True
        seen = min(min(self.counters[place] for place in places) + count, COUNTER_LIMIT)
        for place in places:
            self.counters[place] = max(self.counters[place], seen)
        return seen >= threshold

    def victim(self, window: Iterable[int], policy: int, exponent: float, step: int, now: int) -> int | None:
        def score_of(slot: int) -> Score:
            last, hits, expires = self.last[slot], self.hits[slot], self.expires[slot]
            return score(policy, step=step, last=last, hits=hits, expires=expires, exponent=exponent)

        may_go = (
            slot for slot in window if self.last[slot] < step and (policy != Policy.TTL or self.expires[slot] <= now)
        )
        return min(may_go, key=score_of, default=None)

    def put(self, slot: int, id_: int, step: int, count: int, until: int) -> None:
        self.ids[slot], self.used[slot], self.hits[slot], self.expires[slot] = id_, True, count, until
        self.since[slot] = self.last[slot] = step

    def assign(self, entry: Entry, call: AssignCall, step: int, now: int) -> Assignment:
        window = window_of(entry.start, call.table.slots, call.table.max_probe)
        slot, found, probes = self.search(entry.id_, window)
        until = now + entry.ttl
        if found and slot is not None:
            self.last[slot] = step
            self.hits[slot] += entry.occurrences
            self.expires[slot] = max(self.expires[slot], until)
            return Assignment(IdOutcome.HIT, probes, slot)
        if not entry.insert:
            return Assignment(IdOutcome.MISSING, probes)
        if not self.admits(entry.places, entry.occurrences, call.threshold):
            return Assignment(IdOutcome.NOT_ADMITTED, probes)
        outcome, evicted = IdOutcome.INSERTED, None
        if slot is None:
            slot = self.victim(window, call.policy, call.exponent, step, now) if call.evicts(step) else None
            if slot is None:
                return Assignment(IdOutcome.REJECTED, probes)
            outcome, evicted = IdOutcome.EVICTED, self.ids[slot]
        self.put(slot, entry.id_, step, entry.occurrences, until)
        return Assignment(outcome, probes, slot, evicted)


class Entry(NamedTuple):
    """One of a batch's ids."""

    id_: int
    start: int
    occurrences: int
    insert: bool
    ttl: int
    places: tuple[int, int]  # of its two counters


class Assignment(NamedTuple):
    """Result for one entry."""

    outcome: IdOutcome
    probes: int
    slot: int | None = None
    evicted: int | None = None  # id that lost the slot


def _entries(call: AssignCall, mixed_N: Tensor) -> list[Entry]:
    """Return the batch's entries; raise an error for a count or a time to live out of range."""
    op, total = "zch_assign_", call.ids_N.shape[0]
    counts = [1] * total if call.counts_N is None else call.counts_N.tolist()
    inserts = [True] * total if call.may_insert_N is None else call.may_insert_N.tolist()
    ttls = [call.ttl] * total if call.ttl_N is None else call.ttl_N.tolist()
    for n, (count, time) in enumerate(zip(counts, ttls, strict=True)):
        if not 1 <= count <= COUNTER_LIMIT:
            raise_bad_count(op, n, count)
        if not 0 <= time <= MAX_TIME:
            raise_bad_ttl(op, n, time)
    second_N, each = mixed(mixed_N ^ SECOND), call.state.counters_BC.shape[1]
    places = zip(high(second_N, each).tolist(), low(second_N, each).tolist(), strict=True)
    starts = low(mixed_N, call.table.slots).tolist()
    return list(map(Entry, call.ids_N.tolist(), starts, counts, inserts, ttls, places))


def _fake_assign(call: AssignCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ids_N, evictions = call.ids_N, torch.library.get_ctx().new_dynamic_size()
    return (
        torch.empty_like(ids_N),
        torch.empty_like(ids_N, dtype=torch.uint8),
        torch.empty_like(ids_N, dtype=torch.int32),
        ids_N.new_empty(evictions),
        ids_N.new_empty(evictions),
    )


@LIBRARY.op(f"zch_assign_{_ARGUMENTS} -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _fake_assign, **_FORM)
def zch_assign_reference(call: AssignCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Assign a row to every id, in order.

    Entry n stands for `counts_N[n]` occurrences (default 1). In its window, up to the first empty slot:
    1. If the id is found: a hit. `last` becomes `step`, `hits` grows, `expires` becomes the later of itself and
       now + ttl.
    2. Otherwise, if `may_insert_N[n]` is False: missing. Nothing changes.
    3. Otherwise, if `threshold` > 1: take the lesser of the id's two counters plus its occurrences (at most 2**31 - 1).
       Lesser counters are raised to this number. If it is below the threshold, the id is not admitted.
    4. Otherwise, if there is an empty slot: the id is inserted there.
    5. Otherwise, if `evict` divides the step (0: never): candidates are the slots that this step has not touched (with
       TTL: that have also expired). The one with the least score by `policy` is evicted, and the id takes its place.
    6. Otherwise the id is rejected.
    An inserted id has since = last = step, hits = its occurrences, expires = now + ttl.

    Returns rows_N (int64, numbered over the whole table; -1: none), outcome_N (uint8, `IdOutcome`), probes_N (int32,
    slots searched for the id or an empty slot), evicted_rows_M and evicted_ids_M (int64, in the order of the evicting
    entries; each row occurs at most once).

    1 bucket of 2 slots, LRU, step 9, both used: ids [5, 6], last [3, 9]. Assigning [7, 8]: 7 evicts 5 (6 is touched)
    and takes its row, last is [9, 9]; 8 is rejected. rows [0, -1], outcomes [2, 3], evicted rows [0], ids [5].
    """
    ids_N, (_, slots, _, first) = call.ids_N, call.table
    *state_E, expires_E, counters_BC = call.state
    step, now = call.numbers()
    mixed_N = mixed(ids_N)
    bucket_N = local_buckets("zch_assign_", ids_N, mixed_N, first, call.held, call.table.buckets)
    entries = _entries(call, mixed_N)
    expiring = expires_E.shape[0] > 0
    state_E += [expires_E] if expiring else []

    rows, outcomes, probes = [-1] * len(entries), [0] * len(entries), [0] * len(entries)
    evictions: dict[int, tuple[int, int]] = {}
    for bucket, positions in by_bucket(bucket_N):
        here = slice(bucket * slots, (bucket + 1) * slots)
        state = [values_E[here].tolist() for values_E in state_E]
        content = Bucket._make([*state, *([] if expiring else [[0] * slots]), counters_BC[bucket].tolist()])
        for n in positions:
            outcomes[n], probes[n], slot, evicted = content.assign(entries[n], call, step, now)
            if slot is not None:
                rows[n] = (first + bucket) * slots + slot
            if evicted is not None:
                evictions[n] = rows[n], evicted
        for values_E, values in zip(state_E, state, strict=True):
            values_E[here] = tensor_like(values, values_E.dtype, values_E)
        counters_BC[bucket] = tensor_like(content.counters, counters_BC.dtype, counters_BC)

    ordered = [evictions[n] for n in sorted(evictions)]
    return (
        tensor_like(rows, torch.int64, ids_N),
        tensor_like(outcomes, torch.uint8, ids_N),
        tensor_like(probes, torch.int32, ids_N),
        tensor_like([row for row, _ in ordered], torch.int64, ids_N),
        tensor_like([old for _, old in ordered], torch.int64, ids_N),
    )


def assign_each_from(
    assign: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return `zch_assign_each_` based on `zch_assign_`, which lists the same evictions in the same order."""

    def zch_assign_each_(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run `zch_assign_` with results of the batch's length, so that the host needs no synchronization.

        Returns rows_N, outcomes_N, probes_N as `zch_assign_`, and evicted_ids_N: the id that entry n evicted if its
        outcome is EVICTED, else 0.
        """
        rows_N, outcomes_N, probes_N, _, evicted_ids_M = assign(*arguments)
        evicted_ids_N = torch.zeros_like(rows_N)
        evicted_ids_N[outcomes_N == IdOutcome.EVICTED] = evicted_ids_M
        return rows_N, outcomes_N, probes_N, evicted_ids_N

    return zch_assign_each_


def _fake_assign_each(call: AssignCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids_N = call.ids_N
    uint8, int32 = (torch.empty_like(ids_N, dtype=kind) for kind in (torch.uint8, torch.int32))
    return torch.empty_like(ids_N), uint8, int32, torch.empty_like(ids_N)


LIBRARY.op(f"zch_assign_each_{_ARGUMENTS} -> (Tensor, Tensor, Tensor, Tensor)", _fake_assign_each, **_FORM)(
    assign_each_from(zch_assign_reference)
)
# On CPU it calls the backend's `zch_assign_`.
LIBRARY.impl("zch_assign_each_", assign_each_from(torch.ops.tilerec.zch_assign_.default), "CPU")
