"""Packing: caps hold, pieces of a table part, and memory rules fit what time alone does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tilerec.planner.search.instance import Instance, evaluate, fits
from tilerec.planner.search.pack import PackingOrder, pack
from tilerec.planner.search.relaxed import Relaxed, least
from tilerec.planner.search.work import Work


@pytest.mark.parametrize("rule", PackingOrder)
def test_what_is_packed_is_within_caps_on_allowed_ranks_and_apart(
    rule: PackingOrder, small_instance: Callable[..., Instance]
) -> None:
    packed = 0
    for seed in range(80):
        instance = small_instance(seed)
        relaxed = Relaxed(instance)
        option = least(relaxed.totals, relaxed.memory).option
        found = pack(relaxed, option, rule, Work(10**10))
        if found is None:
            continue
        packed += 1
        now = evaluate(instance, found.option, found.places)
        assert now.memory.tolist() == found.memory.tolist()
        assert fits(instance, now.memory)
        for t, places in enumerate(found.places):
            width, pieces = int(instance.width[t, option[t]]), int(instance.pieces[t, option[t]])
            if width == 1 and instance.allowed is not None:
                assert instance.allowed[t, list(places)].all()
            if width == 1 and instance.allowed is None:
                assert len(set(places)) == min(pieces, instance.ranks)
            assert len(places) == (0 if instance.everywhere(width) else pieces)
    assert packed > 30


def singles(time: list[int], size: list[int], ranks: int, cap: int) -> Instance:
    tables = len(time)
    one = np.ones((tables, 1), np.int64)
    return Instance(
        [f"t{i}" for i in range(tables)],
        one,
        one,
        np.array(time)[:, None, None],
        np.zeros((tables, 1, 1), np.int64),
        np.array(size)[:, None, None],
        np.full((ranks, 1), cap),
        np.zeros(ranks, np.int64),
    )


def test_the_largest_piece_comes_first_and_loads_come_out_even() -> None:
    instance = singles([3, 5, 2, 7, 4], [0] * 5, 3, 1)
    found = pack(Relaxed(instance), np.zeros(5, np.int64), PackingOrder.TIME, Work(10**10))
    assert found is not None
    assert evaluate(instance, found.option, found.places).cost == 7


def test_by_memory_a_tight_fit_is_found_that_time_misses_and_force_goes_beyond() -> None:
    # 6 + 4 and 5 + 5 fill two ranks of 10; by time a 5 comes first, and the 4 joins the other 5.
    instance = singles([1, 8, 9, 7], [6, 4, 5, 5], 2, 10)
    relaxed, option = Relaxed(instance), np.zeros(4, np.int64)
    assert pack(relaxed, option, PackingOrder.TIME, Work(10**10)) is None
    found = pack(relaxed, option, PackingOrder.MEMORY, Work(10**10))
    assert found is not None
    assert found.memory[:, 0].tolist() == [10, 10]
    forced = pack(relaxed, option, PackingOrder.TIME, Work(10**10), force=True)
    assert forced is not None
    assert int(forced.memory.sum()) == 20


def test_a_piece_that_needs_a_whole_rank_is_placed_before_pieces_on_whole_hosts() -> None:
    # Two hosts of two ranks. Both pieces on hosts take 1 of each rank there, and the other piece all 10 of a rank.
    one = singles([9, 9, 1], [1, 1, 10], 4, 10)
    instance = replace(one, width=np.array([[2], [2], [1]]), host_of=np.array([0, 0, 1, 1]), host_cap=None)
    for order in PackingOrder:
        found = pack(Relaxed(instance), np.zeros(3, np.int64), order, Work(10**10))
        assert found is not None
        assert sorted(found.memory[:, 0].tolist()) == [0, 2, 2, 10]


def test_more_pieces_than_ranks_are_repeated_evenly() -> None:
    instance = singles([5], [1], 3, 10)
    five = replace(instance, pieces=instance.pieces * 5)
    found = pack(Relaxed(five), np.zeros(1, np.int64), PackingOrder.TIME, Work(10**10))
    assert found is not None
    assert sorted(np.bincount(found.places[0]).tolist()) == [1, 2, 2]


def test_a_slower_rank_gets_fewer_pieces() -> None:
    """Twelve pieces of 100 ps; on rank 1 each takes three times as long: 9 and 3 take 900 ps on both."""
    instance = replace(singles([100] * 12, [0] * 12, 2, 1), slow=np.array([[1000], [3000]]))
    found = pack(Relaxed(instance), np.zeros(12, np.int64), PackingOrder.TIME, Work(10**10))
    assert found is not None
    assert np.bincount([b for (b,) in found.places]).tolist() == [9, 3]
    assert evaluate(instance, found.option, found.places).cost == 900


def test_a_rank_that_homes_reach_less_gets_more_pieces() -> None:
    # Home takes 12 x 50 on one rank and a third of that on the other.
    instance = singles([100] * 12, [0] * 12, 2, 1)
    instance = replace(instance, home=np.full((12, 1, 1), 50), reach=np.array([[1000], [333]]))
    found = pack(Relaxed(instance), np.zeros(12, np.int64), PackingOrder.TIME, Work(10**9))
    assert found is not None
    ranks = [where[0] for where in found.places]
    assert (ranks.count(0), ranks.count(1)) == (4, 8)


def test_pieces_of_a_table_lie_on_as_many_hosts_as_there_are() -> None:
    # All of a host's ranks share its link: two pieces on one host take it twice as long.
    cost = np.full((1, 1, 1), 80)
    instance = Instance(
        ["a"],
        np.array([[1]]),
        np.array([[4]]),
        cost,
        np.zeros_like(cost),
        np.zeros_like(cost),
        np.full((8, 1), 1),
        np.arange(8) // 2,
        shared=np.array([True]),
    )
    found = pack(Relaxed(instance), np.zeros(1, np.int64), PackingOrder.TIME, Work(10**10))
    assert found is not None
    assert sorted(instance.host_of[list(found.places[0])].tolist()) == [0, 1, 2, 3]
