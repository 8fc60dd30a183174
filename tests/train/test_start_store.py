"""Ranks of a restart meet under a prefix that no earlier start has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tilerec.errors import CommsError
from tilerec.train.start_store import agree_on_prefix


def prefixes(store: dist.Store, size: int, late: bool = False) -> list[str]:
    """Return the prefix that each rank of one start gets; with `late`, rank 0 begins after the others have looked."""
    begin = threading.Event()

    def rank(number: int) -> str:
        if number == 0 and late:
            begin.wait(0.05)
        return agree_on_prefix(store, number, size, 30.0)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 1, 2), (2, 4, 3)])
def test_each_start_has_a_prefix_of_its_own(sizes: tuple[int, ...]) -> None:
    store = dist.HashStore()
    found = [set(prefixes(store, size, late=True)) for size in sizes]
    assert all(len(one) == 1 for one in found)
    assert len(set.union(*found)) == len(sizes)


def test_a_start_that_lost_a_rank_is_left_for_the_next() -> None:
    store = dist.HashStore()
    with pytest.raises(CommsError, match="rank 0 of 3"):
        agree_on_prefix(store, 0, 3, 0.01)  # rank 2 has died before it came
    with pytest.raises(CommsError, match="rank 1 of 3"):
        agree_on_prefix(store, 1, 3, 0.01)
    assert len(set(prefixes(store, 2, late=True))) == 1
