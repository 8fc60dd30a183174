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

The ops of `ops/cache` read and write these tensors. This file allocates and empties them.

Legend: E rows, L lines.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from tilerec.ops.cache.definition import NONE
from tilerec.spec.cache import CacheAlgorithm


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
