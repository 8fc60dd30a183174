"""Updating rows on the GPU: sort the step's occurrences once, then sum and apply while the row is in registers.

Nouns (and those of `sort.py`: occurrence, key, run, chunk)
  span     some sorted occurrences; its program updates the rows whose runs begin there
  tile     ROWS sorted occurrences of a span that are read at once, times COLUMNS >= the row's columns
  group    tables of one type, like columns and like alignment: one launch walks them all
  part     some columns of a table's rows, whose rule runs in phases (`rule_partials_…`, `rule_apply_…`)

One program, one warp (up to 512 numbers a tile). A tile's reads depend on each other in three steps only: the keys;
then places and, as the key says which row it is, weights and slots; then gradients. All of a tile's rows are on their
way together, before anything is added or written. Inside a tile, a row of the run of the row above gets that row's sum
(`runs.fold_tile`), in registers; the last occurrence of a run holds its sum, and there the rule runs. A run that goes
on carries its sum into the next tile; one that goes on behind the span is summed before everything else
(`runs.sum_run`), and its rows are left out of the tiles.

    keys of a tile     3 3 5 7 7     (the tile before ended with key 3, sum c)
    gradients          a b d e f
    sums               c+a  (c+a)+b  d  e  e+f
    rows updated       -    3        5  -  7 (or goes on in the next tile)

Nothing here waits for the device: grids follow from shapes, numbers of tables and features are sent once and kept, and
what was not finite comes back as a tensor. A table's update count goes into paces and the rounding's stream: by value
where all tables of the call have the same; as a small tensor where not, or where counts lie on the device
(`counts.py`).

Legend: T tables, F features, N occurrences, R rows of a tile, C columns of a tile.
"""

# ruff: noqa: RET505 - branches of kernels are taken when they are compiled

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.ops.library import LIBRARY
from tilerec.ops.order import TENSORS as ORDER_TENSORS
from tilerec.ops.order import key_type, layers, order_rows_reference, reach
from tilerec.ops.triton.addresses import capturing, constants, current_stream, kept, upload
from tilerec.ops.triton.counts import pace_table, paces_on_device, read_pace
from tilerec.ops.triton.launch import launch as run_kernel
from tilerec.ops.triton.library import on_own_device
from tilerec.ops.triton.random import round_at_random, round_to_nearest, words
from tilerec.ops.triton.rows import FLOATS as ROW_TYPES
from tilerec.ops.triton.rows import reads
from tilerec.ops.triton.rules import Ready, ready
from tilerec.ops.triton.runs import (
    CHUNK,
    CHUNKS,
    begin_of_run,
    fold_tile,
    gradient_rows,
    nothing,
    one_row,
    sum_run,
    table_of,
)
from tilerec.ops.triton.sort import (
    PER_TABLE,
    Order,
    Record,
    Sorted,
    ceil_div,
    order_occurrences,
    power_of_two,
    sort_occurrences,
    steps_of,
    warps_of,
)
from tilerec.ops.update import update_rows_reference_
from tilerec.ops.update_checks import (
    check_names,
    check_reach,
    check_record,
    check_tables,
)
from tilerec.ops.update_counts import check_counts

WIDEST = 16384
_INDEX = (torch.int64, torch.int32)
_data_ptr = Tensor.data_ptr
GRADIENT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_ELEMENT, _ROW = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_slot(slot, first, row_R, dim, take_R, columns, inside, KIND: tl.constexpr, VEC: tl.constexpr):
    """Slot values of a table's rows, fp32 [R, C] or [R, 1]; 0.0 for a slot that the rule does not have.

    first: element at which the table's slot begins.
    """
    if KIND == _ELEMENT:
        start_R = tl.multiple_of(first + row_R * dim, VEC)
        return tl.load(slot + (start_R[:, None] + columns), mask=take_R[:, None] & inside, other=0.0)
    elif KIND == _ROW:
        return tl.load(slot + (first + row_R), mask=take_R, other=0.0)[:, None]
    else:
        return 0.0


@triton.jit
def store_slot(
    slot, values, first, row_R, dim, take_R, columns, inside, KIND: tl.constexpr, VEC: tl.constexpr
):
    if KIND == _ELEMENT:
        start_R = tl.multiple_of(first + row_R * dim, VEC)
        tl.store(slot + (start_R[:, None] + columns), values, mask=take_R[:, None] & inside)
    elif KIND == _ROW:
        tl.store(slot + (first + row_R), tl.max(values, axis=1), mask=take_R)


