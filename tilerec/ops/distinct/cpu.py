"""Distinct ids, and their rows at every occurrence, on the native library (native/distinct.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.cpu.library import INDEX_TYPES, int64_array
from tilerec.ops.runtime.library import LIBRARY


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    distinct, expand, sums = library.tr_distinct_ids, library.tr_expand_rows, library.tr_sum_rows
    distinct.argtypes, distinct.restype = [ctypes.c_void_p, ctypes.c_int64], None
    for one in (expand, sums):
        one.argtypes, one.restype = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3, None

    def distinct_ids(
        ids_N: Tensor, offsets_S1: Tensor, batches: Sequence[int], rows: Sequence[int], percent: Sequence[int],
        each_id: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
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
        edges = torch.empty((keys if each_id else max(bags, 0) + count) + 1, dtype=torch.int64)
        inverse = torch.empty(count if each_id else bags, dtype=torch.int32)
        counts = torch.empty(keys, dtype=torch.int64)
        lists = [int64_array(own) for own in (batches, rows, percent)]
        call = int64_array(
            [
                ids.data_ptr(), INDEX_TYPES[ids.dtype], offsets.data_ptr(), keys, *map(ctypes.addressof, lists),
                int(each_id), out.data_ptr(), edges.data_ptr(), inverse.data_ptr(), counts.data_ptr(), table.data_ptr(),
                room,
            ]
        )  # fmt: skip
        distinct(ctypes.addressof(call), threads)
        if each_id:
            ends = keys + 1
        else:
            own = counts.tolist()
            ends = 1 + sum([bags_k if count_k < 0 else count_k for bags_k, count_k in zip(batches, own, strict=True)])
        edges = edges[:ends]
        return out[: int(edges[-1])], edges, inverse, counts

    def expand_rows(rows: Tensor, inverse_I: Tensor, *arguments: Any) -> Tensor:
        *slots, size = arguments
        if rows.dtype not in _SIZES or not (rows.is_contiguous() and inverse_I.is_contiguous()):
            return LIBRARY.references["expand_rows"](rows, inverse_I, *arguments)
        out = rows.new_empty(size)
        _call(expand, out, rows, inverse_I, slots)
        return out

    def sum_rows(grads: Tensor, inverse_I: Tensor, *slots: Any) -> Tensor:
        if grads.dtype not in _SIZES or not (grads.is_contiguous() and inverse_I.is_contiguous()):
            return LIBRARY.references["sum_rows"](grads, inverse_I, *slots)
        counts, _, widths, *_ = slots
        out = grads.new_empty(sum([count * width for count, width in zip(counts, widths, strict=True)]))
        _call(sums, out, grads, inverse_I, slots)
        return out

    return {"distinct_ids": distinct_ids, "expand_rows": expand_rows, "sum_rows": sum_rows}


_THREAD_IDS = 16384
_SIZES = {torch.float32: 4, torch.float64: 8}


def _call(function: Any, out: Tensor, given: Tensor, inverse_I: Tensor, slots: Sequence[Sequence[int]]) -> None:
    records = int64_array([number for slot in zip(*slots, strict=True) for number in slot])
    function(
        out.data_ptr(), given.data_ptr(), inverse_I.data_ptr(), ctypes.addressof(records), len(slots[0]),
        given.element_size(), torch.get_num_threads(),
    )  # fmt: skip
