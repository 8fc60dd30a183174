"""From ids to runs: every occurrence of a row gets a key, and one stable sort brings each row's together.

Nouns (and those of `occurrences.py`: occurrence, key, sentinel, place, scale)
  run          sorted occurrences with one key: one row's gradients, in the order (feature, position)
  chunk        CHUNK sorted occurrences that begin at a multiple of CHUNK; whole if all of one run
  super-chunk  CHUNKS chunks, likewise

Long runs: a row with a million occurrences would be a million steps of one program. Chunks that are whole are summed
by programs of their own, whole super-chunks from those sums, and the row's program adds the pieces in ascending order.
There are no atomics, so a row's sum has the same bits every time. What it costs where no run is long: reading two keys
per chunk.

    keys   5 5 5 5 5 5 5 5 5 5 5 7    chunks of 4: [5 5 5 5] [5 5 5 5] [5 5 5 7]; the first two are whole, and the
    program of row 5 adds partials[0], partials[1], then three rows

What the sort costs: `torch.sort` is a library radix sort. It takes all bits of the key type, 8 at a time, and carries
an int64 payload: about 2 * 4 * (4 + 8) bytes per occurrence and int32 key, where a sort of 24 bits with an int32
payload would move 2 * 3 * (4 + 4), and one of int64 keys moves 2 * 8 * (8 + 8). Hence the narrowest key type that holds
the rows. `sort_keys` is told the bits, so that another sort can take its place.

Legend: F features, N occurrences (bound), T tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.triton.launch import launch
from tilerec.ops.triton.occurrences import occurrence_keys
from tilerec.ops.triton.small_sort import is_small, sort_small

CHUNK, CHUNKS = 128, 64
PER_TABLE = 16
"""Numbers a table has in its tensor (`update.py` gives them a meaning); number 0 is its first key, 1 its columns."""
_POSITIONS = 512
_INT16, _INT32 = 15, 31


def key_type(bits: int) -> torch.dtype:
    """The narrowest signed type that holds keys of so many bits."""
    return torch.int16 if bits <= _INT16 else torch.int32 if bits <= _INT32 else torch.int64


def sort_keys(keys_N: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys ascending, and which occurrence each belonged to (int64); equal keys keep their order.

    `bits`: of the largest key; keys have the `key_type` of it.
    """
    sorted_N, occurrence_N = torch.sort(keys_N, stable=True)
    return sorted_N, occurrence_N


@triton.jit
def table_of(meta, key, tables, STEPS: tl.constexpr):
    """Which of the tables, ascending by first key, has the key (a tensor of keys, or one)."""
    table = (key * 0).to(tl.int32)
    for step in tl.static_range(STEPS):
        probe = table + (1 << (STEPS - 1 - step))
        fits = probe < tables
        first = tl.load(meta + probe * 16, mask=fits, other=0)
        table = tl.where(fits & (first <= key.to(tl.int64)), probe, table)
    return table


@triton.jit
def gradient_rows(
    occurrences, places, scales, grad, i, take, columns, inside, SCALED: tl.constexpr, VEC: tl.constexpr
):
    """Scaled gradient rows [R, C] of the sorted occurrences `i`, fp32; zeros where not taken."""
    q = tl.load(occurrences + i, mask=take, other=0)
    place = tl.multiple_of(tl.load(places + q, mask=take, other=0).to(tl.int64), VEC)
    g = tl.load(grad + (place[:, None] + columns), mask=take[:, None] & inside, other=0.0).to(tl.float32)
    if SCALED:
        scale = tl.load(scales + q, mask=take, other=0.0)
        g = g * scale[:, None]
    return g


@triton.jit(do_not_specialize=["total", "sentinel", "tables"])
def sum_chunks(
    keys, occurrences, places, scales, grad, partials, meta, total, sentinel, tables,
    STEPS: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VEC: tl.constexpr, VEC_D: tl.constexpr,
):  # fmt: skip
    """Program c sums chunk c into `partials[c]` (fp32 [COLUMNS]) if it is whole."""
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    key = tl.load(keys + begin)
    if (tl.load(keys + begin + CHUNK - 1) == key) & (key.to(tl.int64) < sentinel):
        dim = tl.load(meta + table_of(meta, key, tables, STEPS) * 16 + 1)
        columns = tl.arange(0, COLUMNS)[None, :]
        inside = columns < tl.multiple_of(dim, VEC_D)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, CHUNK, ROWS):
            i = begin + at + tl.arange(0, ROWS)
            take = i < total
            sums += gradient_rows(occurrences, places, scales, grad, i, take, columns, inside, SCALED, VEC)
        tl.store(
            partials + tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS), tl.sum(sums, axis=0)
        )


