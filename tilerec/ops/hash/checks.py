"""Argument checks of the hash ops, for every backend: states that do not match their buckets, numbers out of range.

Shapes, dtypes and numbers only, so no check synchronizes with a device. Kernels that read the ids detect ids of other
buckets.

Legend: as in `definition.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.ops.hash.policy import Policy
from tilerec.ops.hash.state import AssignCall, HashState, ResizeCall

COUNTER_LIMIT = 2**31 - 1  # maximum of an admission counter, and of an entry's occurrences
MOST = 2**31  # maximum of buckets and of slots: their product with a 32-bit hash fits int64
MOST_ROWS = 2**63 - 1  # maximum of the rows of a table of hashed ids
MAX_TIME = 2**61  # maximum of clocks and times to live: their sum fits int64


def raise_wrong_bucket(op: str, position: int, id_: int, bucket: int, first: int, held: int, buckets: int) -> NoReturn:
    """Raise the error for an id that belongs to other ranks."""
    raise InputError(
        f"{op}: id {id_} (position {position}) belongs to bucket {bucket} of {buckets}, but this state holds buckets "
        f"[{first}, {first + held}). Send ids to the rank that zch_buckets() names."
    )


def raise_misplaced_id(op: str, row: int, id_: int, bucket: int, held: int, buckets: int) -> NoReturn:
    """Raise the error for a state that these ops did not make, or made for another number of buckets."""
    raise InputError(
        f"{op}: row {row} (bucket {held}) holds id {id_}, which belongs to bucket {bucket} of {buckets}; the state was "
        f"made for another number of buckets or slots, or its slice begins elsewhere."
    )


def raise_bad_count(op: str, position: int, count: int) -> NoReturn:
    """Raise the error for an entry with no occurrence, or too many."""
    raise InputError(f"{op}: counts[{position}] is {count}; expected 1 to 2**31 - 1. Leave out ids that do not occur.")


def raise_bad_ttl(op: str, position: int, ttl: int) -> NoReturn:
    """Raise the error for a time to live that is negative or too long."""
    raise InputError(f"{op}: the time to live of ids[{position}] is {ttl}; expected 0 to 2**61.")


def raise_bad_order(order_M: Tensor, items: int) -> NoReturn:
    """Raise the error for an order of `take_items_` with a number that is none of the items'."""
    at = int(((order_M < 0) | (order_M >= items)).nonzero()[0])
    raise InputError(
        f"take_items_: got {int(order_M[at])} in order[{at}]; expected numbers of items in [0, {items}). Correct it."
    )


def _flat(op: str, name: str, values: Tensor, dtype: torch.dtype, length: int, why: str) -> None:
    if values.dtype != dtype:
        raise InputError(f"{op}: {name} is {values.dtype}; expected {dtype}. Convert it before.")
    if values.dim() != 1 or values.shape[0] != length:
        raise InputError(f"{op}: {name} has shape {list(values.shape)}; expected [{length}] ({why}).")


def _ids(op: str, ids_N: Tensor) -> None:
    if ids_N.dtype != torch.int64 or ids_N.dim() != 1:
        raise InputError(
            f"{op}: ids are {ids_N.dtype} of shape {list(ids_N.shape)}; expected a flat list of int64. "
            f"Use .long() and .flatten()."
        )


