"""Mapping of ids to rows: a hash table whose slots are the rows of an embedding table, divided into buckets.

Terms
    bucket    S consecutive rows; a table has B buckets. An id never leaves its bucket, so its row does not depend on
              the number of ranks: a rank holds the buckets [first, first + B'), whose state is one slice
    slot      one row of a bucket:  row = bucket * S + slot
    window    the slots where an id may be: from its start on, circular inside its bucket, at most min(max_probe, S)
    state     data per row: the id, whether the slot is used, step of its insertion (`since`), step of its last use
              (`last`), number of uses (`hits`), and time of expiry (`expires`, may be empty)
    touched   a slot whose `last` is not before this step: a sample of this batch uses the row, so it is not evicted
    counters  admission counters of a bucket; each id without a row uses two of them

    mixed  = the finaliser of splitmix64 (Steele, Lea, Flood 2014) of the id's 64 bits; any int64 is an id
    bucket = ((mixed >> 32) * B) >> 32           start = ((mixed & 0xffffffff) * S) >> 32
    so k B buckets split bucket b into k b ... k b + k - 1

A used slot becomes empty only when its whole bucket is cleared or resized (eviction replaces in place). So a search
ends at the first empty slot. `zch_assign_` is defined by processing its entries in order. Buckets are independent, so a
backend may process them concurrently, with bitwise equal results.

Shapes
    N ids, E' = B' * S held rows, M evictions, C counters per bucket

This file has typed functions that call the ops. Other files of this folder:

    find.py, assign.py, resize.py, hashed_rows.py, taken_items.py
                                    the ops: references (any device; Python loops over the used buckets), fake kernels
    place.py                        positions where an id may be
    policy.py                       eviction policies
    state.py                        records of state and results
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.ops.hash import assign as assign
from tilerec.ops.hash import find as find
from tilerec.ops.hash import hashed_rows as hashed_rows
from tilerec.ops.hash import taken_items as taken_items
from tilerec.ops.hash.checks import COUNTER_LIMIT as COUNTER_LIMIT
from tilerec.ops.hash.policy import IdOutcome as IdOutcome
from tilerec.ops.hash.policy import Policy as Policy
from tilerec.ops.hash.policy import score as score
from tilerec.ops.hash.resize import resized_counters
from tilerec.ops.hash.state import (
    AssignCall,
    Assigned,
    AssignedEach,
    Found,
    HashRange,
    HashState,
    ResizeCall,
    ResizedState,
)
from tilerec.ops.hash.state import AssignOptions as AssignOptions
from tilerec.ops.hash.state import empty_state as empty_state
from tilerec.ops.runtime.dispatch import can_bypass_dispatcher
from tilerec.ops.runtime.library import LIBRARY

_OPS = torch.ops.tilerec


def zch_buckets(ids_N: Tensor, buckets: int) -> Tensor:
    """Return the bucket of every id (int64 [N], any value) as int64 [N]."""
    return _OPS.zch_buckets.default(ids_N, buckets)


def hash_rows(ids_N: Tensor, rows: int, first_row: int, rows_N: Tensor) -> None:
    """Write first_row + (mixed mod rows - first_row) of every id (int64 [N], any value) to `rows_N`, int64 [N].

    ids [1, 2, -1], rows 1000, first_row 0 -> [789, 730, 67]
    """
    _OPS.hash_rows_.default(ids_N, rows, first_row, rows_N)


def take_items_(
    items_n: Tensor, order_M: Tensor, counts: Sequence[int], outs: Sequence[Tensor], starts: Sequence[int], *,
    rows: int = 0, first_row: int = 0,
) -> None:  # fmt: skip
    """Write the items at `order_M` into parts: counts[0] items to outs[0] from starts[0] on, and so forth.

    Args:
        items_n: [n], of a type of 4 or 8 bytes.
        order_M: int32 or int64 [M], each in [0, n).
        counts, starts: integers [parts]; the counts have the sum M.
        outs: one-dimensional, of the type of the items.
        rows, first_row: if rows > 0, the items are int64 ids, and their rows of `hash_rows` are written in their place.

    items [a, b, c], order [2, 0, 2], counts [1, 2], outs [[x], [x, x, x]], starts [0, 1] -> outs [[c], [x, a, c]]

    Raises:
        InputError: a number in `order_M` outside of [0, n), or memory without room for its part.
    """
    args = items_n, order_M, counts, outs, starts, rows, first_row
    if items_n.device.type == "cpu" and can_bypass_dispatcher((items_n, order_M, *outs)):
        LIBRARY.cpu_kernels["take_items_"](*args)  # torch's boxing of tens of parts takes longer than small columns
    else:
        _OPS.take_items_.default(*args)


def zch_find(ids_N: Tensor, state: HashState, table: HashRange) -> Found:
    """Return the rows of ids (-1: none) and the probes; changes nothing."""
    return Found(
        *_OPS.zch_find.default(
            ids_N, state.ids_E, state.used_E, table.first, table.buckets, table.slots, table.max_probe
        )
    )


def zch_assign_(ids_N: Tensor, state: HashState, table: HashRange, options: AssignOptions) -> Assigned:
    """Assign rows to ids, in order; changes `state` in place."""
    return Assigned(*_OPS.zch_assign_.default(*AssignCall.of(ids_N, state, table, options).packed()))


def zch_assign_each_(ids_N: Tensor, state: HashState, table: HashRange, options: AssignOptions) -> AssignedEach:
    """Run `zch_assign_` with results of the batch's length, in place of eviction lists that need a synchronization."""
    return AssignedEach(*_OPS.zch_assign_each_.default(*AssignCall.of(ids_N, state, table, options).packed()))


def zch_resize(
    state: HashState, table: HashRange, new_buckets: int, new_slots: int, *, step: int, policy: Policy = Policy.LRU,
    exponent: float = 1.0,
) -> ResizedState:  # fmt: skip
    """Return the state for new numbers of buckets and slots: `HashRange(new_buckets, new_slots, table.max_probe, ...)`.

    One number of buckets must divide the other, and the held buckets must form whole new buckets. A split bucket's
    counters are copied to each of its parts; counters of merged buckets are added.
    """
    call = ResizeCall(state, table, new_buckets, new_slots, step, int(policy), exponent)
    results = _OPS.zch_resize.default(*call.packed())
    counters = resized_counters(state.counters_BC, table.buckets, new_buckets)
    ids_E, used_E, since_E, last_E, hits_E, expires_E, moved_E = results
    return ResizedState(HashState(ids_E, used_E, since_E, last_E, hits_E, expires_E, counters), moved_E)
