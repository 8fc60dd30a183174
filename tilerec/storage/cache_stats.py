"""`CacheStats`: what a cache was asked for, and what that cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CacheStats:
    """Counts since the cache was made, or since the last reset.

    A request names every row once, however many ids of its batch do; `rows = hits + misses`.
    """

    requests: int = 0  # batches
    ids: int = 0  # of these batches
    rows: int = 0  # distinct ones, batch by batch
    hits: int = 0  # of `rows`: in the cache already
    misses: int = 0  # of `rows`: read from host memory
    conflict_misses: int = (
        0  # of `misses`: their set had no line to give, so they had a spare line for this batch
    )
    evictions: int = 0  # rows that lost the line of their set to another
    write_backs: int = 0  # rows that were written to host memory

    @property
    def hit_rate(self) -> float:
        """Hits per distinct row of a batch; 0 if none was asked for."""
        return self.hits / self.rows if self.rows else 0.0
