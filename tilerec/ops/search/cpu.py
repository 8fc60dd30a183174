"""`best_rows` on the native library (native/search.cpp): one pass over the rows for 64 queries."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.runtime.cpu.library import NO_MEMORY, int64_array
from tilerec.ops.search.definition import quantized

_PADDING = 64
"""A query's bytes are padded with zeros to a multiple of this: kSearchPadding."""


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    search = library.tr_best_rows
    search.argtypes, search.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int32

    def best_rows(
        query: Tensor, rows: Tensor, scale: Tensor, words: Tensor, first: Tensor, last: Tensor, required: Tensor,
        forbidden: Tensor, k: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch, dim = query.shape
        int8 = rows.dtype == torch.int8
        code, query_scale = quantized(query) if int8 else (query, query[:0, 0])
        sums = code.sum(1, dtype=torch.int32) if int8 else query_scale
        width = -(-dim * code.element_size() // _PADDING) * _PADDING // code.element_size()
        code = torch.nn.functional.pad(code, (0, width - dim))
        score, place = query.new_empty(batch, k), first.new_empty(batch, k)
        held = [
            one.contiguous()
            for one in (code, rows, scale, words, query_scale, sums, first.long(), last.long(), required, forbidden)
        ]
        addresses = [one.data_ptr() for one in (*held, score, place)]
        sizes = [batch, dim, rows.shape[0], first.shape[1], k, int(int8), width * code.element_size()]
        call = int64_array([*addresses, *sizes])
        if search(ctypes.addressof(call), torch.get_num_threads()) == NO_MEMORY:
            raise MemoryError(f"best_rows: no memory for {k} candidates of each of {batch} queries.")
        return score, place

    return {"best_rows": best_rows}
