"""Rows of tables and their slots, read and written in tiles of fp32, rows at random places.

Nouns
  slot   optimizer state of a row: a number per element (`_ELEMENT`) or one per row (`_ROW`)
  tile   some rows times COLUMNS >= their columns; `take` masks the rows, `inside` the columns

    slot of one number per row, rows (4, 2) taken, the table's slot beginning at element 10: reads elements 14 and 12

Legend: R rows of a tile, C columns of a tile.
"""

# ruff: noqa: RET505 - the compiler evaluates these branches of kernels

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.random.triton.backend import round_at_random, round_to_nearest, words

_ELEMENT, _ROW = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_slot(slot, first, row_R, dim, take_R, columns, inside, KIND: tl.constexpr, VEC: tl.constexpr):
    """Return slot values of a table's rows, fp32 [R, C] or [R, 1]; 0.0 for a slot that the rule does not have.

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
def store_slot(slot, values, first, row_R, dim, take_R, columns, inside, KIND: tl.constexpr, VEC: tl.constexpr):
    if KIND == _ELEMENT:
        start_R = tl.multiple_of(first + row_R * dim, VEC)
        tl.store(slot + (start_R[:, None] + columns), values, mask=take_R[:, None] & inside)
    elif KIND == _ROW:
        tl.store(slot + (first + row_R), tl.max(values, axis=1), mask=take_R)


@triton.jit
def load_slots(
    slots, firsts, row_R, dim, take_R, columns, inside,
    KIND0: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Return `load_slot` of the three slots: tuples of pointers and of first elements."""
    s0 = load_slot(slots[0], firsts[0], row_R, dim, take_R, columns, inside, KIND0, VEC)
    s1 = load_slot(slots[1], firsts[1], row_R, dim, take_R, columns, inside, KIND1, VEC)
    s2 = load_slot(slots[2], firsts[2], row_R, dim, take_R, columns, inside, KIND2, VEC)
    return s0, s1, s2


@triton.jit
def store_slots(
    slots, values, firsts, row_R, dim, take_R, columns, inside,
    KIND0: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    store_slot(slots[0], values[0], firsts[0], row_R, dim, take_R, columns, inside, KIND0, VEC)
    store_slot(slots[1], values[1], firsts[1], row_R, dim, take_R, columns, inside, KIND1, VEC)
    store_slot(slots[2], values[2], firsts[2], row_R, dim, take_R, columns, inside, KIND2, VEC)


@triton.jit
def names_of_rows(names, numbers, row_R, take_R, NAMED: tl.constexpr):
    """Return the rows' numbers for the random words and for reports; `numbers`: the table's."""
    name = row_R
    if NAMED:
        has = take_R & (row_R * 0 + tl.load(numbers + 13) != 0)
        name = tl.load(names + (tl.load(numbers + 12) + row_R), mask=has, other=0)
        name = tl.where(has, name, row_R)
    return name


@triton.jit
def store_rows(
    weights, values, start_R, take_R, columns, inside, numbers, name_R, count,
    ROUND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Round and write rows.

    ROUND 0: to nearest; 1: stochastic, tiles begin at multiples of 4 columns; 2: stochastic, at any column. numbers:
    the table's; name_R: the rows' numbers for the random words.
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
