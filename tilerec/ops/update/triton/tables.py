"""Tables of an update as kernel arguments: numbers on the device, uploaded once and cached.

Nouns
  group    tables of one data type, equal tile width and equal alignment, which one launch updates. They are neighbours
           in the key space
  numbers  of a table: PER_TABLE int64, in the order of keys:
           0 first key, 1 columns, 2 distance of its rows, 3 to 5 of its slots (`runtime/triton/addresses.py`), 6 row
           offset, 7 column offset, 8 and 9 seed, 10 number in the call, 11 columns of the whole table, 12 distance
           of its rows' names, 13 whether it has any, 14 rows

    two tables of fp32 x 128 of 10 and 5 rows, one of bf16 x 32 of 7: groups (10 + 5 keys: 0 … 14), (15 … 21)

Legend: T tables.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.runtime.triton.addresses import (
    base_and_distances,
    cached_per_stream,
    constants,
    power_of_two,
)
from tilerec.ops.runtime.triton.rows import FLOATS as ROW_TYPES
from tilerec.ops.runtime.triton.rows import reads
from tilerec.ops.update.calls import RuleTables
from tilerec.ops.update.triton.sort import PER_TABLE

WIDEST = 16384
"""Columns of the widest row that kernels update."""
GRADIENT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TableGroup:
    """Tables of one launch: neighbours in the key space."""

    first: int  # table, in the order of keys
    count: int
    first_key: int
    end_key: int
    weight: int  # number in the call of the table from whose rows distances count
    slots: tuple[int, ...]  # the same for each slot
    dtype: torch.dtype
    columns: int
    vec: int
    vec_d: int
    vec_s: int
    aligned: bool  # every table begins at a multiple of 4 of its global columns


@dataclass(frozen=True)
class KernelTables:
    """Tables of a call, as kernel arguments."""

    numbers: Tensor  # int64 [T, PER_TABLE], in the order of keys
    order: tuple[int, ...]
    first_keys: tuple[int, ...]  # in the order of the call
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    sentinel: int
    groups: tuple[TableGroup, ...]
    names: int  # the table from whose names distances count


Shape = tuple[int, int]


class TableAddresses(NamedTuple):
    """Tables of a call by the addresses of their memory: equal addresses have equal `KernelTables`."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    weights: tuple[int, ...]
    slots: tuple[int, ...]
    kinds: str  # of the slots (`checks.slot_kinds`)
    seeds: tuple[int, ...]
    row_offsets: tuple[int, ...]
    column_offsets: tuple[int, ...]
    names: tuple[int, ...]  # of each table's row names, 0 if rows have none

    @staticmethod
    def of(tables: RuleTables, kinds: str, names: Sequence[Tensor]) -> TableAddresses:
        """`names`: row names of all tables, or empty."""
        weights = tables.weights
        return TableAddresses(
            tuple([(w.shape[0], w.shape[1]) for w in weights]), tuple([w.dtype for w in weights]),
            tuple([w.data_ptr() for w in weights]), tuple([s.data_ptr() for s in tables.slots]), kinds,
            tuple(tables.seeds), tuple(tables.row_offsets), tuple(tables.column_offsets),
            tuple([n.data_ptr() if n.numel() else 0 for n in names]) or (0,) * len(weights),
        )  # fmt: skip


