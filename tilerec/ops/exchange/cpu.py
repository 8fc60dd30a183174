"""Exchange ops on the native library: `route_ids`, `place_rows_` and `pick_rows` on CPU.

`definition.py` specifies the ops; this file only converts arguments. Results equal the reference bit for bit, for any
number of threads. The reference computes sums of dtypes other than fp32 and fp64.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilerec.ops.exchange.definition import (
    _pick_rows_reference_,
    _place_rows_reference_,
    pick_rows_from,
    raise_bad_offsets,
    raise_few_offsets,
)
from tilerec.ops.lookup.definition import raise_bad_id
from tilerec.ops.runtime.cpu.library import BAD_ID, BAD_OFFSETS, INDEX_TYPES, NO_MEMORY
from tilerec.ops.runtime.cpu.memory import reused_empty
from tilerec.ops.runtime.cpu.records import ReportRecord, RouteRecord, SegmentsRecord

# `value` of a TR_BAD_ARGUMENT (native/exchange.h).
_FEW_OFFSETS = 3
_ROUTE_FAULTS = {
    1: "lists whose lengths do not match",
    2: "a key that is not in the batch",
    4: "cuts that descend or do not begin at 0",
    5: "wire positions that are used twice, or not at all",
}
_SEGMENT_FAULTS = {
    1: "a negative shape, or more rows than there are",
    2: "slots that are negative or not there",
    3: "places outside its tensor",
    4: "sums of numbers that cannot be added",
}
_SUM_BYTES = {torch.float32: 4, torch.float64: 8}


def _raise_route(
    report: ReportRecord, names: str, cuts: Sequence[int], ranges: Sequence[int], ids: Tensor, offsets: Tensor
) -> NoReturn:
    """Raise the error that a report of `route_ids` describes."""
    route = report.feature
    if report.status == NO_MEMORY:
        raise MemoryError("route_ids: out of memory for its workspace.")
    if report.status == BAD_ID:
        rows = cuts[sum(ranges[: route + 1]) + route]
        raise_bad_id(names, route, report.position, report.value, rows)
    if report.status == BAD_OFFSETS:
        raise_bad_offsets(names, route, report.position, report.value, ids.numel())
    if report.value == _FEW_OFFSETS:
        raise_few_offsets(names, route, report.position, offsets.numel())
    raise AssertionError(f"route_ids: route {route} has {_ROUTE_FAULTS[report.value]}")


def _route_ids(library: ctypes.CDLL) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    begin, finish, free = library.tr_route_begin, library.tr_route_finish, library.tr_route_free
    begin.restype = finish.restype = ctypes.c_int64
    begin.argtypes = finish.argtypes = free.argtypes = [ctypes.c_void_p]
    free.restype = None

    def route_ids(
        ids: Tensor, offsets: Tensor, keys: Sequence[int], batches: Sequence[int], cuts: Sequence[int],
        ranges: Sequence[int], wire: Sequence[int], each_id: bool, dtype: torch.dtype, names: str,
        with_positions: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert len(keys) == len(ranges), "route_ids: one number of parts per route"
        assert dtype in INDEX_TYPES, "route_ids: local ids are int32 or int64"
        ids = (ids if ids.dtype in INDEX_TYPES else ids.to(torch.int64)).contiguous()
        offsets = offsets.to(torch.int64).contiguous()
        lists = array("q", [*keys, *ranges, *batches, *cuts, *wire])
        call = RouteRecord(
            lists.buffer_info()[0], len(keys), len(batches), len(cuts), len(wire), ids.data_ptr(),
            INDEX_TYPES[ids.dtype], ids.numel(), offsets.data_ptr(), offsets.numel(), each_id, INDEX_TYPES[dtype],
            torch.get_num_threads(),
        )  # fmt: skip
        call_pointer = ctypes.byref(call)
        if begin(call_pointer):
            _raise_route(call.report, names, cuts, ranges, ids, offsets)
        try:
            summary = torch.zeros(1 + 2 * call.parts, dtype=torch.int64)  # the fault stays 0: faults raise
            lengths = torch.empty(call.present, dtype=torch.int32)
            local = torch.empty(call.moved, dtype=dtype)
            slots = torch.empty(call.present, dtype=torch.int32)
            positions = torch.empty(call.moved if with_positions else 0, dtype=torch.int64)
            call.counts, call.lengths, call.slots = (
                summary.data_ptr() + 8,
                lengths.data_ptr(),
                slots.data_ptr(),
            )
            call.local, call.positions = local.data_ptr(), positions.data_ptr() if with_positions else None
            if finish(call_pointer):
                _raise_route(call.report, names, cuts, ranges, ids, offsets)
        finally:
            free(call.state)
        return summary, lengths, local, slots, positions

    return route_ids


def _move_rows(op: str, function: Any) -> Callable[..., None]:
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]

    def move_rows(flat: Tensor, rows: Tensor, slots: Tensor, *lists: Sequence[int], fresh: bool = False) -> None:
        """`lists`: the lists of `place_rows_`; `pick_rows` passes no `adds`."""
        count = len(lists[0])
        assert all(len(values) == count for values in lists), f"{op}: lists of different lengths"
        numbers = array("q", itertools.chain.from_iterable(lists))
        call = SegmentsRecord(
            numbers.buffer_info()[0], count, flat.data_ptr(), flat.numel(), rows.data_ptr(), rows.numel(),
            slots.data_ptr(), slots.numel(), flat.element_size(), _SUM_BYTES.get(flat.dtype, 0),
            fresh, torch.get_num_threads(),
        )  # fmt: skip
        if function(ctypes.byref(call)):
            if call.report.status == NO_MEMORY:
                raise MemoryError(f"{op}: out of memory for its workspace.")
            raise AssertionError(f"{op}: segment {call.report.feature} has {_SEGMENT_FAULTS[call.report.value]}")

    return move_rows


def _is_supported(flat: Tensor, rows: Tensor, slots: Tensor) -> bool:
    """Return True if the library can read these tensors; the reference raises the errors for others."""
    return (
        flat.dtype == rows.dtype
        and slots.dtype == torch.int32
        and flat.is_contiguous()
        and rows.is_contiguous()
        and slots.is_contiguous()
    )


def _place_rows_(library: ctypes.CDLL) -> Callable[..., None]:
    move = _move_rows("place_rows_", library.tr_place_rows)

    def place_rows_(out: Tensor, rows: Tensor, slots: Tensor, *rest: Any) -> None:
        lists, fresh = rest[:6], rest[6:] == (True,)
        if not _is_supported(out, rows, slots) or (out.dtype not in _SUM_BYTES and any(lists[-1])):
            _place_rows_reference_(out, rows, slots, *rest)
        else:
            move(out, rows, slots, *lists, fresh=fresh)

    return place_rows_


def _pick_rows_(library: ctypes.CDLL) -> Callable[..., None]:
    move = _move_rows("pick_rows_", library.tr_pick_rows)

    def pick_rows_(rows: Tensor, source: Tensor, slots: Tensor, *lists: Sequence[int]) -> None:
        if _is_supported(source, rows, slots):
            move(source, rows, slots, *lists)
        else:
            _pick_rows_reference_(rows, source, slots, *lists)

    return pick_rows_


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    pick_rows_ = _pick_rows_(library)
    return {
        "route_ids": _route_ids(library),
        "place_rows_": _place_rows_(library),
        "pick_rows": pick_rows_from(pick_rows_, reused_empty),
        "pick_rows_": pick_rows_,
    }
