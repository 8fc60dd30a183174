"""Kernel access to the books of all cached tables at once, and to the segments of a batch.

Nouns as in `definition.py`. One base tensor per type reaches all books of that type by distances
(`runtime/triton/addresses.py`): `ints` (line_of, flights, counts), `longs` (row_in, named, totals), `bytes` (dirty).
The numbers of a table or a segment are a column of a small tensor; the constants below name its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.cache.definition import (
    BOOKS,
    COUNTS,
    DIRTY,
    FLIGHTS,
    LINE_OF,
    NAMED,
    ROW_IN,
    TOTALS,
    key_ranges,
    spare_starts,
)
from tilerec.ops.runtime.triton.addresses import base, cached_per_stream, upload

# Rows of `tables`, int64 [15, T].
T_LINE_OF, T_FLIGHTS, T_COUNTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
T_ROW_IN, T_NAMED, T_TOTALS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
T_DIRTY = tl.constexpr(6)
T_ROWS = tl.constexpr(7)
T_SETS = tl.constexpr(8)  # at least 1
T_FIRST_SPARE = tl.constexpr(9)
T_FIRST_KEY, T_OF_SET, T_EACH = tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)
T_LFU = tl.constexpr(13)
T_SPARE = tl.constexpr(14)  # its first spare line, numbered over the spare lines of all tables

# Rows of `segments`, int64 [5, S].
S_TILE = tl.constexpr(0)  # its first tile
S_START = tl.constexpr(1)  # its first occurrence
S_BEGIN = tl.constexpr(2)  # its first id
S_COUNT = tl.constexpr(3)
S_TABLE = tl.constexpr(4)

# Rows of the clock.
C_SERIAL, C_BIT, C_ALIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def tile_items(values: Tensor) -> int:
    """Return the items of a program's tile: more in the interpreter, which runs programs one after the other."""
    return 128 if values.is_cuda and not triton.knobs.runtime.interpret else 1024


@dataclass(frozen=True)
class Books:
    """Books of the tables of a call, as kernel arguments."""

    ints: Tensor
    longs: Tensor
    bytes: Tensor
    tables: Tensor  # int64 [15, T]
    count: int  # T
    last_key: int
    key_type: torch.dtype
    spares: int


@dataclass(frozen=True)
class _Layout:
    tables: Tensor
    last_key: int
    key_type: torch.dtype
    spares: int


def kernel_books(books: Sequence[Tensor], sets: Sequence[int], ways: int) -> Books:
    """Return the books as kernel arguments."""
    groups = [[own for k in which for own in books[k::BOOKS]] for which in _GROUPS]
    bases = [base(group) for group in groups]
    layout = _layout(
        tuple([own.data_ptr() for own in books]),
        tuple([own.numel() for own in books]),
        tuple(sets), ways, tuple([own.data_ptr() for own in bases]), books[0].device,
    )  # fmt: skip
    return Books(
        bases[0], bases[1], bases[2].view(torch.uint8), layout.tables, len(sets), layout.last_key, layout.key_type,
        layout.spares,
    )  # fmt: skip


_GROUPS = ((LINE_OF, FLIGHTS, COUNTS), (ROW_IN, NAMED, TOTALS), (DIRTY,))
_SIZES = {LINE_OF: 4, FLIGHTS: 4, COUNTS: 4, ROW_IN: 8, NAMED: 8, TOTALS: 8, DIRTY: 1}


class _Shaped:
    """Stand-in for a tensor of which only the size is used."""

    def __init__(self, count: int) -> None:
        self.shape = (count,)

    def numel(self) -> int:
        return self.shape[0]


@cached_per_stream(64)
def _layout(
    addresses: tuple[int, ...], sizes: tuple[int, ...], sets: tuple[int, ...], ways: int, bases: tuple[int, ...],
    device: torch.device,
) -> _Layout:  # fmt: skip
    shaped: list[Tensor] = [_Shaped(count) for count in sizes]  # type: ignore[misc]
    places, last, dtype = key_ranges(shaped, sets)
    lists = []
    for group, start in zip(_GROUPS, bases, strict=True):
        for k in group:
            apart = [
                (at - start) // _SIZES[k] if count else 0
                for at, count in zip(addresses[k::BOOKS], sizes[k::BOOKS], strict=True)
            ]
            lists.append(apart)
    starts = spare_starts(shaped, sets, ways)
    lists += [
        list(sizes[LINE_OF::BOOKS]), [max(count, 1) for count in sets], [count * ways for count in sets],
        *[[place[k] for place in places] for k in range(3)], [int(count > 0) for count in sizes[COUNTS::BOOKS]],
        starts[:-1],
    ]  # fmt: skip
    return _Layout(upload(list(itertools.chain(*lists)), device), last, dtype, starts[-1])


@cached_per_stream(64)
def upload_segments(
    begins: tuple[int, ...], ends: tuple[int, ...], tables: tuple[int, ...], tile: int, device: torch.device
) -> tuple[Tensor, int, int]:
    """Return `segments`, int64 [5, S] on the device, and the number of tiles and of occurrences."""
    counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
    starts = list(itertools.accumulate(counts, initial=0))
    tiles = list(itertools.accumulate([-(-count // tile) for count in counts], initial=0))
    return upload([*tiles[:-1], *starts[:-1], *begins, *counts, *tables], device), tiles[-1], starts[-1]
