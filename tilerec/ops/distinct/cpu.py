"""Distinct ids, and their rows at every item, on the native library (native/distinct.cpp)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.cpu.library import INDEX_TYPES
from tilerec.ops.runtime.cpu.records import DistinctRecord, RepeatsRecord
from tilerec.ops.runtime.library import LIBRARY

_THREAD_IDS = 16384
"""Ids of a batch from which on it is worth more than one thread."""
_TYPES = (torch.float32, torch.float64)


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    return {
        "distinct_ids": _distinct_ids(library),
        "expand_rows_": _expand_rows_(library.tr_expand_rows),
        "sum_rows_": _sum_rows_(library.tr_sum_rows),
    }


def _distinct_ids(library: ctypes.CDLL) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    distinct = library.tr_distinct_ids
    distinct.argtypes, distinct.restype = [ctypes.c_void_p], None

    def distinct_ids(
        ids_N: Tensor, offsets_S1: Tensor, batches: Sequence[int], rows: Sequence[int], percent: Sequence[int],
        each_id: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        ids, offsets = ids_N.contiguous(), offsets_S1.contiguous()
        keys, bags, count = len(batches), sum(batches), ids.shape[0]
        if int(offsets[0]) or int(offsets[-1]) != count or bool((offsets[1:] < offsets[:-1]).any()):
            raise ConfigError(
                f"distinct_ids: got offsets from {int(offsets[0])} to {int(offsets[-1])} for {count} ids; expected "
                "ascending ones that cover all ids. Correct them."
            )
        threads = 1 if count < _THREAD_IDS else min(torch.get_num_threads(), max(1, keys))
        room = max(64, 1 << (2 * count - 1).bit_length())
        table = torch.empty(threads * room, dtype=torch.int64)
        out = torch.empty_like(ids)
        edges = torch.empty((keys if each_id else bags + count) + 1, dtype=torch.int64)
        items, starts, inverse = (torch.empty(count + 1, dtype=torch.int32) for _ in range(3))
        counts = torch.empty(keys, dtype=torch.int64)
        lists = array("q", [*batches, *rows, *percent])
        call = DistinctRecord(
            ids.data_ptr(), INDEX_TYPES[ids.dtype], offsets.data_ptr(), keys, lists.buffer_info()[0], each_id,
            out.data_ptr(), edges.data_ptr(), counts.data_ptr(), items.data_ptr(), starts.data_ptr(),
            inverse.data_ptr(), table.data_ptr(), room, threads,
        )  # fmt: skip
        distinct(ctypes.byref(call))
        own = counts.tolist()
        ends = keys
        if not each_id:
            ends = sum([bags_k if count_k < 0 else count_k for bags_k, count_k in zip(batches, own, strict=True)])
        edges = edges[: ends + 1]
        found = sum([count_k for count_k in own if count_k > 0])
        return out[: int(edges[-1])], edges, items[: call.item_count], starts[: found + 1], counts

    return distinct_ids


def _record(
    flat: Tensor, rows: Tensor, slots: Tensor, items_I: Tensor, starts_U1: Tensor, lists: Sequence[Sequence[int]],
    fresh: bool,
) -> tuple[RepeatsRecord, Any]:  # fmt: skip
    count = len(lists[0])
    assert all(len(values) == count for values in lists), "expand_rows_: lists of different lengths"
    numbers = array("q", chain.from_iterable(lists))
    call = RepeatsRecord(
        numbers.buffer_info()[0], count, flat.data_ptr(), flat.numel(), rows.data_ptr(), rows.numel(),
        slots.data_ptr(), slots.numel(), items_I.data_ptr(), starts_U1.data_ptr(), items_I.numel(), starts_U1.numel(),
        flat.element_size(), fresh, torch.get_num_threads(),
    )  # fmt: skip
    return call, numbers


def _is_supported(flat: Tensor, rows: Tensor, *numbers: Tensor) -> bool:
    return (
        flat.dtype == rows.dtype
        and flat.dtype in _TYPES
        and all(own.dtype == torch.int32 for own in numbers)
        and all(own.is_contiguous() for own in (flat, rows, *numbers))
    )


def _expand_rows_(function: Any) -> Callable[..., None]:
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]

    def expand_rows_(out: Tensor, rows: Tensor, slots: Tensor, *rest: Any) -> None:
        *lists, fresh, items_I, starts_U1, firsts, features = rest
        if not _is_supported(out, rows, slots, items_I, starts_U1):
            LIBRARY.references["expand_rows_"](out, rows, slots, *rest)
            return
        call, _kept = _record(out, rows, slots, items_I, starts_U1, [*lists, firsts, features], fresh)
        _raise("expand_rows_", function(ctypes.byref(call)))

    return expand_rows_


def _sum_rows_(function: Any) -> Callable[..., None]:
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]

    def sum_rows_(rows: Tensor, source: Tensor, slots: Tensor, *rest: Any) -> None:
        *lists, items_I, starts_U1, firsts = rest
        if not _is_supported(source, rows, slots, items_I, starts_U1):
            LIBRARY.references["sum_rows_"](rows, source, slots, *rest)
            return
        unread = [0] * len(firsts)
        call, _kept = _record(source, rows, slots, items_I, starts_U1, [*lists, unread, firsts, unread], False)
        _raise("sum_rows_", function(ctypes.byref(call)))

    return sum_rows_


def _raise(op: str, fault: int) -> None:
    assert not fault, f"{op}: segment {fault - 1} leaves its tensors"