def _number(op: str, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{op}: {name} is {value}; expected {least} to {most}.")


def _state(op: str, state: dict[str, Tensor], first: int, buckets: int, slots: int) -> int:
    """Check that all tensors have one length of whole buckets; return the number of buckets."""
    _number(op, "the number of buckets", buckets, 1, MOST)
    _number(op, "the number of slots per bucket", slots, 1, MOST)
    rows = state["ids"].numel()
    if rows % slots:
        raise InputError(
            f"{op}: the state has {rows} rows, which are not whole buckets of {slots} slots. "
            "Pass the slices of whole buckets."
        )
    held = rows // slots
    if first < 0 or first + held > buckets:
        raise ConfigError(
            f"{op}: the state holds buckets [{first}, {first + held}) ({rows} rows of {slots} a bucket); expected a "
            f"range within [0, {buckets}). first is the number of its first bucket."
        )
    for name, values in state.items():
        dtype = torch.bool if name == "used" else torch.int64
        if name != "expires" or values.numel():
            _flat(op, name, values, dtype, rows, "one per row, as ids has")
        elif values.dtype != dtype:
            raise InputError(f"{op}: {name} is {values.dtype}; expected {dtype}. Convert it before.")
        if not values.is_contiguous():
            raise InputError(f"{op}: {name} is not contiguous. Pass one slice of memory (a clone would lose writes).")
    return held


def _by_name(state: HashState) -> dict[str, Tensor]:
    """Return the tensors with an entry per row, by their names in errors."""
    return dict(zip(("ids", "used", "since", "last", "hits", "expires"), state[:6], strict=True))


def _policy(op: str, policy: int, exponent: float, state: HashState) -> None:
    if policy not in range(len(Policy)):
        raise ConfigError(
            f"{op}: policy {policy} is none of tilerec.ops.hash.definition.Policy (0 to {len(Policy) - 1})."
        )
    if not (math.isfinite(exponent) and 0 <= exponent <= 16):
        raise ConfigError(f"{op}: the exponent is {exponent}; expected 0 to 16.")
    if policy == Policy.TTL and state.ids_E.numel() and not state.expires_E.numel():
        raise ConfigError(f"{op}: policy TTL needs `expires`, one per row. Make the state with expires=True.")


def check_buckets(ids_N: Tensor, buckets: int) -> None:
    _ids("zch_buckets", ids_N)
    _number("zch_buckets", "the number of buckets", buckets, 1, MOST)


def check_hash_rows(ids_N: Tensor, rows: int, first_row: int, rows_N: Tensor) -> None:
    op = "hash_rows_"
    _ids(op, ids_N)
    _number(op, "first_row", first_row, 0, MOST_ROWS - 1)
    _number(op, "rows", rows, first_row + 1, MOST_ROWS)
    _flat(op, "rows_N", rows_N, torch.int64, ids_N.shape[0], "one row per id")
    if not rows_N.is_contiguous():
        raise InputError(f"{op}: rows_N is not contiguous. Pass one slice of memory (a clone would lose writes).")


def check_take_items(
    items_n: Tensor, order_M: Tensor, counts: Sequence[int], outs: Sequence[Tensor], starts: Sequence[int], rows: int,
    first_row: int,
) -> None:  # fmt: skip
    op, dtype = "take_items_", items_n.dtype
    if rows:
        _ids(op, items_n)
        _number(op, "first_row", first_row, 0, MOST_ROWS - 1)
        _number(op, "rows", rows, first_row + 1, MOST_ROWS)
    elif items_n.dim() != 1 or dtype.itemsize not in (4, 8):
        raise InputError(
            f"{op}: got items {list(items_n.shape)} of {dtype}; expected a flat list of 4 or 8 bytes each. Convert it."
        )
    if order_M.dtype not in (torch.int32, torch.int64) or order_M.dim() != 1:
        raise InputError(
            f"{op}: got order {list(order_M.shape)} of {order_M.dtype}; expected a flat list of integers. Convert it."
        )
    if not len(counts) == len(outs) == len(starts):
        raise InputError(
            f"{op}: got {len(counts)} counts, {len(outs)} outs and {len(starts)} starts; expected one of each per "
            "part. Pass lists of one length."
        )
    if sum(counts) != order_M.shape[0]:
        raise InputError(
            f"{op}: got counts with a sum of {sum(counts)}; expected {order_M.shape[0]}, as order has. Correct them."
        )
    # A reader takes each column into tens of parts: maps take a third of the time of a loop.
    if not all(map(Tensor.is_contiguous, outs)) or {(out.dtype, out.dim()) for out in outs} - {(dtype, 1)}:
        out = next(out for out in outs if not (out.is_contiguous() and out.dtype == dtype and out.dim() == 1))
        raise InputError(
            f"{op}: got out {list(out.shape)} of {out.dtype}; expected contiguous flat memory of {dtype}. Allocate "
            "it with items.new_empty()."
        )
    for out, start, count in zip(outs, starts, counts, strict=True):
        if not 0 <= start <= start + count <= out.numel():
            raise InputError(
                f"{op}: got {count} items from {start} on for out of {out.shape[0]}; expected room for them. Pass more."
            )


def check_find(
    ids_N: Tensor, ids_E: Tensor, used_E: Tensor, first: int, buckets: int, slots: int, max_probe: int
) -> None:
    op = "zch_find"
    _ids(op, ids_N)
    _state(op, {"ids": ids_E, "used": used_E}, first, buckets, slots)
    _number(op, "max_probe", max_probe, 1, MOST)


def check_assign(call: AssignCall) -> None:
    op, ids_N, counters_BC = "zch_assign_", call.ids_N, call.state.counters_BC
    _ids(op, ids_N)
    for name, values, dtype in (
        ("counts", call.counts_N, torch.int64), ("may_insert", call.may_insert_N, torch.bool),
        ("ttl", call.ttl_N, torch.int64),
    ):  # fmt: skip
        if values is not None:
            _flat(op, name, values, dtype, ids_N.shape[0], "one per id")
    held = _state(op, _by_name(call.state), call.table.first, call.table.buckets, call.table.slots)
    if counters_BC.dtype != torch.int32 or counters_BC.dim() != 2 or counters_BC.shape[0] != held:
        raise InputError(
            f"{op}: counters are {counters_BC.dtype} of shape {list(counters_BC.shape)}; expected int32 of shape "
            f"[{held}, counters per bucket], or [{held}, 0] without admission."
        )
    if not counters_BC.is_contiguous():
        raise InputError(f"{op}: counters are not contiguous. Pass one slice of memory.")
    _number(op, "the number of counters per bucket", counters_BC.shape[1], 0, MOST)
    _number(op, "max_probe", call.table.max_probe, 1, MOST)
    _number(op, "step", call.step, 0, MAX_TIME)
    _number(op, "now", call.now, -MAX_TIME, MAX_TIME)
    _number(op, "ttl", call.ttl, 0, MAX_TIME)
    _number(op, "evict", call.evict, 0, MOST - 1)
    for name, value in (("step", call.step_there), ("now", call.now_there)):
        if value is not None and (value.dtype != torch.int64 or value.dim() or value.device != ids_N.device):
            raise InputError(
                f"{op}: {name} is {value.dtype} of shape {list(value.shape)} on {value.device}; expected int64 of no "
                f"dimension on {ids_N.device}, the ids' device, or a number."
            )
    _number(op, "threshold", call.threshold, 1, 2**31 - 1)
    if call.threshold > 1 and counters_BC.shape[1] == 0 and ids_N.shape[0]:
        raise ConfigError(
            f"{op}: threshold {call.threshold} needs counters, but the state has none. Make it with "
            "empty_state(counters=...)."
        )
    _policy(op, call.policy, call.exponent, call.state)


def check_resize(call: ResizeCall) -> None:
    op, (buckets, slots, max_probe, first), new_buckets = "zch_resize", call.table, call.new_buckets
    held = _state(op, _by_name(call.state), first, buckets, slots)
    _number(op, "the new number of buckets", new_buckets, 1, MOST)
    _number(op, "the new number of slots per bucket", call.new_slots, 1, MOST)
    _number(op, "max_probe", max_probe, 1, MOST)
    _number(op, "step", call.step, 0, MAX_TIME)
    _policy(op, call.policy, call.exponent, call.state)
    if new_buckets % buckets and buckets % new_buckets:
        raise ConfigError(
            f"{op}: {buckets} buckets cannot become {new_buckets}; expected a multiple or a divisor, "
            "so that buckets split or merge."
        )
    merged = max(buckets // new_buckets, 1)
    if first % merged or held % merged:
        raise ConfigError(
            f"{op}: buckets [{first}, {first + held}) do not merge {merged} by {merged} into whole ones. "
            f"Pass a range whose ends are multiples of {merged}."
        )
