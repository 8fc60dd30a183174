"""Change of the numbers of buckets and slots: `zch_resize`. Terms as in `definition.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.ops.hash.checks import COUNTER_LIMIT, check_resize, raise_misplaced_id
from tilerec.ops.hash.place import by_bucket, high, low, mixed, tensor_like, window_of
from tilerec.ops.hash.policy import score
from tilerec.ops.hash.state import ResizeCall
from tilerec.ops.runtime.library import LIBRARY


def _first_fit(order: Sequence[int], starts: Sequence[int], slots: int, max_probe: int) -> dict[int, int]:
    """Return the first empty slot of each id's window, if it has one. 4 slots, starts [3, 3, 0] -> [3, 0, 1]"""
    empty = [True] * slots
    placed: dict[int, int] = {}
    for item in order:
        for slot in window_of(starts[item], slots, max_probe):
            if empty[slot]:
                empty[slot] = False
                placed[item] = slot
                break
    return placed


def _cut(starts: Sequence[int], slots: int) -> int:
    """Return the slot at which to begin counting starts, so that ids placed in this order do not wrap past the end.

    It is the slot after the minimum of (ids that start up to here) - (slots up to here). Windows are equally long, so
    the id with the earliest start must be placed first: this order minimizes the largest distance of an id from its
    start. 4 slots, starts [3, 3, 0]: 1 - 1, 1 - 2, 1 - 3 and 3 - 4 up to slots 0 to 3 -> 3
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


def _fake_resize(call: ResizeCall) -> tuple[Tensor, ...]:
    rows = call.become(call.held) * call.new_slots
    *state, expires_E, _ = call.state
    expires = expires_E.new_empty(rows if expires_E.shape[0] else 0)
    return (*(values.new_empty(rows) for values in state), expires, torch.empty_like(call.state.ids_E))


@LIBRARY.op(
    "zch_resize(Tensor[] state, int[] table, SymInt[] numbers, float exponent)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_resize,
    unpack=ResizeCall.unpack,
    check=check_resize,
    check_fake=True,
)
def zch_resize_reference(call: ResizeCall) -> tuple[Tensor, ...]:
    """Return the state for another number of slots, or k times (or a k-th of) the buckets; the old state is unchanged.

    In every new bucket the ids that `policy` would evict last are placed first, each in the first empty slot of its
    window; ties go in the order of the old rows. If an id finds no slot, the ids are placed in the order of their
    starts instead, provided that this keeps all of them. It does whenever any arrangement would (`_cut`), so splitting
    buckets, or a resize to the same numbers, drops no id. Otherwise the ids without a slot are dropped.

    Returns the new state (ids, used, since, last, hits, expires) and moved_E (int64): each old row's new row, numbered
    over the whole table; -1: not used, -2: its id was dropped.

    1 bucket of 2 slots to 1 slot, LRU, ids [5, 6], last [3, 9] -> ids [6], moved [-2, 0].
    """
    ids_E, used_E, since_E, last_E, hits_E, expires_E, _ = call.state
    buckets, slots, max_probe, first = call.table
    new_buckets, new_slots = call.new_buckets, call.new_slots
    new_first, new_held = call.become(first), call.become(call.held)
    old = used_E.nonzero().squeeze(1)
    mixed_U = mixed(ids_E[old])
    own_U = high(mixed_U, buckets)
    lost = (own_U != old // slots + first).nonzero()
    if lost.shape[0]:
        at = int(lost[0, 0])
        raise_misplaced_id(
            "zch_resize", int(old[at]) + first * slots, int(ids_E[old[at]]), int(own_U[at]),
            int(old[at]) // slots + first, buckets,
        )  # fmt: skip
    expiring = expires_E.shape[0] > 0
    state_E = [ids_E, used_E, since_E, last_E, hits_E, *([expires_E] if expiring else [])]
    new_E = [values_E.new_zeros(new_held * new_slots) for values_E in state_E]
    moved_E = torch.full_like(ids_E, -1)
    moved_E[old] = -2

    starts = low(mixed_U, new_slots).tolist()
    sources = old.tolist()
    last, hits = last_E[old].tolist(), hits_E[old].tolist()
    expires = expires_E[old].tolist() if expiring else [0] * len(last)
    kept_old, kept_new = [], []
    for bucket, positions in by_bucket(high(mixed_U, new_buckets) - new_first):
        positions.sort(
            key=lambda u: score(
                call.policy,
                step=call.step,
                last=last[u],
                hits=hits[u],
                expires=expires[u],
                exponent=call.exponent,
            ),
            reverse=True,
        )
        placed = _first_fit(positions, starts, new_slots, max_probe)
        if len(placed) < len(positions) <= new_slots:
            cut = _cut([starts[u] for u in positions], new_slots)
            by_start = sorted(positions, key=lambda u, cut=cut: (starts[u] - cut) % new_slots)  # type: ignore[misc]
            all_placed = _first_fit(by_start, starts, new_slots, max_probe)
            placed = all_placed if len(all_placed) == len(positions) else placed
        kept_old += [sources[u] for u in placed]
        kept_new += [bucket * new_slots + slot for slot in placed.values()]
    source, target = tensor_like(kept_old, torch.int64, ids_E), tensor_like(kept_new, torch.int64, ids_E)
    for values_E, values in zip(state_E, new_E, strict=True):
        values[target] = values_E[source]
    moved_E[source] = target + new_first * new_slots
    new_E += [] if expiring else [expires_E.new_zeros(0)]
    return (*new_E, moved_E)


def resized_counters(counters_BC: Tensor, buckets: int, new_buckets: int) -> Tensor:
    """Return counters that are no lower than before for any id; a counter's index does not depend on the bucket."""
    if new_buckets >= buckets:
        return counters_BC.repeat_interleave(new_buckets // buckets, 0)
    merged = counters_BC.unflatten(0, (-1, buckets // new_buckets)).sum(1)
    return merged.clamp(max=COUNTER_LIMIT).to(counters_BC.dtype)
