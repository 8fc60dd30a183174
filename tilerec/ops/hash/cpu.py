"""Hash ops on the native CPU library (native/hash.cpp): `hash_rows_`, `take_items_` and the `zch_*` ops.

`definition.py` specifies the ops; this file only converts arguments. Results equal the reference bit for bit, for any
number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilerec.ops.hash.checks import (
    raise_bad_count,
    raise_bad_order,
    raise_bad_ttl,
    raise_misplaced_id,
    raise_wrong_bucket,
)
from tilerec.ops.hash.place import high, mixed
from tilerec.ops.hash.state import AssignCall, ResizeCall
from tilerec.ops.runtime.cpu.library import BAD_ID, NO_MEMORY, advise_huge_pages
from tilerec.ops.runtime.cpu.memory import reused_empty
from tilerec.ops.runtime.cpu.records import Zch, ZchResizing

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_BAD_COUNT = 1  # TR_ZCH_BAD_COUNT of native/hash.h; the other one is TR_ZCH_BAD_TTL


def _bucket(id_: int, buckets: int) -> int:
    return int(high(mixed(torch.tensor([id_])), buckets))


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _dense(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()


def _raise(op: str, call: Zch) -> NoReturn:
    report = call.report
    if report.status == NO_MEMORY:
        raise MemoryError(f"{op}: out of memory for its workspace.")
    if report.status == BAD_ID:
        bucket = _bucket(report.value, call.buckets)
        raise_wrong_bucket(op, report.position, report.value, bucket, call.first, call.held, call.buckets)
    if report.feature == _BAD_COUNT:
        raise_bad_count(op, report.position, report.value)
    raise_bad_ttl(op, report.position, report.value)


def _zch_buckets(library: ctypes.CDLL) -> Callable[..., Tensor]:
    function = library.tr_zch_buckets
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]

    def zch_buckets(ids_N: Tensor, buckets: int) -> Tensor:
        ids_N = ids_N.contiguous()
        buckets_N = torch.empty_like(ids_N)
        function(ids_N.data_ptr(), ids_N.shape[0], buckets, buckets_N.data_ptr(), torch.get_num_threads())
        return buckets_N

    return zch_buckets


def _hash_rows_(library: ctypes.CDLL) -> Callable[..., None]:
    function = library.tr_hash_rows
    function.restype = None
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def hash_rows_(ids_N: Tensor, rows: int, first_row: int, rows_N: Tensor) -> None:
        ids_N = ids_N.contiguous()
        function(ids_N.data_ptr(), ids_N.shape[0], rows, first_row, rows_N.data_ptr())

    return hash_rows_


def _take_items_(library: ctypes.CDLL) -> Callable[..., None]:
    function = library.tr_take_items
    function.restype = _I64
    function.argtypes = [_P, _I64, _I64, _P, _I64, _P, _P, _I64, _I64, _I64]

    def take_items_(
        items_n: Tensor, order_M: Tensor, counts: Sequence[int], outs: Sequence[Tensor], starts: Sequence[int],
        rows: int, first_row: int,
    ) -> None:  # fmt: skip
        items_n, order_M, item_bytes, parts = items_n.contiguous(), order_M.contiguous(), items_n.itemsize, len(outs)
        places = (_I64 * parts)(*[o.data_ptr() + s * item_bytes for o, s in zip(outs, starts, strict=True)])
        written = function(
            items_n.data_ptr(), items_n.shape[0], item_bytes, order_M.data_ptr(), order_M.itemsize, places,
            (_I64 * parts)(*counts), parts, rows, first_row,
        )  # fmt: skip
        if written < order_M.shape[0]:
            raise_bad_order(order_M, items_n.shape[0])

    return take_items_


def _zch_find(library: ctypes.CDLL) -> Callable[..., tuple[Tensor, Tensor]]:
    function = library.tr_zch_find
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]

    def zch_find(
        ids_N: Tensor, ids_E: Tensor, used_E: Tensor, first: int, buckets: int, slots: int, max_probe: int
    ) -> tuple[Tensor, Tensor]:
        ids_N = ids_N.contiguous()
        rows_N = reused_empty(ids_N.shape[0], torch.int64)
        probes_N = reused_empty(ids_N.shape[0], torch.int32)
        call = Zch(
            ids=ids_N.data_ptr(), count=ids_N.shape[0], slot_ids=ids_E.data_ptr(), used=used_E.data_ptr(), first=first,
            held=ids_E.shape[0] // slots, buckets=buckets, slots=slots, max_probe=max_probe, rows=rows_N.data_ptr(),
            probes=probes_N.data_ptr(), threads=torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(call)):
            _raise("zch_find", call)
        return rows_N, probes_N

    return zch_find


def _zch_assign_(library: ctypes.CDLL) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    function = library.tr_zch_assign
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]

    def zch_assign_(batch: AssignCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        step, now = batch.numbers()
        ids_N = batch.ids_N.contiguous()
        counts_N, may_insert_N, ttl_N = map(_dense, (batch.counts_N, batch.may_insert_N, batch.ttl_N))
        *state_E, expires_E, counters_BC = batch.state
        buckets, slots, max_probe, first = batch.table
        count = ids_N.shape[0]
        rows_N, probes_N = reused_empty(count, torch.int64), reused_empty(count, torch.int32)
        outcomes_N = reused_empty(count, torch.uint8)
        evicted_rows_N, evicted_ids_N = reused_empty(count, torch.int64), reused_empty(count, torch.int64)
        call = Zch(
            ids_N.data_ptr(), count, _address(counts_N), _address(may_insert_N), _address(ttl_N),
            *(values.data_ptr() for values in state_E), expires_E.data_ptr() if expires_E.shape[0] else None,
            counters_BC.data_ptr(), counters_BC.shape[1], first, batch.held, buckets, slots, max_probe, step, now,
            batch.ttl, batch.policy, batch.evicts(step), batch.threshold, batch.exponent, rows_N.data_ptr(),
            outcomes_N.data_ptr(), probes_N.data_ptr(), evicted_rows_N.data_ptr(), evicted_ids_N.data_ptr(), 0,
            torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(call)):
            _raise("zch_assign_", call)
        return (
            rows_N,
            outcomes_N,
            probes_N,
            evicted_rows_N[: call.evicted].clone(),
            evicted_ids_N[: call.evicted].clone(),
        )

    return zch_assign_


def _zch_resize(library: ctypes.CDLL) -> Callable[..., tuple[Tensor, ...]]:
    function = library.tr_zch_resize
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]

    def zch_resize(old: ResizeCall) -> tuple[Tensor, ...]:
        *state_E, expires_E, _ = old.state
        buckets, slots, max_probe, first = old.table
        rows, expiring = old.become(old.held) * old.new_slots, expires_E.shape[0] > 0
        new = [values.new_zeros(rows) for values in state_E]
        new.append(expires_E.new_zeros(rows if expiring else 0))
        for values in new:
            advise_huge_pages(values)
        moved_E = torch.empty_like(old.state.ids_E)
        call = ZchResizing(
            *(values.data_ptr() for values in state_E), expires_E.data_ptr() if expiring else None,
            *(values.data_ptr() for values in new), moved_E.data_ptr(), first, old.held, buckets, slots,
            old.new_buckets, old.new_slots, max_probe, old.step, old.policy, old.exponent, torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(call)):
            if call.report.status == NO_MEMORY:
                raise MemoryError("zch_resize: out of memory for its workspace.")
            row, id_ = call.report.position, call.report.value
            raise_misplaced_id(
                "zch_resize", row + first * slots, id_, _bucket(id_, buckets), row // slots + first, buckets
            )
        return (*new, moved_E)

    return zch_resize


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    return {
        "zch_buckets": _zch_buckets(library),
        "hash_rows_": _hash_rows_(library),
        "take_items_": _take_items_(library),
        "zch_find": _zch_find(library),
        "zch_assign_": _zch_assign_(library),
        "zch_resize": _zch_resize(library),
    }
