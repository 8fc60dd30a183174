"""Row access in kernels: in tiles of one warp, 16 bytes per lane.

Nouns
  tile    `TILE` columns of a row, a power of two; a row is one tile or several, at columns 0, TILE, 2 TILE …
  team    the neighbouring lanes of a warp that read one tile, 16 bytes each
  group   `GROUP` rows that a program reads at once, one per team: one load instruction of the warp reads a tile of each
  vec     a number of elements that divides every row start, tile start and dim. With it the
          compiler joins loads; without the hints below it reads numbers of 4 bytes, in four times as many
          instructions. (A kernel's own arguments cannot be hinted: `tl.multiple_of` is lost on them, and works on
          values that the kernel has loaded.)

  bf16, dim 128: vec 8, tiles of 128 columns, teams of 16 lanes, groups of 2 rows
  fp32, dim 300: vec 4, tiles of 128 columns (three to a row), teams of 32 lanes, groups of 1 row
  fp32, dim 3:   vec 1, tiles of 4 columns, teams of 4 lanes, groups of 8 rows

A kernel runs on one warp (num_warps=1): lanes exchange values without shared memory, and a program that waits for
memory blocks no other program. Sums are fp32, one running sum per column, so teams exchange nothing.

Legend: G rows of a group, C columns of a tile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

WARP_BYTES = 512
"""Bytes that the 32 lanes of a warp load at once, 16 each."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Dtypes of rows that kernels read."""


@functools.lru_cache(maxsize=32)
def reads(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if kernels read and write rows of this dtype on the device.

    GPUs before Ada and Hopper, and AMD's, cannot convert e4m3fn.
    """
    if dtype == torch.float8_e4m3fn and device.type == "cuda":
        return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)
    return dtype in FLOATS


def tile_width(dim: int, element_size: int) -> int:
    """Return the columns of a tile: the power of two that holds `dim`, at most as many as a warp reads at once.

    Example: 48 columns of fp32 -> 64; 300 -> 128; 300 of bf16 -> 256.
    """
    return min(1 << max(dim - 1, 0).bit_length(), WARP_BYTES // element_size)


def group_rows(tile: int, vec: int) -> int:
    """Return the number of rows that a warp of 32 lanes reads at once: tiles of 64 columns, 4 at a time -> 2."""
    return max(32 * vec // tile, 1)


@triton.jit
def tile_columns(column, dim, TILE: tl.constexpr, VEC: tl.constexpr):
    """Return the column numbers [1, C] of a tile that begins at `column`, and a mask of those inside the row."""
    columns = column + tl.arange(0, TILE)[None, :]
    return columns, columns < tl.multiple_of(dim, VEC)


@triton.jit
def read_tiles(base, starts_G, take_G, columns, inside, VEC: tl.constexpr):
    """Return one tile of each row that begins at `base + starts_G` (int64), [G, C]; zeros where `take_G` is False.

    Values keep the dtype of `base`. `columns` and `inside` come from `tile_columns`.
    """
    starts_G1 = tl.multiple_of(starts_G, VEC)[:, None]
    return tl.load(base + (starts_G1 + columns), mask=take_G[:, None] & inside, other=0.0)


@triton.jit
def load_tiles(base, starts_G, take_G, columns, inside, VEC: tl.constexpr):
    """Return `read_tiles` as fp32."""
    return read_tiles(base, starts_G, take_G, columns, inside, VEC).to(tl.float32)


@triton.jit
def store_tiles(base, starts_G, take_G, columns, inside, values_GC, VEC: tl.constexpr):
    """Write fp32 [G, C] to rows that begin at `base + starts_G`, rounded once to their type."""
    starts_G1 = tl.multiple_of(starts_G, VEC)[:, None]
    tl.store(base + (starts_G1 + columns), values_GC.to(base.dtype.element_ty), mask=take_G[:, None] & inside)


@triton.jit
def take_report(report, a, b, c):
    """Take the report (`reports.py`) and write these numbers, unless it is taken."""
    if tl.atomic_cas(report, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64)) == 0:
        tl.store(report + 1, a)
        tl.store(report + 2, b)
        tl.store(report + 3, c)
