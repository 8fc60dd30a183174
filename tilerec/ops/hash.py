"""Which row an id has: a hash table whose slots are the rows of an embedding table, cut into buckets.

Nouns
    bucket    S neighbouring rows; a table has B of them. An id never leaves its bucket, so its row does not depend on
              how many ranks there are: a rank holds the buckets [first, first + B') and their state is one slice
    slot      one row of a bucket:  row = bucket * S + slot
    window    the slots where an id may be: from its start on, circular inside its bucket, at most min(max_probe, S)
    state     what is kept per row: the id, whether the slot is used, step of its insertion (`since`), step of its last
              use (`last`), uses (`hits`), and when it expires (`expires`, kept only where it has a place)
    touched   a slot whose `last` is not before this step: a sample of this batch uses the row, so it is not evicted
    counters  what admission counts per bucket: two of them for every id that has no row

    mixed  = the finaliser of splitmix64 (Steele, Lea, Flood 2014) of the id's 64 bits; any int64 is an id
    bucket = ((mixed >> 32) * B) >> 32           start = ((mixed & 0xffffffff) * S) >> 32
    so k B buckets cut bucket b into k b ... k b + k - 1

A used slot becomes empty only when its whole bucket is cleared or resized (eviction replaces in place), so a search
ends at the first empty slot. The meaning of `zch_assign_` is that of its entries taken one after the other; different
buckets share nothing, so a backend may take them at once and gives the same bits.

Shapes
    N ids, E' = B' * S rows that are held, M evictions, C counters per bucket

Here stand the schemas, the plain reference (any device; Python loops over the buckets that are hit) and the fake
kernels. The functions at the end are the typed way to call them.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilerec.ops.hash_checks import checked, raise_bad_count, raise_bad_ttl, raise_lost_id, raise_wrong_bucket
from tilerec.ops.library import LIBRARY

_OPS = torch.ops.tilerec


Score: TypeAlias = "tuple[float, ...] | tuple[int, ...]"


class Policy(enum.IntEnum):
    """Whom a full window evicts: the least of, and of equals the first in the order of probing."""

    LRU = 0  # last
    LFU = 1  # hits, then last
    DISTANCE_LFU = 2  # hits / (step - last) ** exponent, in float64; the exponent in steps of 1/256
    TTL = 3  # expires; only slots with expires <= now


class Outcome(enum.IntEnum):
    """What became of one id."""

    HIT = 0  # it had a row
    INSERTED = 1  # it took an empty slot
    EVICTED = 2  # it took the row of an evicted id
    REJECTED = 3  # its window is full, and nobody in it was to be evicted
    NOT_ADMITTED = 4  # not seen often enough yet
    MISSING = 5  # not there, and not to be inserted


# ---------------------------------------------------------------------------------------------------------------
# from ids to buckets

_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SECOND = 0x9E3779B97F4A7C15 - 2**64  # what makes another hash of `mixed`
_LOW = 0xFFFFFFFF
COUNTER_LIMIT = 2**31 - 1

LIBRARY.define("zch_buckets(Tensor ids_N, int buckets) -> Tensor")


def _shifted(values_N: Tensor, bits: int) -> Tensor:
    """Shift right, zeros coming in."""
    return (values_N >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(ids_N: Tensor) -> Tensor:
    mixed_N = (ids_N ^ _shifted(ids_N, 30)) * _MULTIPLIERS[0]
    mixed_N = (mixed_N ^ _shifted(mixed_N, 27)) * _MULTIPLIERS[1]
    return mixed_N ^ _shifted(mixed_N, 31)


def _high(mixed_N: Tensor, count: int) -> Tensor:
    return (_shifted(mixed_N, 32) * count) >> 32


def _low(mixed_N: Tensor, count: int) -> Tensor:
    return ((mixed_N & _LOW) * count) >> 32


def _zch_buckets(ids_N: Tensor, buckets: int) -> Tensor:
    """The bucket of every id, int64.

    ids [0, 1, -1], 768 buckets -> [0, 259, 542]: mixed are 0, 0x5692161d100b05e5, 0xb4d055fcf2cbbd7b
    """
    return _high(_mixed(ids_N), buckets)


def _zch_buckets_fake(ids_N: Tensor, buckets: int) -> Tensor:
    return torch.empty_like(ids_N)


# ---------------------------------------------------------------------------------------------------------------
# zch_find

LIBRARY.define(
    "zch_find(Tensor ids_N, Tensor ids_E, Tensor used_E, int first, int buckets, int slots, int max_probe)"
    " -> (Tensor, Tensor)"
)


def _groups(bucket_N: Tensor) -> Iterator[tuple[int, list[int]]]:
    """The positions of every bucket that is hit, in order."""
    order = torch.sort(bucket_N, stable=True).indices.tolist()
    bucket = bucket_N.tolist()
    for found, positions in itertools.groupby(order, key=bucket.__getitem__):
        yield found, list(positions)


def _local_buckets(op: str, ids_N: Tensor, mixed_N: Tensor, first: int, held: int, buckets: int) -> Tensor:
    """Buckets counted from the first one held; an id of another bucket is an error."""
    bucket_N = _high(mixed_N, buckets) - first
    wrong = ((bucket_N < 0) | (bucket_N >= held)).nonzero()
    if wrong.shape[0]:
        at = int(wrong[0, 0])
        raise_wrong_bucket(op, at, int(ids_N[at]), int(bucket_N[at]) + first, first, held, buckets)
    return bucket_N


def _window(start: int, slots: int, max_probe: int) -> list[int]:
    """Slots in the order of probing. start 2 of 4 slots, 3 probes -> [2, 3, 0]"""
    end = start + min(max_probe, slots)
    return [*range(start, min(end, slots)), *range(end - slots)]


def _zch_find(
    ids_N: Tensor, ids_E: Tensor, used_E: Tensor, first: int, buckets: int, slots: int, max_probe: int
) -> tuple[Tensor, Tensor]:
    """The row of every id (int64, of the whole table; -1: none), and the slots looked at (int32). Reads only.

    1 bucket of 4 slots holds [1, -, 8, 3], max_probe 3. 8 starts at slot 2: row 2, 1 probe. 2 starts at slot 0, and
    slot 1 is empty: row -1, 2 probes. 5 starts at slot 2 and is in none of 2, 3 and 0: row -1, 3 probes.
    """
    mixed_N = _mixed(ids_N)
    bucket_N = _local_buckets("zch_find", ids_N, mixed_N, first, ids_E.shape[0] // slots, buckets)
    ids, starts = ids_N.tolist(), _low(mixed_N, slots).tolist()
    rows, probes = [-1] * len(ids), [0] * len(ids)
    for bucket, positions in _groups(bucket_N):
        here = slice(bucket * slots, (bucket + 1) * slots)
        bucket_ids, used = ids_E[here].tolist(), used_E[here].tolist()
        for n in positions:
            for slot in _window(starts[n], slots, max_probe):
                probes[n] += 1
                if not used[slot]:
                    break
                if bucket_ids[slot] == ids[n]:
                    rows[n] = (first + bucket) * slots + slot
                    break
    return _tensor(rows, torch.int64, ids_N), _tensor(probes, torch.int32, ids_N)


def _tensor(values: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)


def _zch_find_fake(
    ids_N: Tensor, ids_E: Tensor, used_E: Tensor, first: int, buckets: int, slots: int, max_probe: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids_N), torch.empty_like(ids_N, dtype=torch.int32)


# ---------------------------------------------------------------------------------------------------------------
# zch_assign_

LIBRARY.define(
    "zch_assign_(Tensor ids_N, Tensor? counts_N, Tensor? may_insert_N, Tensor? ttl_N, Tensor(a!) ids_E, "
    "Tensor(b!) used_E, Tensor(c!) since_E, Tensor(d!) last_E, Tensor(e!) hits_E, Tensor(f!) expires_E, "
    "Tensor(g!) counters_BC, int first, int buckets, int slots, int max_probe, SymInt step, SymInt now, int policy, "
    "float exponent, SymInt ttl, bool evict, int threshold) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _power(age: int, exponent: float) -> float:
    """age ** exponent, taken to the nearest 1/256, by products and square roots: every machine rounds them alike.

    9 ** 1.5 -> 9 * sqrt(9) = 27
    """
    whole, part = divmod(int(exponent * 256 + 0.5), 256)
    result, base, root = 1.0, float(age), float(age)
    while whole:
        result *= base if whole & 1 else 1.0
        whole >>= 1
        base *= base if whole else 1.0
    while part:
        root = math.sqrt(root)
        result *= root if part & 128 else 1.0
        part = (part << 1) & 255
    return result


def _score(policy: int, exponent: float, step: int, last: int, hits: int, expires: int) -> Score:
    """What a policy compares: the least goes first."""
    if policy == Policy.LRU:
        return (last,)
    if policy == Policy.LFU:
        return (hits, last)
    if policy == Policy.DISTANCE_LFU:
        return (float(hits) / _power(max(step - last, 1), exponent),)
    return (expires,)


class _Bucket(NamedTuple):
    """One bucket as lists, for loops in Python."""

    ids: list[int]
    used: list[bool]
    since: list[int]
    last: list[int]
    hits: list[int]
    expires: list[int]
    counters: list[int]

    def search(self, id_: int, window: Iterable[int]) -> tuple[int | None, bool, int]:
        """The slot of the id or the first empty one (None: neither), whether the id is there, slots looked at."""
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
        may_go = (
            slot
            for slot in window
            if self.last[slot] < step and (policy != Policy.TTL or self.expires[slot] <= now)
        )
        return min(may_go, key=lambda slot: self.score(slot, policy, exponent, step), default=None)

    def score(self, slot: int, policy: int, exponent: float, step: int) -> Score:
        return _score(policy, exponent, step, self.last[slot], self.hits[slot], self.expires[slot])

    def hit(self, slot: int, step: int, count: int, until: int) -> None:
        self.last[slot] = step
        self.hits[slot] += count
        self.expires[slot] = max(self.expires[slot], until)

    def put(self, slot: int, id_: int, step: int, count: int, until: int) -> None:
        self.ids[slot], self.used[slot], self.hits[slot], self.expires[slot] = id_, True, count, until
        self.since[slot] = self.last[slot] = step


def _zch_assign_(
    ids_N: Tensor,
    counts_N: Tensor | None,
    may_insert_N: Tensor | None,
    ttl_N: Tensor | None,
    ids_E: Tensor,
    used_E: Tensor,
    since_E: Tensor,
    last_E: Tensor,
    hits_E: Tensor,
    expires_E: Tensor,
    counters_BC: Tensor,
    first: int,
    buckets: int,
    slots: int,
    max_probe: int,
    step: int,
    now: int,
    policy: int,
    exponent: float,
    ttl: int,
    evict: bool,
    threshold: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Give every id a row, one after the other.

    Entry n stands for `counts_N[n]` occurrences (1 without). In its window, up to the first empty slot:
    1. found: a hit. `last` becomes `step`, `hits` grows, `expires` becomes the later of itself and now + ttl.
    2. otherwise, if `may_insert_N[n]` is false: missing. Nothing changes.
    3. otherwise, if `threshold` > 1: the lesser of the id's two counters, plus its occurrences (at most 2**31 - 1), is
       written to those of the two that are less; below the threshold the id is not admitted.
    4. otherwise, an empty slot: inserted there.
    5. otherwise, with `evict`: of the slots that this step has not touched (and with TTL: that have expired), the least
       by `policy` is evicted and the id inserted in its place.
    6. otherwise rejected.
    An inserted id has since = last = step, hits = its occurrences, expires = now + ttl.

    Returns rows_N (int64, of the whole table; -1: none), outcome_N (uint8, `Outcome`), probes_N (int32, slots looked at
    to find the id or an empty slot), evicted_rows_M and evicted_ids_M (int64, in the order of their evictors; a row is
    there at most once).

    1 bucket of 2 slots, LRU, step 9, both used: ids [5, 6], last [3, 9]. Assigning [7, 8]: 7 evicts 5 (6 is touched)
    and takes its row, last is [9, 9]; 8 is rejected. rows [0, -1], outcomes [2, 3], evicted rows [0], ids [5].
    """
    op = "zch_assign_"
    mixed_N = _mixed(ids_N)
    bucket_N = _local_buckets(op, ids_N, mixed_N, first, ids_E.shape[0] // slots, buckets)
    ids, starts = ids_N.tolist(), _low(mixed_N, slots).tolist()
    counts = [1] * len(ids) if counts_N is None else counts_N.tolist()
    inserts = [True] * len(ids) if may_insert_N is None else may_insert_N.tolist()
    ttls = [ttl] * len(ids) if ttl_N is None else ttl_N.tolist()
    for n, (count, time) in enumerate(zip(counts, ttls, strict=True)):
        if not 1 <= count <= COUNTER_LIMIT:
            raise_bad_count(op, n, count)
        if not 0 <= time <= 2**61:
            raise_bad_ttl(op, n, time)
    expiring = expires_E.shape[0] > 0
    second_N = _mixed(mixed_N ^ _SECOND)
    places = list(
        zip(
            _high(second_N, counters_BC.shape[1]).tolist(),
            _low(second_N, counters_BC.shape[1]).tolist(),
            strict=True,
        )
    )

    rows, outcomes, probes = [-1] * len(ids), [0] * len(ids), [0] * len(ids)
    evictions: dict[int, tuple[int, int]] = {}
    for bucket, positions in _groups(bucket_N):
        here = slice(bucket * slots, (bucket + 1) * slots)
        state_E = [ids_E, used_E, since_E, last_E, hits_E, *([expires_E] if expiring else [])]
        state = [values_E[here].tolist() for values_E in state_E]
        bucket_ids, used, since, last, hits = state[:5]
        expires = state[5] if expiring else [0] * slots
        content = _Bucket(bucket_ids, used, since, last, hits, expires, counters_BC[bucket].tolist())
        for n in positions:
            window = _window(starts[n], slots, max_probe)
            until = now + ttls[n]
            slot, found, probes[n] = content.search(ids[n], window)
            if found and slot is not None:
                content.hit(slot, step, counts[n], until)
                outcome = Outcome.HIT
            elif not inserts[n]:
                outcome = Outcome.MISSING
            elif not content.admits(places[n], counts[n], threshold):
                outcome = Outcome.NOT_ADMITTED
            else:
                outcome = Outcome.INSERTED
                if slot is None:
                    slot = content.victim(window, policy, exponent, step, now) if evict else None
                    outcome = Outcome.REJECTED if slot is None else Outcome.EVICTED
                if slot is not None:
                    if outcome == Outcome.EVICTED:
                        evictions[n] = ((first + bucket) * slots + slot, content.ids[slot])
                    content.put(slot, ids[n], step, counts[n], until)
            outcomes[n] = outcome
            if slot is not None and outcome <= Outcome.EVICTED:
                rows[n] = (first + bucket) * slots + slot
        for values_E, values in zip(state_E, state, strict=True):
            values_E[here] = _tensor(values, values_E.dtype, values_E)
        counters_BC[bucket] = _tensor(content.counters, counters_BC.dtype, counters_BC)

    ordered = [evictions[n] for n in sorted(evictions)]
    return (
        _tensor(rows, torch.int64, ids_N),
        _tensor(outcomes, torch.uint8, ids_N),
        _tensor(probes, torch.int32, ids_N),
        _tensor([row for row, _ in ordered], torch.int64, ids_N),
        _tensor([old for _, old in ordered], torch.int64, ids_N),
    )


def _zch_assign_fake(ids_N: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    evictions = torch.library.get_ctx().new_dynamic_size()
    return (
        torch.empty_like(ids_N),
        torch.empty_like(ids_N, dtype=torch.uint8),
        torch.empty_like(ids_N, dtype=torch.int32),
        ids_N.new_empty(evictions),
        ids_N.new_empty(evictions),
    )


# ---------------------------------------------------------------------------------------------------------------
# zch_resize

LIBRARY.define(
    "zch_resize(Tensor ids_E, Tensor used_E, Tensor since_E, Tensor last_E, Tensor hits_E, Tensor expires_E, "
    "int first, int buckets, int slots, int new_buckets, int new_slots, int max_probe, SymInt step, int policy, "
    "float exponent) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _placed(order: Sequence[int], starts: Sequence[int], slots: int, max_probe: int) -> dict[int, int]:
    """The first empty slot of each one's window, for those that find one. 4 slots, starts [3, 3, 0] -> [3, 0, 1]"""
    empty = [True] * slots
    placed: dict[int, int] = {}
    for one in order:
        for slot in _window(starts[one], slots, max_probe):
            if empty[slot]:
                empty[slot] = False
                placed[one] = slot
                break
    return placed


def _cut(starts: Sequence[int], slots: int) -> int:
    """The slot from which to count starts, so that nobody who is placed in their order passes the end.

    That is the slot after the one where (ids that start up to here) - (slots up to here) is least. Windows are equally
    long, so who starts first must be placed first: in this order nobody is further from its start than the worst off in
    any other arrangement. 4 slots, starts [3, 3, 0]: 1 - 1, 1 - 2, 1 - 3 and 3 - 4 up to slots 0 to 3 -> 3
    """
    balance, least, cut = 0, 1, 0
    per_slot = [0] * slots
    for start in starts:
        per_slot[start] += 1
    for slot, count in enumerate(per_slot):
        balance += count - 1
        if balance < least:
            least, cut = balance, (slot + 1) % slots
    return cut


def _new_held(held: int, buckets: int, new_buckets: int) -> int:
    return held * new_buckets // buckets


def _zch_resize(
    ids_E: Tensor,
    used_E: Tensor,
    since_E: Tensor,
    last_E: Tensor,
    hits_E: Tensor,
    expires_E: Tensor,
    first: int,
    buckets: int,
    slots: int,
    new_buckets: int,
    new_slots: int,
    max_probe: int,
    step: int,
    policy: int,
    exponent: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The state of another number of slots, or of k times (or a k-th of) the buckets; the old one is left as it is.

    In every new bucket the ids that `policy` would evict last are placed first, equals in the order of their old rows,
    each in the first empty slot of its window. If somebody finds none, they are placed in the order of their starts
    instead, provided that this keeps everybody; it does wherever some arrangement would (`_cut`), so splitting buckets,
    or a resize to the same numbers, drops nobody. Otherwise whoever found none is dropped.

    Returns the new state (ids, used, since, last, hits, expires) and moved_E (int64): the new row of every old one, of
    the whole table; -1: not used, -2: its id was dropped.

    1 bucket of 2 slots to 1 slot, LRU, ids [5, 6], last [3, 9] -> ids [6], moved [-2, 0].
    """
    held = ids_E.shape[0] // slots
    new_first, new_held = first * new_buckets // buckets, _new_held(held, buckets, new_buckets)
    old = used_E.nonzero().squeeze(1)
    mixed_U = _mixed(ids_E[old])
    own_U = _high(mixed_U, buckets)
    lost = (own_U != old // slots + first).nonzero()
    if lost.shape[0]:
        at = int(lost[0, 0])
        raise_lost_id(
            "zch_resize", int(old[at]) + first * slots, int(ids_E[old[at]]), int(own_U[at]),
            int(old[at]) // slots + first, buckets,
        )  # fmt: skip
    expiring = expires_E.shape[0] > 0
    state_E = [ids_E, used_E, since_E, last_E, hits_E, *([expires_E] if expiring else [])]
    new_E = [values_E.new_zeros(new_held * new_slots) for values_E in state_E]
    moved_E = torch.full_like(ids_E, -1)
    moved_E[old] = -2

    starts = _low(mixed_U, new_slots).tolist()
    sources = old.tolist()
    last, hits = last_E[old].tolist(), hits_E[old].tolist()
    expires = expires_E[old].tolist() if expiring else [0] * len(last)
    kept_old, kept_new = [], []
    for bucket, positions in _groups(_high(mixed_U, new_buckets) - new_first):
        positions.sort(
            key=lambda u: _score(policy, exponent, step, last[u], hits[u], expires[u]), reverse=True
        )
        placed = _placed(positions, starts, new_slots, max_probe)
        if len(placed) < len(positions) <= new_slots:
            cut = _cut([starts[u] for u in positions], new_slots)
            in_turn = sorted(positions, key=lambda u, cut=cut: (starts[u] - cut) % new_slots)  # type: ignore[misc]
            everybody = _placed(in_turn, starts, new_slots, max_probe)
            placed = everybody if len(everybody) == len(positions) else placed
        kept_old += [sources[u] for u in placed]
        kept_new += [bucket * new_slots + slot for slot in placed.values()]
    source, target = _tensor(kept_old, torch.int64, ids_E), _tensor(kept_new, torch.int64, ids_E)
    for values_E, values in zip(state_E, new_E, strict=True):
        values[target] = values_E[source]
    moved_E[source] = target + new_first * new_slots
    new_E += [] if expiring else [expires_E.new_zeros(0)]
    return (*new_E, moved_E)  # type: ignore[return-value]


def _zch_resize_fake(
    ids_E: Tensor,
    used_E: Tensor,
    since_E: Tensor,
    last_E: Tensor,
    hits_E: Tensor,
    expires_E: Tensor,
    first: int,
    buckets: int,
    slots: int,
    new_buckets: int,
    new_slots: int,
    *rest: Any,
) -> tuple[Tensor, ...]:
    rows = _new_held(ids_E.shape[0] // slots, buckets, new_buckets) * new_slots
    state = [values.new_empty(rows) for values in (ids_E, used_E, since_E, last_E, hits_E)]
    expires = expires_E.new_empty(rows if expires_E.shape[0] else 0)
    return (*state, expires, torch.empty_like(ids_E))


# ---------------------------------------------------------------------------------------------------------------
# registration: reference and fake kernels

_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "zch_buckets": (_zch_buckets, _zch_buckets_fake),
    "zch_find": (_zch_find, _zch_find_fake),
    "zch_assign_": (_zch_assign_, _zch_assign_fake),
    "zch_resize": (_zch_resize, _zch_resize_fake),
}

REFERENCE: dict[str, Callable[..., Any]] = {
    name: checked(name, reference) for name, (reference, _) in _KERNELS.items()
}
"""The reference kernels by op name, behind their checks: what every backend is tested against."""

for _name, (_, _fake) in _KERNELS.items():
    LIBRARY.impl(_name, REFERENCE[_name], "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilerec::{_name}", checked(_name, _fake), lib=LIBRARY)


# ---------------------------------------------------------------------------------------------------------------
# the typed way to call them


class HashRange(NamedTuple):
    """The shape of a table, and where the part that is held begins; rows = buckets * slots."""

    buckets: int
    slots: int
    max_probe: int = 128
    first: int = 0


class HashState(NamedTuple):
    """What is kept of the buckets that are held, bucket after bucket. `expires_E` may be empty: nothing expires."""

    ids_E: Tensor  # int64
    used_E: Tensor  # bool
    since_E: Tensor  # int64, steps
    last_E: Tensor  # int64, steps
    hits_E: Tensor  # int64
    expires_E: Tensor  # int64, the caller's clock
    counters_BC: Tensor  # int32


class Found(NamedTuple):
    """See `zch_find`."""

    rows_N: Tensor
    probes_N: Tensor


class Assigned(NamedTuple):
    """See `zch_assign_`."""

    rows_N: Tensor
    outcomes_N: Tensor
    probes_N: Tensor
    evicted_rows_M: Tensor
    evicted_ids_M: Tensor


class Resized(NamedTuple):
    """A new state, and the new row of every old one (-1: it was not used, -2: its id was dropped)."""

    state: HashState
    moved_E: Tensor


def empty_state(
    held: int,
    slots: int,
    *,
    expires: bool = False,
    counters: int = 0,
    device: torch.device | str | None = None,
) -> HashState:
    """The state of `held` buckets without any id; `counters` per bucket are for admission."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    rows = held * slots
    return HashState(
        zeros(rows), zeros(rows, dtype=torch.bool), zeros(rows), zeros(rows), zeros(rows),
        zeros(rows if expires else 0), zeros(held, counters, dtype=torch.int32),
    )  # fmt: skip


def zch_buckets(ids_N: Tensor, buckets: int) -> Tensor:
    """int64 [N]: the bucket of every id (int64, any value)."""
    return _OPS.zch_buckets.default(ids_N, buckets)


def zch_find(ids_N: Tensor, state: HashState, table: HashRange) -> Found:
    """Rows of ids (-1: not there) and slots looked at; changes nothing."""
    return Found(
        *_OPS.zch_find.default(
            ids_N, state.ids_E, state.used_E, table.first, table.buckets, table.slots, table.max_probe
        )
    )


def zch_assign_(
    ids_N: Tensor,
    state: HashState,
    table: HashRange,
    *,
    step: int,
    policy: Policy = Policy.LRU,
    exponent: float = 1.0,
    now: int = 0,
    ttl: int | Tensor = 0,
    evict: bool = True,
    threshold: int = 1,
    counts_N: Tensor | None = None,
    may_insert_N: Tensor | None = None,
) -> Assigned:
    """Give ids rows, in their order; `state` changes in place.

    Args:
        step: of training; `since` and `last` are steps. Rows used in a step are not evicted in it. Must not go back.
        now, ttl: the clock of expiry and the time an id lives after its last use (one number, or int64 [N]).
        evict: False rejects ids whose window is full.
        threshold: occurrences an id needs before it gets a row; above 1 the state needs counters.
        counts_N: int64, how many occurrences each id stands for. may_insert_N: bool, False only looks an id up.
    """
    each = isinstance(ttl, Tensor)
    return Assigned(
        *_OPS.zch_assign_.default(
            ids_N, counts_N, may_insert_N, ttl if each else None, *state, table.first, table.buckets, table.slots,
            table.max_probe, step, now, int(policy), exponent, 0 if each else ttl, evict, threshold,
        )
    )  # fmt: skip


def zch_resize(
    state: HashState,
    table: HashRange,
    new_buckets: int,
    new_slots: int,
    *,
    step: int,
    policy: Policy = Policy.LRU,
    exponent: float = 1.0,
) -> Resized:
    """The state for other numbers of buckets and slots: `HashRange(new_buckets, new_slots, table.max_probe, ...)`.

    One number of buckets must divide the other, and whole new buckets must be held. Counters of a bucket that is split
    go to each of its children; those of buckets that merge are added.
    """
    results = _OPS.zch_resize.default(
        *state[:6], table.first, table.buckets, table.slots, new_buckets, new_slots, table.max_probe, step,
        int(policy), exponent,
    )  # fmt: skip
    counters = _resized_counters(state.counters_BC, table.buckets, new_buckets)
    ids_E, used_E, since_E, last_E, hits_E, expires_E, moved_E = results
    return Resized(HashState(ids_E, used_E, since_E, last_E, hits_E, expires_E, counters), moved_E)


def _resized_counters(counters_BC: Tensor, buckets: int, new_buckets: int) -> Tensor:
    """Still at least what was counted of every id: a counter's place in its bucket does not depend on the bucket."""
    if new_buckets >= buckets:
        return counters_BC.repeat_interleave(new_buckets // buckets, 0)
    merged = counters_BC.unflatten(0, (-1, buckets // new_buckets)).sum(1)
    return merged.clamp(max=COUNTER_LIMIT).to(counters_BC.dtype)


def score(
    policy: Policy, *, step: int, last: int, hits: int, expires: int = 0, exponent: float = 1.0
) -> Score:
    """What a policy compares of one row; the row with the least is evicted first.

    LFU, last 3, hits 2 -> (2, 3); DISTANCE_LFU, step 7, last 3, hits 2, exponent 1 -> (0.5,)
    """
    return _score(policy, exponent, step, last, hits, expires)
