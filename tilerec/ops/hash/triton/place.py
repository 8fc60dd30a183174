"""Bucket and start slot of an id on a GPU, and the runs of each bucket's entries in a sorted batch.

Nouns as in `definition.py` and `backend.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.hash import place as hash_place
from tilerec.ops.hash.place import SECOND

# Numbers that change from batch to batch, or gain nothing from special kernels for 1 and for multiples of 16.
UNSPECIALIZED = [
    "count",
    "first",
    "held",
    "buckets",
    "slots",
    "window",
    "counters_each",
    "step",
    "now",
    "ttl",
    "threshold",
    "every",
]
# A batch's tensors are views of any alignment, which differs from batch to batch: no special kernels for it.
ANYWHERE = ["ids_N", "counts_N", "may_insert_N", "ttl_N", "step_there", "now_there"]
FAR = tl.constexpr(2**62)  # a distance that no window reaches
SECOND_HASH_MASK = tl.constexpr(SECOND % 2**64)


@triton.jit
def mixed_bits(bits):
    """Apply the finaliser of splitmix64. 1 -> 0x5692161d100b05e5"""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def high(mixed, count):
    return (((mixed >> 32) * count.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def low(mixed, count):
    return (((mixed & 0xFFFFFFFF) * count.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def wrapped(slot, slots):
    """Wrap a slot number: slot 5 of 4 -> 1. A window is circular inside its bucket, and never longer than it."""
    return tl.where(slot >= slots, slot - slots, slot)


@triton.jit
def search(id_, ids_E, used_E, base, start, slots, window, WIDTH: tl.constexpr):
    """Return the distances from `start` at which an id's search ends and at which the id is; FAR: nowhere.

    WIDTH slots at a time, one per lane or several. Slots hold [1, -, 8, 3], start 2: id 8 -> 0, 0; id 2 -> 3, FAR.
    """
    lane = tl.arange(0, WIDTH)
    done = start * 0
    end = done + FAR
    match = end
    while (done < window) & (end == FAR):
        distance = done + lane
        slot = wrapped(start + distance, slots)
        inside = distance < window
        there = tl.load(ids_E + base + slot, mask=inside, other=0)
        full = tl.load(used_E + base + slot, mask=inside, other=1) != 0
        same = inside & full & (there == id_)
        end = tl.min(tl.where(same | (inside & (full == 0)), distance, FAR), axis=0)
        match = tl.min(tl.where(same, distance, FAR), axis=0)
        done += WIDTH
    return end, match


@triton.jit(do_not_specialize=["count", "held"])
def runs_kernel(key_N, begin_B, end_B, count, held, BLOCK: tl.constexpr):
    """Store where each bucket's run begins and ends in the sorted keys.

    Keys [0, 2, 2] -> begin [0, -, 1], end [1, -, 3]
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < count
    key = tl.load(key_N + n, mask=inside, other=-1).to(tl.int64)
    before = tl.load(key_N + n - 1, mask=inside & (n > 0), other=-1).to(tl.int64)
    after = tl.load(key_N + n + 1, mask=n + 1 < count, other=-1).to(tl.int64)
    tl.store(begin_B + key, n, mask=inside & (key < held) & (key != before))
    tl.store(end_B + key, n + 1, mask=inside & (key < held) & (key != after))


# Most programs: as many warps as an H100 or H200 holds. With more buckets each program walks several.
_WALKERS = 132 * 64


def blocks(count: int, values: Tensor, block: int) -> tuple[tuple[int], int]:
    """Return a grid, and the elements per program: more in the interpreter, which runs programs one after the other."""
    block = block if values.is_cuda else max(block, 1024)
    return (triton.cdiv(count, block),), block


def walk_grid(buckets: int, values: Tensor) -> tuple[int]:
    return (min(buckets, _WALKERS if values.is_cuda else 2),)


def width_of(window: int) -> int:
    """Return the number of slots of a window that are read at once."""
    return min(triton.next_power_of_2(window), 128)


def as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def bucket_of(id_: int, buckets: int) -> int:
    return int(hash_place.high(hash_place.mixed(torch.tensor([id_], device="cpu")), buckets))
