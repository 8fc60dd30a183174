"""Helpers for tests of tilerec and of your code: run N ranks, make batches."""

from tilerec.testing.batches import concat_batches, random_batch, split_batch
from tilerec.testing.ranks import RankError, Ranks, run_ranks
from tilerec.testing.virtual import run_virtual_ranks

__all__ = [
    "RankError",
    "Ranks",
    "concat_batches",
    "random_batch",
    "run_ranks",
    "run_virtual_ranks",
    "split_batch",
]