@cached_per_stream(256)
def tables_of(op: str, device: torch.device, addresses: TableAddresses) -> KernelTables:
    """Return the tables of a call as kernel arguments."""
    shapes, dtypes, pointers, slot_pointers, kinds, seeds, row_offsets, column_offsets, names = addresses
    for t, (rows, dim) in enumerate(shapes):
        places = (pointers[t], *(slot_pointers[t * len(kinds) : (t + 1) * len(kinds)]))
        if rows and dim and not all(places):
            raise InputError(
                f"{op}: table number {t}, or its optimizer state, has no memory; give it memory with "
                "to_empty(device=...) and load it, or do not update it."
            )
    members: dict[tuple[torch.dtype, int, int], list[int]] = {}
    for t, (_, dim) in enumerate(shapes):
        size = dtypes[t].itemsize
        vec = power_of_two([pointers[t] // size, dim], 16 // size)
        members.setdefault((dtypes[t], triton.next_power_of_2(max(dim, 4)), vec), []).append(t)
    numbers: list[int] = []
    order: list[int] = []
    first_keys = [0] * len(shapes)
    groups, key, each = [], 0, len(kinds)
    sizes = [rows * dim for rows, dim in shapes]
    named = [1 if pointer else 0 for pointer in names]
    names_base, name_distances = base_and_distances(names, named, range(len(shapes)), 8) if shapes else (0, [])
    for (dtype, columns, vec), own in members.items():
        first_key = key
        weight, distances = base_and_distances(pointers, sizes, own, dtype.itemsize)
        bases, slot_distances, vec_s = [], [], 4
        for k, kind in enumerate(kinds):
            at = slot_pointers[k::each]
            slot_sizes = [sizes[t] if kind == "e" else shapes[t][0] for t in range(len(shapes))]
            start, from_start = base_and_distances(at, slot_sizes, own, 4)
            bases.append(start)
            slot_distances.append(from_start)
            if kind == "e":
                vec_s = min(vec_s, power_of_two([*(at[t] // 4 for t in own), *(shapes[t][1] for t in own)], 4))
        for i, t in enumerate(own):
            rows, dim = shapes[t]
            first_keys[t] = key
            to_slots = [own_slots[i] for own_slots in slot_distances]
            numbers += [
                key,
                dim,
                distances[i],
                *to_slots,
                *[0] * (3 - each),
                row_offsets[t],
                column_offsets[t],
            ]
            numbers += [*seeds[2 * t : 2 * t + 2], t, dim, name_distances[t], named[t], rows, 0]
            key += rows
        aligned = all(column_offsets[t] % 4 == 0 for t in own)
        dims = [shapes[t][1] for t in own]
        groups.append(
            TableGroup(
                len(order),
                len(own),
                first_key,
                key,
                weight,
                tuple(bases),
                dtype,
                columns,
                vec,
                power_of_two(dims, 16),
                vec_s,
                aligned,
            )
        )
        order += own
    return KernelTables(
        constants(tuple(numbers), device).view(-1, PER_TABLE), tuple(order), tuple(first_keys),
        tuple(rows for rows, _ in shapes), tuple(dim for _, dim in shapes), key, tuple(groups), names_base,
    )  # fmt: skip


def is_supported(device: torch.device, grad: Tensor, tables: RuleTables) -> bool:
    weights, slots = tables.weights, tables.slots
    return (
        grad.dtype in GRADIENT_TYPES
        and {w.dtype for w in weights} <= set(ROW_TYPES)
        and all([reads(w.dtype, device) and w.is_contiguous() and w.shape[1] <= WIDEST for w in weights])  # noqa: C419
        and all([s.dtype == torch.float32 and s.is_contiguous() for s in slots])  # noqa: C419
    )


def _facts(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(t.shape, t.dtype, t.is_contiguous()) for t in tensors]


class CachedLayout:
    """Cached layout of an earlier call's tables, found by their addresses, and a check that it still holds.

    It holds if the tensors are the same objects, or have the same shapes, dtypes and contiguity.
    """

    def __init__(self, layout: KernelTables, tables: RuleTables) -> None:
        self.layout, weights, slots = layout, tables.weights, tables.slots
        self.facts = _facts((*weights, *slots))
        self.shapes = [w.shape for w in weights]
        self.dtypes = [w.dtype for w in weights]
        self.tensors = [weakref.ref(tensor) for tensor in (*weights, *slots)]

    def fits(self, tables: RuleTables) -> bool:
        weights, tensors = tables.weights, (*tables.weights, *tables.slots)
        if all(map(operator.is_, [tensor() for tensor in self.tensors], tensors)):
            # A parameter's `.data` may now be a tensor of another dtype, with the same address by chance.
            return (
                [w.shape for w in weights] == self.shapes
                and [w.dtype for w in weights] == self.dtypes
                and all(map(Tensor.is_contiguous, weights))
            )
        return _facts(tensors) == self.facts
