"""An instance as if rows over hosts were poured: hosts' means as stages, and places worth more when rows flow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilerec.planner.search.bound import kinds_of
from tilerec.planner.search.exchange import exchange
from tilerec.planner.search.fractional_rows import fractional_view
from tilerec.planner.search.granularity import choose
from tilerec.planner.search.instance import Instance, Solution, evaluate
from tilerec.planner.search.pack import PackingOrder, pack
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.uneven_rows import flow
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
    view = fractional_view(two_hosts_of_two())
    instance = view.instance
    assert instance.twins == [[0, 1]]
    assert instance.shared.tolist() == [False, True]
    places = [(0,), (0,), (2,), (2,), (3,)]
    found = evaluate(instance, np.zeros(5, np.int64), places)
    assert (found.load[:, 0] // 1000).tolist() == [60, 10, 100, 50]
    assert (found.load[:, 1] // 1000).tolist() == [85, 85, 75, 75]


def test_the_mean_of_a_host_has_the_mean_of_what_its_ranks_bear_at_home() -> None:
    instance = two_hosts_of_two()
    home = np.zeros_like(instance.home)
    home[1] = 10_000
    view = fractional_view(replace(instance, home=home, reach=np.array([[1000], [500], [0], [0]])))
    found = evaluate(view.instance, np.zeros(5, np.int64), [(0,), (0,), (2,), (2,), (3,)])
    assert (found.load[:, 0] // 1000).tolist() == [70, 15, 100, 50]
    assert (found.load[:, 1] // 100).tolist() == [925, 925, 750, 750]


def test_without_such_rows_nothing_is_added() -> None:
    even = replace(two_hosts_of_two(), divisible=None, fixed=None)
    assert fractional_view(even).instance.cost.tolist() == even.cost.tolist()
    assert fractional_view(even).instance.twins == []


def test_a_large_piece_is_put_beside_rows_that_can_leave_it_the_rank() -> None:
    def packed(view: Relaxed) -> Solution:
        found = pack(view, np.zeros(5, np.int64), PackingOrder.TIME, Work(10**10))
        assert found is not None
        found, _ = exchange(view, found, 20, 0, Work(10**10))
        return flow(instance, evaluate(instance, found.option, found.places), 240, Work(10**10))

    # 120 over a host's two ranks, 100 whole, and three of 40: 340 / 4 = 85, and 100 is one rank's.
    cost = np.array([60, 100, 40, 40, 40])[:, None, None] * 1000
    instance = replace(two_hosts_of_two(), cost=cost, fixed=None)
    assert packed(fractional_view(instance)).cost <= packed(Relaxed(instance)).cost
    assert packed(fractional_view(instance)).cost < 115_000


def test_a_stage_and_its_mean_count_once() -> None:
    view = fractional_view(two_hosts_of_two())
    found = pack(view, np.zeros(5, np.int64), PackingOrder.TIME, Work(10**10))
    assert found is not None
    after, cost = exchange(view, found, 20, 0, Work(10**10))
    stage = evaluate(view.instance, after.option, after.places).stage
    assert cost == int(stage.max()) < int(stage.sum())


def test_rows_that_are_shared_out_come_last_and_fill_what_pieces_leave() -> None:
    # Two hosts of two: three pieces of 100, and two tables of 50 each that any host's ranks share out.
    cost = np.array([25, 25, 100, 100, 100])[:, None, None] * 1000
    divisible = np.array([True, True, False, False, False])[:, None]
    width = np.array([2, 2, 1, 1, 1])[:, None]
    instance = replace(two_hosts_of_two(), width=width, cost=cost, divisible=divisible, fixed=None)
    found = pack(fractional_view(instance), np.zeros(5, np.int64), PackingOrder.TIME, Work(10**10), divisible_last=True)
    assert found is not None
    after = flow(instance, evaluate(instance, found.option, found.places), 240, Work(10**10))
    assert after.cost <= 101_000


def test_rows_that_are_shared_out_are_preferred_where_they_cost_little_more() -> None:
    # Each table whole for 100, or over a host's two ranks for 51 each.
    both = np.ones((5, 2), np.int64)
    cost = np.stack([both[:, 0] * 100_000, both[:, 0] * 51_000], 1)[:, :, None]
    instance = replace(
        two_hosts_of_two(),
        width=both * np.array([1, 2]),
        pieces=both,
        cost=cost,
        home=np.zeros_like(cost),
        memory=np.zeros_like(cost),
        home_memory=None,
        least_memory=None,
        uses=None,
        divisible=both * np.array([0, 1]) > 0,
        fixed=None,
    )
    relaxed = Relaxed(instance)
    for prefer in (False, True):
        choice = choose(relaxed, kinds_of(relaxed)[0], 1, 1, 0, Work(10**10), prefer)
        assert choice is not None
        assert choice.option.tolist() == [int(prefer)] * 5
