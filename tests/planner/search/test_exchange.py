"""Exchanges: never worse, within caps, and out of overfull memory where a way leads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilerec.planner.search.exchange import exchange, exchange_hosts, repair
from tilerec.planner.search.instance import Instance, evaluate, fits
from tilerec.planner.search.pack import Packing, PackingOrder, pack
from tilerec.planner.search.relaxed import Relaxed, least
from tilerec.planner.search.work import Work


def test_an_exchange_never_makes_a_plan_worse(small_instance: Callable[..., Instance]) -> None:
    better = 0
    for seed in range(60):
        instance = small_instance(seed)
        relaxed = Relaxed(instance)
        found = pack(relaxed, least(relaxed.totals, relaxed.memory).option, PackingOrder.MEMORY, Work(10**10))
        if found is None:
            continue
        before = int(evaluate(instance, found.option, found.places).stage.sum())
        after, cost = exchange(relaxed, found, 20, 0, Work(10**10))
        now = evaluate(instance, after.option, after.places)
        assert int(now.stage.sum()) == cost <= before
        assert fits(instance, now.memory)
        for t, places in enumerate(after.places):
            if instance.width[t, after.option[t]] == 1:
                assert len(set(places)) == len(set(found.places[t]))
                if instance.allowed is not None:
                    assert instance.allowed[t, list(places)].all()
        better += cost < before
    assert better > 5


def on_one_rank(times: list[int], sizes: list[int], ranks: int, cap: int) -> tuple[Relaxed, Packing]:
    tables = len(times)
    one = np.ones((tables, 1), np.int64)
    instance = Instance(
        [f"t{i}" for i in range(tables)],
        one,
        one,
        np.array(times)[:, None, None],
        np.zeros((tables, 1, 1), np.int64),
        np.array(sizes)[:, None, None],
        np.full((ranks, 1), cap),
        np.zeros(ranks, np.int64),
    )
    option = np.zeros(tables, np.int64)
    memory = np.zeros((ranks, 1), np.int64)
    memory[0] = sum(sizes)
    return Relaxed(instance), Packing(option, [(0,)] * tables, memory)


def test_a_heap_on_one_rank_is_levelled_to_the_optimum() -> None:
    relaxed, heap = on_one_rank([7, 6, 5, 4, 3, 3, 2], [0] * 7, 3, 1)
    _, cost = exchange(relaxed, heap, 60, 0, Work(10**10))
    assert cost == 10


def test_a_heap_is_levelled_with_what_ranks_bear_at_home() -> None:
    relaxed, heap = on_one_rank([7, 6, 5, 4, 3, 3, 2], [0] * 7, 2, 1)
    instance = replace(relaxed.instance, home=np.full((7, 1, 1), 2), reach=np.array([[1000], [0]]))
    # 30 of pieces, and 14 at home on the first rank alone.
    packing, cost = exchange(Relaxed(instance), heap, 60, 0, Work(10**10))
    assert cost == 22
    assert evaluate(instance, packing.option, packing.places).load[:, 0].tolist() == [22, 22]


def test_of_two_ranks_a_stage_that_is_level_may_rise_where_another_falls_by_more() -> None:
    # Two stages: the first is level as things lie, the second is not. All exchanges that level it tilt the first.
    cost = np.array([[10, 30], [10, 30], [11, 2], [9, 2]])[:, None, :] * 1000
    one = np.ones((4, 1), np.int64)
    instance = Instance(
        ["a", "b", "c", "d"],
        one,
        one,
        cost,
        np.zeros_like(cost),
        np.zeros((4, 1, 1), np.int64),
        np.ones((2, 1), np.int64),
        np.zeros(2, np.int64),
    )
    places = [(0,), (0,), (1,), (1,)]
    start = Packing(np.zeros(4, np.int64), list(places), np.zeros((2, 1), np.int64))
    packing, cost_now = exchange(Relaxed(instance), start, 60, 0, Work(10**10))
    assert cost_now == 21_000 + 32_000
    assert packing.places[0] != packing.places[1]


def test_an_overfull_rank_is_emptied_by_splitting_pairs() -> None:
    relaxed, heap = on_one_rank([1] * 6, [6, 4, 5, 5, 3, 7], 3, 10)
    found = repair(relaxed, heap, 100, Work(10**10))
    assert found is not None
    assert found.memory[:, 0].tolist() == [10, 10, 10]


def test_what_does_not_fit_is_not_repaired() -> None:
    relaxed, heap = on_one_rank([1, 1, 1], [6, 6, 6], 2, 10)
    assert repair(relaxed, heap, 50, Work(10**10)) is None


def test_exchanges_of_one_round_do_not_overshoot_on_a_link_together() -> None:
    # Four ranks of a host bear 10 each, the other host 18: one piece of 10 is to move, though each pair would move one.
    relaxed, _ = on_one_rank([10_000] * 4 + [18_000], [0] * 5, 8, 1)
    instance = replace(relaxed.instance, host_of=np.arange(8) // 4, shared=np.array([True]), host_cap=None, slow=None)
    places = [(0,), (1,), (2,), (3,), (4,)]
    memory = np.zeros((8, 1), np.int64)
    start = Packing(np.zeros(5, np.int64), list(places), memory)
    _, cost = exchange(Relaxed(instance), start, 2, 0, Work(10**10))
    assert cost == 30_000 // 4


def test_pieces_of_whole_hosts_are_exchanged_between_hosts() -> None:
    # Hosts of 2, 2, 2 and 1 ranks. Of six tables on whole hosts 7 + 6, 5 + 4 and 3 + 2 are to become 9 each. The
    # two single pieces stay. The first table may not lie on the second host.
    width = np.array([2] * 6 + [1] * 2)
    cost = np.array([7, 6, 5, 4, 3, 2, 1, 8])[:, None, None] * 1000
    allowed = np.ones((8, 7), np.bool_)
    allowed[0, 2:4] = False
    instance = Instance(
        [f"t{i}" for i in range(8)],
        width[:, None],
        np.ones((8, 1), np.int64),
        cost,
        np.zeros_like(cost),
        np.ones((8, 1, 1), np.int64),
        np.full((7, 1), 2),
        np.array([0, 0, 1, 1, 2, 2, 3]),
        allowed=allowed,
    )
    places = [(0,), (0,), (1,), (1,), (2,), (2,), (6,), (6,)]
    memory = evaluate(instance, np.zeros(8, np.int64), places).memory
    found = exchange_hosts(Relaxed(instance), Packing(np.zeros(8, np.int64), places, memory), 40, Work(10**10))
    after = evaluate(instance, found.option, found.places)
    assert after.load[:, 0].tolist() == [9000] * 7
    assert found.places[0] != (1,)
    assert found.places[6:] == [(6,), (6,)]
    assert np.array_equal(found.memory, after.memory)


def test_hosts_exchange_pieces_with_what_their_ranks_bear_at_home() -> None:
    # Four tables of 4 on whole hosts; 8 at home on the first host alone.
    one = np.ones((4, 1), np.int64)
    instance = Instance(
        [f"t{i}" for i in range(4)],
        2 * one,
        one,
        4 * one[:, :, None],
        2 * one[:, :, None],
        np.zeros((4, 1, 1), np.int64),
        np.ones((4, 1), np.int64),
        np.array([0, 0, 1, 1]),
        reach=np.array([[1000], [1000], [0], [0]]),
    )
    start = Packing(np.zeros(4, np.int64), [(0,)] * 4, np.zeros((4, 1), np.int64))
    found = exchange_hosts(Relaxed(instance), start, 40, Work(10**10))
    assert evaluate(instance, found.option, found.places).load[:, 0].tolist() == [12] * 4
