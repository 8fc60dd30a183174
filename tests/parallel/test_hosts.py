"""Hosts of ranks, as launchers describe them: hosts of different sizes, too."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.parallel.hosts import launched_topology
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]


def launched(sizes: tuple[int | None, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the hosts where a launcher has set the size of each rank's host."""
    group = ProcessGroupComms()
    size = sizes[group.rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if size is not None:
            patch.setenv("LOCAL_WORLD_SIZE", str(size))
        return launched_topology(group, "cpu").host_ranks


@pytest.mark.parametrize(
    ("sizes", "hosts"),
    [
        ((2, 2, 1), ((0, 1), (2,))),
        ((1, 2, 2), ((0,), (1, 2))),
        ((1, 1, 1), ((0,), (1,), (2,))),
        ((3, 3, 3), ((0, 1, 2),)),
        ((None, None, None), ((0, 1, 2),)),
    ],
)
def test_every_rank_finds_the_same_hosts(
    pool: Pool, sizes: tuple[int | None, ...], hosts: tuple[tuple[int, ...], ...]
) -> None:
    assert pool(3).run(launched, sizes) == [hosts] * 3


def refused(sizes: tuple[int | None, ...]) -> str:
    with pytest.raises(ConfigError) as error:
        launched(sizes)
    return str(error.value)


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 2), (1, 3, 3), (2, 2, None)])
def test_sizes_that_contradict_each_other_are_refused_on_every_rank(pool: Pool, sizes: tuple[int | None, ...]) -> None:
    for text in pool(3).run(refused, sizes):
        assert text.startswith(f"LOCAL_WORLD_SIZE in the environment: got {list(sizes)} on the ranks; expected")
    assert "LOCAL_WORLD_SIZE" not in os.environ
