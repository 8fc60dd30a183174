"""`CacheSets`: which row is in which line of a set-associative cache. Numbers only, no rows.

Nouns
  line    room for one row and its optimizer's state; lines are numbered, and index a cache's tensors
  set     `ways` lines; row r can have a line of set `r % sets` only. Neighbours are in different sets, and a cache of
          as many lines as the table has rows never has two rows at odds
  spare   lines behind those of the sets: for rows whose set has no line to give. They are given back when no batch
          in flight names their row
  serial  number of a request
  held    a line whose row a batch in flight names, or the request itself. It is not given away

  LRU    of a set's lines that are not held, those that were named longest ago go first
  LFU    those whose rows the fewest requests have named (of equals, the longest ago); counts are kept of all rows of
         the table, and a row comes in if it was named as often as the one that goes

Everything is a tensor on the cache's device: a table of a billion rows costs 4 bytes per row there (8 with LFU).

Example: 2 sets of 2 ways, rows 4, 6, 1 in lines 0, 1, 2. Request (6, 8), LRU: 6 is in line 1; 8 is of set 0, whose line
0 was named longest ago, so 4 leaves and 8 has line 0.

Legend: E rows, L lines, U distinct rows of a request, M rows without a line of their set, S sets, W ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from tilerec.ops.cache.definition import MOST, NONE, lines_given
from tilerec.spec.cache import CacheAlgorithm


class Moves(NamedTuple):
    """What a request moves, in this order; rows and lines are int64 and parallel."""

    leaving_rows: Tensor  # they go back to the table
    leaving_lines: Tensor
    old_lines: Tensor  # spare lines whose rows have got a line of their set:
    new_lines: Tensor  # these
    loaded_rows: Tensor  # they come from the table
    loaded_lines: Tensor
    old_rows: Tensor  # in `old_lines`
    named_rows: Tensor  # all that were asked for
    serial: int
    evictions: int  # of the leaving: those that lost a line of their set
    conflicts: int  # of the loaded: those that got a spare line


class NoSpare(NamedTuple):
    """A request that changed nothing: so many spare lines would have been needed."""

    lines: int


@final
class CacheSets:
    """Args:
    rows: of the table.
    sets, ways, spare: how many; lines of sets come first.
    """

    def __init__(
        self, rows: int, sets: int, ways: int, spare: int, algorithm: CacheAlgorithm, device: torch.device
    ) -> None:
        self.sets, self.ways, self.spare = sets, ways, spare
        self.first_spare = sets * ways
        self.line_of_E = torch.full((rows,), NONE, dtype=torch.int32, device=device)
        self.names = torch.full((self.first_spare + spare + 1,), -1, dtype=torch.int64, device=device)
        self.row_in_L = self.names[:-1]  # behind it one of nobody
        self.named_L = torch.zeros_like(self.row_in_L)  # serial of the last request that named the row
        self.flights_L = torch.zeros_like(self.named_L, dtype=torch.int32)  # see ops/cache/definition.py
        lfu = algorithm is CacheAlgorithm.LFU
        self.count_E = torch.zeros(rows if lfu else 0, dtype=torch.int32, device=device)
        self._lfu = lfu

    def forget(self) -> None:
        """No row has a line any more; counts stay."""
        self.line_of_E.fill_(NONE)
        self.row_in_L.fill_(-1)

    def empty(self, lines: Tensor) -> None:
        """The rows in these lines have none any more."""
        self.line_of_E[self.row_in_L[lines]] = NONE
        self.row_in_L[lines] = -1

    def grow(self, spare: int) -> None:
        """Have so many spare lines, not fewer than before."""
        more = spare - self.spare
        names = torch.cat((self.names, self.names.new_full((more,), -1)))
        named_L = torch.cat((self.named_L, self.named_L.new_zeros(more)))
        flights_L = torch.cat((self.flights_L, self.flights_L.new_zeros(more)))
        self.names, self.row_in_L, self.spare = names, names[:-1], spare
        self.named_L, self.flights_L = named_L, flights_L

    def tensors(self) -> list[Tensor]:
        """All memory."""
        return [self.line_of_E, self.row_in_L, self.named_L, self.flights_L, self.count_E]

    def request(self, rows_U: Tensor, serial: int, flying: Sequence[Tensor] = ()) -> Moves | NoSpare:
        """Find a line for each of these rows. No row moves before `seat`.

        Args:
            rows_U: distinct, ascending.
            flying: rows of each batch in flight; they may have lines or not.
        """
        line_U = self.line_of_E[rows_U].long()
        self.named_L[line_U[line_U >= 0]] = serial
        lines = self.row_in_L.shape[0]
        held_L = torch.zeros(
            lines + 1, dtype=torch.bool, device=rows_U.device
        )  # the last: of rows without a line
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
        given_M = lines_given(
            rows_M, turns_M, liked_M, held_L, self.row_in_L, self.named_L, self.count_E, self.sets, self.ways
        )
        # Rows that get no line of their set: those that have a spare line keep it.
        wants_spare = (given_M < 0) & (line_M < 0)
        free = (~taken | idle).nonzero()[:, 0] + self.first_spare
        wanted = int(wants_spare.sum())
        if wanted > free.numel():
            return NoSpare(self.spare - free.numel() + wanted)
        given_M[wants_spare] = free[:wanted]

        evicted = given_M[(given_M >= 0) & (given_M < self.first_spare)]
        evicted = evicted[self.row_in_L[evicted] >= 0]
        leaving_lines = torch.cat((evicted, released))
        leaving_rows = self.row_in_L[leaving_lines]
        moves, loads = (given_M >= 0) & (line_M >= 0), line_M < 0
        return Moves(
            leaving_rows, leaving_lines, line_M[moves], given_M[moves], rows_M[loads], given_M[loads], rows_M[moves],
            rows_U, serial, evicted.numel(), wanted,
        )  # fmt: skip

    def seat(self, moves: Moves) -> None:
        """Have what `request` found, before anything else changes."""
        self.line_of_E[moves.leaving_rows] = NONE
        self.row_in_L[moves.leaving_lines] = -1
        self.row_in_L[moves.old_lines] = -1
        for rows, lines in ((moves.old_rows, moves.new_lines), (moves.loaded_rows, moves.loaded_lines)):
            self.line_of_E[rows] = lines.int()
            self.row_in_L[lines] = rows
            self.named_L[lines] = moves.serial
        if self._lfu:  # up to the largest number there is, not round to the least
            counts = self.count_E[moves.named_rows]
            self.count_E[moves.named_rows] = counts + (counts < MOST).to(torch.int32)
