"""`CacheStats`: requests, hits and transfers of a cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CacheStats:
    """Counts since the cache was made, or since the last reset.

    A request counts each distinct row of its batch once; `rows = hits + misses`.
    """

    requests: int = 0  # batches
    ids: int = 0  # ids of these batches
    rows: int = 0  # distinct rows per batch, summed over batches
    hits: int = 0  # rows of `rows` that were in the cache already
    misses: int = 0  # rows of `rows` that were read from host memory
    conflict_misses: int = 0  # rows of `misses` whose set had no line to give, so they got a spare line for this batch
    evictions: int = 0  # rows that lost the line of their set to another row
    write_backs: int = 0  # rows that were written to host memory

    @property
    def hit_rate(self) -> float:
        """Hits per distinct row of a batch; 0 if no rows were requested."""
        return self.hits / self.rows if self.rows else 0.0
