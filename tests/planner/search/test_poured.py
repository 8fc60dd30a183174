"""An instance as if rows over hosts were poured: hosts' means as stages, and places worth more when rows flow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilerec.planner.search.flow import flow
from tilerec.planner.search.instance import Instance, Solution, evaluate
from tilerec.planner.search.pack import Rule, pack
from tilerec.planner.search.poured import poured
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.work import Work


def two_hosts_of_two() -> Instance:
    """A table over one host's ranks, 60 on each of which 10 in any case; and four of 50 on single ranks."""
    cost = np.array([60, 50, 50, 50, 50])[:, None, None] * 1000
    return Instance(
        [f"t{i}" for i in range(5)],
        np.array([2, 1, 1, 1, 1])[:, None],
        np.ones((5, 1), np.int64),
        cost,
        np.zeros_like(cost),
        np.zeros_like(cost),
        np.full((4, 1), 1),
        np.array([0, 0, 1, 1]),
        divisible=np.array([True, False, False, False, False])[:, None],
        fixed=np.array([10_000, 0, 0, 0, 0])[:, None, None],
    )


def test_ranks_bear_what_stays_and_hosts_the_mean_with_what_flows() -> None:
    instance = poured(two_hosts_of_two())
    assert instance.shared.tolist() == [False, True]
    places = [(0,), (0,), (2,), (2,), (3,)]
    found = evaluate(instance, np.zeros(5, np.int64), places)
    assert (found.load[:, 0] // 1000).tolist() == [60, 10, 100, 50]
    assert (found.load[:, 1] // 1000).tolist() == [85, 85, 75, 75]


def test_without_such_rows_nothing_is_added() -> None:
    even = replace(two_hosts_of_two(), divisible=None, fixed=None)
    assert poured(even).cost.tolist() == even.cost.tolist()


def test_a_large_piece_is_put_beside_rows_that_can_leave_it_the_rank() -> None:
    def packed(view: Instance) -> Solution:
        found = pack(Relaxed(view), np.zeros(5, np.int64), Rule.TIME, Work(10**10))
        assert found is not None
        return flow(instance, evaluate(instance, found.option, found.places), 240, Work(10**10))

    # 120 over a host's two ranks, 100 whole, and three of 40: 340 / 4 = 85, and 100 is one rank's.
    cost = np.array([60, 100, 40, 40, 40])[:, None, None] * 1000
    instance = replace(two_hosts_of_two(), cost=cost, fixed=None)
    assert packed(poured(instance)).cost <= packed(instance).cost
    assert packed(poured(instance)).cost < 115_000
