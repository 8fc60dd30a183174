"""Rows of all tables poured at once: to where ranks bear least, within caps, never for the worse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tilerec.planner.search.instance import SHARE, Instance, Solution, evaluate, fits
from tilerec.planner.search.pack import PackingOrder, pack
from tilerec.planner.search.relaxed import Relaxed, least
from tilerec.planner.search.uneven_rows import flow
from tilerec.planner.search.work import Work


def chain(lumps: list[int], cap: int = 10**9) -> Instance:
    """A lump on each of some ranks of one host, and between each two neighbours a table of 40 on each, divisible."""
    ranks = len(lumps)
    cost = np.array([*lumps, *[40_000] * (ranks - 1)])[:, None, None]
    tables = len(cost)
    return Instance(
        [f"t{i}" for i in range(tables)],
        np.ones((tables, 1), np.int64),
        np.array([1] * ranks + [2] * (ranks - 1))[:, None],
        cost,
        np.zeros_like(cost),
        np.array([0] * ranks + [1000] * (ranks - 1))[:, None, None],
        np.full((ranks, 1), cap),
        np.zeros(ranks, np.int64),
        divisible=np.array([False] * ranks + [True] * (ranks - 1))[:, None],
    )


def places(ranks: int) -> list[tuple[int, ...]]:
    return [*((r,) for r in range(ranks)), *((r, r + 1) for r in range(ranks - 1))]


def test_rows_flow_from_table_to_table_until_ranks_are_level() -> None:
    # The last rank has no lump and at most the 80 of its table: (60 + 20 + 20 + 160) / 3 are left for each other.
    instance = chain([60_000, 20_000, 20_000, 0])
    even = evaluate(instance, np.zeros(7, np.int64), places(4))
    assert even.cost == 100_000
    found = flow(instance, even, 300, Work(10**10))
    assert 86_667 <= found.cost <= 86_900
    assert all(int(shares.sum()) == SHARE for shares in found.rows.values())
    assert found.cost == evaluate(instance, found.option, found.places, found.rows).cost


def test_rows_flow_to_ranks_that_bear_less_of_home() -> None:
    instance = chain([0, 0])
    home = np.zeros_like(instance.home)
    home[2] = 20_000
    instance = replace(instance, home=home, reach=np.array([[1000], [0]]))
    found = flow(instance, evaluate(instance, np.zeros(3, np.int64), places(2)), 200, Work(10**9))
    assert np.allclose(found.load[:, 0], 50_000, rtol=1e-3)


def test_memory_stops_the_flow() -> None:
    free = flow(chain([60_000, 0]), evaluate(chain([60_000, 0]), np.zeros(3, np.int64), places(2)), 200, Work(10**10))
    assert int(free.memory.max()) > 1500
    tight = chain([60_000, 0], 1300)
    found = flow(tight, evaluate(tight, np.zeros(3, np.int64), places(2)), 200, Work(10**10))
    assert fits(tight, found.memory)
    assert free.cost < found.cost < 100_000


def two_hosts(cap: Sequence[int], lumps: Sequence[int]) -> tuple[Instance, Solution]:
    """Two hosts of two ranks: a lump on each rank, and ten tables of 4000 on each of a host's ranks, divisible."""
    width = np.array([1] * 4 + [2] * 20)
    cost = np.array([*lumps, *[4000] * 20])[:, None, None]
    instance = Instance(
        [f"t{i}" for i in range(24)],
        width[:, None],
        np.ones((24, 1), np.int64),
        cost,
        np.zeros_like(cost),
        np.where(width == 1, 0, 1000)[:, None, None],
        np.array(cap)[:, None],
        np.arange(4) // 2,
        divisible=(width > 1)[:, None],
    )
    where = [(r,) for r in range(4)] + [(t // 10,) for t in range(20)]
    return instance, evaluate(instance, np.zeros(24, np.int64), where)


def test_tables_on_the_same_ranks_flow_as_one_at_first() -> None:
    # 140,000 on each host. Six steps of two tables, then six of twenty; twelve of twenty come to 72,000.
    instance, even = two_hosts([10**6] * 4, [50_000, 10_000, 60_000, 0])
    assert even.cost == 100_000
    assert flow(instance, even, 6, Work(10**9)).cost <= 71_000


def test_a_full_rank_keeps_only_its_own_tables_from_flowing() -> None:
    # The second rank has no byte to spare; the other host becomes level all the same.
    instance, even = two_hosts([20_000, 10_001, 20_000, 20_000], [50_000, 10_000, 60_000, 0])
    found = flow(instance, even, 150, Work(10**9))
    assert fits(instance, found.memory)
    assert found.cost < 90_500
    assert found.load[2:].max() < 75_000


def test_more_rounds_are_no_worse_than_what_was_found_and_level_plans_stay() -> None:
    instance = chain([10_000, 10_000])
    even = evaluate(instance, np.zeros(3, np.int64), places(2))
    assert flow(instance, even, 100, Work(10**10)) is even
    nothing = replace(instance, divisible=np.zeros_like(instance.divisible))
    assert flow(nothing, even, 100, Work(10**10)) is even


def test_of_random_plans_none_gets_dearer_or_leaves_a_cap(small_instance: Callable[..., Instance]) -> None:
    better = 0
    for seed in range(60):
        instance = small_instance(seed)
        divisible = (instance.pieces > 1) & (instance.width == 1)
        instance = replace(instance, divisible=divisible)
        relaxed = Relaxed(instance)
        option = np.where(divisible.any(1), divisible.argmax(1), least(relaxed.totals, relaxed.memory).option)
        packed = pack(relaxed, option, PackingOrder.BOTH, Work(10**10))
        if packed is None:
            continue
        before = evaluate(instance, packed.option, packed.places)
        after = flow(instance, before, 90, Work(10**10))
        assert fits(instance, after.memory)
        assert after.cost <= before.cost
        assert after.cost == evaluate(instance, after.option, after.places, after.rows).cost
        better += after.cost < before.cost
    assert better > 5
