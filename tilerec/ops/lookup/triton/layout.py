"""Constants shared by consecutive pooled lookups: parts by families, uploaded once. Nouns as in `backend.py`.

Two fp32 tables of 128 and 300 columns, one feature each, make one family of four parts: feature 0's columns from 0,
feature 1's from 0, 128 and 256. A third table of 64 columns makes a second family, whose tiles are 64 wide.

Legend: F features, T tables, S parts of a family.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.gradient.definition import pooled_blocks
from tilerec.ops.lookup.calls import PooledLayout
from tilerec.ops.lookup.checks import check_contiguous, check_layout, raise_no_rows
from tilerec.ops.lookup.triton.parts import FIELDS
from tilerec.ops.runtime.devices import check_devices
from tilerec.ops.runtime.triton.addresses import (
    base_and_distances,
    cached_per_stream,
    constants,
    power_of_two,
)
from tilerec.ops.runtime.triton.launch import GRID_Y
from tilerec.ops.runtime.triton.rows import group_rows, tile_width
from tilerec.torch_private import dtype_of


@dataclass(frozen=True)
class Family:
    """Parts of one launch, and the compile-time constants of its kernel."""

    parts: Tensor  # int64 [S, FIELDS], on the device
    count: int
    planes: int
    table: int  # one of its tables: distances count from its memory
    tile: int
    vec: int
    out_vec: int
    one: bool  # rows are one tile (sample_weight_grad)
    reader: int  # number of the reader (sample_weight_grad)

    @property
    def group(self) -> int:
        """Return the bags of a program: one for each team."""
        return group_rows(self.tile, self.vec)


@dataclass(frozen=True)
class LookupConstants:
    """Constants shared by consecutive lookups."""

    tables: tuple[int, ...]  # per feature, as are
    dims: tuple[int, ...]
    rows: tuple[int, ...]
    width: int  # of all features
    last_key: int  # -1: no features
    families: tuple[Family, ...]


class _Kind(NamedTuple):
    """Properties that all parts of one family share."""

    reader: int  # sample_weight_grad: a launch for each, in their order; else 0
    dtype: torch.dtype
    tile: int
    one: bool


_Memory = tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...], tuple[int, ...]]
"""Shapes, dtypes and pointers of tables."""


@cached_per_stream(128)
def _layout(
    tables: tuple[int, ...], keys: tuple[int, ...], means: tuple[int, ...], memory: _Memory, out_size: int,
    uniform: bool, cut: bool, device: torch.device, names: str,
) -> LookupConstants:  # fmt: skip
    """Return the families of a pooled lookup, or of the gradient of its sample weights.

    out_size: bytes of an element of the output. cut: rows wider than a tile make several parts.
    """
    shapes, dtypes, pointers = memory
    check_layout(shapes, tables, keys, means, True)
    check_memory(pointers, shapes, tables, names)
    dims, sizes = tuple([shapes[t][1] for t in tables]), list(map(math.prod, shapes))
    places, _ = pooled_blocks(dims, [0] * len(dims), True)
    readers: Counter[int] = Counter()
    members: dict[_Kind, list[tuple[int, int, int]]] = {}  # feature, column, reader
    for f, (t, key) in enumerate(zip(tables, keys, strict=True)):
        tile = tile_width(dims[f], dtypes[t].itemsize)
        kind = _Kind(0 if cut else readers[key], dtypes[t], tile, not cut and dims[f] <= tile)
        for column in range(0, dims[f], tile) if cut else (0,):
            members.setdefault(kind, []).append((f, column, readers[key]))
        readers[key] += 1
    families = []
    for kind, parts in sorted(members.items(), key=lambda item: item[0].reader):
        own = [tables[f] for f, _, _ in parts]
        start, distances = base_and_distances(pointers, sizes, own, kind.dtype.itemsize)
        width = 1 + max(reader for _, _, reader in parts)
        numbers: list[int] = []
        for (f, column, reader), distance in zip(parts, distances, strict=True):
            plane = column // kind.tile * width + reader if cut else 0
            stride = sum(dims) if uniform else dims[f]
            numbers += [
                distance, shapes[tables[f]][0], dims[f], column, keys[f], places[f], stride, means[f], f, plane
            ]  # fmt: skip
        places_of_rows = [pointers[t] // kind.dtype.itemsize for t in own if sizes[t]]
        families.append(
            Family(
                constants(tuple(numbers), device),
                len(parts),
                1 + max(numbers[9 :: FIELDS.value]),
                start,
                kind.tile,
                power_of_two([*places_of_rows, *(dims[f] for f, _, _ in parts)], 16 // kind.dtype.itemsize),
                # Places and strides in the output are sums of dims, times numbers of bags.
                power_of_two(dims, 16 // out_size),
                kind.one,
                kind.reader,
            )
        )
    rows = tuple([shapes[t][0] for t in tables])
    return LookupConstants(tables, dims, rows, sum(dims), max(keys, default=-1), tuple(families))


def layout_of(
    weights: Sequence[Tensor], ids: Tensor, layout: PooledLayout, dtypes: tuple[torch.dtype, ...], out_size: int,
    cut: bool, names: str,
) -> LookupConstants:  # fmt: skip
    """Return the layout of a call: check and compute it if it is new, else return the cached one.

    dtypes: of the weights (`types_of`).
    """
    pointers = tuple(map(Tensor.data_ptr, weights))
    try:
        found = _layout(
            tuple(layout.tables), tuple(layout.keys), tuple(layout.means),
            (tuple(map(Tensor.size, weights)), dtypes, pointers), out_size, layout.uniform, cut, ids.device, names,
        )  # fmt: skip
    except InputError:
        if all(0 <= t < len(weights) for t in layout.tables):
            check_devices(weights, ids, layout.tables, names)  # a table on "meta" has no memory either
        raise
    check_tables(weights, ids, layout.tables, names, 0 in pointers)
    return found


def types_of(weights: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    """Return the dtype of each tensor."""
    return tuple(map(dtype_of, weights))


def check_tables(
    weights: Sequence[Tensor], ids: Tensor, tables: Sequence[int], names: str, no_memory: bool = True
) -> None:
    """Raise an `InputError` for tables that are on another device than the ids, or not contiguous.

    no_memory: some tables have no memory, so a device number alone does not identify their device.
    """
    if no_memory or set(map(Tensor.get_device, weights)) != {ids.get_device()}:
        check_devices(weights, ids, tables, names)
    check_contiguous(weights)


def check_memory(pointers: Sequence[int], shapes: Sequence[Sequence[int]], tables: Sequence[int], names: str) -> None:
    for f, t in enumerate(tables):
        if not pointers[t] and 0 not in shapes[t]:
            raise_no_rows(names, tables, f)


def launches_of(family: Family) -> Sequence[tuple[Tensor, int]]:
    """Return pairs of parts and their number, one per launch; the grid's second axis limits a launch. Mostly one."""
    if family.count <= GRID_Y:
        return ((family.parts, family.count),)
    step = FIELDS.value
    return [
        (family.parts[first * step :], min(family.count - first, GRID_Y)) for first in range(0, family.count, GRID_Y)
    ]
