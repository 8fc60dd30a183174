"""`hot_ids` on the native library (native/hot.cpp): maps are shared by two threads or more."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.gradient.definition import bag_starts
from tilerec.ops.hot.definition import hot_ids_reference, result_type
from tilerec.ops.lookup.definition import raise_bad_id
from tilerec.ops.runtime.cpu.library import INDEX_TYPES


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    replace = library.tr_hot_ids
    replace.argtypes, replace.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 5], ctypes.c_int64

    def hot_ids(
        ids_N: Tensor, offsets: Tensor, keys: Sequence[int], batches: Sequence[int], hot: Sequence[Tensor],
        finders: Sequence[Tensor], rows: Sequence[int], names: str,
    ) -> Tensor:  # fmt: skip
        if offsets.dtype != torch.int64 or not all(own.is_contiguous() for own in (offsets, *hot, *finders)):
            return hot_ids_reference(ids_N, offsets, keys, batches, hot, finders, rows, names)
        # Ids of other keys, and those that are not hot, stay as they are.
        out_N = ids_N.to(result_type(ids_N, hot, rows), copy=True).contiguous()
        numbers: list[int] = []
        for m, (first, count) in enumerate(zip(*bag_starts(keys, batches), strict=True)):
            if not hot[m].numel() or first + count >= offsets.numel():
                numbers += [0] * 7
                continue
            begin = offsets.data_ptr() + 8 * first
            finder = finders[m]
            numbers += (begin, begin + 8 * count, hot[m].data_ptr(), finder.data_ptr(), finder.numel(), rows[m], -1)
        calls = (ctypes.c_int64 * max(1, len(numbers)))(*numbers)
        bad = replace(
            ctypes.addressof(calls), len(keys), out_N.data_ptr(), INDEX_TYPES[out_N.dtype], out_N.numel(),
            torch.get_num_threads(),
        )  # fmt: skip
        if bad >= 0:
            m, at = divmod(bad, max(1, out_N.numel()))
            raise_bad_id(names, m, at, int(ids_N[at]), rows[m])
        return out_N

    return {"hot_ids": hot_ids}