@triton.jit(do_not_specialize=["sentinel"])
def sum_super_chunks(
    keys, partials, supers, sentinel,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program s adds the partials of super-chunk s's chunks into `supers[s]` if it is whole."""
    first = tl.program_id(0).to(tl.int64) * CHUNKS
    key = tl.load(keys + first * CHUNK)
    if (tl.load(keys + (first + CHUNKS) * CHUNK - 1) == key) & (key.to(tl.int64) < sentinel):
        columns = tl.arange(0, COLUMNS)[None, :]
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, CHUNKS, ROWS):
            chunk = first + at + tl.arange(0, ROWS)
            sums += tl.load(partials + (chunk[:, None] * COLUMNS + columns))
        tl.store(
            supers + tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS), tl.sum(sums, axis=0)
        )


@triton.jit
def finish_run(
    sums, key, i, keys, occurrences, places, scales, grad, partials, supers, total, inside,
    levels, SCALED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PITCH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """`sums` [COLUMNS] and what the run of `key` has from sorted occurrence `i` on.

    In steps of up to ROWS pieces, the largest that fit: single occurrences up to the next chunk, whole chunks up to the
    next super-chunk, whole super-chunks, and down again at the run's end.
    """
    lanes = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    going = (i < total) & (tl.load(keys + i, mask=i < total, other=-1) == key)
    while going:
        piece = tl.full((), 1, tl.int64)
        until = total.to(tl.int64)
        if levels >= 1:
            until = tl.minimum(total, (i // CHUNK + 1) * CHUNK)
            end = i + CHUNK - 1
            fits = (i % CHUNK == 0) & (end < total)
            if tl.load(keys + end, mask=fits, other=-1) == key:
                piece = tl.full((), CHUNK, tl.int64)
                until = total.to(tl.int64)
                if levels >= 2:
                    until = tl.minimum(total, (i // (CHUNK * CHUNKS) + 1) * (CHUNK * CHUNKS))
                    end = i + CHUNK * CHUNKS - 1
                    fits = (i % (CHUNK * CHUNKS) == 0) & (end < total)
                    if tl.load(keys + end, mask=fits, other=-1) == key:
                        piece = tl.full((), CHUNK * CHUNKS, tl.int64)
                        until = total.to(tl.int64)
        end_R = i + (lanes + 1) * piece - 1
        take = end_R < until
        take = take & (tl.load(keys + end_R, mask=take, other=-1) == key)
        if piece == 1:
            rows = gradient_rows(
                occurrences, places, scales, grad, i + lanes, take, columns, inside, SCALED, VEC
            )
            sums += tl.sum(rows, axis=0)
        elif piece == CHUNK:
            at = (i // CHUNK + lanes) * PITCH
            sums += tl.sum(tl.load(partials + at[:, None] + columns, mask=take[:, None], other=0.0), axis=0)
        else:
            at = (i // (CHUNK * CHUNKS) + lanes) * PITCH
            sums += tl.sum(tl.load(supers + at[:, None] + columns, mask=take[:, None], other=0.0), axis=0)
        i += tl.sum(take.to(tl.int64), axis=0) * piece
        going = (i < total) & (tl.load(keys + i, mask=i < total, other=-1) == key)
    return sums


@dataclass(frozen=True)
class Record:
    """A gradient record as kernels read it: contiguous tensors, ids as they came."""

    grad: Tensor
    ids: Tensor
    offsets: Tensor | None
    sample_weights: Tensor | None
    features: Tensor  # int64 [F, PER_FEATURE]
    count: int  # F
    means: bool
    total: int  # N
    vec: int  # every gradient row begins at a multiple of this


@dataclass(frozen=True)
class Sorted:
    """Occurrences by key."""

    keys: Tensor
    occurrences: Tensor
    places: Tensor
    scales: Tensor | None
    partials: Tensor
    supers: Tensor
    levels: int  # of chunks that are summed
    pitch: int  # columns of a partial


def sort_occurrences(
    record: Record, tables: Tensor, table_count: int, sentinel: int, dims: Sequence[int]
) -> Sorted:
    """Keys, one sort, and sums of whole chunks.

    tables: int64 [T, PER_TABLE]; sentinel: the sum of their rows; dims: their columns.
    """
    device, total = record.ids.device, record.total
    bits = sentinel.bit_length()
    keys = torch.empty(total, dtype=key_type(bits), device=device)
    places = torch.empty(
        total, dtype=torch.int32 if record.grad.numel() < 1 << 31 else torch.int64, device=device
    )
    scaled = record.means or record.sample_weights is not None
    scales = torch.empty(total, dtype=torch.float32, device=device) if scaled else None
    nothing = keys  # pointers that are not followed must still be some, and of one type whatever the batch
    arguments = (
        record.ids, nothing if record.offsets is None else record.offsets,
        nothing if record.sample_weights is None else record.sample_weights, record.features, keys, places,
        nothing if scales is None else scales, record.count,
    )  # fmt: skip
    given = record.offsets is not None, record.sample_weights is not None, record.means
    if is_small(total, record.count, bits):
        ordered, occurrences = sort_small(*arguments, total, sentinel, *given)
    else:
        programs = programs_of(total, record.count)
        launch(
            occurrence_keys, (programs * (record.count + 1),), *arguments, record.ids.numel(), total, sentinel,
            programs, JAGGED=given[0], WEIGHTED=given[1], MEANS=given[2],
            FEATURES=min(triton.next_power_of_2(record.count), 1024), BLOCK=_POSITIONS, num_warps=4,
        )  # fmt: skip
        ordered, occurrences = sort_keys(keys, bits)
    levels = 0
    pitch = triton.next_power_of_2(max(4, *dims))  # no tile of `update.py` has fewer columns, and it reads all of them
    rows = max(1, min(16, CHUNK, CHUNKS, 512 // pitch))
    warps = warps_of(rows * pitch)
    chunks = total // CHUNK if total >= 2 * CHUNK else 0
    partials = torch.empty((max(chunks, 1), pitch), dtype=torch.float32, device=device)
    supers = partials
    if chunks:
        levels = 1
        launch(
            sum_chunks, (chunks,), ordered, occurrences, places, nothing if scales is None else scales, record.grad,
            partials, tables, total, sentinel, table_count,
            STEPS=steps_of(table_count), SCALED=scaled, CHUNK=CHUNK, ROWS=rows, COLUMNS=pitch,
            VEC=record.vec, VEC_D=power_of_two(dims, 16), num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    if chunks >= 2 * CHUNKS:
        levels, count = 2, chunks // CHUNKS
        supers = torch.empty((count, pitch), dtype=torch.float32, device=device)
        launch(
            sum_super_chunks, (count,), ordered, partials, supers, sentinel,
            CHUNK=CHUNK, CHUNKS=CHUNKS, ROWS=rows, COLUMNS=pitch, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return Sorted(ordered, occurrences, places, scales, partials, supers, levels, pitch)


def programs_of(total: int, features: int) -> int:
    """How many programs share a feature: up to one per block of positions, and 4,096 of all features or a little more.

    Example: 2.6 million occurrences of 26 features -> 158; 70,000 features -> 1.
    """
    return max(1, min(ceil_div(total, _POSITIONS), ceil_div(4096, features)))


def power_of_two(values: Sequence[int], most: int) -> int:
    """The largest power of two up to `most` that divides all values. Example: (12, 40), 16 -> 4."""
    divisor = math.gcd(most, *values)
    return divisor & -divisor


def ceil_div(a: int, b: int) -> int:
    """`triton.cdiv` takes a microsecond."""
    return -(-a // b)


def steps_of(tables: int) -> int:
    """How often to halve the tables to find one."""
    return (tables - 1).bit_length()


def warps_of(elements: int) -> int:
    """Warps for a tile of so many fp32 numbers: one as long as it fits one warp's registers."""
    return max(1, min(elements // 512, 16))
