"""Sort of occurrences into runs: every occurrence has a row's key, and one stable sort makes each row's contiguous.

Nouns (and those of `occurrences.py`: occurrence, key, sentinel, place, scale)
  run          sorted occurrences with one key: one row's gradients, in the order (feature, position)

This file also launches the sums of long runs' chunks, on many programs; `runs.py` defines chunks and the order of all
additions.

Cost of the sort: `torch.sort` is a library radix sort. It sorts all bits of the key type, 8 at a time, and carries an
int64 payload: about 2 * 4 * (4 + 8) bytes per occurrence and int32 key. A sort of 24 bits with an int32 payload would
move 2 * 3 * (4 + 4), and one of int64 keys moves 2 * 8 * (8 + 8). Hence the narrowest key type that holds the rows.

Legend: F features, N occurrences (bound), T tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.ops.runtime.triton.addresses import ceil_div, power_of_two
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.update.order import key_type as key_type
from tilerec.ops.update.triton.occurrences import occurrence_keys
from tilerec.ops.update.triton.runs import CHUNK, CHUNKS, sum_chunks
from tilerec.ops.update.triton.small_sort import is_small, sort_small
from tilerec.ops.update.triton.status import STATUS_SIZE, new_status

PER_TABLE = 16
"""Numbers per table in its tensor (`tables.py` lists them); number 0 is its first key, 1 its columns."""
_POSITIONS = 512
# Registers of a thread of `sum_chunks`: 64 leave room for 32 programs on a multiprocessor, its maximum.
REGISTERS: dict[str, int] = {} if torch.version.hip else {"maxnreg": 64}


@dataclass(frozen=True)
class Record:
    """A gradient record as kernel arguments: contiguous tensors, ids unchanged."""

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
class SortedKeys:
    """Keys ascending, and the place and scale of each sorted occurrence: a function of the ids alone (`order.py`)."""

    keys: Tensor
    places: Tensor
    scales: Tensor | None


@dataclass(frozen=True)
class Sorted:
    """An `SortedKeys`, and the sums of its chunks."""

    keys: Tensor
    places: Tensor
    scales: Tensor | None
    partials: Tensor
    supers: Tensor
    levels: int  # of chunks that are summed
    pitch: int  # columns of a partial
    status: Tensor  # status of the update, initialized (`status.py`)


def order_occurrences(record: Record, sentinel: int, reach: int, status: Tensor) -> SortedKeys:
    """Compute keys, sort them, and initialize `status`.

    sentinel: the sum of the tables' rows; reach: number of elements of the gradient, or a lower bound; status: see
    `status.py`, with any number of counters.
    """
    device, total = record.ids.device, record.total
    bits = sentinel.bit_length()
    keys = torch.empty(total, dtype=key_type(bits), device=device)
    places = torch.empty(total, dtype=torch.int32 if reach < 1 << 31 else torch.int64, device=device)
    scaled = record.means or record.sample_weights is not None
    scales = torch.empty(total, dtype=torch.float32, device=device) if scaled else None
    nothing = keys  # unread pointer arguments must be valid, and of one dtype for all batches
    arguments = (
        record.ids, nothing if record.offsets is None else record.offsets,
        nothing if record.sample_weights is None else record.sample_weights, record.features, keys, places,
        nothing if scales is None else scales, status, record.count,
    )  # fmt: skip
    given = record.offsets is not None, record.sample_weights is not None, record.means
    if is_small(total, record.count, bits):
        ordered, places, sorted_scales = sort_small(*arguments, total, sentinel, *given)
        return SortedKeys(ordered, places, None if scales is None else sorted_scales)
    programs = programs_of(total, record.count)
    launch(
        occurrence_keys, (programs * (record.count + 1),), *arguments, record.ids.numel(), total, sentinel,
        status.numel(), programs, JAGGED=given[0], WEIGHTED=given[1], MEANS=given[2],
        FEATURES=min(next_power_of_two(record.count), 1024), BLOCK=_POSITIONS, num_warps=4,
    )  # fmt: skip
    ordered, occurrences = torch.sort(keys, stable=True)
    # In sorted order, so that an update reads neighbouring numbers, each once, without an index.
    places = places.gather(0, occurrences)
    return SortedKeys(ordered, places, None if scales is None else scales.gather(0, occurrences))


def sort_occurrences(
    record: Record, tables: Tensor, table_count: int, sentinel: int, dims: Sequence[int],
    order: SortedKeys | None = None,
) -> Sorted:  # fmt: skip
    """Return the sorted occurrences, and the sums of long runs' chunks.

    tables: int64 [T, PER_TABLE]; sentinel: the sum of their rows; dims: their columns; order: computed before, or None.
    """
    device, total = record.ids.device, record.total
    # A tile of `apply_runs.py` has at least 4 columns, and reads as many of a partial.
    pitch = next_power_of_two(max(4, *dims))
    chunks = total // CHUNK if total >= 2 * CHUNK else 0
    super_chunks = chunks // CHUNKS if chunks >= 2 * CHUNKS else 0
    if order is None:
        status = torch.empty(STATUS_SIZE + super_chunks, dtype=torch.int64, device=device)
        order = order_occurrences(record, sentinel, record.grad.numel(), status)
    else:
        status = new_status(super_chunks, device)
    ordered, places, scales = order.keys, order.places, order.scales
    nothing, scaled = ordered, scales is not None
    partials = torch.empty((max(chunks, 1), pitch), dtype=torch.float32, device=device)
    supers = partials
    levels = 0
    if super_chunks:
        supers = torch.empty((super_chunks, pitch), dtype=torch.float32, device=device)
    if chunks:
        levels = 2 if super_chunks else 1
        launch(
            sum_chunks, (chunks,), ordered, places, nothing if scales is None else scales, record.grad,
            partials, supers, status, tables, total, sentinel, table_count,
            CHUNKS if super_chunks else 0, STEPS=steps_of(table_count), SCALED=scaled, CHUNK=CHUNK, CHUNKS=CHUNKS,
            COLUMNS=pitch, VEC=record.vec, VEC_D=power_of_two(dims, 16), num_warps=warps_of(pitch),
            enable_fp_fusion=False, **(REGISTERS if pitch <= 256 else {}),
        )  # fmt: skip
    return Sorted(ordered, places, scales, partials, supers, levels, pitch, status)


def programs_of(total: int, features: int) -> int:
    """Return the programs per feature: at most one per block of positions, and 4,096 or a few more over all features.

    Example: 2.6 million occurrences of 26 features -> 158; 70,000 features -> 1.
    """
    return max(1, min(ceil_div(total, _POSITIONS), ceil_div(4096, features)))


def next_power_of_two(n: int) -> int:
    """Return the least power of two from `n` >= 1 on; Triton's own takes some microseconds. Example: 5 -> 8."""
    return 1 << (n - 1).bit_length()


def steps_of(tables: int) -> int:
    """Return the number of halvings that finds one of so many tables."""
    return (tables - 1).bit_length()


def warps_of(elements: int) -> int:
    """Return the warps for a tile of so many fp32 numbers: one as long as the tile fits one warp's registers."""
    return max(1, min(elements // 512, 16))
