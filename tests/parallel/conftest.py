"""Process pools, one per world size, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tilerec.testing.ranks import Ranks


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Ranks]]:
    """`pool(2)`: two gloo ranks, reused by every test of the session."""
    pools: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size))

    yield of
    for ranks in pools.values():
        ranks.close()
