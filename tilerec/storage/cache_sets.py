"""`CacheSets`: the row of each line of a set-associative cache. Row numbers only; the values are in `RowCache`.

Nouns
  line    room for one row and its optimizer state; lines are numbered, and index a cache's tensors
  set     `ways` lines; row r can have a line of set `r % sets` only. Consecutive rows are in different sets, and in a
          cache with as many lines as the table has rows no two rows conflict
  spare   lines after those of the sets: for rows whose set has no free line. They are released once no batch in flight
          names their row
  serial  number of a request
  held    a line whose row is named by a batch in flight or by the request itself. It is not evicted

  LRU    evicts, of a set's lines that are not held, the line that was named longest ago
  LFU    evicts the row that the fewest requests have named (of equals, the one named longest ago). Counts are kept for
         all rows of the table. A row is admitted if it was named as often as the row that it evicts

Everything is a tensor on the cache's device: a table of a billion rows costs 4 bytes per row there (8 with LFU).

Example: 2 sets of 2 ways, rows 4, 6, 1 in lines 0, 1, 2. Request (6, 8), LRU: row 6 is in line 1. Row 8 belongs to set
0, whose line 0 was named longest ago, so row 4 is evicted and row 8 gets line 0.

Legend: E rows, L lines, U distinct rows of a request, M rows without a line of their set, S sets, W ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from tilerec.ops.cache.definition import MAX_COUNT, NONE, assign_lines
from tilerec.spec.cache import CacheAlgorithm


class LineMoves(NamedTuple):
    """The transfers of a request, in this order; rows and lines are int64 and parallel."""

    leaving_rows: Tensor  # written back to the table if dirty
    leaving_lines: Tensor
    old_lines: Tensor  # spare lines whose rows have got a line of their set
    new_lines: Tensor  # the lines that these rows have got
    loaded_rows: Tensor  # read from the table
    loaded_lines: Tensor
    old_rows: Tensor  # the rows in `old_lines`
    named_rows: Tensor  # all rows of the request
    serial: int
    evictions: int  # number of leaving rows that lost a line of their set
    conflicts: int  # number of loaded rows that got a spare line


class SpareLinesNeeded(NamedTuple):
    """The result of a request that changed nothing because it needs `lines` spare lines."""

    lines: int


@final
class CacheSets:
    """The books of one cache: line of each row, and row, age and use count of each line.

    Args:
        rows: number of rows of the table.
        sets: number of sets. Their lines come first.
        ways: number of lines per set.
        spare: number of spare lines.
    """

    def __init__(
        self, rows: int, sets: int, ways: int, spare: int, algorithm: CacheAlgorithm, device: torch.device
    ) -> None:
        self.sets, self.ways, self.spare = sets, ways, spare
        self.first_spare = sets * ways
        self.line_of_E = torch.full((rows,), NONE, dtype=torch.int32, device=device)
        self.names = torch.full((self.first_spare + spare + 1,), -1, dtype=torch.int64, device=device)
        self.row_in_L = self.names[:-1]  # the last entry of `names` belongs to no row
        self.named_L = torch.zeros_like(self.row_in_L)  # serial of the last request that named the row
        self.flights_L = torch.zeros_like(self.named_L, dtype=torch.int32)  # see ops/cache/definition.py
        lfu = algorithm is CacheAlgorithm.LFU
        self.count_E = torch.zeros(rows if lfu else 0, dtype=torch.int32, device=device)
        self._lfu = lfu

    def forget(self) -> None:
        """Empty all lines; use counts stay."""
        self.line_of_E.fill_(NONE)
        self.row_in_L.fill_(-1)

    def empty(self, lines: Tensor) -> None:
        """Empty these lines."""
        self.line_of_E[self.row_in_L[lines]] = NONE
        self.row_in_L[lines] = -1

    def grow(self, spare: int) -> None:
        """Increase the number of spare lines to `spare`."""
        more = spare - self.spare
        names = torch.cat((self.names, self.names.new_full((more,), -1)))
        named_L = torch.cat((self.named_L, self.named_L.new_zeros(more)))
        flights_L = torch.cat((self.flights_L, self.flights_L.new_zeros(more)))
        self.names, self.row_in_L, self.spare = names, names[:-1], spare
        self.named_L, self.flights_L = named_L, flights_L

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the books."""
        return [self.line_of_E, self.row_in_L, self.named_L, self.flights_L, self.count_E]

    def request(
        self, rows_U: Tensor, serial: int, flying: Sequence[Tensor] = ()
    ) -> LineMoves | SpareLinesNeeded:
        """Find a line for each of these rows. No row moves before `seat`.

        Args:
            rows_U: distinct rows, ascending.
            flying: the rows of each batch in flight, with or without lines.
        """
        line_U = self.line_of_E[rows_U].long()
        self.named_L[line_U[line_U >= 0]] = serial
        lines = self.row_in_L.shape[0]
        held_L = torch.zeros(
            lines + 1, dtype=torch.bool, device=rows_U.device
        )  # the last entry: rows without a line
        for own in (rows_U, *flying):
            lines_n = self.line_of_E[own].long()
            held_L.index_fill_(0, lines_n.masked_fill_(lines_n < 0, lines), True)
        held_L = held_L[:lines]
        spare_rows = self.row_in_L[self.first_spare :]
        taken = spare_rows >= 0
        idle = taken & ~held_L[self.first_spare :]
        released = idle.nonzero()[:, 0] + self.first_spare
        homeless = (line_U < 0) | (line_U >= self.first_spare)
        rows_M, line_M = rows_U[homeless], line_U[homeless]
        turns_M = torch.arange(rows_M.numel(), device=rows_M.device)
        liked_M = None
        if self._lfu:
            count_M = self.count_E[rows_M]
            turns_M, liked_M = torch.argsort(count_M, descending=True, stable=True), count_M.long() + 1
        given_M = assign_lines(
            rows_M, turns_M, liked_M, held_L, self.row_in_L, self.named_L, self.count_E, self.sets, self.ways
        )
        # Rows that get no line of their set and have a spare line keep it.
        wants_spare = (given_M < 0) & (line_M < 0)
        free = (~taken | idle).nonzero()[:, 0] + self.first_spare
        wanted = int(wants_spare.sum())
        if wanted > free.numel():
            return SpareLinesNeeded(self.spare - free.numel() + wanted)
        given_M[wants_spare] = free[:wanted]

        evicted = given_M[(given_M >= 0) & (given_M < self.first_spare)]
        evicted = evicted[self.row_in_L[evicted] >= 0]
        leaving_lines = torch.cat((evicted, released))
        leaving_rows = self.row_in_L[leaving_lines]
        moves, loads = (given_M >= 0) & (line_M >= 0), line_M < 0
        return LineMoves(
            leaving_rows, leaving_lines, line_M[moves], given_M[moves], rows_M[loads], given_M[loads], rows_M[moves],
            rows_U, serial, evicted.numel(), wanted,
        )  # fmt: skip

    def seat(self, moves: LineMoves) -> None:
        """Apply the result of `request`, before anything else changes."""
        self.line_of_E[moves.leaving_rows] = NONE
        self.row_in_L[moves.leaving_lines] = -1
        self.row_in_L[moves.old_lines] = -1
        for rows, lines in ((moves.old_rows, moves.new_lines), (moves.loaded_rows, moves.loaded_lines)):
            self.line_of_E[rows] = lines.int()
            self.row_in_L[lines] = rows
            self.named_L[lines] = moves.serial
        if self._lfu:  # counts saturate at the largest int32 and do not wrap around
            counts = self.count_E[moves.named_rows]
            self.count_E[moves.named_rows] = counts + (counts < MAX_COUNT).to(torch.int32)
