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

Here are the ops' registration and, at the end, the typed way to call them. The schemas, the plain references (any
device; Python loops over the buckets that are hit) and the fake kernels are in `hash_find.py`, `hash_assign.py` and
`hash_resize.py`, on the ground of `hash_place.py` (where an id may be), `hash_policy.py` (who goes) and `state.py`
(what is kept).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.hash.assign import each_by, zch_assign_each_fake, zch_assign_fake, zch_assign_reference
from tilerec.ops.hash.checks import COUNTER_LIMIT as COUNTER_LIMIT
from tilerec.ops.hash.checks import checked
from tilerec.ops.hash.find import zch_buckets_fake, zch_buckets_reference, zch_find_fake, zch_find_reference
from tilerec.ops.hash.policy import Outcome as Outcome
from tilerec.ops.hash.policy import Policy, Score, score_of
from tilerec.ops.hash.resize import resized_counters, zch_resize_fake, zch_resize_reference
from tilerec.ops.hash.state import (
    AssignCall,
    Assigned,
    AssignedEach,
    Found,
    HashRange,
    HashState,
    ResizeCall,
    Resized,
)
from tilerec.ops.hash.state import AssignOptions as AssignOptions
from tilerec.ops.hash.state import empty_state as empty_state
from tilerec.ops.runtime.library import LIBRARY

_OPS = torch.ops.tilerec

_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "zch_buckets": (zch_buckets_reference, zch_buckets_fake),
    "zch_find": (zch_find_reference, zch_find_fake),
    "zch_assign_": (zch_assign_reference, zch_assign_fake),
    "zch_assign_each_": (each_by(zch_assign_reference), zch_assign_each_fake),
    "zch_resize": (zch_resize_reference, zch_resize_fake),
}

REFERENCE: dict[str, Callable[..., Any]] = {
    name: checked(name, reference) for name, (reference, _) in _KERNELS.items()
}
"""The reference kernels by op name, behind their checks: what every backend is tested against."""

for _name, (_, _fake) in _KERNELS.items():
    LIBRARY.impl(_name, REFERENCE[_name], "CompositeExplicitAutograd")
    LIBRARY.fake(_name)(checked(_name, _fake))
# A backend that has `zch_assign_` has this too.
LIBRARY.impl("zch_assign_each_", each_by(_OPS.zch_assign_.default), "CPU")


# ---------------------------------------------------------------------------------------------------------------
# the typed way to call them


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


def zch_assign_(ids_N: Tensor, state: HashState, table: HashRange, options: AssignOptions) -> Assigned:
    """Give ids rows, in their order; `state` changes in place."""
    return Assigned(*_OPS.zch_assign_.default(*AssignCall.of(ids_N, state, table, options).packed()))


def zch_assign_each_(
    ids_N: Tensor, state: HashState, table: HashRange, options: AssignOptions
) -> AssignedEach:
    """`zch_assign_` without a list of evictions, whose length a host would have to wait for: all have the batch's."""
    return AssignedEach(*_OPS.zch_assign_each_.default(*AssignCall.of(ids_N, state, table, options).packed()))


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
    call = ResizeCall(state, table, new_buckets, new_slots, step, int(policy), exponent)
    results = _OPS.zch_resize.default(*call.packed())
    counters = resized_counters(state.counters_BC, table.buckets, new_buckets)
    ids_E, used_E, since_E, last_E, hits_E, expires_E, moved_E = results
    return Resized(HashState(ids_E, used_E, since_E, last_E, hits_E, expires_E, counters), moved_E)


def score(
    policy: Policy, *, step: int, last: int, hits: int, expires: int = 0, exponent: float = 1.0
) -> Score:
    """What a policy compares of one row; the row with the least is evicted first.

    LFU, last 3, hits 2 -> (2, 3); DISTANCE_LFU, step 7, last 3, hits 2, exponent 1 -> (0.5,)
    """
    return score_of(policy, exponent, step, last, hits, expires)