@triton.jit
def store_rows(
    weights, values, start_R, take_R, columns, inside, numbers, name_R, count,
    ROUND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Round and write rows. ROUND 0: to nearest; 1: at random, tiles begin at multiples of 4 columns; 2: anywhere.

    numbers: the table's; name_R: the rows' numbers in it.
    """
    TYPE: tl.constexpr = weights.dtype.element_ty
    if ROUND:
        row = (tl.load(numbers + 6) + name_R)[:, None]
        zero = row * 0
        k0 = zero + tl.load(numbers + 8)
        k1 = zero + tl.load(numbers + 9)
        random = words(row, zero + tl.load(numbers + 7), zero + count, k0, k1, ROWS, COLUMNS, ROUND == 1)
        out = round_at_random(values, random, TYPE)
    else:
        out = round_to_nearest(values, TYPE)
    tl.store(weights + (tl.multiple_of(start_R, VEC)[:, None] + columns), out, mask=take_R[:, None] & inside)


@triton.jit
def _tell_not_finite(result, count, first):
    """Count rows that were skipped, and keep the first: `result` is (rows, table, row, least code, lock).

    first: the least table << 40 | row of this program's. The least of all is agreed on by an atomic minimum; whoever
    brought it writes it out, unless a lesser one has come meanwhile.
    """
    tl.atomic_add(result, count)
    if first < tl.atomic_min(result + 3, first):
        free = tl.full((), 0, tl.int64)
        taken = tl.full((), 1, tl.int64)
        while tl.atomic_cas(result + 4, free, taken) == 1:
            pass
        if tl.atomic_min(result + 3, first) == first:
            tl.atomic_xchg(result + 1, first >> 40)
            tl.atomic_xchg(result + 2, first & 0xFFFFFFFFFF)
        tl.debug_barrier()
        tl.atomic_xchg(result + 4, free)


@triton.jit(
    do_not_specialize=[
        "total", "span", "levels", "tables", "first_key", "end_key", "step", "grad_scale", "h0", "h1", "h2", "h3",
        "h4", "h5", "h6", "h7", "e0", "e1",
    ]
)  # fmt: skip
def update_runs(
    keys, occurrences, places, scales, grad, weights, slot0, slot1, slot2, partials, supers, meta, paces, names, result,
    runs, rows_out, total, span, levels, tables, first_key, end_key, step, grad_scale, h0, h1, h2, h3, h4, h5, h6, h7,
    e0, e1,
    TERMS: tl.constexpr, APPLY: tl.constexpr, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr,
    SUMS0: tl.constexpr, SUMS1: tl.constexpr, KIND0: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr,
    KEEPS: tl.constexpr, READS: tl.constexpr, GRAD_SCALED: tl.constexpr, SCALED: tl.constexpr, ROUND: tl.constexpr,
    PER_TABLE: tl.constexpr, NAMED: tl.constexpr, COMPACT: tl.constexpr, STEPS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PITCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr, VEC_D: tl.constexpr, VEC_G: tl.constexpr, VEC_S: tl.constexpr,
):  # fmt: skip
    """Program s updates the rows in [first_key, end_key) whose runs begin in span s.

    COMPACT: the row written is not the key's but the run's number (`runs` [N]), and which row it was goes to
    `rows_out`: how sums are given out instead of applied.

    Example: keys (2, 2, 4), gradients (1), (3), (5), span 2, "sgd", lr 0.1: program 0 reads 1 and 3 and writes
    w[2] -= 0.4; program 1 writes w[4] -= 0.5.
    """
    begin = tl.program_id(0).to(tl.int64) * span
    end = tl.minimum(begin + span, total)
    before = tl.load(keys + begin - 1, mask=begin > 0, other=-1)
    final = tl.load(keys + end - 1)
    # Nothing begins here, or nothing of this group.
    if (final != before) & (final >= first_key) & (tl.load(keys + begin) < end_key):
        lanes = tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)[None, :]
        carry = nothing(COLUMNS)
        # First the last run, if it goes on behind the span, all of it: now registers are still free.
        through = nothing(COLUMNS)
        until = end
        if (tl.load(keys + end, mask=end < total, other=-1) == final) & (final < end_key):
            until = begin_of_run(keys, final, begin, end - 1)
            width = tl.multiple_of(tl.load(meta + table_of(meta, final, tables, STEPS) * 16 + 1), VEC_D)
            through = sum_run(
                final, until, keys, occurrences, places, scales, grad, partials, supers, total, columns,
                columns < width, levels, SCALED, CHUNK, CHUNKS, PITCH, COLUMNS, VEC_G,
            )  # fmt: skip
        # From here on occurrences are counted from the span's first: 32 bits, and fewer registers.
        count = (end - begin).to(tl.int32)
        summed = (until - begin).to(tl.int32)  # occurrences from here on are in `through`
        known = tl.minimum(total - begin, count + 1).to(tl.int32)
        earliest = tl.where(begin > 0, 0, 1)  # has one before it
        keys += begin
        occurrences += begin
        if COMPACT:
            runs += begin
        for at in range(0, count, ROWS):
            i = at + lanes
            here = i < count
            key = tl.load(keys + i, mask=here, other=-1)
            prior = tl.load(keys + i - 1, mask=here & (i >= earliest), other=-1)
            following = tl.load(keys + i + 1, mask=i + 1 < known, other=-1)
            edge = tl.minimum(count - at, ROWS) - 1
            left = (here & (key != before) & (key >= first_key) & (key < end_key)).to(tl.int32)
            # Nearly always once: a table's numbers are then the same for all lanes, and take few registers.
            while tl.max(left, axis=0) > 0:
                key0 = tl.min(tl.where(left != 0, key.to(tl.int64), 0x7FFFFFFFFFFFFFFF), axis=0)
                table = table_of(meta, key0, tables, STEPS)
                numbers = meta + table * 16
                first = tl.load(numbers)
                dim = tl.multiple_of(tl.load(numbers + 1), VEC_D)
                behind_table = first + tl.load(numbers + 14)
                mine = (left != 0) & (key < behind_table)
                left = tl.where(mine, 0, left)
                inside = columns < dim
                take = mine & ((key != following) | (i == count - 1))
                key_row = key.to(tl.int64) - first
                row = key_row
                if COMPACT:
                    row = tl.load(runs + i, mask=take, other=0) - tl.load(numbers + 6)
                start = tl.multiple_of(tl.load(numbers + 2), VEC) + row * dim
                own = mine & (i < summed)
                g = gradient_rows(occurrences, places, scales, grad, i, own, columns, inside, SCALED, VEC_G)
                if READS:
                    w = tl.load(
                        weights + (tl.multiple_of(start, VEC)[:, None] + columns),
                        mask=take[:, None] & inside,
                        other=0.0,
                    ).to(tl.float32)
                else:
                    w = tl.zeros((ROWS, COLUMNS), tl.float32)
                at0 = tl.load(numbers + 3)
                at1 = tl.load(numbers + 4)
                at2 = tl.load(numbers + 5)
                s0 = load_slot(slot0, at0, row, dim, take, columns, inside, KIND0, VEC_S)
                s1 = load_slot(slot1, at1, row, dim, take, columns, inside, KIND1, VEC_S)
                s2 = load_slot(slot2, at2, row, dim, take, columns, inside, KIND2, VEC_S)
                repeats = own & (key == prior)
                g = tl.where((repeats & (lanes == 0))[:, None], carry + g, g)
                sums = fold_tile(g, repeats, ROWS)
                carry = one_row(sums, lanes == edge)
                sums = tl.where((mine & (i >= summed))[:, None], through, sums)
                name = key_row
                if NAMED:
                    has = take & (key_row * 0 + tl.load(numbers + 13) != 0)
                    name = tl.load(names + (tl.load(numbers + 12) + key_row), mask=has, other=0)
                    name = tl.where(has, name, key_row)
                if KEEPS:
                    bad = take & (tl.max(tl.where(tl.abs(sums) < float("inf"), 0, 1), axis=1) != 0)
                    skips = tl.sum(bad.to(tl.int64), axis=0)
                    if skips > 0:
                        code = tl.where(bad, (tl.load(numbers + 10) << 40) | name, 0x7FFFFFFFFFFFFFFF)
                        _tell_not_finite(result, skips, tl.min(code, axis=0))
                    take = take & (bad == 0)
                    sums = tl.where(take[:, None], sums, 0.0)
                if GRAD_SCALED:
                    sums = tl.div_rn(sums, grad_scale)
                t, p0, p1, r0, r7 = step, e0, e1, h0, h7
                if PER_TABLE:
                    t, p0, p1, r0, r7 = read_pace(paces, tl.load(numbers + 10))
                whole_dim = tl.zeros((ROWS, 1), tl.float32) + tl.load(numbers + 11).to(tl.float32)
                z0 = 0.0
                z1 = 0.0
                z2 = 0.0
                if SUMS0 >= 1:
                    x0, x1 = TERMS(
                        0, sums, w, s0, s1, s2, z0, z1, z2, whole_dim, r0, h1, h2, h3, h4, h5, h6, r7, p0, p1,
                        MODE, WD, ROW_STEP,
                    )  # fmt: skip
                    z0 = tl.sum(tl.where(inside, x0, 0.0), axis=1)[:, None]
                    if SUMS0 >= 2:
                        z1 = tl.sum(tl.where(inside, x1, 0.0), axis=1)[:, None]
                if SUMS1 >= 1:
                    x0, x1 = TERMS(
                        1, sums, w, s0, s1, s2, z0, z1, z2, whole_dim, r0, h1, h2, h3, h4, h5, h6, r7, p0, p1,
                        MODE, WD, ROW_STEP,
                    )  # fmt: skip
                    z1 = tl.sum(tl.where(inside, x0, 0.0), axis=1)[:, None]
                    if SUMS1 >= 2:
                        z2 = tl.sum(tl.where(inside, x1, 0.0), axis=1)[:, None]
                w, s0, s1, s2 = APPLY(
                    sums, w, s0, s1, s2, z0, z1, z2, whole_dim, r0, h1, h2, h3, h4, h5, h6, r7, p0, p1,
                    MODE, WD, ROW_STEP,
                )  # fmt: skip
                if COLUMNS > 512:
                    # Several warps: each has read the row's slots, of which one writes what they become.
                    tl.debug_barrier()
                store_rows(
                    weights, w, start, take, columns, inside, numbers, name, t, ROUND, ROWS, COLUMNS, VEC
                )
                store_slot(slot0, s0, at0, row, dim, take, columns, inside, KIND0, VEC_S)
                store_slot(slot1, s1, at1, row, dim, take, columns, inside, KIND1, VEC_S)
                store_slot(slot2, s2, at2, row, dim, take, columns, inside, KIND2, VEC_S)
                if COMPACT:
                    tl.store(rows_out + tl.load(runs + i, mask=take, other=0), key_row, mask=take)


@dataclass(frozen=True)
class Group:
    """Tables of one launch: neighbours in the key space."""

    first: int  # table, in the order of keys
    count: int
    first_key: int
    end_key: int
    weight: int  # the tables, in the order of the call, from which distances count
    slots: tuple[int, ...]
    dtype: torch.dtype
    columns: int
    vec: int
    vec_d: int
    vec_s: int
    aligned: bool  # every table begins at a multiple of 4 of its global columns


@dataclass(frozen=True)
class Tables:
    """The tables of a call, as kernels read them."""

    numbers: Tensor  # int64 [T, PER_TABLE], in the order of keys
    order: tuple[int, ...]
    first_keys: tuple[int, ...]  # in the order of the call
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    sentinel: int
    groups: tuple[Group, ...]
    names: int  # the table whose names are counted from


Shape = tuple[int, int]


def counted(
    pointers: Sequence[int], sizes: Sequence[int], own: Sequence[int], size: int
) -> tuple[int, list[int]]:
    """Which of `own` to count from (the first with elements), and each one's distance in elements (`addresses.py`)."""
    start = next((t for t in own if sizes[t]), own[0])
    return start, [(pointers[t] - pointers[start]) // size if sizes[t] else 0 for t in own]


@kept(256)
def _tables(
    op: str, device: torch.device, shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...],
    pointers: tuple[int, ...], slot_pointers: tuple[int, ...], kinds: str, seeds: tuple[int, ...],
    row_offsets: tuple[int, ...], column_offsets: tuple[int, ...], names: tuple[int, ...],
) -> Tables:  # fmt: skip
    """names: pointer of each table's row names, 0 where rows have none."""
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
    names_base, name_distances = counted(names, named, range(len(shapes)), 8) if shapes else (0, [])
    for (dtype, columns, vec), own in members.items():
        first_key = key
        weight, distances = counted(pointers, sizes, own, dtype.itemsize)
        bases, slot_distances, vec_s = [], [], 4
        for k, kind in enumerate(kinds):
            at = slot_pointers[k::each]
            slot_sizes = [sizes[t] if kind == "e" else shapes[t][0] for t in range(len(shapes))]
            start, from_start = counted(at, slot_sizes, own, 4)
            bases.append(start)
            slot_distances.append(from_start)
            if kind == "e":
                vec_s = min(
                    vec_s, power_of_two([*(at[t] // 4 for t in own), *(shapes[t][1] for t in own)], 4)
                )
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
            Group(
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
    return Tables(
        constants(tuple(numbers), device).view(-1, PER_TABLE), tuple(order), tuple(first_keys),
        tuple(rows for rows, _ in shapes), tuple(dim for _, dim in shapes), key, tuple(groups), names_base,
    )  # fmt: skip


@dataclass(frozen=True)
class Features:
    """A record's features, as kernels read them."""

    numbers: Tensor  # int64 [F, PER_FEATURE]
    layers: int
    count: int  # of their bags
    vec: int
    means: bool


def _describe_features(
    op: str, grad_count: int, ids_count: int, offsets_count: int | None, dims: Sequence[int], first_keys: Sequence[int],
    rows: Sequence[int], device: torch.device, kept: bool, tables: Sequence[int], starts: Sequence[int],
    bags: Sequence[int], grad_starts: Sequence[int], grad_strides: Sequence[int], means: Sequence[int],
) -> Features:  # fmt: skip
    check_reach(
        op, grad_count, ids_count, offsets_count, dims, tables, starts, bags, grad_starts, grad_strides
    )
    numbers: list[int] = []
    for t, *own in zip(tables, starts, bags, grad_starts, grad_strides, means, strict=True):
        numbers += [first_keys[t], rows[t], *own, max(own[1] - 1, 1).bit_length() - 1]
    some = [f for f, count in enumerate(bags) if count]
    vec = power_of_two([*(grad_starts[f] for f in some), *(grad_strides[f] for f in some)], 8)
    put = constants(tuple(numbers), device) if kept else upload(numbers, device)
    return Features(put, layers(starts, bags), sum(bags), vec, any(means) and offsets_count is not None)


@kept(256)
def _kept_features(*key: object) -> Features:
    """Features of batches of one size: bags lie where they lay in the step before."""
    return _describe_features(*key)  # type: ignore[arg-type]


def read_record(
    op: str, tables: Tables, grad: Tensor, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None,
    per_feature: Sequence[Sequence[int]], kept: bool, grad_count: int | None = None,
) -> Record:  # fmt: skip
    """The record as kernels read it; raises what the reference raises, but for values on the device.

    kept: the features' numbers will be wanted again; grad_count: elements of the gradient, where `grad` is not it.
    """
    check_record(op, ids, offsets, sample_weights, *per_feature)
    grad, ids = grad.contiguous(), (ids if ids.dtype in _INDEX else ids.to(torch.int64)).contiguous()
    if offsets is not None:
        offsets = offsets.contiguous()
    if sample_weights is not None:
        sample_weights = sample_weights.contiguous()
    ids_count = ids.numel()
    grad_count = grad.numel() if grad_count is None else grad_count
    if kept and offsets is not None:
        features = _kept_features(
            op, grad_count, 0, offsets.numel(), tables.dims, tables.first_keys, tables.rows, ids.device, True,
            *map(tuple, per_feature),
        )  # fmt: skip
    else:
        count = None if offsets is None else offsets.numel()
        features = _describe_features(
            op, grad_count, ids_count, count, tables.dims, tables.first_keys, tables.rows, ids.device, False,
            *per_feature,
        )  # fmt: skip
    total = features.count if offsets is None else features.layers * ids_count
    vec = min(features.vec, 16 // grad.element_size())
    return Record(
        grad, ids, offsets, sample_weights, features.numbers, len(per_feature[0]), features.means, total, vec
    )


def same_device(op: str, device: torch.device, **others: Tensor | Sequence[Tensor] | None) -> None:
    for name, given in others.items():
        for tensor in [given] if isinstance(given, Tensor) else given or ():
            if tensor.device != device:
                raise InputError(
                    f"{op}: {name} are on {tensor.device}, the ids on {device}; move one of them with .to()."
                )


def tile_rows(columns: int, element_slots: int) -> int:
    """Rows of a tile: 16 numbers a lane, half of that where slots per element come along; at most 16 rows."""
    return max(1, min(16, (256 if element_slots else 512) // columns))


def _span(total: int, rows: int) -> int:
    """Sorted occurrences of a program: enough programs for every GPU first, then up to 8 tiles each."""
    return rows * max(1, min(8, total // (rows * 8192)))


def served(device: torch.device, grad: Tensor, weights: Sequence[Tensor], slots: Sequence[Tensor]) -> bool:
    return (
        grad.dtype in GRADIENT_TYPES
        and {w.dtype for w in weights} <= set(ROW_TYPES)
        and all([reads(w.dtype, device) and w.is_contiguous() and w.shape[1] <= WIDEST for w in weights])  # noqa: C419
        and all([s.dtype == torch.float32 and s.is_contiguous() for s in slots])  # noqa: C419
    )


def _facts(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(t.shape, t.dtype, t.is_contiguous()) for t in tensors]


class _Seen:
    """The tables of a call that was made before, found by where they lie; are they still to be read in the same way?

    Yes, if these are the very same tensors, or look as those did.
    """

    def __init__(self, layout: Tables, weights: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        self.layout = layout
        self.facts = _facts((*weights, *slots))
        self.shapes = [w.shape for w in weights]
        self.dtypes = [w.dtype for w in weights]
        self.tensors = [weakref.ref(tensor) for tensor in (*weights, *slots)]

    def fits(self, weights: Sequence[Tensor], slots: Sequence[Tensor]) -> bool:
        tensors = (*weights, *slots)
        if all(map(operator.is_, [tensor() for tensor in self.tensors], tensors)):
            # A parameter's `.data` may be another tensor's, of another type, too, at the same place by chance.
            return (
                [w.shape for w in weights] == self.shapes
                and [w.dtype for w in weights] == self.dtypes
                and all(map(Tensor.is_contiguous, weights))
            )
        return _facts(tensors) == self.facts


_KNOWN: dict[tuple[object, ...], _Seen] = {}
_NOTHING_SKIPPED = (0, -1, -1, (1 << 63) - 1, 0)


def update_rows_(
    weights: Sequence[Tensor], slots: Sequence[Tensor], grad: Tensor, ids: Tensor, offsets: Tensor | None,
    sample_weights: Tensor | None, tables: Sequence[int], starts: Sequence[int], bags: Sequence[int],
    grad_starts: Sequence[int], grad_strides: Sequence[int], means: Sequence[int], rule: str, hyper: Sequence[float],
    steps: Sequence[int], seeds: Sequence[int], row_offsets: Sequence[int], column_offsets: Sequence[int],
    row_names: Sequence[Tensor] | None = None, counts: Sequence[Tensor] | None = None, lr: Tensor | None = None,
    ordered: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """`tilerec/ops/update.py`; ids that are no rows are left out here (their lookup has told), and the result stays on
    the device."""
    op, device = "update_rows_", ids.device
    check_counts(op, steps, counts, lr, len(weights))
    made = ready(rule, hyper)
    kinds = made.slots
    names = () if row_names is None else check_names(op, row_names, [w.shape[0] for w in weights])
    # What stays the same from step to step is checked and sent once.
    key = (
        device, current_stream(), rule, kinds, len(weights if counts else steps), tuple(seeds), tuple(row_offsets),
        tuple(column_offsets), tuple(map(_data_ptr, weights)), tuple(map(_data_ptr, slots)),
        tuple([(n.data_ptr(), n.shape[0]) for n in names]),
    )  # fmt: skip
    graph = capturing()  # what a graph reads must be kept for it
    seen = _KNOWN.get(key) if grad.dtype in GRADIENT_TYPES and not graph else None
    if seen is not None and seen.fits(weights, slots):
        layout = seen.layout
    else:
        if not served(device, grad, weights, slots):
            return update_rows_reference_(
                weights, slots, grad, ids, offsets, sample_weights, tables, starts, bags, grad_starts, grad_strides,
                means, rule, hyper, steps, seeds, row_offsets, column_offsets, row_names, counts, lr,
            )  # fmt: skip
        check_tables(
            op, weights, slots, kinds, rule, column_offsets, (counts or steps, 1), (seeds, 2), (row_offsets, 1)
        )  # fmt: skip
        same_device(op, device, weights=weights, slots=slots)
        layout = _tables(
            op, device, tuple([(w.shape[0], w.shape[1]) for w in weights]), tuple([w.dtype for w in weights]),
            tuple([w.data_ptr() for w in weights]), tuple([s.data_ptr() for s in slots]), kinds, tuple(seeds),
            tuple(row_offsets), tuple(column_offsets),
            tuple([n.data_ptr() if n.numel() else 0 for n in names]) or (0,) * len(weights),
        )  # fmt: skip
        if len(_KNOWN) >= 256:
            _KNOWN.clear()
        if not graph:
            _KNOWN[key] = _Seen(layout, weights, slots)
    same_device(op, device, gradients=grad, offsets=offsets, sample_weights=sample_weights)
    per_feature = (tables, starts, bags, grad_starts, grad_strides, means)
    record = read_record(op, layout, grad, ids, offsets, sample_weights, per_feature, True)
    if graph and counts is None:
        refuse_frozen_counts(made, [group.dtype for group in layout.groups])
    result = constants(_NOTHING_SKIPPED, device).clone()
    with device_of(ids):
        by_key = paces = None
        if record.total and layout.sentinel:
            by_key = sort_occurrences(
                record, layout.numbers, len(weights), layout.sentinel, layout.dims,
                made_before(ordered, layout, record),
            )  # fmt: skip
        if counts:  # behind the sort, which may find no memory: an update that is not made is not counted
            paces = paces_on_device(op, made, counts, lr, device, True)
        if by_key is None:
            return result[:3]
        by_value, step = (0.0, 0.0), 0
        if counts is None and min(steps) == max(steps):
            by_value, step = made.paces(steps[0]), steps[0]
        elif counts is None:
            paces = pace_table(made, steps, device)
        for group in layout.groups:
            _update_group(
                group, layout, record, by_key, made, weights, slots, names, result, step, by_value, paces
            )
    return result[:3]


def refuse_frozen_counts(made: Ready, dtypes: Sequence[torch.dtype]) -> None:
    """Raise a `ConfigError` if a graph would repeat an update count, and anything depends on it."""
    rounds = made.rule.h["stochastic_rounding"] and any(dtype != torch.float32 for dtype in dtypes)
    if rounds or made.paces(1) != made.paces(2):
        what = "the random words of stochastic rounding" if rounds else "bias correction or lr_decay"
        raise ConfigError(
            f"An update by {type(made.rule).__name__} is captured in a CUDA graph with its update count by value: "
            f"every replay would repeat it, and {what} depends on it. Attach the optimizer with "
            "{'capturable': True}, which keeps count and learning rate on the device (the op: pass counts and lr)."
        )


def _update_group(
    group: Group, layout: Tables, record: Record, ordered: Sorted, made: Ready, weights: Sequence[Tensor],
    slots: Sequence[Tensor], names: Sequence[Tensor], result: Tensor, step: int, by_value: tuple[float, float],
    paces: Tensor | None,
) -> None:  # fmt: skip
    each = len(group.slots)
    own = [slots[start * each + k] for k, start in enumerate(group.slots)]
    rounds = made.rule.h["stochastic_rounding"] and group.dtype != torch.float32
    nothing = (
        ordered.keys
    )  # a pointer that is not followed must still be one, and of one type whatever the batch
    numbers = layout.numbers[group.first :] if group.first else layout.numbers
    launch(
        group, numbers, record, ordered, made, weights[group.weight], [*own, *[nothing] * (3 - each)], result, step,
        by_value, paces=given(paces, nothing),
        names=names[layout.names] if names else nothing,
        ROUND=0 if not rounds else 1 if group.aligned else 2, PER_TABLE=paces is not None, NAMED=bool(names),
    )  # fmt: skip


def launch(
    group: Group, numbers: Tensor, record: Record, ordered: Sorted, made: Ready, weight: Tensor,
    slots: Sequence[Tensor], result: Tensor, step: int, by_value: tuple[float, float], *, paces: Tensor, names: Tensor,
    ROUND: int, PER_TABLE: bool, NAMED: bool, runs: Tensor | None = None, rows_out: Tensor | None = None,
) -> None:  # fmt: skip
    nothing = (
        ordered.keys
    )  # a pointer that is not followed must still be one, and of one type whatever the batch
    rows = tile_rows(group.columns, made.kinds.count(1))
    span = _span(record.total, rows)
    assert span <= CHUNK, "what a run has in one span is at most a chunk, so it is a fold of rows (runs.py)"
    scale = made.rule.h["grad_scale"]
    run_kernel(update_runs, (ceil_div(record.total, span),),
        ordered.keys, ordered.occurrences, ordered.places, given(ordered.scales, nothing), record.grad, weight, *slots,
        ordered.partials, ordered.supers, numbers, paces, names, result,
        given(runs, nothing), given(rows_out, nothing), record.total, span, ordered.levels, group.count,
        group.first_key, group.end_key, step, scale, *made.numbers, *by_value,
        TERMS=made.bundle.terms, APPLY=made.bundle.apply, MODE=made.mode, WD=made.decays, ROW_STEP=made.row_step,
        SUMS0=made.sums[0], SUMS1=made.sums[1], KIND0=made.kinds[0], KIND1=made.kinds[1], KIND2=made.kinds[2],
        KEEPS=made.bundle.keeps, READS=made.rule.keeps, GRAD_SCALED=scale != 1.0, SCALED=ordered.scales is not None,
        ROUND=ROUND, PER_TABLE=PER_TABLE, NAMED=NAMED, COMPACT=runs is not None, STEPS=steps_of(group.count),
        CHUNK=CHUNK, CHUNKS=CHUNKS, PITCH=ordered.pitch, ROWS=rows, COLUMNS=group.columns,
        VEC=group.vec, VEC_D=group.vec_d, VEC_G=record.vec, VEC_S=group.vec_s, num_warps=warps_of(rows * group.columns),
        enable_fp_fusion=False,
    )  # fmt: skip


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def given(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's pointer that it does not follow must still be one."""
    return other if tensor is None else tensor


def made_before(ordered: Sequence[Tensor] | None, layout: Tables, record: Record) -> Order | None:
    """The order that `order_rows` made, or None: there is none, or the tables lie otherwise than they did."""
    if ordered is None:
        return None
    if len(ordered) != ORDER_TENSORS:
        raise InputError(
            f"update_rows_: ordered has {len(ordered)} tensors, wanted {ORDER_TENSORS}; pass what order_rows gave."
        )
    keys, occurrences, places, scales, first_keys = ordered
    scaled = record.means or record.sample_weights is not None
    if (
        keys.numel() != record.total
        or (scales.numel() > 0) != scaled
        or first_keys.tolist() != [*layout.first_keys, layout.sentinel]
        or keys.device != record.ids.device
    ):
        return None
    return Order(keys, occurrences, places, scales if scaled else None)


def order_rows(
    weights: Sequence[Tensor], ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None,
    tables: Sequence[int], starts: Sequence[int], bags: Sequence[int], grad_starts: Sequence[int],
    grad_strides: Sequence[int], means: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """`tilerec/ops/order.py`; keys go by groups of tables, as `update_rows_` has them."""
    op, device, count = "order_rows", ids.device, len(weights)
    same_device(op, device, weights=weights, offsets=offsets, sample_weights=sample_weights)
    per_feature = (tables, starts, bags, grad_starts, grad_strides, means)
    if not all([w.dtype in ROW_TYPES for w in weights]):  # noqa: C419 - their updates are the reference's
        return order_rows_reference(weights, ids, offsets, sample_weights, *per_feature)
    layout = _tables(
        op, device, tuple([(w.shape[0], w.shape[1]) for w in weights]), tuple([w.dtype for w in weights]),
        tuple([w.data_ptr() for w in weights]), (), "", (0, 0) * count, (0,) * count, (0,) * count, (0,) * count,
    )  # fmt: skip
    least = reach(layout.dims, tables, bags, grad_starts, grad_strides)
    record = read_record(op, layout, ids, ids, offsets, sample_weights, per_feature, True, grad_count=least)
    first_keys = torch.tensor([*layout.first_keys, layout.sentinel], dtype=torch.int64, device="cpu")
    no_scales = torch.empty(0, dtype=torch.float32, device=device)
    if not record.total or not layout.sentinel:  # there is nothing to update
        nothing = torch.zeros(record.total, dtype=torch.int64, device=device)
        keys, places = nothing.to(key_type(layout.sentinel.bit_length())), nothing.to(torch.int32)
        return [keys, nothing, places, no_scales, first_keys]
    with device_of(ids):
        made = order_occurrences(record, layout.sentinel, least)
    scales = no_scales if made.scales is None else made.scales
    return [made.keys, made.occurrences, made.places, scales, first_keys]


def register(key: str = "CUDA") -> None:
    """Let the kernels serve the update ops on devices of this dispatch key."""
    for function in (update_rows_, order_rows):
        LIBRARY.impl(function.__name__, on_own_device(function), key, allow_override=True)
