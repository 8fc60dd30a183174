"""Ops of hot rows on the native library (native/hot.cpp): maps and tensors are shared by two threads or more."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.gradient.definition import bag_starts
from tilerec.ops.hot.copies import copy_rows_reference_
from tilerec.ops.hot.definition import hot_ids_reference, result_type
from tilerec.ops.lookup.definition import raise_bad_id
from tilerec.ops.runtime.cpu.library import INDEX_TYPES


def kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    return {
        "hot_ids": _hot_ids(library),
        "updated_hot_rows": _updated_hot_rows(library),
        "copy_rows_": _copy_rows_(library),
    }


def _hot_ids(library: ctypes.CDLL) -> Callable[..., Tensor]:
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

    return hot_ids


def _updated_hot_rows(library: ctypes.CDLL) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    find = library.tr_updated_hot_rows
    find.argtypes, find.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 5, *[ctypes.c_void_p] * 4], ctypes.c_int64

    def updated_hot_rows(
        ids_N: Tensor, heads: Sequence[int], begins: Sequence[int], ends: Sequence[int], names: Sequence[Tensor],
        tiles: Sequence[int], *rows: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ids, own = ids_N.contiguous(), [name.contiguous() for name in names]
        sizes = [name.numel() for name in own]
        most = sum([sizes[h] for h in tiles])
        numbers = array(
            "q", [*heads, *begins, *ends, *[name.data_ptr() for name in own], *sizes, *tiles, *rows[0], *rows[1]]
        )
        sources, targets = (torch.empty(most, dtype=torch.int64) for _ in range(2))
        counts, changed = torch.empty(len(tiles), dtype=torch.int64), torch.zeros(sum(sizes), dtype=torch.uint8)
        found = find(
            numbers.buffer_info()[0], len(heads), len(own), len(tiles), ids.data_ptr(), INDEX_TYPES[ids.dtype],
            changed.data_ptr(), sources.data_ptr(), targets.data_ptr(), counts.data_ptr(),
        )  # fmt: skip
        return sources[:found], targets[:found], counts

    return updated_hot_rows


def _copy_rows_(library: ctypes.CDLL) -> Callable[..., None]:
    copy = library.tr_copy_rows
    copy.argtypes, copy.restype = (
        [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int64],
        ctypes.c_int64,
    )

    def copy_rows_(
        targets: Sequence[Tensor], sources: Sequence[Tensor], targets_U: Tensor, sources_U: Tensor,
        begins: Sequence[int], ends: Sequence[int], columns: Sequence[int],
    ) -> None:  # fmt: skip
        # Lists, not generators: with 26 tables every tenth of a microsecond counts 26 times.
        if not all([own.is_contiguous() for own in (*targets, *sources, targets_U, sources_U)]):  # noqa: C419
            copy_rows_reference_(targets, sources, targets_U, sources_U, begins, ends, columns)
            return
        numbers = array("q")
        for target, source, *rest in zip(targets, sources, begins, ends, columns, strict=True):
            at = target.data_ptr(), source.data_ptr(), target.shape[0], source.shape[0]
            # Not strides: torch gives rows without columns, and a single row, any.
            widths = (target.shape[1], source.shape[1]) if target.dim() == 2 else (1, 1)
            numbers.extend((*at, *widths, target.element_size(), *rest))
        bad = copy(
            numbers.buffer_info()[0], len(targets), targets_U.data_ptr(), sources_U.data_ptr(), torch.get_num_threads()
        )
        if bad >= 0:
            raise IndexError(
                f"copy_rows_: got row {int(targets_U[bad])} from {int(sources_U[bad])}; expected rows of both tensors. "
                "Correct the numbers."
            )

    return copy_rows_
