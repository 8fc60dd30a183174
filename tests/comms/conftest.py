"""Process pools, one per world size and module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tilerec.testing.ranks import Ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Ranks]]:
    """`pool(4)`: four gloo ranks, reused by every test of the module."""
    pools: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size))

    yield of
    for ranks in pools.values():
        ranks.close()
